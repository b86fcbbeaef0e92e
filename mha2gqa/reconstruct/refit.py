"""Closed-form refit of one output projection on what the student's heads really deliver."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .capture import Stream


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


@torch.no_grad()
def refit(
    student: Stream,
    module: nn.Module,
    teacher: Stream,
    target: nn.Module,
    which: range,
    *,
    transposed: bool = False,
    ridge: float = 1e-3,
) -> None:
    """Refit an output projection in place: ridge least squares onto the original's output.

    Args:
        student, module: Where the student is, and its output projection (a linear layer).
        teacher, target: Where the original is, and its output projection.
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
        y = teacher.call(target, i).output
        assert y is not None
        if bias is not None:
            z = torch.cat([z, z.new_ones(len(z), 1)], 1)
        gram += z.T @ z
        cross += z.T @ y.flatten(0, -2).to(torch.float64)
    solution = ridge_solution(gram, cross, prior, ridge, free=0 if bias is None else 1)
    new = solution if bias is None else solution[:-1]
    weight.copy_((new if transposed else new.T).to(weight.dtype))
    if bias is not None:
        bias.copy_(solution[-1].to(bias.dtype))
