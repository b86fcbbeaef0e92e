"""One attention module as two sharing problems, keys and values, with the freedom its architecture grants."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from ..heads import AttentionWeights, Grouping, rotary_pair_index
from .base import MergeContext
from .covariance import augmented, centred, key_moment, query_moment, value_moment
from .mean import pooled
from .rotary import RotaryObjective, UnitRotaryObjective
from .subspace import LinearObjective, MeanObjective, OrthogonalObjective, SubspaceObjective, costs_only

Symmetries = Literal["full", "rigid"]  # rigid: rotations only, unweighted (the Procrustes baseline)


@dataclass(frozen=True)
class KeyPart:
    """A problem over some dims of the key heads, in the order the problem lays them out."""

    dims: list[int]
    objective: SubspaceObjective


@dataclass(frozen=True)
class MergeObjective:
    """What it costs the heads of a module to share, and how to do it.

    Args:
        weights: The module.
        context: Spec, moments.
        keys: Independent parts of the key heads (rotated planes; dims that are not rotated).
        values: The value problem.
        frame: `[K, r D, e]` output blocks of each KV head's queries; a value solution's maps act on it.
        queries: `[H, d, n]` effective query functionals.
        folds: Whether a value's constant part may move into the output bias.
        notes: What was granted less than the method would like, and why.
    """

    weights: AttentionWeights
    context: MergeContext
    keys: tuple[KeyPart, ...]
    values: SubspaceObjective
    frame: Tensor
    queries: Tensor
    folds: bool
    notes: tuple[str, ...] = ()
    totals: tuple[float, float] = field(init=False)

    def __post_init__(self) -> None:
        keys = sum(part.objective.energy for part in self.keys)
        object.__setattr__(self, "totals", (keys or 1.0, self.values.energy or 1.0))

    def pairs(self) -> Tensor:
        """`[K, K]` cost of pairs: share of the key energy plus share of the value energy lost."""
        keys = torch.stack([part.objective.pairs() for part in self.keys]).sum(0)
        return keys / self.totals[0] + self.values.pairs() / self.totals[1]

    def cost(self, group: Sequence[int]) -> float:
        """The same for one group of any size, exactly."""
        if len(group) < 2:
            return 0.0
        keys = sum(part.objective.cost(group) for part in self.keys)
        return keys / self.totals[0] + self.values.cost(group) / self.totals[1]

    def costs_only(self) -> MergeObjective:
        """A light copy for searching: `pairs`, `cost` and `residual` work, on the processor."""
        light = copy.copy(self)
        parts = tuple(KeyPart(part.dims, costs_only(part.objective)) for part in self.keys)
        empty = self.frame.new_empty(0)
        for name, x in (
            ("keys", parts),
            ("values", costs_only(self.values)),
            ("frame", empty),
            ("queries", empty),
        ):
            object.__setattr__(light, name, x)
        object.__setattr__(light, "weights", None)
        return light

    def residual(self, grouping: Grouping) -> float:
        """Mean of the lost shares of key and value energy: 0 lossless, 1 nothing kept."""
        return sum(self.cost(group) for group in grouping) / 2


Finish = Callable[[MergeObjective, Grouping, Tensor, Tensor, AttentionWeights], AttentionWeights]


def _has_sinks(weights: AttentionWeights) -> bool:
    return any("sink" in name or name == "softmax_offset" for name in weights.query_extras)


def _value_problem(
    weights: AttentionWeights, context: MergeContext, freedom: Symmetries, folds: bool
) -> tuple[SubspaceObjective, Tensor]:
    heads = weights.num_kv_heads
    rows = augmented(weights.v, weights.v_bias)
    moment = value_moment(weights, context)
    moment = centred(moment) if folds else moment
    blocks = weights.o.to(torch.float64)  # [H, D, e] -> [K, r D, e]
    blocks = blocks.reshape(heads, -1, blocks.shape[-1])
    symmetry = context.spec.value_symmetry
    if symmetry == "none":
        return MeanObjective(rows, moment), blocks
    if freedom == "rigid" or symmetry == "orthogonal":
        loudness = blocks.square().sum((1, 2)) if freedom == "full" else blocks.new_ones(heads)
        return OrthogonalObjective(rows, moment, loudness), blocks
    frame, left = torch.linalg.qr(blocks)
    return LinearObjective(left, rows, moment), frame


def _root(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric square roots of `[K, R, R]` and their inverses, zero where a head is dead."""
    mean = moment.diagonal(dim1=1, dim2=2).mean(1)[:, None]
    values, vectors = torch.linalg.eigh(moment)
    values = (values.clamp_min(0) + 1e-6 * mean).sqrt()
    inverse = torch.where(values > 0, 1 / torch.where(values > 0, values, 1.0), 0.0)
    return (vectors * values[:, None]) @ vectors.mT, (vectors * inverse[:, None]) @ vectors.mT


