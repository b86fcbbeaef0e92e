"""From one attention module to its merge objective: which symmetry holds where, and what an error counts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..heads import AttentionWeights, join_heads, rotary_pair_index, view_heads
from .base import MergeContext
from .covariance import augmented, centred, key_moment, query_moment, value_moment
from .objective import KeySubspace, MergeObjective, Symmetries
from .rotary import RotaryObjective, UnitRotaryObjective
from .subspace import LinearObjective, MeanObjective, OrthogonalObjective, SubspaceObjective


def merge_objective(
    weights: AttentionWeights, context: MergeContext, symmetries: Symmetries = "full"
) -> MergeObjective:
    """State what it costs the heads of one module to share.

    Args:
        weights: The module, K stored KV heads.
        context: Spec (the symmetries), rotary dims, second moments; without them the metric of the weights.
        symmetries: `full` uses every symmetry and weighs errors by their effect; `orthogonal` only rotates.

    Returns:
        The objective; its tensors are float64 on the device of `weights`.
    """
    folds_bias = weights.o_bias is not None and not has_sinks(weights)
    queries, keys = effective_rows(weights, context)
    parts, note = _key_subspaces(weights, context, symmetries, queries, keys)
    values, frame = _value_objective(weights, context, symmetries, folds_bias)
    notes = [note] if note else []
    if context.spec.value_symmetry != "linear":
        notes.append(f"values: symmetry {context.spec.value_symmetry}")
    return MergeObjective(
        weights=weights,
        context=context,
        keys=parts,
        values=values,
        frame=frame,
        queries=queries,
        folds_bias=folds_bias,
        notes=tuple(notes),
    )


def has_sinks(weights: AttentionWeights) -> bool:
    """Whether softmax sees an attention sink, so that a constant added to all logits counts."""
    return any("sink" in name or name == "softmax_offset" for name in weights.query_extras)


def full_norm_gains(weights: AttentionWeights, context: MergeContext) -> tuple[Tensor | None, Tensor | None]:
    """Gains of a full-width norm on q `[H, d]` and on k `[K, d]`, float64; None where there is none."""

    def gains(per_head: Mapping[str, Tensor], name: str) -> Tensor | None:
        found = next((x for key, x in per_head.items() if key.startswith(name)), None)
        return None if found is None else found.to(torch.float64)

    if context.spec.key_symmetry != "phases":
        return None, None
    return gains(weights.query_extras, "q_norm"), gains(weights.kv_extras, "k_norm")


def effective_rows(weights: AttentionWeights, context: MergeContext) -> tuple[Tensor, Tensor]:
    """Query `[H, d, n]` and key `[K, d, n]` functionals, with the gains of a full-width norm in them."""
    queries, keys = augmented(weights.q, weights.q_bias), augmented(weights.k, weights.k_bias)
    q_gain, k_gain = full_norm_gains(weights, context)
    queries = queries if q_gain is None else queries * q_gain[:, :, None]
    return queries, keys if k_gain is None else keys * k_gain[:, :, None]


def head_energy(rows: Tensor, moment: Tensor) -> Tensor:
    """E|row x̂|² of `[heads, d, n]`, averaged over the dims of a head, as `[heads, 1, 1]`."""
    return ((rows @ moment) * rows).sum((1, 2), keepdim=True) / rows.shape[1]


# --- values ----------------------------------------------------------------------------------------------


def _value_objective(
    weights: AttentionWeights, context: MergeContext, symmetries: Symmetries, folds_bias: bool
) -> tuple[SubspaceObjective, Tensor]:
    heads = weights.num_kv_heads
    rows = augmented(weights.v, weights.v_bias)
    moment = value_moment(weights, context)
    moment = centred(moment) if folds_bias else moment
    blocks = view_heads(join_heads(weights.o.to(torch.float64)), heads)  # [H, D, e] -> [K, r D, e]
    granted = context.spec.value_symmetry
    if granted == "none":
        return MeanObjective(rows, moment), blocks
    if symmetries == "orthogonal" or granted == "orthogonal":
        loudness = blocks.square().sum((1, 2)) if symmetries == "full" else blocks.new_ones(heads)
        return OrthogonalObjective(rows, moment, loudness), blocks
    frame, left = torch.linalg.qr(blocks)
    return LinearObjective(left, rows, moment, channels=context.channels), frame


# --- keys ------------------------------------------------------------------------------------------------


def _root(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric square roots of `[K, R, R]` and their inverses, zero where a head is dead."""
    mean = moment.diagonal(dim1=1, dim2=2).mean(1)[:, None]
    values, vectors = torch.linalg.eigh(moment)
    values = (values.clamp_min(0) + 1e-6 * mean).sqrt()
    inverse = torch.where(values > 0, 1 / torch.where(values > 0, values, 1.0), 0.0)
    return (vectors * values[:, None]) @ vectors.mT, (vectors * inverse[:, None]) @ vectors.mT


