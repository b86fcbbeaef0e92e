"""What a conversion will do, decided from the config and the shapes; nothing is read."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .. import heads
from ..architectures import (
    AttentionModule,
    AttentionSpec,
    Geometry,
    check_wide,
    config_changes,
    find_attention_modules,
    find_spec,
    kv_heads_before,
    lookup,
    plan_groups,
    rotary_dim,
    wide_changes,
)
from ..architectures import geometry as module_geometry
from ..architectures.explain import check_layers, not_found, refuse_adapters, refuse_latent, refuse_quantised
from ..checkpoints.config_spelling import both_spellings
from ..checkpoints.reader import edit_config
from ..errors import UsageError
from ..merging import MERGERS
from ..modeling import Export, find_export
from ..modeling import config_changes as export_changes
from .plan_notes import export_note, plan_notes, wide_note

ATTENTION = ("self", "cross")  # kinds of decoder attention whose heads are shared
Groupings = Mapping[str, heads.Grouping]  # by module path


@dataclass(frozen=True)
class ModulePlan:
    """One attention module and what becomes of it.

    Args:
        module: Where it is.
        geometry: Its heads now.
        grouping: Which of its KV heads become one.
        wide: How many times as wide as those the new heads are (R of wide heads).
    """

    module: AttentionModule
    geometry: Geometry
    grouping: tuple[tuple[int, ...], ...]
    wide: int = 1

    @property
    def result(self) -> Geometry:
        """Its heads after the conversion."""
        g = self.geometry
        return Geometry(g.num_heads, len(self.grouping), self.wide * g.head_dim, self.wide * g.value_dim)

    @property
    def path(self) -> str:
        """Path of the module in the model."""
        return self.module.path

    @property
    def names(self) -> Mapping[str, str]:
        """Role -> tensor name."""
        return self.module.names

    @property
    def unchanged(self) -> bool:
        """Whether the module stays as it is."""
        same = len(self.grouping) == self.geometry.num_kv_heads and not self.reordered
        return same and self.wide == 1

    @property
    def reordered(self) -> bool:
        """Whether query heads move."""
        return [h for group in self.grouping for h in group] != list(range(self.geometry.num_kv_heads))


@dataclass(frozen=True)
class Plan:
    """All decisions of a conversion; no tensor has been read.

    Args:
        spec: The architecture.
        modules: Every attention module.
        num_kv_heads: `(before, after)`: heads as they are stored; wide ones are fewer than `groups`.
        config: The raw config to write.
        source: The raw config of the source, its KV heads stated.
        method: Merging method.
        warnings: What the user should know before converting.
        attention: Kinds of attention whose heads are shared.
        export: The modelling code that must travel with the result; None where transformers has it.
        untied: `(head, embedding)`: name of the output head to store, and of the tensor that it is; None where
            the head is stored as in the source.
        wide: How many times as wide the new heads are (R of wide heads, 1 for plain ones).
    """

    spec: AttentionSpec
    modules: tuple[ModulePlan, ...]
    num_kv_heads: tuple[int, int]
    config: dict[str, Any]
    source: dict[str, Any]
    method: str
    seed: int = 0
    warnings: tuple[str, ...] = ()
    attention: tuple[str, ...] = ("self",)
    export: Export | None = None
    untied: tuple[str, str] | None = None
    wide: int = 1

    @property
    def groups(self) -> int:
        """G, the number of plain KV heads whose cache the result has."""
        return self.num_kv_heads[1] * self.wide

    def regrouped(self, groupings: Groupings) -> Plan:
        """The same conversion with other heads sharing."""
        modules = tuple(
            replace(s, grouping=_grouping(s.module, s.geometry, len(s.grouping), groupings))
            for s in self.modules
        )
        check_order(self.spec, modules)
        return replace(self, modules=modules)

    def moved(self, pairs: Sequence[Sequence[int]]) -> list[list[int]]:
        """Where query heads of cross-attention lie once those that share are neighbours.

        Args:
            pairs: `(layer, query head)` in the source, such as `alignment_heads` of a Whisper model.
        """
        orders = {
            s.module.layer: heads.query_order(s.grouping, s.geometry.num_heads // s.geometry.num_kv_heads)
            for s in self.modules
            if s.module.kind == "cross"
        }
        return [
            [layer, orders[layer].index(head) if head in orders.get(layer, ()) else head]
            for layer, head in pairs
        ]


def plan_modules(
    spec: AttentionSpec, config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]
) -> list[tuple[AttentionModule, Geometry]]:
    """Every attention module with its head counts, all checked against the config.

    Raises:
        UnsupportedModelError: No attention module is found.
        CheckpointError: Tensors and config disagree, or attention layers are missing.
    """
    refuse_adapters(shapes)
    refuse_latent(config, shapes)
    modules = find_attention_modules(spec, shapes)
    if not modules:
        find_export(config)  # which says it better where the decoder is missing
        raise not_found(spec, config, shapes)
    check_layers(spec, spec.text_config(config), shapes)
    found = [(module, module_geometry(spec, config, module, shapes)) for module in modules]
    for module, geometry in found:
        rotary_dim(spec, config, geometry.head_dim, module.layer)  # refuses what it cannot use
    return found


def plan_conversion(
    config: Mapping[str, Any],
    shapes: Mapping[str, Sequence[int]],
    groups: int,
    *,
    method: str = "mean",
    groupings: Groupings | None = None,
    seed: int = 0,
    attention: Sequence[str] = ATTENTION,
    wide: int = 1,
) -> Plan:
    """Decide everything about a conversion from the config and the tensor shapes alone.

    Args:
        config: Raw `config.json`.
        shapes: Shape by tensor name.
        groups: KV heads G to reach; must divide the current number.
        method: A key of `MERGERS`.
        groupings: Which heads share, by module path; neighbours where absent.
        seed: For methods that draw numbers.
        attention: Kinds of decoder attention to share, of those the model has.
        wide: R: G / R KV heads that are R times as wide, in place of G; 1 for plain ones.

    Raises:
        UnsupportedModelError, UsageError, CheckpointError: Before anything is written.
    """
    refuse_quantised(config, shapes)
    return plan_for_spec(find_spec(config), config, shapes, groups, method, groupings, seed, attention, wide)


def plan_for_spec(
    spec: AttentionSpec,
    config: Mapping[str, Any],
    shapes: Mapping[str, Sequence[int]],
    groups: int,
    method: str,
    groupings: Groupings | None,
    seed: int,
    attention: Sequence[str] = ATTENTION,
    wide: int = 1,
) -> Plan:
    """`plan_conversion` for a spec that is already known."""
    if method not in MERGERS:
        raise UsageError(f"no method {method!r}", where="--method", fix=f"choose one of {', '.join(MERGERS)}")
    export = find_export(config)
    found = plan_modules(spec, config, shapes)
    if wide != 1:
        _check_wide(spec, config, found, groups, wide, method)
        groups //= wide
    targets = _targets(spec, config, found, groups, attention)
    modules = tuple(
        ModulePlan(module, geometry, _grouping(module, geometry, target, groupings), wide)
        for (module, geometry), target in zip(found, targets, strict=True)
    )
    check_order(spec, modules)
    shared = [s for s in modules if s.module.kind in attention]
    before = kv_heads_before(spec, config, [s.geometry for s in shared])
    numbers, num_heads = (before, groups), shared[0].geometry.num_heads
    if export is None:
        changes = config_changes(spec, config, num_heads, groups)
        if wide > 1:
            changes |= wide_changes(spec, config, shared[0].geometry, wide)
    else:  # stock classes ignore the key (Whisper's takes it for another): ours only
        heads_of = {s.module.kind: len(s.grouping) for s in modules}
        changes = {} if groups == before else export_changes(config, heads_of, "lm_head.weight" in shapes)
    notes = plan_notes(spec, config, num_heads, numbers, changes)
    if wide > 1:
        notes.append(wide_note(shared, groups, wide))
    travels = export if changes else None
    if travels is not None:
        notes.append(export_note(travels))
    kinds = tuple(kind for kind in ATTENTION if any(s.module.kind == kind for s in shared))
    source = dict(config) if export is not None else _with_kv_heads(spec, config, before)
    new = edit_config(config, changes)
    if new != config:
        new = both_spellings(new)
    return Plan(
        spec=spec,
        modules=modules,
        num_kv_heads=numbers,
        config=new,
        source=source,
        method=method,
        seed=seed,
        warnings=tuple(notes),
        attention=kinds,
        export=travels,
        wide=wide,
    )


def _with_kv_heads(spec: AttentionSpec, config: Mapping[str, Any], num_kv_heads: int) -> dict[str, Any]:
    """The source's config, in which the number of KV heads stands even where it was left out."""
    key = spec.kv_heads_keys[0] if spec.kv_heads_keys and not spec.variants else None
    if key is None or lookup(spec.text_config(config), key) is not None:
        return dict(config)
    return edit_config(config, {(*spec.config_path, *key.split(".")): num_kv_heads})


