"""Calibrated merging and the Procrustes baseline: both solve a module's sharing problems."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..heads import AttentionWeights, Grouping, query_order, rotary_pair_index
from .base import MergeContext, Merged
from .covariance import augmented, key_moment
from .objective import MergeObjective, Symmetries, merge, merge_objective


def joint(weights: AttentionWeights, grouping: Grouping, context: MergeContext) -> Merged:
    """Merge keys and values to the optimum of their effect on attention, within the granted symmetries.

    Keys share one complex functional per RoPE plane (weighted by query energy; a member's own phase and
    amplitude move into its queries), values share the best rank-d map in the output metric (a member's
    way back moves into its output block). For the shared keys the merged queries are the least-squares optimum
    among all linear maps of the input: there is nothing left to refit in them but drifting inputs.

    Args:
        weights: One module, K stored KV heads.
        grouping: G equal-size groups of them.
        context: Spec, rotary dims and, if text was given, moments; without them the weights' own metric.

    Returns:
        G KV heads, the lost share of key and value energy, and what could not be used.
    """
    return _merged(weights, grouping, context, "full")


def align(weights: AttentionWeights, grouping: Grouping, context: MergeContext) -> Merged:
    """Generalised Procrustes, the best published plain start (Jin et al. 2025), with norms put back.

    Unit rotations per RoPE plane for keys (undone in the queries), orthogonal maps for values (undone in
    the output blocks), then the mean, scaled to the members' norm. Every head counts the same.
    """
    return _merged(weights, grouping, context, "rigid")


def _merged(
    weights: AttentionWeights, grouping: Grouping, context: MergeContext, freedom: Symmetries
) -> Merged:
    objective = merge_objective(weights, context, freedom)
    normed = context.spec.key_symmetry == "phases" and len(grouping) < weights.num_kv_heads
    merged, residual = merge(objective, grouping, _split_gains if normed else None)
    return Merged(merged, residual, objective.notes)


def _split_gains(
    objective: MergeObjective, grouping: Grouping, keys: Tensor, queries: Tensor, base: AttentionWeights
) -> AttentionWeights:
    """Distribute effective rows over the rows and the gains of full-width norms.

    The rows keep the plane energies they had (a shared key: its members' mean), so that the norm's
    statistic is right on average; the gains take the rest.

    Args:
        problem: The sharing problems.
        grouping: G groups.
        keys: `[G, d, n]` shared effective keys.
        queries: `[H, d, n]` effective queries, source order.
        base: The result so far.

    Returns:
        `base` with rows and gains of keys and queries.
    """
    w = objective.weights
    members = torch.as_tensor([list(group) for group in grouping], device=keys.device)
    order = torch.as_tensor(query_order(grouping, w.num_heads // w.num_kv_heads), device=keys.device)
    wanted_k = _dim_energy(objective, augmented(w.k, w.k_bias))[members].mean(1)  # [G, d]
    wanted_q = _dim_energy(objective, augmented(w.q, w.q_bias))[order]
    key_rows, key_gains = _gained(objective, keys, wanted_k)
    query_rows, query_gains = _gained(objective, queries[order], wanted_q)
    return replace(
        base,
        k=key_rows[:, :, :-1].to(w.k.dtype),
        q=query_rows[:, :, :-1].to(w.q.dtype),
        k_bias=None if w.k_bias is None else key_rows[:, :, -1].to(w.k_bias.dtype),
        q_bias=None if w.q_bias is None else query_rows[:, :, -1].to(w.q_bias.dtype),
        kv_extras={n: key_gains.to(x) if n.startswith("k_norm") else x for n, x in base.kv_extras.items()},
        query_extras={
            n: query_gains.to(x) if n.startswith("q_norm") else x for n, x in base.query_extras.items()
        },
    )


def _dim_energy(objective: MergeObjective, rows: Tensor) -> Tensor:
    """E|row x̂|² of `[heads, d, n]` as `[heads, d]`; both dims of a plane get the plane's mean."""
    context, moment = objective.context, key_moment(objective.weights, objective.context)
    first, second, _ = rotary_pair_index(context.spec.position, context.rotary, rows.shape[1])
    energy = ((rows @ moment) * rows).sum(2).clamp_min(0)
    mean = (energy[:, first] + energy[:, second]) / 2
    energy[:, first], energy[:, second] = mean, mean
    return energy


def _gained(objective: MergeObjective, rows: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """`rows` scaled to the energies `wanted` `[heads, d]`, and the gains that undo it."""
    have = _dim_energy(objective, rows)
    alive = (have > 0) & (wanted > 0)
    gains = torch.where(alive, (have / torch.where(alive, wanted, 1.0)).sqrt(), 1.0)
    return rows / gains[:, :, None], gains
