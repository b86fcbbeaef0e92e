"""Convert a checkpoint: plan, stream, publish. The one module that knows all the others."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from . import heads
from .architectures import (
    AttentionSite,
    AttentionSpec,
    Geometry,
    config_changes,
    find_sites,
    find_spec,
    lookup,
    plan_groups,
    rotary_dim,
)
from .architectures import geometry as site_geometry
from .checkpoint import MANIFEST, Checkpoint, edit_config, open_checkpoint
from .errors import CheckpointError, UnsupportedModelError, UsageError
from .merging import MERGERS, MergeContext, Merged
from .results import Result
from .verification import Check, check_twin, failed, verify_folder
from .writer import (
    NewTensor,
    check_output,
    check_space,
    copy_side_files,
    entry_nbytes,
    plan_shards,
    publish,
    write_shards,
    write_text,
)

POOLING = ("mean", "first", "random")  # touch only k, v and their extras
Groupings = Mapping[str, heads.Grouping]  # by site path


@dataclass(frozen=True)
class Site:
    """One attention module and what becomes of it."""

    site: AttentionSite
    geometry: Geometry
    grouping: tuple[tuple[int, ...], ...]

    @property
    def kept(self) -> bool:
        """Whether the module stays as it is."""
        return len(self.grouping) == self.geometry.num_kv_heads and not self.reordered

    @property
    def reordered(self) -> bool:
        """Whether query heads move."""
        return [h for group in self.grouping for h in group] != list(range(self.geometry.num_kv_heads))


@dataclass(frozen=True)
class Plan:
    """All decisions of a conversion; no tensor has been read.

    Args:
        spec: The architecture.
        sites: Every attention module.
        num_kv_heads: `(before, after)`.
        config: The raw config to write.
        method: Merging method.
        warnings: What the user should know before converting.
    """

    spec: AttentionSpec
    sites: tuple[Site, ...]
    num_kv_heads: tuple[int, int]
    config: dict[str, Any]
    method: str
    seed: int = 0
    warnings: tuple[str, ...] = ()


@dataclass
class ConvertResult(Result):
    """What `convert` did.

    Args:
        source: Folder or hub id, as given.
        output: The folder written.
        num_kv_heads: `{"before": K, "after": G}`.
        method: Merging method used.
        layers: Per attention module: path, grouping, residual, norm ratios, notes.
        verification: The checks made on the finished folder.
        warnings: What the user should know.
    """

    command: ClassVar[str] = "convert"
    source: str
    output: str
    num_kv_heads: dict[str, int]
    method: str
    layers: list[dict[str, Any]] = field(default_factory=list)
    verification: list[Check] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def plan_sites(
    spec: AttentionSpec, config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]
) -> list[tuple[AttentionSite, Geometry]]:
    """Every attention module with its head counts, all checked against the config.

    Raises:
        UnsupportedModelError: No attention module is found.
        CheckpointError: Tensors and config disagree, or attention layers are missing.
    """
    sites = find_sites(spec, shapes)
    if not sites:
        raise UnsupportedModelError(
            "no attention projections under the expected names",
            where=f"model_type {config.get('model_type')!r}",
            fix="this is not a checkpoint as transformers saves it",
        )
    return [(site, site_geometry(spec, config, site, shapes)) for site in sites]


def plan_conversion(
    config: Mapping[str, Any],
    shapes: Mapping[str, Sequence[int]],
    groups: int,
    *,
    method: str = "mean",
    groupings: Groupings | None = None,
    seed: int = 0,
) -> Plan:
    """Decide everything about a conversion from the config and the tensor shapes alone.

    Args:
        config: Raw `config.json`.
        shapes: Shape by tensor name.
        groups: KV heads G to reach; must divide the current number.
        method: A key of `MERGERS`.
        groupings: Which heads share, by module path; neighbours where absent.
        seed: For methods that draw numbers.

    Raises:
        UnsupportedModelError, UsageError, CheckpointError: Before anything is written.
    """
    quantised = config.get("quantization_config")
    if quantised:
        name = quantised.get("quant_method", "unknown method") if isinstance(quantised, dict) else quantised
        raise UnsupportedModelError(
            f"quantised checkpoint ({name})",
            where="config.json",
            fix="convert the full-precision model first",
        )
    return plan_for_spec(find_spec(config), config, shapes, groups, method, groupings, seed)


def plan_for_spec(
    spec: AttentionSpec,
    config: Mapping[str, Any],
    shapes: Mapping[str, Sequence[int]],
    groups: int,
    method: str,
    groupings: Groupings | None,
    seed: int,
) -> Plan:
    """`plan_conversion` for a spec that is already known."""
    if method not in MERGERS:
        raise UsageError(f"no method {method!r}", where="--method", fix=f"choose one of {', '.join(MERGERS)}")
    found = plan_sites(spec, config, shapes)
    geometries = [geometry for _, geometry in found]
    targets = plan_groups(spec, config, geometries, groups)
    sites = tuple(
        Site(site, geometry, _grouping(site, geometry, target, groupings))
        for (site, geometry), target in zip(found, targets, strict=True)
    )
    before = max(geometry.num_kv_heads for geometry in geometries)
    changes = config_changes(spec, config, geometries[0].num_heads, groups)
    notes = [spec.note] if spec.note else []
    target = spec.target(geometries[0].num_heads, groups)
    if target is not None and target.note:
        notes.append(target.note)
    if groups == before:
        notes.append(f"the model already has {groups} KV heads: the output is a verified copy")
    if ("pretraining_tp",) in changes:
        notes.append("pretraining_tp is set to 1: sliced projections would count the wrong heads")
    if lookup(spec.text_config(config), spec.kv_heads_keys[0]) is None and not spec.variants:
        notes.append(f"{spec.kv_heads_keys[0]} was absent: {before} KV heads are read off the tensors")
    return Plan(spec, sites, (before, groups), edit_config(config, changes), method, seed, tuple(notes))


def _grouping(
    site: AttentionSite, geometry: Geometry, groups: int, groupings: Groupings | None
) -> tuple[tuple[int, ...], ...]:
    if groupings is None:
        return heads.neighbours(geometry.num_kv_heads, groups)
    try:
        grouping = tuple(tuple(int(h) for h in group) for group in groupings[site.path])
    except KeyError:
        raise UsageError(f"no entry for {site.path}", where="--grouping", fix="list every module") from None
    size = geometry.num_kv_heads // groups
    whole = sorted(h for group in grouping for h in group) == list(range(geometry.num_kv_heads))
    if not whole or [len(group) for group in grouping] != [size] * groups:
        raise UsageError(
            f"not {groups} groups of {size} that hold each head once",
            where=f"--grouping {site.path}",
            fix="write G lists of equal length",
        )
    return grouping


def merge_site(
    plan: Plan, site: Site, tensors: Mapping[str, Tensor], context: MergeContext | None = None
) -> tuple[dict[str, Tensor], Merged]:
    """One attention module, by role, before -> after.

    Args:
        plan: The conversion.
        site: The module.
        tensors: Role -> tensor as stored.
        context: What the method may know; weights only where None.

    Returns:
        Role -> tensor to store, and the merged module.
    """
    weights = heads.split(plan.spec, site.geometry, tensors)
    if site.kept:
        return dict(tensors), Merged(weights, residual=0.0)
    if context is None:
        rotary = rotary_dim(plan.spec, plan.config, site.geometry.head_dim, site.site.layer)
        context = MergeContext(plan.spec, rotary, seed=site_seed(plan, site))
    merged = MERGERS[plan.method](weights, site.grouping, context)
    return heads.unsplit(plan.spec, merged.weights), merged


def site_seed(plan: Plan, site: Site) -> int:
    """A seed of its own for every module, the same in every run."""
    return plan.seed * 1_000_003 + [s.site.path for s in plan.sites].index(site.site.path)


def site_changes(
    plan: Plan, site: Site, shapes: Mapping[str, Sequence[int]]
) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """What a conversion does to a module's tensors; those not named are copied as bytes.

    The shapes are found by pooling on the meta device, so that no layout is described twice.

    Returns:
        Role -> new shape of each changed tensor, and the roles that vanish (one tensor per lost head).
    """
    if site.kept:
        return {}, []
    names = site.site.names
    empty = {role: torch.empty(tuple(shapes[name]), device="meta") for role, name in names.items()}
    weights = heads.split(plan.spec, site.geometry, empty)
    pooled = MERGERS["mean"](weights, site.grouping, MergeContext(plan.spec, 0)).weights
    stored = {role: tuple(x.shape) for role, x in heads.unsplit(plan.spec, pooled).items()}
    shared = {f"{norm}.{leaf}" for norm in plan.spec.qk_norm for leaf in ("weight", "bias")}
    lost = [role for role in names if role not in stored and role not in shared]
    if plan.method in POOLING and not site.reordered:
        kv = set(weights.kv_extras)
        moved = {r for r in stored if r.startswith(("k.", "v.", "qkv."))} | {
            r for r in stored if _template(r) in kv
        }
        stored = {role: shape for role, shape in stored.items() if role in moved}
    return stored, lost


def _template(role: str) -> str:
    """An extra's name with its head number blanked, as the spec has it."""
    return re.sub(r"\.\d+\.", ".{head}.", role)


