"""What every merging method takes and gives back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from ..architectures.spec import AttentionSpec
from ..heads import AttentionWeights, Grouping

if TYPE_CHECKING:
    from ..calibration import SecondMoments


@dataclass(frozen=True)
class MergeContext:
    """All a merging method may know beside the weights.

    Args:
        spec: The architecture, which grants the symmetries.
        rotary: Number of rotary dims of a key head (0 without RoPE).
        statistics: Moments of this attention module on calibration text; None without text.
        seed: For methods that draw numbers; differs per module.
        gains: Weights of the per-head norms on q and k, `[d]` each, shared by all heads; empty if the
            module has no such norm, or one without weights.
        channels: How many times as wide as a source head a shared head is (wide heads; 1 without).
        query_scale: What queries are multiplied by, so that the class's own scale of logits fits them.
    """

    spec: AttentionSpec
    rotary: int
    statistics: SecondMoments | None = None
    seed: int = 0
    gains: tuple[Tensor, ...] = ()
    channels: int = 1
    query_scale: float = 1.0


@dataclass(frozen=True)
class Merged:
    """One attention module with fewer KV heads.

    Args:
        weights: G key/value heads; query heads re-ordered so that each group's are contiguous.
        relative_error: Share of the layer's key and value energy the shared heads cannot express, in the
            method's own metric; None for methods that do not measure it.
        notes: What was not done and why (a symmetry that does not hold here, …).
    """

    weights: AttentionWeights
    relative_error: float | None = None
    notes: tuple[str, ...] = ()


MergeFunction = Callable[[AttentionWeights, Grouping, MergeContext], Merged]
