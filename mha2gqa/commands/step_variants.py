"""Ways to run the layers of a decode step on a GPU: the benchmark tries them and takes the fastest for each model.

Attention apart, a step is products of a few rows with every weight, and small operations between them. Its bytes are those
of the weights; what it takes longer is the start and the end of some ten kernels a layer, in which little of the memory's
bandwidth is used. Fewer kernels shorten that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

APART = 0.1  # most that logits of two ways may differ, relative to their norm; rounding of bfloat16 is a tenth of it


@dataclass(frozen=True)
class Variant:
    """One way to run the layers.

    Args:
        compiled: By torch.compile.
        merged: Projections of the same states are one product.
    """

    compiled: bool = False
    merged: bool = False

    def __str__(self) -> str:
        name = "compiled layers" if self.compiled else "layers as they are"
        return f"{name}, merged projections" if self.merged else name


def variants(device: torch.device, compiled: bool) -> list[Variant]:
    """What is tried on a device, in this order; without a choice the one that is asked for.

    Args:
        device: Of the model.
        compiled: Whether layers may be compiled.
    """
    if not compiled or device.type != "cuda":
        return [Variant(compiled)]
    return [Variant(), Variant(True), Variant(True, merged=True)]


def agree(logits: Tensor, reference: Tensor) -> bool:
    """Whether two ways give the same logits, up to rounding."""
    apart = (logits.float() - reference.float()).norm() / reference.float().norm().clamp(min=1e-30)
    return bool(apart < APART)  # not where one is NaN


__all__ = ["Variant", "agree", "variants"]
