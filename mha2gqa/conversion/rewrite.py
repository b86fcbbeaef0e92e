"""Carry out a plan, one attention module at a time: which tensors change, and their new values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import heads
from ..architectures import query_scale, rotary_dim
from ..errors import CheckpointError
from ..merging import MERGERS, MergeContext, Merged
from .plan import ModulePlan, Plan

if TYPE_CHECKING:
    from ..calibration import Statistics

POOLING = ("mean", "first", "random")  # touch only k, v and their extras


def merge_context(
    plan: Plan, module: ModulePlan, tensors: Mapping[str, Tensor], statistics: Statistics | None = None
) -> MergeContext:
    """What a merging method may know of one module, beside its weights."""
    norms = (f"{norm}.weight" for norm in plan.spec.qk_norm)
    moments = None if statistics is None else statistics.of(module.module)
    shares = None if moments is None else moments.clip_shares
    spec = plan.spec if shares is None else plan.spec.within_bound(not any(shares[:2]), not shares[2])
    return MergeContext(
        spec,
        rotary_dim(plan.spec, plan.config, module.geometry.head_dim, module.module.layer),
        moments,
        module_seed(plan, module),
        tuple(tensors[role] for role in norms if role in tensors),
        module.wide,
        query_scale(plan.spec, module.wide),
    )


def check_finite(module: ModulePlan, tensors: Mapping[str, Tensor]) -> None:
    """Refuse a module whose weights no method can measure.

    Raises:
        CheckpointError: A tensor holds NaN or infinity; it is named.
    """
    for role, x in tensors.items():
        if x.is_floating_point() and not bool(x.isfinite().all()):
            raise CheckpointError(
                "holds NaN or infinity",
                where=module.names[role],
                fix="the source is broken: download or save it again",
            )


def merge_module(
    plan: Plan, module: ModulePlan, tensors: Mapping[str, Tensor], context: MergeContext
) -> tuple[dict[str, Tensor], Merged]:
    """One attention module, by role, before -> after.

    Args:
        plan: The conversion.
        module: The module.
        tensors: Role -> tensor as stored.
        context: What the method may know.

    Returns:
        Role -> tensor to store, and the merged module.
    """
    weights = heads.split(plan.spec, module.geometry, tensors)
    if module.unchanged:
        return dict(tensors), Merged(weights, relative_error=0.0)
    merged = MERGERS[plan.method](weights, module.grouping, context)
    return heads.unsplit(plan.spec, merged.weights), merged


def module_seed(plan: Plan, module: ModulePlan) -> int:
    """A seed of its own for every module, the same in every run."""
    return plan.seed * 1_000_003 + [s.path for s in plan.modules].index(module.path)


def module_changes(
    plan: Plan, module: ModulePlan, shapes: Mapping[str, Sequence[int]], fitted: bool = False
) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """What a conversion does to a module's tensors; those not named are copied as bytes.

    The shapes are found by pooling on the meta device, so that no layout is described twice.

    Args:
        plan: The conversion.
        module: The module.
        shapes: Shape of every tensor of the source by name.
        fitted: Whether queries, output projections and norms change too, whatever the method.

    Returns:
        Role -> new shape of each changed tensor, and the roles that vanish (one tensor per lost head).
    """
    if module.unchanged:
        return {}, []
    names = module.names
    empty = {role: torch.empty(tuple(shapes[name]), device="meta") for role, name in names.items()}
    weights = heads.split(plan.spec, module.geometry, empty)
    # Not by the mean: adding on the meta device loads a second's worth of torch.
    shared = heads.neighbours(module.geometry.num_kv_heads, len(module.grouping) * module.wide)
    grouping = module.grouping if module.wide == 1 else shared
    pooled = MERGERS["first"](weights, grouping, MergeContext(plan.spec, 0)).weights
    if module.wide > 1:
        pooled = heads.widen(pooled, module.wide, plan.spec.position, 0)
    stored = {role: tuple(x.shape) for role, x in heads.unsplit(plan.spec, pooled).items() if role in names}
    norms = {f"{norm}.{leaf}" for norm in plan.spec.qk_norm for leaf in ("weight", "bias")}
    if fitted:  # the gains that all heads share are trained with them
        stored |= {role: tuple(shapes[name]) for role, name in names.items() if role in norms}
    lost = [role for role in names if role not in stored and role not in norms]
    if plan.method in POOLING and not module.reordered and not fitted:
        kv = set(weights.kv_extras)
        moved = {r for r in stored if r.startswith(("k.", "v.", "qkv."))} | {
            r for r in stored if role_template(r) in kv
        }
        stored = {role: shape for role, shape in stored.items() if role in moved}
    return stored, lost


def role_template(role: str) -> str:
    """An extra's name with its head number blanked, as the spec has it."""
    return re.sub(r"\.\d+\.", ".{head}.", role)


