"""From a merge objective to weights: the shared heads, and what their queries and output blocks absorb."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..heads import AttentionWeights, Grouping, rotary_pair_index, wide_dims
from .covariance import augmented, key_moment, value_moment
from .full_norm import with_gains
from .mean import pooled
from .module_objective import has_sinks, head_energy
from .objective import MergeObjective


def merge(objective: MergeObjective, grouping: Grouping) -> tuple[AttentionWeights, float]:
    """Minimise `objective` for `grouping` and write the solution as weights.

    Args:
        objective: From `merge_objective`.
        grouping: G groups of source KV heads.

    Returns:
        G KV heads (query heads re-ordered so that each group's are contiguous; dtypes of the source), and
        what `objective.relative_error` says of the grouping.
    """
    w = objective.weights
    if len(grouping) == w.num_kv_heads:  # nobody shares: the same numbers, perhaps in another order
        return pooled(w, grouping, objective.context, "first"), 0.0
    keys = _solve_keys(objective, grouping)
    values, blocks, value_cost = _solve_values(objective, grouping)
    relative_error = float(keys.cost / objective.totals[0] + value_cost / objective.totals[1]) / 2
    bias = _folded_bias(objective, values, blocks, grouping)
    shared = keys.shared
    if w.k_bias is not None and not has_sinks(w):
        shared = _without_constant(objective, shared)
    k, k_bias = _cast(shared, w.k, w.k_bias)
    v, v_bias = _cast(values, w.v, w.v_bias)
    q, q_bias = _cast(keys.queries * objective.context.query_scale, w.q, w.q_bias)
    merged = replace(
        pooled(replace(w, q=q, q_bias=q_bias, o=blocks.to(w.o.dtype)), grouping, objective.context, "mean"),
        k=k,
        k_bias=k_bias,
        v=v,
        v_bias=v_bias,
        o_bias=None if bias is None or w.o_bias is None else bias.to(w.o_bias.dtype),
    )
    if objective.context.spec.key_symmetry == "phases":
        merged = with_gains(objective, grouping, shared, keys.queries, keys.maps, merged)
    return merged, relative_error


class _KeySolution(NamedTuple):
    """Shared keys and what their queries absorb.

    Args:
        shared: `[G, S d, n]` key functionals.
        queries: `[H, S d, n]` query functionals, in source order.
        maps: `[K, S d, d]`, what a KV head's effective queries were multiplied by.
        cost: `[]`, key energy lost.
    """

    shared: Tensor
    queries: Tensor
    maps: Tensor
    cost: Tensor


def _solve_keys(objective: MergeObjective, grouping: Grouping) -> _KeySolution:
    heads, width = objective.weights.num_kv_heads, objective.queries.shape[1]
    position, rotary = objective.context.spec.position, objective.context.rotary
    channels = objective.context.channels
    source = objective.queries.reshape(heads, -1, *objective.queries.shape[1:])  # [K, r, d, n]
    queries = source.repeat(1, 1, channels, 1)
    shared = queries.new_empty(len(grouping), queries.shape[2], queries.shape[3])
    maps = queries.new_zeros(heads, queries.shape[2], width)
    cost = queries.new_zeros(())
    for g, group in enumerate(grouping):
        members = torch.as_tensor(list(group), device=queries.device)
        for part in objective.keys:
            solved = part.objective.solve(group)
            wide = wide_dims(part.dims, position, rotary, width, channels)
            shared[g, wide] = solved.rows
            cost += solved.cost
            moved = solved.maps[:, None] @ source[members][:, :, part.dims]
            dims, rows = (torch.as_tensor(x, device=queries.device) for x in (part.dims, wide))
            for i, h in enumerate(group):
                queries[h][:, wide] = moved[i]
                maps[h, rows[:, None], dims] = solved.maps[i]
    if objective.context.spec.key_symmetry == "plane_rotations":  # solved at unit norm: give the norm back
        rows = augmented(objective.weights.k, objective.weights.k_bias)
        energy = head_energy(rows, key_moment(objective.weights, objective.context))
        members = torch.as_tensor([list(group) for group in grouping], device=energy.device)
        shared = shared * energy[members].mean(1).sqrt()
    return _KeySolution(shared, queries.flatten(0, 1), maps, cost)


def _solve_values(objective: MergeObjective, grouping: Grouping) -> tuple[Tensor, Tensor, Tensor]:
    """Shared value functionals `[G, S e, n]`, output blocks `[H, D, S e]` in source order, and the cost."""
    frame = objective.frame
    shared, blocks = [], frame.new_empty(*frame.shape[:2], frame.shape[2] * objective.context.channels)
    cost = objective.frame.new_zeros(())
    for group in grouping:
        solved = objective.values.solve(group)
        shared.append(solved.rows)
        cost += solved.cost
        blocks[list(group)] = objective.frame[list(group)] @ solved.maps
    return torch.stack(shared), blocks.reshape(*objective.weights.o.shape[:2], blocks.shape[2]), cost


def _folded_bias(
    objective: MergeObjective, values: Tensor, blocks: Tensor, grouping: Grouping
) -> Tensor | None:
    """The output bias that keeps the mean attention output: what centred values left out."""
    weights = objective.weights
    if not objective.folds_bias or weights.o_bias is None:
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
    context = objective.context
    _, _, rest = rotary_pair_index(context.spec.position, context.rotary * context.channels, keys.shape[1])
    if objective.context.spec.key_symmetry not in ("planes", "linear") or not rest:
        return keys
    moment = key_moment(objective.weights, objective.context)
    keys = keys.clone()
    keys[:, rest, -1] -= keys[:, rest] @ (moment[:, -1] / moment[-1, -1])
    return keys


def _cast(rows: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Functionals `[heads, R, n]` as weight and bias in the dtypes of the source."""
    return rows[:, :, :-1].to(weight.dtype), None if bias is None else rows[:, :, -1].to(bias.dtype)
