"""Which heads share in every module of a model, within what its architecture allows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import distributed, heads
from ..calibration import Statistics
from ..checkpoints.loading import resolve_device
from ..merging.grouping import evaluations, read_groupings, search
from ..merging.objective import MergeObjective
from ..merging.setup import merge_objective
from .options import CalibrationOptions
from .plan import Groupings, ModulePlan, Plan
from .rewrite import check_finite, merge_context

ReportFields = dict[str, dict[str, Any]]  # module path -> further fields of its report
Read = Callable[[str], Tensor]
Found = tuple[heads.Grouping, dict[str, float]]  # and what neighbours would lose, by module path


def grouped(
    plan: Plan,
    read: Read,
    statistics: Statistics | None,
    options: CalibrationOptions,
    modules: Sequence[ModulePlan] | None = None,
) -> tuple[Plan, ReportFields]:
    """`plan` with the groupings the options ask for, and what a search gained.

    Args:
        plan: With neighbours.
        read: Tensor name -> tensor.
        statistics: Moments, if there are any.
        options: `grouping` is what counts.
        modules: Those of the plan that are searched now; all by default.
    """
    how = options.how(plan)
    if how in ("neighbours", "given"):
        return plan, {}
    if how != "search":
        counts = {s.path: (s.geometry.num_kv_heads, len(s.grouping)) for s in plan.modules}
        return plan.regrouped(read_groupings(how, counts)), {}
    groupings, fields = _searched(
        plan, read, statistics, options, plan.modules if modules is None else modules, modules is None
    )
    return plan.regrouped(groupings), fields


def _searched(
    plan: Plan,
    read: Read,
    statistics: Statistics | None,
    options: CalibrationOptions,
    modules: Sequence[ModulePlan],
    report: bool,
) -> tuple[Groupings, ReportFields]:
    """The best groupings found: one for each module, or one for all where heads may only move together."""
    found: dict[str, heads.Grouping] = {s.path: s.grouping for s in plan.modules}
    fields: ReportFields = {}
    together: dict[tuple[str, int, int], list[tuple[ModulePlan, MergeObjective]]] = {}
    searched = [m for m in modules if _free(plan, m)]
    with _threads() as (pool, workers):
        few = len(searched) < workers  # one cost a thread then, else one search a thread
        jobs: list[Callable[[], Found]] = []

        def begin(members: list[tuple[ModulePlan, MergeObjective]]) -> None:
            if few:
                jobs.append(partial(_search, plan.method, members, options.seed, pool))
            else:
                jobs.append(pool.submit(_search, plan.method, members, options.seed).result)

        for module in searched:
            count, groups = module.geometry.num_kv_heads, len(module.grouping)
            objective = _objective(plan, module, read, statistics, options).costs_only()
            if plan.spec.permutable_of(module.module.kind) == "model":
                together.setdefault((module.module.kind, count, groups), []).append((module, objective))
            else:
                begin([(module, objective)])
        for members in together.values():
            begin(members)
        for done, job in enumerate(jobs):
            if report:
                options.say("grouping", done, len(jobs))
            best, errors = job()
            for path, error in errors.items():
                found[path] = best
                fields[path] = {"relative_error_neighbours": error, "residual_neighbours": error}
    return found, fields


def _free(plan: Plan, module: ModulePlan) -> bool:
    """Whether there is a choice of heads that share."""
    chosen = len(module.grouping) in (1, module.geometry.num_kv_heads)
    return not chosen and plan.spec.permutable_of(module.module.kind) != "never"


@contextmanager
def _threads() -> Iterator[tuple[ThreadPoolExecutor, int]]:
    """One thread per core, and how many: a small eigenproblem does not gain from several."""
    own = torch.get_num_threads()
    workers = max(1, min(_allowed(own), os.cpu_count() or 1))
    torch.set_num_threads(workers)
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool, workers
    finally:
        torch.set_num_threads(own)


def _allowed(own: int) -> int:
    """Threads that a search may take: rank 0 searches while others wait, and launchers leave one to each process."""
    if own == 1 and distributed.world_size() > 1 and hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return own


def _objective(
    plan: Plan, module: ModulePlan, read: Read, statistics: Statistics | None, options: CalibrationOptions
) -> MergeObjective:
    """What sharing costs in one module."""
    device = resolve_device(options.device)
    tensors = {role: read(name).to(device) for role, name in module.names.items()}
    check_finite(module, tensors)
    weights = heads.split(plan.spec, module.geometry, tensors)
    context = merge_context(plan, module, tensors, statistics)
    return merge_objective(weights, context, "full" if plan.method == "joint" else "orthogonal")


def _search(
    method: str,
    members: list[tuple[ModulePlan, MergeObjective]],
    seed: int,
    pool: ThreadPoolExecutor | None = None,
) -> Found:
    """The grouping of least summed cost of modules that must keep one order."""
    module, objectives = members[0][0], [objective for _, objective in members]
    groups = len(module.grouping)
    size = module.geometry.num_kv_heads // groups * module.geometry.head_dim
    pairs = torch.stack([objective.pairs() for objective in objectives]).sum(0).numpy()
    # Procrustes costs are slow iterations; its authors search on sums of pairs alone, and so do we.
    budget = max(24, evaluations(size) // len(objectives)) if method == "joint" else 0
    known: dict[tuple[int, ...], list[float]] = {}  # neighbours are asked for again at the end

    def costs(group: tuple[int, ...]) -> list[float]:
        if group not in known:
            known[group] = [objective.cost(group) for objective in objectives]
        return known[group]

    best = search(pairs, lambda group: sum(costs(group)), groups, budget=budget, seed=seed, pool=pool)
    each = [
        sum(lost) / 2 for lost in zip(*map(costs, module.grouping), strict=True)
    ]  # see MergeObjective.relative_error
    return best, {member.module.path: lost for (member, _), lost in zip(members, each, strict=True)}
