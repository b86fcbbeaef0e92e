"""Muon: momentum whose matrix is orthogonalised before each step, so that no basis of heads is better than another."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

ROUNDS = 5
COEFFICIENTS = (
    3.4445,
    -4.7750,
    2.0315,
)  # of the quintic that drives singular values towards 1 fastest (Jordan 2024)
LENGTH = 0.2  # RMS of a step's entries over the rate: about what Adam's are, so that rates mean the same


@torch.no_grad()
def orthogonalised(x: Tensor) -> Tensor:
    """U Vᵀ of x = U S Vᵀ `[rows, columns]`, roughly: singular values end between 0.7 and 1.2; zero stays zero.

    In bfloat16 on a GPU, as everything there.
    """
    wide = x if x.shape[0] <= x.shape[1] else x.mT
    y = (wide / wide.norm().clamp_min(1e-30)).to(torch.bfloat16 if x.is_cuda else x.dtype)
    a, b, c = COEFFICIENTS
    for _ in range(ROUNDS):
        gram = y @ y.mT
        y = a * y + (b * gram + c * gram @ gram) @ y
    return (y if wide is x else y.mT).to(x.dtype)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; for matrices.

    Args:
        parameters: Matrices, or groups of them.
        momentum: Of the running sum of gradients.
    """

    def __init__(self, parameters: Iterable[Any], momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": 1e-3, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step along the gradients."""
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                sums = self.state[p].setdefault("sum", torch.zeros_like(p))
                sums.mul_(group["momentum"]).add_(p.grad)
                direction = orthogonalised(p.grad + group["momentum"] * sums)
                p.sub_(direction, alpha=group["lr"] * LENGTH * max(p.shape) ** 0.5)