class SiteRewriter:
    """Merges a module when the first of its tensors is due, and lets go of each once it is taken.

    Args:
        plan: The conversion.
        site: The module.
        shapes: Shape of every tensor of the source by name.
        read: Name -> tensor.
    """

    def __init__(
        self, plan: Plan, site: Site, shapes: Mapping[str, Sequence[int]], read: Callable[[str], Tensor]
    ) -> None:
        self.plan, self.site, self.read = plan, site, read
        self.shapes, self._lost = site_changes(plan, site, shapes)
        self._pending: dict[str, Tensor] = {}
        self.report: dict[str, Any] = {}

    @property
    def names(self) -> dict[str, str]:
        """Role -> name of every tensor that changes."""
        return {role: self.site.site.names[role] for role in self.shapes}

    @property
    def lost(self) -> list[str]:
        """Names of the tensors that vanish."""
        return [self.site.site.names[role] for role in self._lost]

    def take(self, role: str) -> Tensor:
        """The new tensor of a role; each can be taken once."""
        if role not in self._pending:
            before = {role: self.read(name) for role, name in self.site.site.names.items()}
            after, merged = merge_site(self.plan, self.site, before)
            self._pending = {role: after[role] for role in self.shapes}
            self.report = layer_report(self.plan, self.site, before, merged)
        return self._pending.pop(role)


