"""Closed-form refit of projections on what they really read in the student."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .hidden_states import Stream
from .ranks import Ranks

ALONE = Ranks()
STRONGER = (10.0, 100.0, 1000.0)  # ridges tried where the configured one does harm, as multiples of it


def ridge_solution(gram: Tensor, cross: Tensor, prior: Tensor, ridge: float, free: int = 0) -> Tensor:
    """Minimise |Z W - Y|² + λ |W - W₀|² with λ = `ridge` x mean diagonal of ZᵀZ.

    Args:
        gram: `[n, n]`, ZᵀZ.
        cross: `[n, D]`, ZᵀY.
        prior: `[n, D]`, W₀.
        ridge: Relative strength.
        free: How many of the last rows (a bias) are not penalised.
    """
    strength = ridge * gram.diagonal()[: len(gram) - free].mean()
    weight = torch.full((len(gram),), float(strength), dtype=gram.dtype, device=gram.device)
    # A dead student (all zero) and a free bias still need a solvable system.
    weight = weight.clamp_min(1e-12 * float(gram.diagonal().max()) or 1.0)
    if free:
        weight[-free:] = 1e-12 * float(gram.diagonal().max())
    left = gram + torch.diag(weight)
    return torch.linalg.solve(left, cross + weight[:, None] * prior)


@dataclass
class _Moments:
    """Sums over tokens of what a projection reads, z, and of what it should give, y.

    Args:
        gram: `[n, n]`, ZᵀZ.
        cross: `[n, D]`, ZᵀY.
    """

    gram: Tensor
    cross: Tensor

    def error(self, solution: Tensor) -> float:
        """|Z W - Y|² but for |Y|², which is the same for every `solution`."""
        return float((solution * (self.gram @ solution - 2 * self.cross)).sum())


def _moments(
    student: Stream,
    module: nn.Module,
    wanted: Callable[[int], Tensor],
    which: range,
    prior: Tensor,
    bias: bool,
    ranks: Ranks,
) -> _Moments:
    """Moments over the batches `which` of all ranks; with a bias, z gets a last dim of ones."""
    n, width = prior.shape
    sums = _Moments(prior.new_zeros(n, n), prior.new_zeros(n, width))
    for i in which:
        z = next(iter(student.call(module, i, before=True).rows.values()))
        z, y = (student.real_rows(i, x).to(torch.float64) for x in (z, wanted(i)))
        if bias:
            z = torch.cat([z, z.new_ones(len(z), 1)], 1)
        sums.gram += z.T @ z
        sums.cross += z.T @ y
    ranks.sum(sums.gram)
    ranks.sum(sums.cross)
    return sums


@torch.no_grad()
def refit(
    student: Stream,
    module: nn.Module,
    wanted: Callable[[int], Tensor],
    split: tuple[range, range],
    *,
    transposed: bool = False,
    ridge: float = 1e-3,
    ranks: Ranks = ALONE,
) -> float | None:
    """Refit a projection in place: ridge least squares of its outputs onto `wanted`.

    How many tokens really say something differs from layer to layer: where a few of them carry the output's
    energy, a weak ridge fits their noise. Where the refitted projection comes out worse than the merged one on
    held-out batches, stronger ones are tried, and the best of them and of no refit is taken. A ridge that helps
    is not second-guessed: held-out errors of two helpful ones are close, and few tokens decide between them.

    Args:
        student, module: Where the student is, and the projection (a linear layer).
        wanted: Batch number -> outputs `[B, T, rows]` that it should give.
        split: Batches to solve on, and batches to validate by.
        transposed: Whether weights are stored `[in, out]`.
        ridge: Strength of the ridge, see `ReconstructConfig`.
        ranks: Who shares the rows.

    Returns:
        The ridge that was chosen; None if the projection stays as it was.
    """
    weight: Tensor = module.weight  # type: ignore[assignment]
    bias: Tensor | None = getattr(module, "bias", None)
    prior = (weight if transposed else weight.T).to(torch.float64)  # [H e, D]
    if bias is not None:
        prior = torch.cat([prior, bias.to(torch.float64)[None]])
    seen, validation = (
        _moments(student, module, wanted, which, prior, bias is not None, ranks) for which in split
    )
    best, solution, chosen = validation.error(prior), None, None
    for strength in (ridge, *(ridge * times for times in STRONGER)):
        if chosen == ridge:
            break
        tried = ridge_solution(seen.gram, seen.cross, prior, strength, free=0 if bias is None else 1)
        error = validation.error(tried)
        if error < best:
            best, solution, chosen = error, tried, strength
    if solution is None:
        return None
    new = solution if bias is None else solution[:-1]
    weight.copy_((new if transposed else new.T).to(weight.dtype))
    if bias is not None:
        bias.copy_(solution[-1].to(bias.dtype))
    return chosen
