"""The decode step that a server runs: one token a sequence on a full cache, timed.

The cache has one fixed slot a token and every slot is used, so that no mask is needed and the step is the same
graph every time. Attention reads the shared heads as they are: the queries of a group attend as one head's
queries, and keys and values are never repeated. On a GPU the layers are compiled (small operations fused) and
the step is replayed as one CUDA graph, as servers do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface
from transformers.cache_utils import DynamicCache

from ..kv_cache import kv_layers
from ..uptraining.model_prep import compile_layers, repeated_layers, undo_compile

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WARM_UP = 3  # steps before the clock starts
NAME = "fixed_cache_decode"
# Without cuDNN's attention, which torch prefers on Hopper and later: it plans anew for every length (tens of
# milliseconds), and a cache is longer at every step.
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# What a layer may hand to attention beside scaling and dropout without changing what is computed here.
HARMLESS = frozenset({"scaling", "dropout", "is_causal", "sliding_window"})


class NotServed(Exception):
    """This model's attention is not the plain kind that the fixed step stands for; the message says why."""


@dataclass(frozen=True)
class DecodeTimes:
    """What was measured.

    Args:
        seconds: Of one decode step, the median.
        first_token_seconds: From a prompt of one sequence to its first token.
        context: Tokens that the timed steps attend to (at the last of them, where a cache grows).
        path: What was timed, in words.
        attention: Kernel of the step, and whether it reads shared heads as they are.
        native_gqa: Whether keys and values are read without being repeated.
        cuda_graph, compiled: Whether the step is replayed as a graph, and its layers compiled.
        warnings: Why the step is not the one that servers run, where it is not.
    """

    seconds: float
    first_token_seconds: float
    context: int
    path: str
    attention: str
    native_gqa: bool
    cuda_graph: bool = False
    compiled: bool = False
    warnings: tuple[str, ...] = ()