def _gain(per_head: Mapping[str, Tensor], name: str) -> Tensor | None:
    """A full-width norm's gains per head, `[heads, d, 1]`."""
    found = next((x for key, x in per_head.items() if key.startswith(name)), None)
    return None if found is None else found.to(torch.float64)[:, :, None]


def effective_rows(weights: AttentionWeights, context: MergeContext) -> tuple[Tensor, Tensor]:
    """Query `[H, d, n]` and key `[K, d, n]` functionals, with the gains of a full-width norm in them."""
    queries, keys = augmented(weights.q, weights.q_bias), augmented(weights.k, weights.k_bias)
    if context.spec.key_symmetry != "phases":
        return queries, keys
    q_gain, k_gain = _gain(weights.query_extras, "q_norm"), _gain(weights.kv_extras, "k_norm")
    return queries if q_gain is None else queries * q_gain, keys if k_gain is None else keys * k_gain


def _head_energy(rows: Tensor, moment: Tensor) -> Tensor:
    """E|row x̂|² of `[heads, d, n]`, averaged over the dims of a head, as `[heads, 1, 1]`."""
    return ((rows @ moment) * rows).sum((1, 2), keepdim=True) / rows.shape[1]


def _head_normalised(rows: Tensor, moment: Tensor) -> Tensor:
    """`[heads, d, n]` scaled to unit RMS per head: what a per-head norm makes of them, on average."""
    energy = _head_energy(rows, moment)
    return torch.where(energy > 0, rows / energy.clamp_min(1e-300).sqrt(), rows)


def _rotatable(
    context: MergeContext, first: list[int], second: list[int], like: Tensor
) -> tuple[Tensor, str]:
    """Which planes have one gain in both norms, and a note if some have not."""
    symmetry = context.spec.key_symmetry
    if symmetry != "plane_rotations" or not context.gains:  # no norm, or one without weights: it turns along
        return torch.full((len(first),), symmetry != "none", device=like.device), ""
    good = torch.ones(len(first), dtype=torch.bool, device=like.device)
    for gains in context.gains:
        g = gains.to(like.device, torch.float64).flatten()
        good &= (g[first] - g[second]).abs() <= 1e-3 * (g[first].abs() + g[second].abs())
    left_out = int((~good).sum())
    note = f"keys: {left_out} of {len(first)} planes have unequal gains, sign flips only"
    return good, note if left_out else ""


def _scalable(weights: AttentionWeights, context: MergeContext) -> bool:
    """Whether a key's amplitude can move into the query (under a full-width norm: through the gains)."""
    if context.spec.key_symmetry == "phases":
        both = _gain(weights.query_extras, "q_norm"), _gain(weights.kv_extras, "k_norm")
        return all(x is not None for x in both)
    return context.spec.key_symmetry in ("planes", "linear")


