"""Which heads share in every module of a model, within what its architecture allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import heads
from ..calibration import Statistics
from ..checkpoints.loading import resolve_device
from ..merging.grouping import evaluations, read_groupings, search
from ..merging.module_objective import merge_objective
from ..merging.objective import MergeObjective
from ..merging.subspace import one_by_one
from ..reconstruct.ranks import Ranks
from .calibration_options import GIVEN, CalibrationOptions
from .plan import Groupings, ModulePlan, Plan
from .rewrite import check_finite, merge_context
from .workers import Workers, one_core_threads, own_workers, workers

ReportFields = dict[str, dict[str, Any]]  # module path -> further fields of its report
Read = Callable[[str], Tensor]
Found = tuple[heads.Grouping, dict[str, float]]  # and what neighbours would lose, by module path


def with_groupings(plan: Plan, options: CalibrationOptions) -> tuple[Plan, CalibrationOptions]:
    """The plan with the partitions of a file, where the options name one, and options that keep them.

    Raises:
        UsageError: The file is none, or does not fit the model.
    """
    how = options.how(plan)
    if how in ("neighbours", "search", GIVEN):
        return plan, options
    counts = {s.path: (s.geometry.num_kv_heads, len(s.grouping)) for s in plan.modules}
    return plan.regrouped(read_groupings(how, counts)), replace(options, grouping=GIVEN)


def grouped(
    plan: Plan,
    read: Read,
    statistics: Statistics | None,
    options: CalibrationOptions,
    modules: Sequence[ModulePlan] | None = None,
    ranks: Ranks | None = None,
) -> tuple[Plan, ReportFields]:
    """`plan` with the groupings the options ask for, and what a search gained.

    Several processes share its work and find the same.

    Args:
        plan: With neighbours.
        read: Tensor name -> tensor.
        statistics: Moments, if there are any.
        options: `grouping` is what counts.
        modules: Those of the plan that are searched now; all by default.
        ranks: The processes that call this at the same time, with the same; this one alone by default.
    """
    plan, options = with_groupings(plan, options)
    if options.how(plan) != "search":
        return plan, {}
    objective = partial(_objective, plan, read=read, statistics=statistics, options=options)
    report = options.say if modules is None else _silent
    groupings, fields = _searched(
        plan, plan.modules if modules is None else modules, objective, options.seed, report, ranks or Ranks()
    )
    return plan.regrouped(groupings), fields


class SearchBeside:
    """A search that runs on cores of this process while it does something else, as the fits of another block on a GPU.

    It is not shared with other processes, whose sums would get into each other's way; the groupings are the same.

    Args:
        plan: With neighbours.
        read: Tensor name -> tensor; what is needed of them is read at once.
        statistics: Moments, if there are any.
        options: `grouping` is `search`.
        modules: Those of the plan that are searched.
        ranks: The processes that do this at the same time.
    """

    def __init__(
        self,
        plan: Plan,
        read: Read,
        statistics: Statistics | None,
        options: CalibrationOptions,
        modules: Sequence[ModulePlan],
        ranks: Ranks,
    ) -> None:
        objective = partial(_objective, plan, read=read, statistics=statistics, options=options)
        problems = _problems(plan, [m for m in modules if _free(plan, m)])
        stated = [[(member, objective(member).costs_only()) for member in members] for members in problems]
        self.ranks, self._open = ranks, ExitStack()
        driver = self._open.enter_context(one_core_threads(1))
        team = self._open.enter_context(own_workers(ranks))
        self._begun = [driver.submit(_search, plan.method, each, options.seed, team) for each in stated]

    def __call__(self, plan: Plan) -> tuple[Plan, ReportFields]:
        """`plan` with the groupings found, which are waited for; every process has to ask at the same time."""
        with self._open:
            answers = self.ranks.agree([search.result() for search in self._begun])
        groupings, fields = _told(answers)
        return plan.regrouped(_all_with(plan, groupings)), fields

    def stop(self) -> None:
        """Give the search up, once the costs that are being computed are there."""
        self._open.close()


def _searched(
    plan: Plan,
    modules: Sequence[ModulePlan],
    objective: Callable[[ModulePlan], MergeObjective],
    seed: int,
    report: Callable[[str, int, int], None],
    ranks: Ranks,
) -> tuple[Groupings, ReportFields]:
    """The best groupings found: one for each module, or one for all where heads may only move together."""
    problems = _problems(plan, [m for m in modules if _free(plan, m)])
    with workers(ranks) as team:
        few = sum(map(len, problems)) < team.count  # one cost a thread then, else one search a thread
        jobs: list[Callable[[], Found]] = []
        for members in problems if few else problems[ranks.rank :: ranks.count]:
            stated = [(member, objective(member).costs_only()) for member in members]
            if few:
                jobs.append(partial(_search, plan.method, stated, seed, team))
            else:
                jobs.append(team.pool.submit(_search, plan.method, stated, seed).result)
        answers: list[Found] = []
        for job in jobs:
            report("grouping", len(answers), len(jobs))
            answers.append(job())
        if not few:
            answers = [answer for part in ranks.gather(answers) for answer in part]
    found, fields = _told(answers)
    return _all_with(plan, found), fields


def _all_with(plan: Plan, found: Groupings) -> Groupings:
    """The groupings of all modules, some as they were found."""
    return {m.path: found.get(m.path, m.grouping) for m in plan.modules}


def _told(answers: Sequence[Found]) -> tuple[Groupings, ReportFields]:
    """The grouping of each module that was searched, and further fields of its report."""
    found: dict[str, heads.Grouping] = {path: best for best, errors in answers for path in errors}
    fields: ReportFields = {
        path: {"relative_error_neighbours": error, "residual_neighbours": error}
        for _, errors in answers
        for path, error in errors.items()
    }
    return found, fields


def _silent(stage: str, done: int, total: int) -> None:
    """A search within a stage that others report."""


def _problems(plan: Plan, modules: Sequence[ModulePlan]) -> list[list[ModulePlan]]:
    """Modules that are searched on their own, then those that must keep one order of heads."""
    alone: list[list[ModulePlan]] = []
    together: dict[tuple[str, int, int], list[ModulePlan]] = {}
    for module in modules:
        if plan.spec.permutable_of(module.module.kind) == "model":
            key = (module.module.kind, module.geometry.num_kv_heads, len(module.grouping))
            together.setdefault(key, []).append(module)
        else:
            alone.append([module])
    return [*alone, *together.values()]


def _free(plan: Plan, module: ModulePlan) -> bool:
    """Whether there is a choice of heads that share."""
    chosen = len(module.grouping) in (1, module.geometry.num_kv_heads)
    return not chosen and plan.spec.permutable_of(module.module.kind) != "never"


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
    method: str, members: list[tuple[ModulePlan, MergeObjective]], seed: int, team: Workers | None = None
) -> Found:
    """The grouping of least summed cost of modules that must keep one order."""
    module, objectives = members[0][0], [objective for _, objective in members]
    groups = len(module.grouping)
    size = module.geometry.num_kv_heads // groups * module.geometry.head_dim
    each = one_by_one if team is None else team.each
    pairs = torch.stack([objective.pairs(each) for objective in objectives]).sum(0).numpy()
    # Procrustes costs are slow iterations; its authors search on sums of pairs alone, and so do we.
    budget = max(24, evaluations(size) // len(objectives)) if method == "joint" else 0
    # Cost of a group by objective; neighbours are asked for again at the end.
    known: dict[tuple[int, ...], list[float]] = {}

    def costs(wanted: Sequence[tuple[int, ...]]) -> list[float]:
        new = [group for group in wanted if group not in known]
        known.update(zip(new, each(lambda group: [o.cost(group) for o in objectives], new), strict=True))
        return [sum(known[group]) for group in wanted]

    if team is None:
        best = search(pairs, costs, groups, budget=budget, seed=seed)
    else:  # every process takes the same steps, which it can only on the same costs
        pairs = team.ranks.agree(pairs)
        best = search(pairs, costs, groups, budget=budget, seed=seed, at_once=team.count)
    costs(module.grouping)
    # As MergeObjective.relative_error.
    each_lost = [sum(lost) / 2 for lost in zip(*map(known.__getitem__, module.grouping), strict=True)]
    return best, {member.module.path: lost for (member, _), lost in zip(members, each_lost, strict=True)}