def _check_wide(
    spec: AttentionSpec,
    config: Mapping[str, Any],
    found: Sequence[tuple[AttentionModule, Geometry]],
    groups: int,
    wide: int,
    method: str,
) -> None:
    """Refuse what cannot have wide heads, before anything is divided."""
    if isinstance(wide, bool) or not isinstance(wide, int) or wide < 1:
        raise UsageError(f"{wide!r} is not a whole number above 0", where="--wide", fix="give R, such as 2")
    if method != "joint":
        raise UsageError(
            f"not possible with --method {method}",
            where=f"--wide {wide}",
            fix="use --method joint",
        )
    geometries = [geometry for _, geometry in found]
    plan_groups(spec, config, geometries, groups)
    check_wide(spec, config, geometries, groups, wide)


def check_order(spec: AttentionSpec, modules: Sequence[ModulePlan]) -> None:
    """Refuse groupings that move heads where that would change the model.

    Raises:
        UsageError: Heads cannot be reordered (ALiBi), or must be reordered in all layers alike (T5).
    """
    first: dict[str, ModulePlan] = {}
    for module in modules:
        freedom = spec.permutable_of(module.module.kind)
        if freedom == "never" and module.reordered:
            raise UsageError(
                "heads cannot be reordered: each has an ALiBi slope of its own",
                where=f"--grouping {module.path}",
                fix="use --grouping neighbours",
            )
        other = first.setdefault(module.module.kind, module)
        if freedom == "model" and module.grouping != other.grouping:
            raise UsageError(
                f"not the grouping of {other.module.path}, but all layers share one position bias per head",
                where=f"--grouping {module.path}",
                fix="give all layers the same grouping",
            )


