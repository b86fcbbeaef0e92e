"""The cost of sharing the heads of one attention module: its keys and values as merge objectives."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ..heads import AttentionWeights, Grouping
from .base import MergeContext
from .subspace import Each, SubspaceObjective, costs_only, one_by_one

Symmetries = Literal["full", "orthogonal"]  # orthogonal: rotations only, unweighted (the Procrustes baseline)


@dataclass(frozen=True)
class KeySubspace:
    """An objective over some dims of the key heads, in the order in which it lays them out."""

    dims: list[int]
    objective: SubspaceObjective


@dataclass(frozen=True)
class MergeObjective:
    """What it costs the heads of a module to share; `solve.merge` minimises it.

    Args:
        weights: The module.
        context: Spec, second moments.
        keys: Independent subspaces of the key heads (rotary pairs; dims that are not rotated).
        values: The objective of the values.
        frame: `[K, r D, e]` output blocks of each KV head's queries; a value solution's maps act on it.
        queries: `[H, d, n]` effective query functionals.
        folds_bias: Whether a value's constant part may move into the output bias.
        notes: Symmetries that the method could not use, and why.
    """

    weights: AttentionWeights
    context: MergeContext
    keys: tuple[KeySubspace, ...]
    values: SubspaceObjective
    frame: Tensor
    queries: Tensor
    folds_bias: bool
    notes: tuple[str, ...] = ()
    totals: tuple[float, float] = field(init=False)

    def __post_init__(self) -> None:
        keys = sum(part.objective.energy for part in self.keys)
        object.__setattr__(self, "totals", (keys or 1.0, self.values.energy or 1.0))

    def pairs(self, each: Each = one_by_one) -> Tensor:
        """`[K, K]` cost of pairs: share of the key energy plus share of the value energy lost.

        Args:
            each: Who computes the costs where every pair is a problem of its own.
        """
        keys = torch.stack([part.objective.pairs(each) for part in self.keys]).sum(0)
        return keys / self.totals[0] + self.values.pairs(each) / self.totals[1]

    def cost(self, group: Sequence[int]) -> float:
        """The same for one group of any size, exactly."""
        if len(group) < 2:
            return 0.0
        keys = sum(part.objective.cost(group) for part in self.keys)
        return keys / self.totals[0] + self.values.cost(group) / self.totals[1]

    def costs_only(self) -> MergeObjective:
        """A light copy for searching: `pairs`, `cost` and `relative_error` work, on the processor."""
        light = copy.copy(self)
        keys = tuple(KeySubspace(part.dims, costs_only(part.objective)) for part in self.keys)
        empty = self.frame.new_empty(0)
        for name, x in (
            ("keys", keys),
            ("values", costs_only(self.values)),
            ("frame", empty),
            ("queries", empty),
        ):
            object.__setattr__(light, name, x)
        object.__setattr__(light, "weights", None)
        return light

    def relative_error(self, grouping: Grouping) -> float:
        """Mean of the lost shares of key and value energy: 0 lossless, 1 nothing kept."""
        return sum(self.cost(group) for group in grouping) / 2