class LayerCache:
    """Keys and values of one layer, `[B, K, S, d]` with every slot in use.

    Args:
        slots: S: tokens of context, or of the layer's window if that is shorter.
        context: Tokens of the sequence, the newest included.
    """

    def __init__(self, batch: int, heads: int, slots: int, dims: tuple[int, int], like: Tensor) -> None:
        self.key, self.value = (
            torch.zeros(batch, heads, slots, dim, dtype=like.dtype, device=like.device) for dim in dims
        )

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Put one token into the last slot, or a prompt of one sequence into the slots before it."""
        if key.shape[2] == 1:
            self.key[:, :, -1:] = key
            self.value[:, :, -1:] = value
            return self.key, self.value
        slots = self.key.shape[2] - 1
        for held, new in ((self.key, key), (self.value, value)):
            held[:, :, :slots] = new[:, :, -slots:]  # of the one sequence, for all of the batch
        return key, value


class FixedCache(DynamicCache):
    """A cache of `context` tokens that stays as long as it is: every step writes the last token.

    Args:
        config: Raw config, which says what every layer keeps.
        batch, context: Sequences; tokens, the newest included.
        like: A tensor of the model's dtype and device.
    """

    def __init__(self, config: Mapping[str, Any], batch: int, context: int, like: Tensor) -> None:
        super().__init__()
        self.seen, self.context = 0, context
        self.parts = [
            LayerCache(
                batch,
                layer.heads,
                min(context, layer.window or context),
                (layer.key_dim, layer.value_dim),
                like,
            )
            for layer in kv_layers(config)
        ]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """As `LayerCache.update`, of one layer."""
        return self.parts[layer_idx].update(key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before the ones that come."""
        return self.seen


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of query `[B, H, T, d]` on key and value `[B, K, S, d]`: the prompt causally, one token on all.

    One token: the H / K queries of a group are that many queries of one head, `[B, K, H / K, d]`, which every
    kernel runs on the K heads as they are stored.
    """
    more = {name for name, x in kwargs.items() if x is not None and name not in HARMLESS}
    if unknown := sorted(more & {"s_aux", "softcap", "position_bias", "head_mask"}):
        raise NotServed(f"its attention takes {', '.join(unknown)}")
    length, groups = query.shape[2], query.shape[1] // key.shape[1]
    scaled_attention = nn.functional.scaled_dot_product_attention
    if length == 1:
        folded = query.reshape(query.shape[0], key.shape[1], groups, query.shape[3])
        output = scaled_attention(folded, key, value, scale=scaling).reshape(*query.shape[:3], value.shape[3])
    else:
        window = kwargs.get("sliding_window")
        if window is not None and window < length:
            place = torch.arange(length, device=query.device)
            ahead = place[:, None] - place
            band: dict[str, Any] = {"attn_mask": (ahead >= 0) & (ahead < window)}
        else:
            band = {"is_causal": True}
        output = scaled_attention(query, key, value, scale=scaling, enable_gqa=groups > 1, **band)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attend)  # no mask function of that name: transformers makes no mask


class FixedStep:
    """The decode step of a model at one batch and context.

    Args:
        model: In eval mode, on its device; its attention implementation is restored by `close`.
        config: Raw config.
        batch, context: Sequences; tokens that the step attends to, the new one included.
        compiled: Whether to compile the layers; None for yes on a GPU.

    Raises:
        NotServed: The model's attention is of another kind, or keeps another kind of state.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: Mapping[str, Any],
        batch: int,
        context: int,
        compiled: bool | None = None,
    ) -> None:
        if context < 2:
            raise NotServed("a context of one token has no prompt")
        self.model, self.warnings = model, []  # type: tuple[PreTrainedModel, list[str]]
        self.before = model.config._attn_implementation
        layers = repeated_layers(model)
        if len(kv_layers(config)) != len(layers):
            raise NotServed("not every layer keeps keys and values of its own")
        self.device = model.device
        like = next(model.get_input_embeddings().parameters())
        self.compiled = self.device.type == "cuda" if compiled is None else compiled
        self.cache = FixedCache(config, batch, context, like)
        generator = torch.Generator().manual_seed(0)
        vocabulary = int(model.get_output_embeddings().weight.shape[0])  # type: ignore[index, arg-type]
        self.prompt = torch.randint(vocabulary, (1, context - 1), generator=generator).to(self.device)
        self.token = self.prompt[:, :1].expand(batch, 1).clone()
        self.position = torch.full((batch, 1), context - 1, device=self.device)
        self.hooks: list[Any] = []
        self.replay: Callable[[], None] = self.step
        named = "cache" in signature(type(model).forward).parameters  # its older name is deprecated
        self.keys_and_values = {"cache" if named else "past_key_values": self.cache, "use_cache": True}

    def step(self) -> None:
        """One token for every sequence, into `token`; the cache stays as long as it is."""
        out = self.model(input_ids=self.token, position_ids=self.position, **self.keys_and_values)
        self.token.copy_(out.logits[:, -1:].argmax(-1))

    def prefill(self) -> float:
        """Fill the cache by a prompt of one sequence, copied to the others; wall seconds to its first token."""
        self.cache.seen = 0
        wait(self.device)
        began = time.perf_counter()
        out = self.model(input_ids=self.prompt, logits_to_keep=1, **self.keys_and_values)
        self.token.copy_(out.logits[:, -1:].argmax(-1).expand_as(self.token))
        wait(self.device)
        self.cache.seen = self.cache.context - 1
        return time.perf_counter() - began

    def prepare(self) -> None:
        """Compile the layers and capture the step, where that is asked for and possible."""
        if self.compiled:
            self._compile()
        if self.device.type == "cuda":
            self._capture()

    def time(self, steps: int) -> float:
        """Median wall seconds of a step."""
        times = []
        for _ in range(WARM_UP + steps):
            wait(self.device)
            began = time.perf_counter()
            self.replay()
            wait(self.device)
            times.append(time.perf_counter() - began)
        return statistics.median(times[WARM_UP:])

    @property
    def graphed(self) -> bool:
        """Whether the step is a CUDA graph."""
        return self.replay != self.step

    def close(self) -> None:
        """Give the model its own attention and layers back."""
        for hook in self.hooks:
            hook.remove()
        if self.hooks:
            undo_compile(self.model)
            for module, index in self.indices.items():
                module.layer_idx = index  # type: ignore[assignment]
        self.model.set_attn_implementation(self.before)

    def _compile(self) -> None:
        """One program for all layers: each gets the part of the cache that is its own, under one number."""
        layers = repeated_layers(self.model)
        self.indices: dict[nn.Module, Any] = {}
        for layer, part in zip(layers, self.cache.parts, strict=True):
            for module in layer.modules():
                if hasattr(module, "layer_idx"):
                    self.indices[module], module.layer_idx = module.layer_idx, 0  # type: ignore[assignment]
            self.hooks.append(
                layer.register_forward_pre_hook(_with_own_part(self.cache, part), with_kwargs=True)
            )
        torch._dynamo.reset()
        compile_layers(self.model)
        try:
            self.step()
        except Exception as error:  # torch.compile raises many kinds; the step runs without, and says so
            self.warnings.append(f"layers not compiled: {_first_line(error)}")
            undo_compile(self.model)
            self.compiled = False

    def _capture(self) -> None:
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self.step()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self.step()
        except RuntimeError as error:
            wait(self.device)
            self.warnings.append(f"no CUDA graph: {_first_line(error)}")
            return
        self.replay = graph.replay