def _unit_energy(rows: Tensor, moment: Tensor) -> Tensor:
    """`[heads, d, n]` scaled to unit RMS per head: what a per-head norm makes of them, on average."""
    energy = head_energy(rows, moment)
    return torch.where(energy > 0, rows / energy.clamp_min(1e-300).sqrt(), rows)


def _rotatable(
    context: MergeContext, first: list[int], second: list[int], like: Tensor
) -> tuple[Tensor, str]:
    """Which rotary pairs have one gain in both norms, and a note if some have not."""
    granted = context.spec.key_symmetry
    if granted != "plane_rotations" or not context.gains:  # no norm, or one without weights: it turns along
        return torch.full((len(first),), granted != "none", device=like.device), ""
    good = torch.ones(len(first), dtype=torch.bool, device=like.device)
    for gains in context.gains:
        g = gains.to(like.device, torch.float64).flatten()
        good &= (g[first] - g[second]).abs() <= 1e-3 * (g[first].abs() + g[second].abs())
    left_out = int((~good).sum())
    note = f"keys: {left_out} of {len(first)} rotary pairs have unequal gains, sign flips only"
    return good, note if left_out else ""


def _scalable(weights: AttentionWeights, context: MergeContext) -> bool:
    """Whether a key's amplitude can move into the query (under a full-width norm: through the gains)."""
    if context.spec.key_symmetry == "phases":
        return all(x is not None for x in full_norm_gains(weights, context))
    return context.spec.key_symmetry in ("planes", "linear")


def _key_subspaces(
    weights: AttentionWeights, context: MergeContext, symmetries: Symmetries, queries: Tensor, keys: Tensor
) -> tuple[tuple[KeySubspace, ...], str]:
    spec, width = context.spec, keys.shape[1]
    moment = key_moment(weights, context)
    every = list(range(width))
    if spec.key_symmetry == "none" or spec.position == "unknown":
        reason = "position style unknown" if spec.position == "unknown" else "no symmetry"
        return (KeySubspace(every, MeanObjective(keys, moment)),), f"keys: {reason}, plain mean"
    if spec.key_symmetry == "plane_rotations":
        keys, queries = _unit_energy(keys, moment), _unit_energy(queries, moment)
    energy = query_moment(weights, queries, context)  # [K, d, d]
    if symmetries == "orthogonal":
        energy = torch.eye(width, dtype=energy.dtype, device=energy.device).expand_as(energy)
    first, second, rest = rotary_pair_index(spec.position, context.rotary, width)
    omega = energy.diagonal(dim1=1, dim2=2)  # [K, d]
    parts, note = [], ""
    if first:
        pairs = torch.complex(keys[:, first], keys[:, second])
        weight = omega[:, first] + omega[:, second]
        rotatable, note = _rotatable(context, first, second, pairs)
        objective: SubspaceObjective
        if symmetries == "full" and _scalable(weights, context):
            objective = RotaryObjective(pairs, weight, moment, context.channels)
        else:
            objective = UnitRotaryObjective(pairs, weight, moment, rotatable)
        parts.append(KeySubspace([*first, *second], objective))
    if rest:
        objective = _unrotated_objective(weights, context, symmetries, keys[:, rest], energy, rest)
        parts.append(KeySubspace(rest, objective))
    return tuple(parts), note


def _unrotated_objective(
    weights: AttentionWeights,
    context: MergeContext,
    symmetries: Symmetries,
    keys: Tensor,
    energy: Tensor,
    rest: list[int],
) -> SubspaceObjective:
    """The dims of a key that positions do not rotate."""
    moment = key_moment(weights, context)
    if not has_sinks(weights):
        moment = centred(moment)  # a constant key is invisible to softmax
    if context.spec.key_symmetry in ("planes", "linear"):
        if symmetries == "orthogonal":
            return OrthogonalObjective(keys, moment, keys.new_ones(len(keys)))
        left, undo = _root(energy[:, rest][:, :, rest])
        return LinearObjective(left, keys, moment, undo, context.channels)
    single = torch.complex(keys, torch.zeros_like(keys))
    omega = energy.diagonal(dim1=1, dim2=2)[:, rest]
    fixed = torch.zeros(len(rest), dtype=torch.bool, device=keys.device)
    return UnitRotaryObjective(single, omega, moment, fixed, single=True)
