"""Layer-local regression: Adam on one module's projections, no back-propagation through the network."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from ..config.reconstruct import ReconstructConfig
from .hidden_states import Calls
from .train_state import autocast


def rate(step: int, config: ReconstructConfig) -> float:
    """Learning-rate factor of a step: linear warm-up, then the schedule."""
    warm = int(config.warmup * config.steps)
    if step < warm:
        return (step + 1) / warm
    done = (step - warm) / max(1, config.steps - warm)
    if config.schedule == "constant":
        return 1.0
    return 1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))


def row_order(count: int, size: int, seed: int) -> Iterator[Tensor]:
    """Endless index batches: every row once per round, in a new order each round."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.empty(0, dtype=torch.long)
    while True:
        while len(left) < size:
            left = torch.cat([left, torch.randperm(count, generator=generator)])
        yield left[:size]
        left = left[size:]


@torch.no_grad()
def relative_error(module: nn.Module, calls: Calls) -> float:
    """Squared error over the target's variance, on all rows."""
    total = 0.0
    for index in torch.arange(len(calls)).split(calls.size):
        with autocast(calls.target):
            out = calls.output(module, index)
        total += float(calls.loss(out, index)) * len(index)
    return total / len(calls)


def _optimizer(
    parameters: Sequence[nn.Parameter], config: ReconstructConfig
) -> tuple[torch.optim.Adam, list[float]]:
    """Adam with one group per tensor, and each group's peak rate."""
    peaks = []
    for p in parameters:
        size = float(p.detach().float().square().mean().sqrt())
        peaks.append(config.learning_rate * (size or 1e-2) if config.relative else config.learning_rate)
    groups = [{"params": [p], "lr": peak} for p, peak in zip(parameters, peaks, strict=True)]
    fused = parameters[0].device.type == "cuda"
    return torch.optim.Adam(groups, betas=config.betas, fused=fused), peaks


def regress(
    module: nn.Module,
    parameters: Sequence[nn.Parameter],
    train: Calls,
    held_out: Calls,
    config: ReconstructConfig,
) -> int:
    """Train `parameters` of `module` until it returns its targets; the best weights seen are kept.

    Args:
        module: What is run: an attention module, or the block around it.
        parameters: What is trained: float32, asking for gradients, and nothing else of the module.
        train, held_out: Rows and targets.
        config: Steps, rate, patience.

    Returns:
        Steps made.
    """
    order = row_order(len(train), train.size, config.seed)

    def backward() -> None:
        index = next(order).to(train.target.device)
        with autocast(train.target):
            out = train.output(module, index)
        train.loss(out, index).backward()

    return minimise(parameters, backward, lambda: relative_error(module, held_out), config)


def minimise(
    parameters: Sequence[nn.Parameter],
    backward: Callable[[], None],
    validate: Callable[[], float],
    config: ReconstructConfig,
) -> int:
    """Adam down a loss; the weights that `validate` liked best are kept.

    Args:
        parameters: What is trained.
        backward: Adds the gradients of the next batch to them.
        judge: An error of the parameters as they are, lower is better.
        config: Steps, rate, schedule, patience.

    Returns:
        Steps made.
    """
    best, waited = validate(), 0
    kept, step = [p.detach().clone() for p in parameters], -1
    optimizer, peaks = _optimizer(parameters, config)
    averaged: list[Tensor] = []
    first_averaged = config.steps - int(config.average * config.steps)
    for step in range(config.steps):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * rate(step, config)
        backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step >= first_averaged:
            _average(averaged, parameters, step - first_averaged)
        if (step + 1) % config.check_every == 0 or step + 1 == config.steps:
            with _swapped(parameters, averaged):
                now = validate()
                waited = 0 if now < best else waited + 1
                if now < best:
                    best, kept = now, [p.detach().clone() for p in parameters]
            if waited >= config.patience or not math.isfinite(now):
                break
    with torch.no_grad():
        for p, x in zip(parameters, kept, strict=True):
            p.copy_(x)
    return step + 1


@torch.no_grad()
def _average(averaged: list[Tensor], parameters: Sequence[nn.Parameter], seen: int) -> None:
    """Running mean of the weights, in place."""
    if not averaged:
        averaged += [p.detach().clone() for p in parameters]
    for mean, p in zip(averaged, parameters, strict=True):
        mean.lerp_(p, 1 / (seen + 1))


@contextlib.contextmanager
def _swapped(parameters: Sequence[nn.Parameter], averaged: Sequence[Tensor]) -> Iterator[None]:
    """Hold the averaged weights for a while, if there are any."""
    own = [p.detach().clone() for p in parameters] if averaged else []
    with torch.no_grad():
        for p, x in zip(parameters, averaged, strict=False):
            p.copy_(x)
        yield
        for p, x in zip(parameters, own, strict=False):
            p.copy_(x)
