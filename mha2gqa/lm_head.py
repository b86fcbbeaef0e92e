"""The output head of a language model, and logits that never exist whole.

A vocabulary of 128k over 4k tokens would be 2 GB of float32 logits: the transformer runs once per batch, and its
output head on slices of the last hidden states. Evaluation, uptraining and distillation share what is here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

# Keys of a config by which classes of transformers change the product of hidden states and weight.
FACTORS = ("logit_scale", "lm_head_multiplier")
DIVISORS = ("logits_scaling",)
SOFTCAPS = ("final_logit_softcapping",)
CHUNK_ELEMENTS = {"cpu": 2**22, "default": 2**27}  # float32 logits of one chunk: 16 MiB, 512 MiB
ULPS = 4  # a factor or a cap may differ from the model's own by this many roundings of its dtype


@dataclass(frozen=True)
class LMHead:
    """How a model turns its last hidden states into logits: a linear map, a factor, a soft cap.

    Args:
        module: The output projection; its weight `[V, D]` is read at each call (sharding swaps it).
        scale: Factor on the logits (`logit_scale` of Cohere, 1 / `logits_scaling` of Granite).
        softcap: `cap * tanh(logits / cap)` of Gemma 2, or None.
    """

    module: nn.Linear
    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """The model's own logits `[…, V]` of hidden states `[…, D]`, in its dtype."""
        return self.finish(self.module(hidden))

    def finish(self, product: Tensor) -> Tensor:
        """Apply factor and cap to the bare product, any shape."""
        return finish(product, self.scale, self.softcap)


def finish(product: Tensor, scale: float, softcap: float | None) -> Tensor:
    """`LMHead.finish` of its numbers alone, for what is compiled."""
    scaled = product if scale == 1.0 else product * scale
    return scaled if softcap is None else softcap * torch.tanh(scaled / softcap)