def _with_own_part(cache: FixedCache, part: LayerCache) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, {name: part if x is cache else x for name, x in kwargs.items()}

    return hook


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def _ours(step: FixedStep) -> Iterator[None]:
    """Run the model with `attend`, on kernels that do not plan by length."""
    try:
        step.model.set_attn_implementation(NAME)
        with sdpa_kernel(BACKENDS):
            yield
    finally:
        step.close()


@torch.inference_mode()
def fixed_step(
    model: PreTrainedModel,
    config: Mapping[str, Any],
    batch: int,
    context: int,
    steps: int,
    compiled: bool | None = None,
) -> DecodeTimes:
    """Time the step that servers run.

    Args:
        model: In eval mode, on its device.
        config: Its raw config.
        batch, context: Sequences; tokens that a step attends to, the new one included.
        steps: How many are timed.
        compiled: Whether the layers are compiled; None for yes on a GPU.

    Raises:
        NotServed: This model's attention is of another kind.
    """
    step = FixedStep(model, config, batch, context, compiled)
    with _ours(step):
        try:
            with counted_attention() as calls:
                first = step.prefill()
            if calls[0] < len(step.cache.parts):
                raise NotServed("its class does not use transformers' attention interface")
            first = min(first, step.prefill())  # the first time kernels are chosen and memory is found
            step.prepare()
            seconds = step.time(steps)
        except (TypeError, AttributeError, ValueError) as error:  # a class with a cache protocol of its own
            raise NotServed(_first_line(error)) from error
    flash = flash_runs(step.cache.parts[0], model)
    how = ["fixed cache, no mask"]
    how += ["compiled layers"] if step.compiled else []
    how += ["CUDA graph"] if step.graphed else []
    return DecodeTimes(
        seconds, first, context, ", ".join(how), f"sdpa {flash}", True, step.graphed, step.compiled,
        tuple(step.warnings),
    )  # fmt: skip


@contextmanager
def counted_attention() -> Iterator[list[int]]:
    """How often `attend` is called inside (before layers are compiled)."""
    calls = [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return attend(*args, **kwargs)

    AttentionInterface.register(NAME, counted)
    try:
        yield calls
    finally:
        AttentionInterface.register(NAME, attend)


def flash_runs(part: LayerCache, model: PreTrainedModel) -> str:
    """The kernel that attention runs on: `flash`, or what is left."""
    query = part.key[:1, :, :1]
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            nn.functional.scaled_dot_product_attention(query, part.key[:1], part.value[:1])
    except RuntimeError:
        return "without flash"
    return "flash"


@torch.inference_mode()
def growing_cache(
    model: PreTrainedModel, batch: int, context: int, steps: int, why: str | None = None
) -> DecodeTimes:
    """Time transformers' own loop with its growing cache, for models that the fixed step does not stand for.

    Args:
        model, batch, context, steps: As in `fixed_step`; the last step attends to `context` tokens.
        why: Why the fixed step is not timed.
    """
    prompt = max(1, context - steps - WARM_UP)
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(model.get_output_embeddings().weight.shape[0])  # type: ignore[index, arg-type]
    ids = torch.randint(vocabulary, (batch, prompt), generator=generator).to(model.device)
    model(input_ids=ids[:1], use_cache=True, logits_to_keep=1)
    wait(model.device)
    began = time.perf_counter()
    model(input_ids=ids[:1], use_cache=True, logits_to_keep=1).logits.argmax()
    wait(model.device)
    first = time.perf_counter() - began
    out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
    cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)
    times = []
    with sdpa_kernel(BACKENDS):
        for _ in range(WARM_UP + steps):
            wait(model.device)
            began = time.perf_counter()
            out = model(input_ids=token, past_key_values=cache, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
            wait(model.device)
            times.append(time.perf_counter() - began)
    name = str(model.config._attn_implementation)
    warning = f"timed in transformers' own loop: {why}; it may repeat keys and values for every query head"
    return DecodeTimes(
        statistics.median(times[WARM_UP:]), first, min(context, prompt + WARM_UP + steps), "growing cache", name,
        False, warnings=(warning,) if why else (),
    )  # fmt: skip


def copy_bandwidth(device: torch.device, gigabytes: float | None = None) -> float:
    """Bytes per second that a copy in the device's memory moves (each byte is read and written): the best of a few.

    Args:
        device: Where.
        gigabytes: Size of the copied buffer; None for 2 on a GPU and 0.25 elsewhere.
    """
    size = int((gigabytes or (2 if device.type == "cuda" else 0.25)) * 1e9)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(6):
        wait(device)
        began = time.perf_counter()
        target.copy_(source)
        wait(device)
        best = min(best, time.perf_counter() - began)
    return 2 * size / best


def wait(device: torch.device) -> None:
    """Until everything that was started on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


__all__ = ["WARM_UP", "DecodeTimes", "NotServed", "copy_bandwidth", "fixed_step", "growing_cache", "wait"]
