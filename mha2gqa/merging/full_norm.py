"""Keys and queries behind one RMSNorm over all heads (OLMo 2): rows, gains, and the norm's own statistic.

Such a norm computes `gains * (W x) / s(x)`, with one statistic s² = mean of (W x)² over all heads. The
*effective* rows `gains * W` enter the logits, and heads share on them as anywhere else. What is special is
s(x): it reads the rows without their gains. Of a rotary pair with effective rows κ `[2, n]` it reads the
quadratic form |G⁻¹ κ x|², G the two gains. A shared key that stands for members κ_h = C_h κ must supply the
mean of their forms, κᵀ M κ with M = mean of C_hᵀ G_h⁻² C_h: the rotation φ that diagonalises M and gains
1/√(eigenvalues) do so exactly, since RoPE allows to turn a pair of the key and of its queries alike. Queries
have to live with the same φ: their form stays exact where their own gains are equal in the pair, or where
the heads differ by no turn at all; elsewhere φ is the best compromise and the statistic right on average.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..heads import AttentionWeights, Grouping, query_order, rotary_pair_index
from .covariance import augmented, key_moment
from .module_objective import full_norm_gains
from .objective import MergeObjective
from .subspace import ratio

_FLAT = 1e-12  # share of the forms' squares below which no turn is worth while


@dataclass(frozen=True)
class _Side:
    """Keys, or queries, of all groups.

    Args:
        rows: `[G, m, d, n]` effective rows (m = 1 for keys).
        forms: `[G, m, d, d]`: the norm's statistic is to be `rowsᵀ forms rows`, summed.
        energy: `[G, m, d]` energy that the rows without their gains had.
    """

    rows: Tensor
    forms: Tensor
    energy: Tensor

    def turned(self, turn: Tensor) -> _Side:
        """Both rows and forms in the basis `turn` `[G, 1, d, d]`."""
        return _Side(turn @ self.rows, turn @ self.forms @ turn.mT, self.energy)

    def split(self, moment: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
        """Rows without gains `[G, m, d, n]` and gains `[G, m, d]`; `pair` adds up the dims of a rotary pair."""
        inverse = self.forms.diagonal(dim1=-2, dim2=-1)
        read = inverse * energy_of(self.rows, moment)
        inverse = inverse * ratio(self.energy @ pair, read @ pair)  # in the mean the form is right
        gains = torch.where(inverse > 0, 1 / inverse.clamp_min(1e-300).sqrt(), 1.0)
        return self.rows / gains[..., None], gains


def energy_of(rows: Tensor, moment: Tensor) -> Tensor:
    """E|row x̂|² of functionals `[…, n]`."""
    return ((rows @ moment) * rows).sum(-1).clamp_min(0)


def with_gains(
    objective: MergeObjective,
    grouping: Grouping,
    keys: Tensor,
    queries: Tensor,
    maps: Tensor,
    merged: AttentionWeights,
) -> AttentionWeights:
    """Distribute effective rows over the rows and the gains of full-width norms.

    Args:
        objective: The module's objective.
        grouping: G groups.
        keys: `[G, d, n]` shared effective keys.
        queries: `[H, d, n]` effective queries, source order.
        maps: `[K, d, d]`: effective queries were multiplied by them.
        merged: The module with effective rows in place of its rows.

    Returns:
        `merged` with rows and gains of keys and queries.
    """
    w, context = objective.weights, objective.context
    q_gain, k_gain = full_norm_gains(w, context)
    moment = key_moment(w, context)
    repeat = w.num_heads // w.num_kv_heads
    members = torch.as_tensor([list(group) for group in grouping], device=keys.device)  # [G, m]
    order = torch.as_tensor(query_order(grouping, repeat), device=keys.device).view(len(grouping), -1)
    first, second, _ = rotary_pair_index(context.spec.position, context.rotary, keys.shape[1])
    key_energy = energy_of(augmented(w.k, w.k_bias), moment)
    query_energy = energy_of(augmented(w.q, w.q_bias), moment)
    key_side = _Side(
        keys[:, None],
        (maps @ _inverse_square(k_gain, w.k) @ maps.mT)[members].mean(1, keepdim=True),
        key_energy[members].mean(1, keepdim=True),
    )
    undo = _inverse(maps).repeat_interleave(repeat, 0)
    query_forms = undo.mT @ _inverse_square(q_gain, w.q) @ undo
    query_side = _Side(queries[order], query_forms[order], query_energy[order])
    turn = _turn((key_side, query_side), moment, first, second)
    pair = torch.eye(keys.shape[1], dtype=keys.dtype, device=keys.device)
    pair[first, second], pair[second, first] = 1.0, 1.0
    new_keys, key_gains = key_side.turned(turn).split(moment, pair)
    new_queries, query_gains = query_side.turned(turn).split(moment, pair)
    new_keys, new_queries = new_keys.flatten(0, 1), new_queries.flatten(0, 1)
    return replace(
        merged,
        k=new_keys[:, :, :-1].to(w.k.dtype),
        q=new_queries[:, :, :-1].to(w.q.dtype),
        k_bias=None if w.k_bias is None else new_keys[:, :, -1].to(w.k_bias.dtype),
        q_bias=None if w.q_bias is None else new_queries[:, :, -1].to(w.q_bias.dtype),
        kv_extras=_replaced(merged.kv_extras, "k_norm", key_gains.flatten(0, 1)),
        query_extras=_replaced(merged.query_extras, "q_norm", query_gains.flatten(0, 1)),
    )


def _replaced(per_head: Mapping[str, Tensor], norm: str, gains: Tensor) -> dict[str, Tensor]:
    return {name: gains.to(x) if name.startswith(norm) else x for name, x in per_head.items()}


def _inverse_square(gains: Tensor | None, weight: Tensor) -> Tensor:
    """G⁻² as diagonal matrices `[heads, d, d]`; a gain of zero reads a row that no logit sees: 0."""
    if gains is None:
        return torch.eye(weight.shape[1], dtype=torch.float64, device=weight.device).repeat(len(weight), 1, 1)
    square = gains.square()
    return torch.diag_embed(torch.where(square > 0, 1 / square.clamp_min(1e-300), 0.0))


def _inverse(maps: Tensor) -> Tensor:
    """Inverse of `[K, d, d]` maps that scale and turn rotary pairs: the transpose over the square."""
    square = (maps * maps).sum(-1)[:, :, None]
    return torch.where(square > 0, maps / square.clamp_min(1e-300), 0.0).mT


def _turn(sides: tuple[_Side, _Side], moment: Tensor, first: list[int], second: list[int]) -> Tensor:
    """Per group the turn `[G, 1, d, d]` of each rotary pair that makes the statistics' forms diagonal.

    In a basis turned by φ the off-diagonal entry of a form [[p, r], [r, s]] is r cos 2φ + (p - s)/2 sin 2φ:
    the least sum of their squares, each weighted by its share of the statistic, is a 2 x 2 eigenproblem.
    """
    groups, width = sides[0].rows.shape[0], sides[0].rows.shape[2]
    total = sides[0].rows.new_zeros(groups, len(first), 2, 2)
    scale = total.new_zeros(groups, len(first))
    for side in sides:
        energy = energy_of(side.rows, moment)
        weight = ((energy[..., first] + energy[..., second]) / side.energy.sum()).square()
        p, s = side.forms[..., first, first], side.forms[..., second, second]
        off = torch.stack([side.forms[..., first, second], (p - s) / 2], -1)  # [G, m, P, 2]
        total += torch.einsum("gmp,gmpi,gmpj->gpij", weight, off, off)
        scale += (weight * (p + s).square()).sum(1)
    total[..., 1, 1] += _FLAT * scale  # where nothing is to be gained, nothing turns
    double = torch.linalg.eigh(total)[1][..., 0]  # [G, P, 2]: (cos 2φ, sin 2φ)
    double = double * torch.where(double[..., :1] < 0, -1.0, 1.0)
    angle = torch.atan2(double[..., 1], double[..., 0]) / 2
    out = torch.eye(width, dtype=moment.dtype, device=moment.device).repeat(groups, 1, 1)
    cos, sin = angle.cos(), angle.sin()
    out[:, first, first], out[:, second, second] = cos, cos
    out[:, first, second], out[:, second, first] = -sin, sin
    return out[:, None]