class ModuleConverter:
    """Merges a module when the first of its tensors is due, and lets go of each once it is taken.

    Args:
        plan: The conversion.
        module: The module.
        shapes: Shape of every tensor of the source by name.
        read: Name -> tensor.
        statistics: Moments on calibration text, for methods that use them.
        fitted: Whether the module is fitted after merging (see `finish_with`).
    """

    def __init__(
        self,
        plan: Plan,
        module: ModulePlan,
        shapes: Mapping[str, Sequence[int]],
        read: Callable[[str], Tensor],
        statistics: Statistics | None = None,
        fitted: bool = False,
    ) -> None:
        self.plan, self.module, self.read, self.statistics = plan, module, read, statistics
        self.shapes, self._lost = module_changes(plan, module, shapes, fitted)
        self.fields: dict[str, Any] = {}  # further fields of the report
        self._pending: dict[str, Tensor] = {}
        self._finished: Callable[[], Mapping[str, Tensor]] | None = None
        self.report: dict[str, Any] = {}

    @property
    def names(self) -> dict[str, str]:
        """Role -> name of every tensor that changes."""
        return {role: self.module.names[role] for role in self.shapes}

    @property
    def removed(self) -> list[str]:
        """Names of the tensors that vanish."""
        return [self.module.names[role] for role in self._lost]

    def tensor(self, role: str) -> Tensor:
        """The new tensor of a role; each can be taken once."""
        if role not in self._pending:
            self._pending = self._merged() if self._finished is None else self._made_elsewhere()
        return self._pending.pop(role)

    def _merged(self) -> dict[str, Tensor]:
        before = {role: self.read(name) for role, name in self.module.names.items()}
        if self.plan.method not in POOLING:
            check_finite(self.module, before)
        context = merge_context(self.plan, self.module, before, self.statistics)
        after, merged = merge_module(self.plan, self.module, before, context)
        self.report = layer_report(self.plan, self.module, before, merged) | self.fields
        if self.plan.spec.clip_key and self.plan.method not in POOLING and not self.module.unchanged:
            moments = context.statistics
            self.report["clipped"] = clip_report(None if moments is None else moments.clip_shares)
        return {role: after[role] for role in self.shapes}

    def _made_elsewhere(self) -> dict[str, Tensor]:
        assert self._finished is not None
        tensors = self._finished()
        return {role: tensors[role] for role in self.shapes}

    def finish_with(self, tensors: Callable[[], Mapping[str, Tensor]], report: Mapping[str, Any]) -> None:
        """Say where the module has been merged and fitted already.

        Args:
            tensors: Called when the first tensor is due; gives that of every role in `shapes`.
            report: As `layer_report` makes it.
        """
        self._finished, self.report = tensors, dict(report)


def rms(x: Tensor) -> float:
    """Root mean square of `[K, …]`, summed in float32 or more a head at a time, without a copy."""
    wide = torch.promote_types(x.dtype, torch.float32)
    norms = (float(torch.linalg.vector_norm(head, dtype=wide)) for head in x)
    return math.sqrt(sum(norm * norm for norm in norms) / x.numel())


def layer_report(
    plan: Plan, module: ModulePlan, before: Mapping[str, Tensor], merged: Merged
) -> dict[str, Any]:
    """The report of one module.

    `norm_ratio` is the RMS norm of the new key (value) heads over that of the old: 1 where heads agree,
    1/sqrt(group size) where they are unrelated and cancel.
    """
    source = heads.split(plan.spec, module.geometry, before)
    ratio = {
        name: rms(new) / max(rms(old), 1e-30)
        for name, new, old in (("k", merged.weights.k, source.k), ("v", merged.weights.v, source.v))
    }
    return {
        "path": module.path,
        "layer": module.module.layer,
        "kind": module.module.kind,
        "grouping": [list(group) for group in module.grouping],
        "regrouped": module.reordered,
        "relative_error": merged.relative_error,
        "residual": merged.relative_error,  # its name before
        "norm_ratio": {name: round(value, 4) for name, value in ratio.items()},
        "notes": list(merged.notes),
    }


def clip_report(shares: tuple[float, float, float] | None) -> dict[str, float | None]:
    """Share of the entries of q, k and v that the model's bound changes; None where that is not known."""
    return dict(zip("qkv", shares or (None, None, None), strict=True))


def module_converters(
    plan: Plan,
    shapes: Mapping[str, Sequence[int]],
    read: Callable[[str], Tensor],
    statistics: Statistics | None,
    fitted: bool = False,
) -> list[ModuleConverter]:
    """One converter per attention module of the plan."""
    return [ModuleConverter(plan, module, shapes, read, statistics, fitted) for module in plan.modules]
