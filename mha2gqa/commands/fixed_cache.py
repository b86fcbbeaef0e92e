"""A cache of fixed length whose every slot is used, and the attention of one token on it.

Attention reads the shared heads as they are: the queries of a group attend as one head's queries, and keys and
values are never repeated. A GPU has several kernels for that, of which the fastest for the cache at hand is taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface
from transformers.cache_utils import DynamicCache

from ..kv_cache import kv_layers

NAME = "fixed_cache_decode"
# Without cuDNN's attention, which torch prefers on Hopper and later: it plans anew for every length (tens of
# milliseconds), and a cache is longer at every step.
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# What a layer may hand to attention beside scaling and dropout without changing what is computed here.
HARMLESS = frozenset({"scaling", "dropout", "is_causal", "sliding_window"})
TRIALS = 10  # timed calls of each kernel


class NotServed(Exception):
    """This model's attention is not the plain kind that the fixed step stands for; the message says why."""


@dataclass(frozen=True)
class Kernel:
    """How one token attends.

    Args:
        backend: A name of `SDPBackend`; empty for whichever torch takes.
    """

    backend: str = ""

    @property
    def backends(self) -> list[SDPBackend]:
        """What torch may choose from."""
        return [getattr(SDPBackend, self.backend)] if self.backend else BACKENDS

    def __str__(self) -> str:
        return self.backend.lower().removesuffix("_attention") or "torch's choice"


class LayerCache:
    """Keys and values of one layer, `[B, K, S, d]` with every slot in use.

    Args:
        batch, heads: B and K.
        slots: S: tokens of context, or of the layer's window if that is shorter.
        dims: Widths of keys and of values.
        like: A tensor of the model's dtype and device.
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


# --- attention -----------------------------------------------------------------------------------------


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of query `[B, H, T, d]` on key and value `[B, K, S, d]`: the prompt causally, one token on all."""
    more = {name for name, x in kwargs.items() if x is not None and name not in HARMLESS}
    if unknown := sorted(more & {"s_aux", "softcap", "position_bias", "head_mask"}):
        raise NotServed(f"its attention takes {', '.join(unknown)}")
    length, groups = query.shape[2], query.shape[1] // key.shape[1]
    if length == 1:
        return one_token(query, key, value, scaling).transpose(1, 2).contiguous(), None
    window = kwargs.get("sliding_window")
    if window is not None and window < length:
        place = torch.arange(length, device=query.device)
        ahead = place[:, None] - place
        band: dict[str, Any] = {"attn_mask": (ahead >= 0) & (ahead < window)}
    else:
        band = {"is_causal": True}
    output = nn.functional.scaled_dot_product_attention(
        query, key, value, scale=scaling, enable_gqa=groups > 1, **band
    )
    return output.transpose(1, 2).contiguous(), None


def one_token(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Attention of one token on every slot.

    The H / K queries of a group are that many queries of one head, `[B, K, H / K, d]`, which every kernel runs on the
    K heads as they are stored.

    Args:
        query: `[B, H, 1, d]`.
        key, value: `[B, K, S, d]` and `[B, K, S, e]`.
        scaling: Of the logits; None for 1 / sqrt(d).

    Returns:
        `[B, H, 1, e]`.
    """
    batch, heads = query.shape[:2]
    folded = query.reshape(batch, key.shape[1], heads // key.shape[1], query.shape[3])
    output = nn.functional.scaled_dot_product_attention(folded, key, value, scale=scaling)
    return output.reshape(batch, heads, 1, value.shape[3])


AttentionInterface.register(NAME, attend)  # no mask function of that name: transformers makes no mask


# --- which kernel --------------------------------------------------------------------------------------


KERNELS = tuple(map(Kernel, ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")))


def fastest(part: LayerCache, heads: int) -> tuple[Kernel, dict[str, float]]:
    """`quickest` on a GPU; elsewhere torch's own choice, and no seconds."""
    return quickest(part, heads) if part.key.device.type == "cuda" else (Kernel(), {})


def quickest(part: LayerCache, heads: int) -> tuple[Kernel, dict[str, float]]:
    """The kernel that attends fastest to a layer's cache, and the seconds of each that can.

    Args:
        part: The layer's cache.
        heads: Query heads H.

    Returns:
        The kernel; torch's own choice where none of ours runs.
    """
    batch, width = part.key.shape[0], part.key.shape[3]
    query = torch.zeros(batch, heads, 1, width, dtype=part.key.dtype, device=part.key.device).normal_()
    found: dict[Kernel, float] = {}
    for kernel in KERNELS:
        with suppress_refusal(), sdpa_kernel(kernel.backends):
            found[kernel] = timed(partial(one_token, query, part.key, part.value, None))
    best = min(found, key=found.__getitem__) if found else Kernel()
    return best, {str(kernel): seconds for kernel, seconds in found.items()}


@contextmanager
def suppress_refusal() -> Iterator[None]:
    """Pass over a kernel that does not take these tensors on this card."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        pass


def timed(call: Callable[[], Any]) -> float:
    """Seconds of one of several calls on a GPU, as one CUDA graph: what launching them costs is left out."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(TRIALS):
            call()
    graph.replay()
    torch.cuda.synchronize()
    began = time.perf_counter()
    graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / TRIALS


__all__ = [
    "BACKENDS", "KERNELS", "NAME", "FixedCache", "Kernel", "LayerCache", "NotServed", "attend", "fastest", "one_token",
]  # fmt: skip