def _key_parts(
    weights: AttentionWeights, context: MergeContext, freedom: Symmetries, queries: Tensor, keys: Tensor
) -> tuple[tuple[KeyPart, ...], str]:
    spec, width = context.spec, keys.shape[1]
    moment = key_moment(weights, context)
    every = list(range(width))
    if spec.key_symmetry == "none" or spec.position == "unknown":
        reason = "position style unknown" if spec.position == "unknown" else "no symmetry"
        return (KeyPart(every, MeanObjective(keys, moment)),), f"keys: {reason}, plain mean"
    if spec.key_symmetry == "plane_rotations":
        keys, queries = _head_normalised(keys, moment), _head_normalised(queries, moment)
    energy = query_moment(weights, queries, context)  # [K, d, d]
    if freedom == "rigid":
        energy = torch.eye(width, dtype=energy.dtype, device=energy.device).expand_as(energy)
    first, second, rest = rotary_pair_index(spec.position, context.rotary, width)
    omega = energy.diagonal(dim1=1, dim2=2)  # [K, d]
    parts, note = [], ""
    if first:
        planes = torch.complex(keys[:, first], keys[:, second])
        weight = omega[:, first] + omega[:, second]
        rotatable, note = _rotatable(context, first, second, planes)
        objective: SubspaceObjective
        if freedom == "full" and _scalable(weights, context):
            objective = RotaryObjective(planes, weight, moment)
        else:
            objective = UnitRotaryObjective(planes, weight, moment, rotatable)
        parts.append(KeyPart([*first, *second], objective))
    if rest:
        parts.append(KeyPart(rest, _rest_problem(weights, context, freedom, keys[:, rest], energy, rest)))
    return tuple(parts), note


def _rest_problem(
    weights: AttentionWeights,
    context: MergeContext,
    freedom: Symmetries,
    keys: Tensor,
    energy: Tensor,
    rest: list[int],
) -> SubspaceObjective:
    """The dims of a key that positions do not rotate."""
    moment = key_moment(weights, context)
    if not _has_sinks(weights):
        moment = centred(moment)  # a constant key is invisible to softmax
    if context.spec.key_symmetry in ("planes", "linear"):
        if freedom == "rigid":
            return OrthogonalObjective(keys, moment, keys.new_ones(len(keys)))
        left, undo = _root(energy[:, rest][:, :, rest])
        return LinearObjective(left, keys, moment, undo)
    single = torch.complex(keys, torch.zeros_like(keys))
    omega = energy.diagonal(dim1=1, dim2=2)[:, rest]
    fixed = torch.zeros(len(rest), dtype=torch.bool, device=keys.device)
    return UnitRotaryObjective(single, omega, moment, fixed, single=True)


def merge_objective(
    weights: AttentionWeights, context: MergeContext, freedom: Symmetries = "full"
) -> MergeObjective:
    """State the sharing problems of one module.

    Args:
        weights: The module, K stored KV heads.
        context: Spec (the symmetries), rotary dims, moments; without moments the metric of the weights.
        freedom: `full` uses every symmetry and weighs errors by their effect; `rigid` rotates only.

    Returns:
        The problems; their tensors are float64 on the device of `weights`.
    """
    folds = weights.o_bias is not None and not _has_sinks(weights)
    queries, keys = effective_rows(weights, context)
    parts, note = _key_parts(weights, context, freedom, queries, keys)
    values, frame = _value_problem(weights, context, freedom, folds)
    notes = [note] if note else []
    if context.spec.value_symmetry != "linear":
        notes.append(f"values: symmetry {context.spec.value_symmetry}")
    return MergeObjective(weights, context, parts, values, frame, queries, folds, tuple(notes))


# --- from solutions back to weights --------------------------------------------------------------------


def _solve_keys(objective: MergeObjective, grouping: Grouping) -> tuple[Tensor, Tensor, Tensor]:
    """Shared key functionals `[G, d, n]`, query functionals `[H, d, n]` in source order, and the cost."""
    heads, width = objective.weights.num_kv_heads, objective.queries.shape[1]
    queries = objective.queries.reshape(heads, -1, *objective.queries.shape[1:]).clone()  # [K, r, d, n]
    shared = queries.new_empty(len(grouping), width, queries.shape[-1])
    cost = queries.new_zeros(())
    for g, group in enumerate(grouping):
        members = torch.as_tensor(list(group), device=queries.device)
        for part in objective.keys:
            solved = part.objective.solve(group)
            shared[g, part.dims] = solved.rows
            cost += solved.cost
            moved = solved.maps[:, None] @ queries[members][:, :, part.dims]
            for i, h in enumerate(group):
                queries[h][:, part.dims] = moved[i]
    if objective.context.spec.key_symmetry == "plane_rotations":  # solved at unit norm: give the norm back
        rows = augmented(objective.weights.k, objective.weights.k_bias)
        energy = _head_energy(rows, key_moment(objective.weights, objective.context))
        members = torch.as_tensor([list(group) for group in grouping], device=energy.device)
        shared = shared * energy[members].mean(1).sqrt()
    return shared, queries.flatten(0, 1), cost


