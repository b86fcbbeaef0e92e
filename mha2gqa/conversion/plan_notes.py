"""What the user should know of a conversion before it is made, read off its plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..architectures import AttentionSpec, lookup
from ..modeling import Export

if TYPE_CHECKING:
    from .plan import ModulePlan


def plan_notes(
    spec: AttentionSpec,
    config: Mapping[str, Any],
    num_heads: int,
    num_kv_heads: tuple[int, int],
    changes: Mapping[tuple[str, ...], Any],
) -> list[str]:
    """What the user should know before converting.

    Args:
        spec: The model's entry in the table.
        config: Its raw config.
        num_heads: Query heads H.
        num_kv_heads: KV heads before and after.
        changes: Keys of the config that are rewritten.
    """
    before, groups = num_kv_heads
    notes = [spec.note] if spec.note else []
    if spec.uncalibrated:
        notes.append(f"it cannot be calibrated: {spec.uncalibrated}")
    target = spec.target(num_heads, groups)
    if target is not None and target.note:
        notes.append(target.note)
    if groups == before:
        notes.append(f"the model already has {groups} KV heads: none are shared")
    if ("pretraining_tp",) in changes:
        notes.append("pretraining_tp is set to 1: sliced projections would count the wrong heads")
    keys = () if spec.variants else spec.kv_heads_keys
    if changes and keys and lookup(spec.text_config(config), keys[0]) is None:
        notes.append(f"{keys[0]} was absent: {before} KV heads are read off the tensors")
    return notes


def export_note(export: Export) -> str:
    """What it means that modelling code goes with the result."""
    return (
        f"transformers has no KV-head count for this type: {export.file} goes with the result, which loads in "
        f"transformers alone ({export.since} or later), with trust_remote_code=True; no other engine knows the class "
        "(mha2gqa itself runs its own copy and needs no consent)"
    )


def wide_note(modules: Sequence[ModulePlan], groups: int, wide: int) -> str:
    """What wide heads cost, and that they save nothing where they hold the cache of the source."""
    heads = f"{groups} KV heads" if groups > 1 else "1 KV head"
    text = (
        f"wide heads: {heads} of head_dim {modules[0].result.head_dim} hold{'' if groups > 1 else 's'} the cache of "
        f"GQA-{groups * wide}; query and output projections, and the arithmetic of attention, are {wide} times as large "
        f"(`mha2gqa plan --wide {wide}` says where that pays)"
    )
    if groups * wide < modules[0].geometry.num_kv_heads:
        return text
    return f"{text}; the source's cache is no larger: give fewer --groups to save any"