def layer_report(plan: Plan, site: Site, before: Mapping[str, Tensor], merged: Merged) -> dict[str, Any]:
    """What the user is told of one module.

    `norm_ratio` is the RMS norm of the new key (value) heads over that of the old: 1 where heads agree,
    1/sqrt(group size) where they are unrelated and cancel.
    """
    source = heads.split(plan.spec, site.geometry, before)
    ratio = {
        name: float(new.float().square().mean().sqrt() / old.float().square().mean().sqrt().clamp_min(1e-30))
        for name, new, old in (("k", merged.weights.k, source.k), ("v", merged.weights.v, source.v))
    }
    return {
        "path": site.site.path,
        "layer": site.site.layer,
        "grouping": [list(group) for group in site.grouping],
        "regrouped": site.reordered,
        "residual": merged.residual,
        "norm_ratio": {name: round(value, 4) for name, value in ratio.items()},
        "notes": list(merged.notes),
    }


def convert(
    source: str | Path,
    out: str | Path,
    groups: int,
    *,
    method: str | None = None,
    groupings: Groupings | None = None,
    seed: int = 0,
    max_shard_size: int | None = None,
    revision: str | None = None,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ConvertResult:
    """Write SOURCE with `groups` key/value heads to the folder OUT.

    Args:
        source: Checkpoint folder or hub id.
        out: Folder to make; it appears only when complete and checked.
        groups: KV heads G (the paper's GQA-G; not the group size).
        method: `mean`, `first`, `random`, …; None means `mean` without calibration text.
        groupings: Which KV heads share, by module path; neighbours by default.
        seed: For methods that draw numbers.
        max_shard_size: Bytes per output file; the source's files by default.
        revision: Hub revision of SOURCE.
        force: Replace an OUT that an earlier run of ours made.
        progress: Called with `(bytes written, bytes in all)`.

    Returns:
        What was done, layer by layer, and every check on the result.

    Raises:
        UsageError, UnsupportedModelError: Options or model cannot be meant; nothing is written.
        CheckpointError: The source is broken, or the result failed a check; nothing is published.

    Example:
        >>> convert("llama-2-7b", "llama-2-7b-gqa8", groups=8).num_kv_heads  # doctest: +SKIP
        {'before': 32, 'after': 8}
    """
    out = Path(out)
    checkpoint = open_checkpoint(source, revision)
    check_output(checkpoint.path, out, force)
    plan = plan_conversion(
        checkpoint.config, checkpoint.shapes, groups, method=method or "mean", groupings=groupings, seed=seed
    )
    check_dtypes(plan, checkpoint)
    rewriters = [SiteRewriter(plan, site, checkpoint.shapes, checkpoint.read) for site in plan.sites]
    new = {
        name: NewTensor(checkpoint.tensors[name].dtype, r.shapes[role], partial(r.take, role))
        for r in rewriters
        for role, name in r.names.items()
    }
    shards = plan_shards(checkpoint, new, [name for r in rewriters for name in r.lost], max_shard_size)
    total = sum(entry_nbytes(entry) for shard in shards for entry in shard.entries.values())
    check_space(out, total)
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress:
            progress(done, total)

    with ThreadPoolExecutor(1) as pool, publish(out, force) as folder:
        # Loading transformers and running the small twin takes seconds: they pass while bytes are copied.
        twin = pool.submit(check_twin, plan.spec, plan.config, *plan.num_kv_heads)
        write_shards(checkpoint, shards, folder, advance)
        copy_side_files(checkpoint, folder)
        write_text(folder / "config.json", json.dumps(plan.config, indent=2, ensure_ascii=False) + "\n")
        names = [name for shard in shards for name in shard.entries]
        oracles = twin.result()
        checks = [*verify_folder(folder, expected=names), oracles]
        if broken := failed(checks):
            raise CheckpointError(
                f"the result failed its check: {broken}", where=out, fix="nothing was published"
            )
        result = ConvertResult(
            str(source),
            str(out),
            dict(zip(("before", "after"), plan.num_kv_heads, strict=True)),
            plan.method,
            [r.report for r in rewriters if r.report],
            checks,
            [*plan.warnings, *_pooling_warnings(rewriters)],
        )
        write_manifest(folder, result, checkpoint, plan)
    return result


def check_dtypes(plan: Plan, checkpoint: Checkpoint) -> None:
    """Refuse packed or 8-bit projections.

    Raises:
        UnsupportedModelError: An attention tensor is not stored as ordinary floating point.
    """
    for site in plan.sites:
        for name in site.site.names.values():
            dtype = checkpoint.tensors[name].dtype
            if dtype not in ("F64", "F32", "F16", "BF16"):
                raise UnsupportedModelError(
                    f"stored as {dtype}: a quantised checkpoint",
                    where=name,
                    fix="convert the full-precision model",
                )


def _pooling_warnings(rewriters: Sequence[SiteRewriter]) -> list[str]:
    ratios = [r.report["norm_ratio"]["k"] for r in rewriters if r.report and r.plan.method == "mean"]
    if ratios and min(ratios) < 0.6:
        return [
            f"pooled keys keep only {min(ratios):.2f} to {max(ratios):.2f} of a head's norm: the heads of a group "
            "are nearly unrelated and cancel; calibrated merging (--calibration TEXT) or --method joint loses far less"
        ]
    return []


def write_manifest(folder: Path, result: ConvertResult, checkpoint: Checkpoint, plan: Plan) -> None:
    """Write `mha2gqa.json`: everything needed to say where this checkpoint comes from."""
    manifest = result.to_dict() | {
        "source_revision": checkpoint.revision,
        "source_path": str(checkpoint.path.resolve()),
        "seed": plan.seed,
        "grouping": {site.site.path: [list(group) for group in site.grouping] for site in plan.sites},
    }
    del manifest["output"]
    write_text(folder / MANIFEST, json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")


def convert_state_dict(
    state_dict: Mapping[str, Tensor],
    spec: AttentionSpec,
    groups: int,
    *,
    num_heads: int,
    head_dim: int | None = None,
    method: str = "mean",
    groupings: Groupings | None = None,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Convert a model of your own, described by its own spec.

    Args:
        state_dict: Name -> tensor.
        spec: Where its attention is (`modules`, `q`, `k`, `v`, `o`, layout, positions).
        groups: KV heads G to reach.
        num_heads: Query heads H.
        head_dim: Width of a head; rows of q over H where None.
        method: A key of `MERGERS`.
        groupings: Which heads share, by module path; neighbours by default.
        seed: For methods that draw numbers.

    Returns:
        A new dict; tensors that do not change are the same objects.

    Example:
        >>> spec = AttentionSpec(modules=(("self", "blocks.{layer}.attn"),), q="q_linear", k="k_linear",
        ...                      v="v_linear", o="o_linear")
        >>> new = convert_state_dict(model.state_dict(), spec, 2, num_heads=8)  # doctest: +SKIP
    """
    config: dict[str, Any] = {spec.heads_key: num_heads}
    if head_dim is not None:
        config[spec.head_dim_key] = head_dim
    return _convert_tensors(state_dict, spec, config, groups, method, groupings, seed)[0]


def _convert_tensors(
    state_dict: Mapping[str, Tensor],
    spec: AttentionSpec,
    config: Mapping[str, Any],
    groups: int,
    method: str,
    groupings: Groupings | None,
    seed: int,
) -> tuple[dict[str, Tensor], Plan]:
    shapes = {name: tuple(x.shape) for name, x in state_dict.items()}
    plan = plan_for_spec(spec, config, shapes, groups, method, groupings, seed)
    out = dict(state_dict)
    for site in plan.sites:
        rewriter = SiteRewriter(plan, site, shapes, state_dict.__getitem__)
        out |= {name: rewriter.take(role) for role, name in rewriter.names.items()}
        for name in rewriter.lost:
            del out[name]
    return out, plan


def convert_model(
    model: Any,
    groups: int,
    *,
    method: str = "mean",
    groupings: Groupings | None = None,
    seed: int = 0,
) -> Any:
    """Convert a model in memory; the given one stays as it is.

    Args:
        model: A `transformers` model of a supported architecture.
        groups: KV heads G to reach.
        method: A key of `MERGERS`.
        groupings: Which heads share, by module path; neighbours by default.
        seed: For methods that draw numbers.

    Returns:
        A working model of the same class with its own tensors, in eval mode.
    """
    config = json.loads(model.config.to_json_string(use_diff=False))
    spec = find_spec(config)
    state, plan = _convert_tensors(model.state_dict(), spec, config, groups, method, groupings, seed)
    num_heads = plan.sites[0].geometry.num_heads
    return rebuild(model, config_changes(spec, config, num_heads, plan.num_kv_heads[1]), state)


def rebuild(model: Any, changes: Mapping[tuple[str, ...], Any], state: Mapping[str, Tensor]) -> Any:
    """A model of the same class under a changed config, holding copies of `state`."""
    config = copy.deepcopy(model.config)
    for (*parents, key), value in changes.items():
        node = config
        for parent in parents:
            node = node[parent] if isinstance(node, dict) else getattr(node, parent)
        setattr(node, key, value)
    with torch.device("meta"):
        new = type(model)(config)
    new.load_state_dict({name: x.detach().clone() for name, x in state.items()}, assign=True, strict=True)
    buffers = dict(model.named_buffers())  # those that are not saved (RoPE tables) do not depend on K
    for name, buffer in list(new.named_buffers()):
        if buffer.is_meta:
            owner, _, leaf = name.rpartition(".")
            new.get_submodule(owner).register_buffer(leaf, buffers[name].clone(), persistent=False)
    if hasattr(new, "tie_weights"):
        new.tie_weights()
    if hasattr(model, "generation_config"):
        new.generation_config = copy.deepcopy(model.generation_config)
    return new.eval()
