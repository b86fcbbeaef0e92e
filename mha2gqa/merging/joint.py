"""Calibrated merging and the Procrustes baseline: both minimise a module's merge objective."""

from __future__ import annotations

from ..heads import AttentionWeights, Grouping
from .base import MergeContext, Merged
from .module_objective import merge_objective
from .objective import Symmetries
from .solve import merge


def joint(weights: AttentionWeights, grouping: Grouping, context: MergeContext) -> Merged:
    """Merge keys and values to the optimum of their effect on attention, within the granted symmetries.

    Keys share one complex functional per rotary pair (weighted by query energy; a member's own phase and
    amplitude move into its queries), values share the best rank-d map in the output metric (a member's
    way back moves into its output block). For the shared keys the merged queries are the least-squares
    optimum among all linear maps of the input: only inputs that drift leave something to refit in them.

    Args:
        weights: One module, K stored KV heads.
        grouping: G equal-size groups of them.
        context: Spec, rotary dims and, with text, second moments; without them the weights' own metric.

    Returns:
        G KV heads, the lost share of key and value energy, and the symmetries that could not be used.
    """
    return _merged(weights, grouping, context, "full")


def align(weights: AttentionWeights, grouping: Grouping, context: MergeContext) -> Merged:
    """Generalised Procrustes, the best published plain start (Jin et al. 2025), with norms put back.

    Unit rotations per rotary pair for keys (undone in the queries), orthogonal maps for values (undone in
    the output blocks), then the mean, scaled to the members' norm. Every head counts the same.
    """
    return _merged(weights, grouping, context, "orthogonal")


def _merged(
    weights: AttentionWeights, grouping: Grouping, context: MergeContext, symmetries: Symmetries
) -> Merged:
    objective = merge_objective(weights, context, symmetries)
    merged, relative_error = merge(objective, grouping)
    return Merged(merged, relative_error, objective.notes)