def _solve_values(objective: MergeObjective, grouping: Grouping) -> tuple[Tensor, Tensor, Tensor]:
    """Shared value functionals `[G, e, n]`, output blocks `[H, D, e]` in source order, and the cost."""
    shared, blocks = [], torch.empty_like(objective.frame)
    cost = objective.frame.new_zeros(())
    for group in grouping:
        solved = objective.values.solve(group)
        shared.append(solved.rows)
        cost += solved.cost
        blocks[list(group)] = objective.frame[list(group)] @ solved.maps
    return torch.stack(shared), blocks.reshape(objective.weights.o.shape), cost


def _folded_bias(
    objective: MergeObjective, values: Tensor, blocks: Tensor, grouping: Grouping
) -> Tensor | None:
    """The output bias that keeps the mean attention output: what centred values left out."""
    weights = objective.weights
    if not objective.folds or weights.o_bias is None:
        return weights.o_bias
    moment = value_moment(weights, objective.context)
    mean = moment[:, -1] / moment[-1, -1]  # E[x̃̂]
    repeat = weights.num_heads // weights.num_kv_heads
    owner = {h: g for g, group in enumerate(grouping) for h in group}
    before = (augmented(weights.v, weights.v_bias) @ mean).repeat_interleave(repeat, 0)  # [H, e]
    after = (values @ mean)[[owner[h // repeat] for h in range(weights.num_heads)]]
    old = torch.einsum("hde,he->d", weights.o.to(torch.float64), before)
    new = torch.einsum("hde,he->d", blocks, after)
    return weights.o_bias.to(torch.float64) + old - new


def _without_constant(objective: MergeObjective, keys: Tensor) -> Tensor:
    """Keys `[G, d, n]` with the mean of their unrotated dims at zero: softmax does not see it, rounding does."""
    _, _, rest = rotary_pair_index(objective.context.spec.position, objective.context.rotary, keys.shape[1])
    if objective.context.spec.key_symmetry not in ("planes", "linear") or not rest:
        return keys
    moment = key_moment(objective.weights, objective.context)
    keys = keys.clone()
    keys[:, rest, -1] -= keys[:, rest] @ (moment[:, -1] / moment[-1, -1])
    return keys


def _cast(rows: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Functionals `[heads, R, n]` as weight and bias in the dtypes of the source."""
    return rows[:, :, :-1].to(weight.dtype), None if bias is None else rows[:, :, -1].to(bias.dtype)


def merge(
    objective: MergeObjective,
    grouping: Grouping,
    finish: Finish | None = None,
) -> tuple[AttentionWeights, float]:
    """Solve the sharing problems for `grouping` and write the solution as weights.

    Args:
        problem: From `merge_objective`.
        grouping: G groups of source KV heads.
        finish: Writes shared keys `[G, d, n]` and queries `[H, d, n]` into the result where they are not
            simply its rows.

    Returns:
        G KV heads (query heads re-ordered so that each group's are contiguous; dtypes of the source), and
        what `objective.residual` says of the grouping.
    """
    w = objective.weights
    if len(grouping) == w.num_kv_heads:  # nobody shares: the same numbers, perhaps in another order
        return pooled(w, grouping, objective.context, "first"), 0.0
    keys, queries, key_cost = _solve_keys(objective, grouping)
    values, blocks, value_cost = _solve_values(objective, grouping)
    residual = float(key_cost / objective.totals[0] + value_cost / objective.totals[1]) / 2
    bias = _folded_bias(objective, values, blocks, grouping)
    if w.k_bias is not None and not _has_sinks(w):
        keys = _without_constant(objective, keys)
    k, k_bias = _cast(keys, w.k, w.k_bias)
    v, v_bias = _cast(values, w.v, w.v_bias)
    q, q_bias = _cast(queries, w.q, w.q_bias)
    base = replace(
        pooled(replace(w, q=q, q_bias=q_bias, o=blocks.to(w.o.dtype)), grouping, objective.context, "mean"),
        k=k,
        k_bias=k_bias,
        v=v,
        v_bias=v_bias,
        o_bias=None if bias is None or w.o_bias is None else bias.to(w.o_bias.dtype),
    )
    return (base if finish is None else finish(objective, grouping, keys, queries, base)), residual
