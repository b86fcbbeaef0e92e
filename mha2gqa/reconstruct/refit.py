"""Closed-form refit of one output projection on what the student's heads really deliver."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..calibration import Batch, batches
from .capture import call_of


def _pairs(
    model: nn.Module,
    module: nn.Module,
    target_model: nn.Module,
    target: nn.Module,
    inputs: Batch | Tensor,
    size: int,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs `[B T, H e]` of the student's output projection and outputs `[B T, D]` of the original's."""
    for batch in batches(inputs, size):
        z = next(iter(call_of(model, module, batch, before=True).rows.values()))
        y = call_of(target_model, target, batch).output
        assert y is not None
        yield z.flatten(0, -2), y.flatten(0, -2)


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
    student: nn.Module,
    module: nn.Module,
    teacher: nn.Module,
    target: nn.Module,
    inputs: Batch | Tensor,
    *,
    transposed: bool = False,
    ridge: float = 1e-3,
    batch_size: int = 8,
) -> tuple[float, float]:
    """Refit an output projection in place: ridge least squares onto the original's output.

    Args:
        student, module: The student and its output projection (a linear layer).
        teacher, target: The original and its output projection.
        inputs: `[N, T]` ids or keyword tensors.
        transposed: Whether weights are stored `[in, out]`.
        ridge: See `ReconstructConfig`.
        batch_size: Rows per pass.

    Returns:
        Relative squared error of the output on these rows, before and after.
    """
    weight: Tensor = module.weight  # type: ignore[assignment]
    bias: Tensor | None = getattr(module, "bias", None)
    prior = (weight if transposed else weight.T).to(torch.float64)  # [H e, D]
    if bias is not None:
        prior = torch.cat([prior, bias.to(torch.float64)[None]])
    n, width = prior.shape
    gram, cross = prior.new_zeros(n, n), prior.new_zeros(n, width)
    energy, total, count = prior.new_zeros(()), prior.new_zeros(width), 0
    for z, y in _pairs(student, module, teacher, target, inputs, batch_size):
        z, y = z.to(torch.float64), y.to(torch.float64)
        if bias is not None:
            z = torch.cat([z, z.new_ones(len(z), 1)], 1)
        gram += z.T @ z
        cross += z.T @ y
        energy += y.square().sum()
        total += y.sum(0)
        count += len(y)
    solution = ridge_solution(gram, cross, prior, ridge, free=0 if bias is None else 1)
    spread = (energy - total.square().sum() / count).clamp_min(1e-300)  # variance around the mean output

    def error(w: Tensor) -> float:
        return float((energy - 2 * (w * cross).sum() + (w * (gram @ w)).sum()).clamp_min(0) / spread)

    new = solution if bias is None else solution[:-1]
    weight.copy_((new if transposed else new.T).to(weight.dtype))
    if bias is not None:
        bias.copy_(solution[-1].to(bias.dtype))
    return error(prior), error(solution)
