"""The second moments a merging method works with: measured on text, or the identity when there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..heads import AttentionWeights

if TYPE_CHECKING:
    from .base import MergeContext


def augmented(weight: Tensor, bias: Tensor | None) -> Tensor:
    """`[heads, R, D]` and `[heads, R]` as functions of [x; 1]: float64 `[heads, R, D + 1]`."""
    weight = weight.to(torch.float64)
    column = weight.new_zeros(weight.shape[:2]) if bias is None else bias.to(torch.float64)
    return torch.cat([weight, column[:, :, None]], 2)


def regularised(moment: Tensor, tokens: int) -> Tensor:
    """`moment` of [x; 1] with a small multiple of the identity added on x.

    The fewer tokens, the more: 1e-2 of the mean diagonal when there are as many tokens as dims, less in
    proportion after that. A text too short for a full-rank moment still ranks unseen directions by their
    weights instead of calling them free.
    """
    dims = moment.shape[0] - 1
    strength = min(0.1, 1e-2 * dims / max(tokens, 1))
    ridge = strength * moment.diagonal()[:-1].mean()
    out = moment.clone()
    out.diagonal()[:-1] += ridge
    return out


def centred(moment: Tensor) -> Tensor:
    """Covariance form of a moment of [x; 1]: what is left once constants are free."""
    return moment - torch.outer(moment[:, -1], moment[-1]) / moment[-1, -1]


def key_moment(weights: AttentionWeights, context: MergeContext) -> Tensor:
    """`[D + 1, D + 1]` second moment of the inputs that keys are made of."""
    statistics = context.statistics
    if statistics is None:
        return torch.eye(weights.k.shape[2] + 1, dtype=torch.float64, device=weights.k.device)
    return regularised(statistics.inputs.to(weights.k.device), statistics.tokens)


def value_moment(weights: AttentionWeights, context: MergeContext) -> Tensor:
    """`[D + 1, D + 1]` second moment of the attention-averaged inputs that values are made of."""
    statistics = context.statistics
    if statistics is None or statistics.mixed is None:
        return key_moment(weights, context)
    return regularised(statistics.mixed.to(weights.v.device), statistics.tokens)


def query_moment(weights: AttentionWeights, queries: Tensor, context: MergeContext) -> Tensor:
    """E[q qᵀ] summed over the queries that read each KV head, `[K, d, d]`.

    Args:
        weights: The module.
        queries: `[H, d, n]` query functionals, used where no query was observed on text.
        context: May hold observed moments.
    """
    statistics = context.statistics
    if statistics is not None and statistics.queries is not None:
        observed = statistics.queries.to(queries.device)
    else:
        source = None if statistics is None else statistics.query_inputs
        if source is None:
            moment = torch.eye(queries.shape[2], dtype=torch.float64, device=queries.device)
        else:
            moment = source.to(queries.device)
        observed = queries @ moment @ queries.mT
    heads = weights.num_kv_heads
    return observed.view(heads, -1, *observed.shape[1:]).sum(1)