def finish_backward(grad: Tensor, logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    """The gradient of the bare product from that of the logits."""
    if softcap is not None:
        grad = grad * (1 - (logits / softcap) ** 2)
    return grad if scale == 1.0 else grad * scale


# --- finding it ------------------------------------------------------------------------------------------

_FOUND: WeakKeyDictionary[nn.Module, tuple[Any, LMHead | None]] = WeakKeyDictionary()  # by model


def find_lm_head(model: Any) -> LMHead | None:
    """The model's output head, proven on a few tokens to give the model's own logits.

    Args:
        model: A language model of transformers; a model in memory is probed once.

    Returns:
        The head, or None where the logits are something else (encoder-decoders, unknown heads): then only the
        model's own forward gives its logits.

    Example:
        >>> head = find_lm_head(model)  # doctest: +SKIP
        >>> head(model.base_model(input_ids=ids).last_hidden_state) == model(input_ids=ids).logits  # doctest: +SKIP
    """
    module = model.get_output_embeddings()
    known = _FOUND.get(model)
    if known is None or known[0] is not module:
        known = _FOUND[model] = (module, _probe(model, module))
    return known[1]


@torch.no_grad()
def _probe(model: Any, module: Any) -> LMHead | None:
    base = getattr(model, getattr(model, "base_model_prefix", ""), None)
    seq2seq = getattr(model.config, "is_encoder_decoder", False)
    if type(module) is not nn.Linear or base is None or base is model or seq2seq:
        return None
    seen: dict[str, Any] = {}
    hook = module.register_forward_hook(lambda _, args, out: seen.update(states=args[0], product=out))
    training = model.training
    model.eval()
    try:
        count = min(8, model.config.get_text_config().vocab_size)
        ids = torch.arange(count, device=module.weight.device)[None]  # [1, 8]
        logits = model(input_ids=ids, use_cache=False).logits
        hidden = getattr(base(input_ids=ids, use_cache=False), "last_hidden_state", None)
    finally:
        model.train(training)
        hook.remove()
    if hidden is None or not seen or not _close(hidden, seen["states"]):
        return None
    heads = _declared_heads(model.config.get_text_config(), module)
    return next((head for head in heads if _gives(head, seen["product"], logits)), None)


def _declared_heads(config: Any, module: nn.Linear) -> Iterator[LMHead]:
    """What the config says happens to the product; the plain product only where it says nothing."""
    factors = [float(value) for key in FACTORS if (value := getattr(config, key, None)) is not None]
    factors += [1.0 / float(value) for key in DIVISORS if (value := getattr(config, key, None)) is not None]
    caps = [float(value) for key in SOFTCAPS if (value := getattr(config, key, None)) is not None]
    for scale in factors:
        yield LMHead(module, scale=scale)
    for cap in caps:
        yield LMHead(module, softcap=cap)
    if not factors and not caps:
        yield LMHead(module)


def _close(a: Tensor, b: Tensor) -> bool:
    """Whether two runs of one computation gave the same, but for the order of a device's sums."""
    return a.shape == b.shape and bool((a - b).abs().max() <= 1e-3 * b.abs().max())


def _gives(head: LMHead, product: Tensor, logits: Tensor) -> bool:
    """Whether a head finishes a product as the model does: to the bit where it does nothing to it."""
    wide = logits.double()
    if head.scale == 1.0 and head.softcap is None:
        return torch.equal(product.double(), wide)
    tolerance = ULPS * torch.finfo(product.dtype).eps * wide.abs().max()
    return bool((head.finish(product).double() - wide).abs().max() <= tolerance)


# --- logits of chosen positions --------------------------------------------------------------------------


class ChunkedLogits:
    """A model whose logits are made for some positions at a time.

    Args:
        model: A language model of transformers.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.head = model, find_lm_head(model)
        self.base = None if self.head is None else getattr(model, model.base_model_prefix)
        output, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        self.embeddings = int(embedding.weight.shape[0])
        self.vocabulary = int(output.weight.shape[0]) if hasattr(output, "weight") else self.embeddings

    def states(self, **inputs: Any) -> Tensor:
        """What the logits of a batch are made of: last hidden states `[B * T, D]`, or the logits `[B * T, V]`.

        Args:
            **inputs: Of the model's forward.
        """
        if self.base is None:
            return self.model(**inputs, use_cache=False).logits.flatten(0, 1)
        return self.base(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)

    def logits(self, states: Tensor) -> Tensor:
        """The model's own logits `[n, V]` of some states `[n, …]`, in its dtype."""
        return states if self.head is None else self.head(states)


def chunk_slices(count: int, vocabulary: int, device: str, elements: int | None = None) -> list[slice]:
    """Cut `count` positions into even chunks whose float32 logits stay within a limit.

    Args:
        count: Positions.
        vocabulary: Columns of the logits.
        device: Kind of device, whose limit in `CHUNK_ELEMENTS` applies.
        elements: Another limit.
    """
    most = elements or CHUNK_ELEMENTS.get(device, CHUNK_ELEMENTS["default"])
    limit = max(1, most // vocabulary)
    pieces = max(1, -(-count // limit))
    size = max(1, -(-count // pieces))
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


# --- products --------------------------------------------------------------------------------------------


@functools.cache
def gives_wide_products(device: str) -> bool:
    """Whether half-precision products can come out in float32 on this kind of device."""
    if device != "cuda":
        return False
    probe = torch.zeros(16, 16, dtype=torch.bfloat16, device=device)
    try:
        torch.mm(probe, probe, out_dtype=torch.float32)  # type: ignore[call-overload]
    except (TypeError, RuntimeError):  # torch < 2.8
        return False
    return True


def product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` for matrices, in float32 (float64 stays) and unrounded where the device can."""
    if a.dtype in (torch.bfloat16, torch.float16):
        if gives_wide_products(a.device.type):
            return torch.mm(a, b, out_dtype=torch.float32)  # type: ignore[call-overload]
        return (a @ b).float()
    return a @ b
