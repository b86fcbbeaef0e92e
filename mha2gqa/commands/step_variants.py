"""Ways to run the layers of a decode step on a GPU: the benchmark tries them and takes the fastest for each model.

Attention apart, a step is products of a few rows with every weight, and small operations between them. Its bytes are those
of the weights; what it takes longer is the start and the end of some ten kernels a layer, in which little of the memory's
bandwidth is used. Fewer kernels (compiled, merged), faster ones (tuned) and ones that start while the last one ends
(overlapped) shorten that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

APART = 0.1  # most that logits of two ways may differ, relative to their norm; rounding of bfloat16 is a tenth of it
HOPPER = (9, 0)  # the first cards on which a kernel can start while the last one ends


@dataclass(frozen=True)
class Variant:
    """One way to run the layers.

    Args:
        compiled: By torch.compile.
        merged: Projections of the same states are one product.
        tuned: Kernels are chosen by trial; norms, rotary factors and the choice of the token are compiled too.
        overlapped: Kernels of the compiler start before the last one has ended.
        few_rows: Products by our own kernel for few rows, where that is faster than the library's.
    """

    compiled: bool = False
    merged: bool = False
    tuned: bool = False
    overlapped: bool = False
    few_rows: bool = False

    def __str__(self) -> str:
        names = ["compiled layers"] if self.compiled else ["layers as they are"]
        names += ["merged projections"] if self.merged else []
        names += ["tuned kernels"] if self.tuned else []
        names += ["overlapped"] if self.overlapped else []
        names += ["own products"] if self.few_rows else []
        return ", ".join(names)

    @property
    def options(self) -> dict[str, Any] | None:
        """What torch.compile is told beside its defaults."""
        told: dict[str, Any] = {"max_autotune": True, "coordinate_descent_tuning": True} if self.tuned else {}
        if self.overlapped:
            told["triton.enable_pdl"] = True
        return told or None


def variants(device: torch.device, compiled: bool) -> list[Variant]:
    """What is tried on a device, in this order; without a choice the one that is asked for.

    Args:
        device: Of the model.
        compiled: Whether layers may be compiled.
    """
    if not compiled or device.type != "cuda":
        return [Variant(compiled)]
    overlapped = torch.cuda.get_device_capability(device) >= HOPPER
    tuned = Variant(True, merged=True, tuned=True, overlapped=overlapped)
    found = [Variant(), Variant(True), Variant(True, merged=True), tuned]
    return [*found, replace(tuned, few_rows=True)] if overlapped else found


def agree(logits: Tensor, reference: Tensor) -> bool:
    """Whether two ways give the same logits, up to rounding."""
    apart = (logits.float() - reference.float()).norm() / reference.float().norm().clamp(min=1e-30)
    return bool(apart < APART)  # not where one is NaN


__all__ = ["Variant", "agree", "variants"]
