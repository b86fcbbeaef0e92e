"""Layer-local regression: Adam on one module's projections, no back-propagation through the network."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..config.reconstruct import ReconstructConfig
from .calls import Calls
from .ranks import Ranks
from .row_store import Prefetched
from .train_state import autocast, behind_masks, product_dtype

ALONE = Ranks()
STRATA = 8  # at most so many processes can share a step's rows


def rate(step: int, config: ReconstructConfig) -> float:
    """Learning-rate factor of a step: linear warm-up, then the schedule."""
    warm = int(config.warmup * config.steps)
    if step < warm:
        return (step + 1) / warm
    done = (step - warm) / max(1, config.steps - warm)
    if config.schedule == "constant":
        return 1.0
    return 1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))


def row_order(count: int, size: int, seed: int, ranks: Ranks = ALONE) -> Iterator[Tensor]:
    """Endless index batches: every row once per round, in a new order each round.

    Each batch takes as many rows of every residue class (of 2, 4 or 8): ranks that hold every n-th row then share
    the very batches that one rank alone takes.

    Args:
        count, size: Rows, and rows of a batch, over all ranks.
        seed: Of the orders.
        ranks: Which rows are this rank's; only those are given, by their number on this rank.
    """
    strata = math.gcd(count, size, STRATA)
    orders = [_order(count // strata, size // strata, seed * STRATA + s) for s in range(strata)]
    while True:
        batch = [next(order) * strata + s for s, order in enumerate(orders)]
        yield torch.cat(batch[ranks.rank :: ranks.count]) // ranks.count


def _order(count: int, size: int, seed: int) -> Iterator[Tensor]:
    """`row_order` of one residue class."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.empty(0, dtype=torch.long)
    while True:
        while len(left) < size:
            left = torch.cat([left, torch.randperm(count, generator=generator)])
        yield left[:size]
        left = left[size:]


def batch_order(calls: Calls, seed: int, ranks: Ranks = ALONE) -> Iterator[Tensor]:
    """`row_order` of some calls; rows with masks of their own stay in their batches."""
    if not calls.masked:
        yield from row_order(len(calls) * ranks.count, calls.size * ranks.count, seed, ranks)
    for number in _order(len(calls) // calls.size, 1, seed):
        yield torch.arange(calls.size) + calls.size * number


def variance(calls: Calls, ranks: Ranks = ALONE) -> float:
    """Variance of all elements of the targets (of all ranks)."""
    sums = torch.zeros(3, dtype=torch.float64, device=calls.target.memory.device)
    for index in calls.in_order():
        y, real = calls.fetch(index)[0].double(), calls.real_of(index)
        y = y if real is None else y[real]
        sums += torch.stack([sums.new_tensor(y.numel()), y.sum(), y.square().sum()])
    count, total, squares = ranks.sum(sums).tolist()
    return max(0.0, squares / count - (total / count) ** 2) * count / max(1.0, count - 1)


@torch.no_grad()
def relative_error(module: nn.Module, calls: Calls, ranks: Ranks = ALONE) -> float:
    """Squared error over the target's variance, on all rows (of all ranks)."""
    total = torch.zeros(2, dtype=torch.float64)
    for index in calls.in_order():
        target, *inputs = calls.fetch(index)
        with autocast(target):
            out = calls.output(module, inputs, index)
        weight = calls.weight(index)
        total += torch.tensor([float(calls.loss(out, target, index)) * weight, weight], dtype=torch.float64)
    total = ranks.sum(total.to(calls.target.memory.device)).cpu()
    return float(total[0] / total[1])


def _optimizer(
    parameters: Sequence[nn.Parameter], rest: Sequence[nn.Parameter], config: ReconstructConfig
) -> tuple[torch.optim.Adam, list[float]]:
    """Adam with one group per tensor, and each group's peak rate; that of `rest` is `rest_rate` of the others'."""
    shares = [1.0] * len(parameters) + [config.rest_rate] * len(rest)
    groups: list[dict[str, Any]] = []
    for p, share in zip((*parameters, *rest), shares, strict=True):
        size = float(p.detach().float().square().mean().sqrt())
        peak = config.learning_rate * (size or 1e-2) if config.relative else config.learning_rate
        groups.append({"params": [p], "lr": peak * share})
    fused = parameters[0].device.type == "cuda"
    return torch.optim.Adam(groups, betas=config.betas, fused=fused), [group["lr"] for group in groups]


def regress(
    module: nn.Module,
    parameters: Sequence[nn.Parameter],
    train: Calls,
    validation: Calls,
    config: ReconstructConfig,
    ranks: Ranks = ALONE,
    rest: Sequence[nn.Parameter] = (),
) -> int:
    """Train `parameters` of `module` until it returns its targets; the best weights on the validation rows are kept.

    Args:
        module: What is run: an attention module, or the block around it.
        parameters: What is trained at the full rate: float32, asking for gradients, and nothing else of the
            module but `rest`.
        train, validation: Rows and targets; of this rank, where there are several.
        config: Steps, rate, patience.
        ranks: Who shares the rows.
        rest: What is trained at `rest_rate` of it; not every batch needs all of them (experts).

    Returns:
        Steps made.
    """
    device = train.target.memory.device

    def ordered() -> Iterator[tuple[Tensor, ...]]:
        for index in batch_order(train, config.seed, ranks):
            yield (index, *train.fetch(index))

    fetched = Prefetched(ordered(), device) if train.target.distant else ordered()

    def backward() -> None:
        index, target, *inputs = next(fetched)
        with autocast(target):
            out = train.output(module, inputs, index)
        train.loss(out, target, index).backward()
        mean()

    products = product_dtype(device, train.target.data.dtype)
    with ranks.mean_gradients(parameters, rest, products) as mean, behind_masks(train.masked):
        return minimise(parameters, backward, lambda: relative_error(module, validation, ranks), config, rest)


def minimise(
    parameters: Sequence[nn.Parameter],
    backward: Callable[[], None],
    validate: Callable[[], float],
    config: ReconstructConfig,
    rest: Sequence[nn.Parameter] = (),
) -> int:
    """Adam down a loss; the weights with the least validation error are kept.

    Args:
        parameters: What is trained at the full rate.
        backward: Adds the gradients of the next batch to them and to `rest`.
        validate: An error of the parameters as they are, lower is better.
        config: Steps, rate, schedule, patience.
        rest: What is trained at `rest_rate` of it.

    Returns:
        Steps made.
    """
    trained = (*parameters, *rest)
    best, waited = validate(), 0
    kept, step = [p.detach().clone() for p in trained], -1
    optimizer, peaks = _optimizer(parameters, rest, config)
    for step in range(config.steps):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * rate(step, config)
        backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % config.check_every == 0 or step + 1 == config.steps:
            now = validate()
            waited = 0 if now < best else waited + 1
            if now < best:
                best, kept = now, [p.detach().clone() for p in trained]
            if waited >= config.patience or not math.isfinite(now):
                break
    with torch.no_grad():
        for p, x in zip(trained, kept, strict=True):
            p.copy_(x)
    return step + 1
