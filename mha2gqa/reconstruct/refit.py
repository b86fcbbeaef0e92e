"""Closed-form refit of projections on what they really read in the student."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .capture import Stream, first_tensor


def ridge_solution(gram: Tensor, cross: Tensor, prior: Tensor, ridge: float, free: int = 0) -> Tensor:
    """Minimise |Z W - Y|² + λ |W - W₀|² with λ = `ridge` x mean diagonal of ZᵀZ.

    Args:
        gram: `[n, n]`, ZᵀZ.
        cross: `[n, D]`, ZᵀY.
        prior: `[n, D]`, W₀.
        ridge: Relative strength.
        free: How many of the last rows (a bias) are not pulled.
    """
    pull = ridge * gram.diagonal()[: len(gram) - free].mean()
    weight = torch.full((len(gram),), float(pull), dtype=gram.dtype, device=gram.device)
    # A dead student (all zero) and a free bias still need a solvable system.
    weight = weight.clamp_min(1e-12 * float(gram.diagonal().max()) or 1.0)
    if free:
        weight[-free:] = 1e-12 * float(gram.diagonal().max())
    left = gram + torch.diag(weight)
    return torch.linalg.solve(left, cross + weight[:, None] * prior)


def delivered(teacher: Stream, target: nn.Module) -> Callable[[int], Tensor]:
    """What the original's `target` returns, batch by batch: what an output projection should."""

    def wanted(i: int) -> Tensor:
        output = teacher.call(target, i).output
        assert output is not None
        return output

    return wanted


def undrifted(teacher: Stream, target: nn.Module, module: nn.Module) -> Callable[[int], Tensor]:
    """What `module` makes of the inputs that the original's `target` reads: what it should make of its own.

    Merging is optimal for the original's inputs; those of the student have drifted. Queries of a module with
    the best shared keys need no other refit: no linear map of the input does better than the merged one
    where inputs have not moved.
    """
    return lambda i: first_tensor(module(next(iter(teacher.call(target, i, before=True).rows.values()))))


@torch.no_grad()
def refit(
    student: Stream,
    module: nn.Module,
    wanted: Callable[[int], Tensor],
    which: range,
    *,
    transposed: bool = False,
    ridge: float = 1e-3,
) -> None:
    """Refit a projection in place: ridge least squares of its outputs onto `wanted`.

    Args:
        student, module: Where the student is, and the projection (a linear layer).
        wanted: Batch number -> outputs `[B, T, rows]` that it should give.
        which: Batches.
        transposed: Whether weights are stored `[in, out]`.
        ridge: See `ReconstructConfig`.
    """
    weight: Tensor = module.weight  # type: ignore[assignment]
    bias: Tensor | None = getattr(module, "bias", None)
    prior = (weight if transposed else weight.T).to(torch.float64)  # [H e, D]
    if bias is not None:
        prior = torch.cat([prior, bias.to(torch.float64)[None]])
    n, width = prior.shape
    gram, cross = prior.new_zeros(n, n), prior.new_zeros(n, width)
    for i in which:
        z = next(iter(student.call(module, i, before=True).rows.values())).flatten(0, -2).to(torch.float64)
        y = wanted(i)
        if bias is not None:
            z = torch.cat([z, z.new_ones(len(z), 1)], 1)
        gram += z.T @ z
        cross += z.T @ y.flatten(0, -2).to(torch.float64)
    solution = ridge_solution(gram, cross, prior, ridge, free=0 if bias is None else 1)
    new = solution if bias is None else solution[:-1]
    weight.copy_((new if transposed else new.T).to(weight.dtype))
    if bias is not None:
        bias.copy_(solution[-1].to(bias.dtype))