def _targets(
    spec: AttentionSpec,
    config: Mapping[str, Any],
    found: Sequence[tuple[AttentionModule, Geometry]],
    groups: int,
    attention: Sequence[str],
) -> list[int]:
    """KV heads each module gets; one whose kind is not in `attention` keeps its own."""
    if not attention or set(attention) - set(ATTENTION):
        raise UsageError(
            f"{', '.join(attention) or 'nothing'} is not a choice",
            where="--attention",
            fix="try self, cross or both",
        )
    geometries = [geometry for module, geometry in found if module.kind in attention]
    if not geometries:
        have = " and ".join(sorted({module.kind for module, _ in found}))
        raise UsageError(
            f"the decoder has only {have} attention", where="--attention", fix="leave the option out"
        )
    shared = iter(plan_groups(spec, config, geometries, groups))
    return [next(shared) if module.kind in attention else g.num_kv_heads for module, g in found]


def _grouping(
    module: AttentionModule, geometry: Geometry, groups: int, groupings: Groupings | None
) -> tuple[tuple[int, ...], ...]:
    if groupings is None:
        return heads.neighbours(geometry.num_kv_heads, groups)
    try:
        grouping = tuple(tuple(map(operator.index, group)) for group in groupings[module.path])
    except KeyError:
        raise UsageError(f"no entry for {module.path}", where="--grouping", fix="list every module") from None
    except TypeError:
        raise UsageError(
            f"holds no lists of head numbers for {module.path}",
            where="--grouping",
            fix=f"map module paths to lists such as {[list(g) for g in heads.neighbours(geometry.num_kv_heads, groups)]}",
        ) from None
    size = geometry.num_kv_heads // groups
    whole = sorted(h for group in grouping for h in group) == list(range(geometry.num_kv_heads))
    if not whole or [len(group) for group in grouping] != [size] * groups:
        raise UsageError(
            f"not {groups} groups of {size} that hold each head once",
            where=f"--grouping {module.path}",
            fix="write G lists of equal length",
        )
    return grouping
