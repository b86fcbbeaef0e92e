"""Convert a checkpoint: plan, stream, publish. The one module that knows all the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Unpack

from .. import distributed
from ..arch_conversion import ArchConvertedCheckpoint, as_architecture, carry_tokenizer, written
from ..architectures import check_read
from ..architectures.wide import stored_heads
from ..checkpoints.hf_config import dtype_bytes, vocabulary_size
from ..checkpoints.loading import resolve_device
from ..checkpoints.manifest import DIGESTS, write_manifest
from ..checkpoints.output import check_output, check_space, publish
from ..checkpoints.reader import Checkpoint, open_checkpoint
from ..checkpoints.side_files import SideFiles, copy_side_files, find_side_files
from ..checkpoints.writer import (
    NewTensor,
    Shard,
    Written,
    entry_nbytes,
    plan_shards,
    write_shards,
)
from ..config import ConvertConfig
from ..config.convert import DEFAULT_METHOD
from ..config.keywords import ConvertKeywords
from ..config.option import build
from ..config.signature import takes_options
from ..data import paths_or_source
from ..errors import CheckpointError, UnsupportedModelError
from ..progress import Callback, Progress, current, reporting
from ..report import write_card
from ..results import Check, Result
from ..verification.checks import failed, verify_folder
from ..verification.preflight import check_early, demand, settled, unchecked
from ..verification.tiny_random import EQUIVALENCE, check_arch_conversion
from . import Calibrated, CalibrationOptions, Stage, calibrate, convert_model
from .in_memory import convert_state_dict
from .plan import Groupings, Plan, plan_conversion
from .recommended import next_command
from .result_files import move_alignment_heads, write_config
from .result_tensors import result_tensors
from .sampled_text import with_generated
from .untie import untied
from .warnings import (
    broken_warnings,
    clip_warnings,
    data_free_warnings,
    dropped_warnings,
    loss_warnings,
    merging_notes,
    pooling_warnings,
    result_clip_warnings,
)

WRITING = "writing"  # the stage in which tensors go into files

__all__ = ["ConvertResult", "convert", "convert_model", "convert_state_dict"]


@dataclass
class ConvertResult(Result):
    """What `convert` did.

    Args:
        source: Folder or hub id, as given.
        output: The folder written.
        num_kv_heads: `{"before": K, "after": G}`; of wide heads as they are stored, G / R.
        method: Merging method used.
        reexpression: `{"source_type": …, "target_type": …}` where the result has another architecture than
            the source; empty where it has the same.
        attention: Kinds of decoder attention whose heads are shared.
        layers: Per attention module: path, grouping, relative error, norm ratios, notes.
        verification: The checks made on the finished folder.
        warnings: What the user should know.
        calibration: Text, tokens, losses on held-out calibration text, seconds per stage; empty without.
        kv_bytes_per_token: `{"before": …, "after": …}`.
        groups: G, the number of KV heads of the source's width whose cache the result has.
        wide: R, how many times as wide the result's KV heads are; 1 for plain ones.
        head_dim: `{"before": d, "after": R d}`.
        recommended: A command to copy.
    """

    command: ClassVar[str] = "convert"
    table: ClassVar[str] = "layers"
    source: str
    output: str
    num_kv_heads: dict[str, int]
    method: str
    reexpression: dict[str, str] = field(default_factory=dict)
    attention: list[str] = field(default_factory=list)
    layers: list[dict[str, Any]] = field(default_factory=list)
    verification: list[Check] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    calibration: dict[str, Any] = field(default_factory=dict)
    kv_bytes_per_token: dict[str, int] = field(default_factory=dict)
    groups: int = 0
    wide: int = 1
    head_dim: dict[str, int] = field(default_factory=dict)
    recommended: str = ""


@takes_options(ConvertConfig)
def convert(
    source: str | Path,
    out: str | Path,
    groups: int,
    *,
    groupings: Groupings | None = None,
    progress: Progress | Callable[[int, int], None] | None = None,
    stage: Stage | None = None,
    **options: Unpack[ConvertKeywords],
) -> ConvertResult:
    """Write SOURCE with `groups` key/value heads to the folder OUT.

    Args:
        source: Checkpoint folder or Hub id.
        out: Folder to make; it appears only when complete and checked.
        groups: KV heads G (the paper's GQA-G; not the group size).
        groupings: Which KV heads share, by module path, instead of `grouping`.
        progress: Whom to report to. In an older form a function, called with `(bytes written, bytes in all)`.
        stage: The other half of that: called with the name of another stage, what is done of it, and how much
            there is.
        **options: See `ConvertConfig`.

    Returns:
        What was done, layer by layer, and every check on the result.

    Raises:
        UsageError, UnsupportedModelError: Options or model are invalid; nothing is written.
        CheckpointError: The source is broken, or the result failed a check; nothing is published.

    Example:
        >>> convert("llama-2-7b", "llama-2-7b-gqa8", groups=8).num_kv_heads  # doctest: +SKIP
        {'before': 32, 'after': 8}
    """
    config = build(
        ConvertConfig,
        "convert",
        {"source": source, "out": out, "groups": groups} | options,  # type: ignore[operator]
    )
    out, texts = Path(out), paths_or_source(config.calibration, config.text_column)
    if texts:
        distributed.initialize(
            resolve_device(config.device).type
        )  # torchrun splits the text over its processes
    original = open_checkpoint(source, config.revision)
    if texts:
        check_read(original.config, "--calibration")
    dropped = original.drop(config.drop_extra)
    check_output(original.path, out, config.force)
    sides = find_side_files(original.path, original.config, config.keep)
    seen = as_architecture(original, stored_heads(groups, config.wide), config.as_)
    plan = plan_conversion(
        seen.config,
        seen.shapes,
        groups,
        method=config.method or DEFAULT_METHOD,
        groupings=groupings,
        seed=config.seed,
        attention=config.attention,
        wide=config.wide,
    )
    if config.untie:
        plan = untied(plan, seen.shapes)
    check_dtypes(plan, seen)
    check_space(out, seen.nbytes)
    early = _check_early(plan, seen, source, config.allow_unchecked)
    calibration = CalibrationOptions.of(config, texts, groupings is not None)
    consent = config.trust_remote_code
    opened = written(seen, out, consent) if texts else nullcontext(seen)
    lost = distributed.lost_processes("convert", "the last finished layer", CheckpointError)
    with lost, reporting(_listener(progress, stage)), opened as checkpoint:
        calibration = with_generated(checkpoint, calibration, out)
        calibrated = calibrate(checkpoint, plan, calibration, out, config.force)
        job = _Job(
            str(source),
            original,
            seen,
            sides,
            out,
            config.force,
            consent,
            config.keep,
            tuple(dropped),
            config.allow_unchecked,
            next_command(config, original.config, not plan.spec.unread),
        )
        try:
            if distributed.is_rank_zero():
                result = _publish(job, checkpoint, calibrated, config.max_shard_size, early)
            else:
                result = _result(job, calibrated, [], [])
            distributed.barrier()
        finally:
            if calibrated.work is not None:
                calibrated.work.close()
        if calibrated.work is not None:
            calibrated.work.remove()
        return result


def _listener(progress: Progress | Callable[[int, int], None] | None, stage: Stage | None) -> Progress | None:
    """Whom to report to, also in the older form of two functions: one for writing, one for all else."""
    if isinstance(progress, Progress) or (progress is None and stage is None):
        return progress

    def changed(name: str, done: int, total: int) -> None:
        if name != WRITING:
            if stage is not None:
                stage(name, done, total)
        elif progress is not None and done:
            progress(done, total)

    return Callback(changed)


@dataclass(frozen=True)
class _Job:
    """From where to where.

    Args:
        source: As given.
        original: The checkpoint there.
        seen: The same, as the architecture of the result.
        sides: Its files beside the weights.
        out: The folder to make.
        force: Whether it may replace one of ours.
        trust_remote_code: Consent to code of the source.
        keep: Patterns of further files that go along.
        dropped: Names of tensors that are left out.
        allow_unchecked: Whether checks that cannot be made are allowed.
        recommended: The command to type next.
    """

    source: str
    original: Checkpoint
    seen: Checkpoint
    sides: SideFiles
    out: Path
    force: bool
    trust_remote_code: bool
    keep: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    allow_unchecked: bool = False
    recommended: str = ""


def _check_early(plan: Plan, seen: Checkpoint, source: str | Path, allow_unchecked: bool) -> list[Check]:
    """Ask before a long calibration what publishing will demand.

    Raises:
        CheckpointError, UnsupportedModelError: As `preflight.demand`.
    """
    checks = check_early(plan.config, plan.source, result_tensors(plan, seen.shapes, seen.dtypes))
    checks = settled(checks, plan.config, allow_unchecked)
    demand(checks, plan.config, source, allow_unchecked)
    return checks


def _publish(
    job: _Job,
    checkpoint: Checkpoint,
    calibrated: Calibrated,
    max_shard_size: int | None,
    early: Sequence[Check],
) -> ConvertResult:
    """Stream the new checkpoint beside OUT, check it, and let it appear only if it holds."""
    plan, converters = calibrated.plan, calibrated.converters
    new = {
        name: NewTensor(checkpoint.tensors[name].dtype, r.shapes[role], partial(r.tensor, role))
        for r in converters
        for role, name in r.names.items()
    } | calibrated.rest
    if plan.untied:
        head, embedding = plan.untied
        info = checkpoint.tensors[embedding]
        new[head] = NewTensor(info.dtype, info.shape, partial(checkpoint.read, embedding))
    shards = plan_shards(checkpoint, new, [name for r in converters for name in r.removed], max_shard_size)
    total = sum(entry_nbytes(entry) for shard in shards for entry in shard.entries.values())
    progress, done = current(), 0  # not in `advance`: that is called in other threads
    progress.stage(WRITING, total, "B")

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress.advance(done)

    with publish(job.out, job.force, calibrated.work.root if calibrated.work else None) as folder:
        written = write_shards(checkpoint, shards, folder, advance)
        return _finish(job, calibrated, shards, folder, early, written)


def _finish(
    job: _Job,
    calibrated: Calibrated,
    shards: Sequence[Shard],
    folder: Path,
    early: Sequence[Check],
    written: Written,
) -> ConvertResult:
    """Put everything beside the weights of a folder that is about to be published, and check it."""
    plan = calibrated.plan
    current().stage("checking")
    copy_side_files(job.sides, folder)
    write_config(folder, plan)
    move_alignment_heads(folder, plan)
    names = [name for shard in shards for name in shard.entries]
    checks = [
        *settled(verify_folder(folder, expected=names), plan.config, job.allow_unchecked),
        *(check for check in early if check.name == EQUIVALENCE),
        *_arch_conversion_checks(job, folder),
    ]
    if broken := failed(checks):
        raise CheckpointError(
            f"the result failed its check: {broken}", where=job.out, fix="nothing was published"
        )
    result = _result(job, calibrated, checks, written.odd)
    write_manifest(folder, _manifest(result, job, plan) | {DIGESTS: written.digests}, job.out)
    write_card(folder)
    return result


def _result(job: _Job, calibrated: Calibrated, checks: list[Check], odd: Sequence[str]) -> ConvertResult:
    """What was done; `odd` are tensors that hold NaN or infinity."""
    plan, converters = calibrated.plan, calibrated.converters
    return ConvertResult(
        job.source,
        str(job.out),
        dict(zip(("before", "after"), plan.num_kv_heads, strict=True)),
        plan.method,
        job.seen.found.summary if isinstance(job.seen, ArchConvertedCheckpoint) else {},
        list(plan.attention),
        [c.report for c in converters if c.report],
        checks,
        [
            *plan.warnings,
            *broken_warnings(odd),
            *(f"published unchecked, as allowed: {what}" for what in unchecked(checks, plan.config)),
            *dropped_warnings(job.dropped),
            *job.sides.warnings(),
            *_notes(job.seen),
            *calibrated.warnings,
            *loss_warnings(calibrated.about.get("losses", {}), vocabulary_size(plan.config)),
            *(data_free_warnings(plan) if not calibrated.about else []),
            *clip_warnings(plan, converters),
            *result_clip_warnings(plan, converters),
            *merging_notes(converters),
            *pooling_warnings(converters),
        ],
        calibrated.about,
        cache_sizes(plan),
        plan.groups,
        plan.wide,
        {"before": plan.modules[0].geometry.head_dim, "after": plan.modules[0].result.head_dim},
        job.recommended,
    )


def cache_sizes(plan: Plan) -> dict[str, int]:
    """KV-cache bytes per token before and after.

    From the shapes of the plan: `kv_cache` asks transformers for what a config leaves out, which takes seconds
    that a plain conversion does not need.
    """
    each = dtype_bytes(plan.config)
    sizes = {"before": 0, "after": 0}
    for module in plan.modules:
        for when, g in (("before", module.geometry), ("after", module.result)):
            sizes[when] += each * (g.head_dim + g.value_dim) * g.num_kv_heads
    return sizes


def _notes(seen: Checkpoint) -> list[str]:
    return [seen.found.sentence, *seen.found.notes] if isinstance(seen, ArchConvertedCheckpoint) else []


def _arch_conversion_checks(job: _Job, folder: Path) -> list[Check]:
    """Another architecture must compute the same, and the tokenizer must read as before under its name."""
    if not isinstance(job.seen, ArchConvertedCheckpoint):
        return []
    tokenizer = carry_tokenizer(job.original.path, folder, job.trust_remote_code)
    return [check_arch_conversion(job.original.config, job.seen.found), Check("tokenizer", *tokenizer)]


def check_dtypes(plan: Plan, checkpoint: Checkpoint) -> None:
    """Refuse packed or 8-bit projections.

    Raises:
        UnsupportedModelError: An attention tensor is not stored as ordinary floating point.
    """
    for module in plan.modules:
        for name in module.names.values():
            dtype = checkpoint.tensors[name].dtype
            if dtype not in ("F64", "F32", "F16", "BF16"):
                raise UnsupportedModelError(
                    f"stored as {dtype}: a quantised checkpoint",
                    where=name,
                    fix="convert the full-precision model",
                )


def _manifest(result: ConvertResult, job: _Job, plan: Plan) -> dict[str, Any]:
    """Everything needed to say where the checkpoint comes from."""
    manifest = result.to_dict() | {
        "source_revision": job.original.revision,
        "source_path": str(job.original.path.resolve()),
        "seed": plan.seed,
        "grouping": {module.path: [list(group) for group in module.grouping] for module in plan.modules},
    }
    if job.keep:
        manifest["keep"] = list(job.keep)
    if job.dropped:
        manifest["dropped"] = sorted(job.dropped)
    del manifest["output"], manifest["recommended"]
    return manifest
