"""Projections that read the same hidden states, computed as one product while decoding is timed, as servers do.

One product of a few rows with `q`, `k` and `v` (or `gate` and `up`) together takes less time than three: each has a start
and an end in which little of the memory's bandwidth is used, and a narrow `k` or `v` keeps few of a GPU's processors busy.
The weights of a set become slices of one tensor; values and names stay what they are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SETS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Shared:
    """One product for several projections of the same states; what it gave is kept until each has read its slice.

    Args:
        modules: The projections, in the order of the slices.
    """

    def __init__(self, modules: list[nn.Linear]) -> None:
        self.modules = modules
        self.weight = torch.cat([m.weight.data for m in modules])
        biases = [m.bias.data for m in modules if m.bias is not None]
        self.bias = torch.cat(biases) if biases else None
        self.states: Tensor | None = None
        self.output: Tensor | None = None
        self.left = 0

    def read(self, states: Tensor, begin: int, end: int) -> Tensor:
        """Columns of the product with states `[..., D]`."""
        if self.states is not states or self.output is None:
            self.states, self.output = states, F.linear(states, self.weight, self.bias)
            self.left = len(self.modules)
        found = self.output[..., begin:end]
        self.left -= 1
        if self.left == 0:
            self.states = self.output = None
        return found


def merge_projections(layer: nn.Module) -> list[Shared]:
    """Let the projections of a layer that read the same states share one product.

    Args:
        layer: Of a decoder. Weights in it become slices of new tensors with the same values.

    Returns:
        For `undo_merge`; none where the layer names its projections otherwise, or one is no plain linear layer.
    """
    found: list[Shared] = []
    for parent in layer.modules():
        for names in SETS:
            modules: list[Any] = [getattr(parent, name, None) for name in names]
            if all(type(m) is nn.Linear for m in modules) and _alike(modules):
                found.append(_merge(modules))
    return found


def undo_merge(merged: list[Shared]) -> None:
    """Give each projection its own product back."""
    for shared in merged:
        for module in shared.modules:
            module.__dict__.pop("forward", None)


def _alike(modules: list[Any]) -> bool:
    """Whether one product can stand for all, and nobody has changed what one of them does."""
    kinds = {(m.in_features, m.weight.dtype, m.weight.device, m.bias is None) for m in modules}
    own = any("forward" in m.__dict__ or m._forward_hooks or m._forward_pre_hooks for m in modules)
    return len(kinds) == 1 and not own


@torch.inference_mode(False)
@torch.no_grad()
def _merge(modules: list[nn.Linear]) -> Shared:
    shared, begin = Shared(modules), 0
    for module in modules:
        end = begin + module.out_features
        module.weight.data = shared.weight[begin:end]
        if module.bias is not None:
            assert shared.bias is not None
            module.bias.data = shared.bias[begin:end]
        module.forward = _reader(shared, begin, end)  # type: ignore[method-assign]
        begin = end
    return shared


def _reader(shared: Shared, begin: int, end: int) -> Any:
    def forward(states: Tensor) -> Tensor:
        return shared.read(states, begin, end)

    return forward


__all__ = ["Shared", "merge_projections", "undo_merge"]
