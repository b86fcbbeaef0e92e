"""The GQA paper's three starts: mean pooling, the first head of each group, fresh random heads."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..heads import AttentionWeights, Grouping, permute_queries, pool, pool_per_head, query_order
from .base import MergeContext, Merged


def pooled(
    weights: AttentionWeights, grouping: Grouping, context: MergeContext, how: str
) -> AttentionWeights:
    """Query heads moved to their groups; K/V heads and their extras pooled (`mean` or `first`)."""

    def maybe(x: Tensor | None) -> Tensor | None:
        return None if x is None else pool(x, grouping, how)

    order = query_order(grouping, weights.num_heads // weights.num_kv_heads)
    moved = permute_queries(weights, order)
    return replace(
        moved,
        k=pool(weights.k, grouping, how),
        v=pool(weights.v, grouping, how),
        k_bias=maybe(weights.k_bias),
        v_bias=maybe(weights.v_bias),
        kv_extras=pool_per_head(context.spec, weights.kv_extras, grouping, how),
    )


def mean(weights: AttentionWeights, grouping: Grouping, context: MergeContext) -> Merged:
    """Average the heads of each group (Ainslie et al. 2023, section 2.2), accumulated in float64."""
    return Merged(pooled(weights, grouping, context, "mean"))


def first(weights: AttentionWeights, grouping: Grouping, context: MergeContext) -> Merged:
    """Keep the first head of each group and drop the others."""
    return Merged(pooled(weights, grouping, context, "first"))


def random(weights: AttentionWeights, grouping: Grouping, context: MergeContext) -> Merged:
    """Draw fresh K/V heads, as wide as the pooled source heads are on average (the paper's control).

    Biases and extras are pooled: only the projections start over.
    """
    generator = torch.Generator().manual_seed(context.seed)

    def draw(x: Tensor) -> Tensor:
        shape = (len(grouping), *x.shape[1:])
        return (torch.randn(shape, generator=generator) * x.float().std().cpu()).to(x)

    return Merged(replace(pooled(weights, grouping, context, "mean"), k=draw(weights.k), v=draw(weights.v)))
