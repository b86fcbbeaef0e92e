"""Convert a checkpoint: plan it, calibrate it, publish the result."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from .. import distributed
from ..arch_conversion import as_architecture, written
from ..architectures import check_read
from ..architectures.wide import stored_heads
from ..checkpoints.batch_log import remove_left
from ..checkpoints.fingerprints import checkpoint_fingerprint, weights_fingerprint
from ..checkpoints.loading import resolve_device
from ..checkpoints.output import check_output, check_space, targets_file
from ..checkpoints.reader import Checkpoint, open_checkpoint
from ..checkpoints.side_files import find_side_files
from ..config import ConvertConfig
from ..config.convert import DEFAULT_METHOD
from ..config.keywords import ConvertKeywords
from ..config.option import build
from ..config.pair_options import GENERATE
from ..config.signature import takes_options
from ..data import paths_or_source
from ..errors import CheckpointError, UnsupportedModelError
from ..progress import Callback, Progress, reporting
from ..verification.preflight import check_early, demand, settled
from . import CalibrationOptions, Stage, calibrate, convert_model
from .convert_result import ConvertResult
from .in_memory import convert_state_dict
from .plan import Groupings, Plan, plan_conversion
from .publishing import WRITING, Job, convert_result, publish_converted
from .result_tensors import result_tensors
from .search import with_groupings
from .through_model import check_walk
from .untie import untied

__all__ = ["ConvertResult", "convert", "convert_model", "convert_state_dict"]


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
    given = {"source": source, "out": out, "groups": groups} | options  # type: ignore[operator]
    config = build(ConvertConfig, "convert", given)
    texts = paths_or_source(config.calibration, config.text_column)
    if texts:  # torchrun splits the text over its processes
        distributed.initialize(resolve_device(config.device).type)
    job, plan = _prepare(config, groupings, bool(texts))
    plan, calibration = with_groupings(plan, CalibrationOptions.of(config, texts, groupings))
    if reads := calibration.reads_text(plan):
        check_walk(job.seen, plan, calibration)
    if calibration.texts == (GENERATE,):
        calibration = replace(calibration, original=checkpoint_fingerprint(job.original.path))
    if config.statistics:
        calibration = replace(calibration, weights=f"files {weights_fingerprint(job.original.path)}")
    opened = written(job.seen, job.out, config.trust_remote_code) if reads else nullcontext(job.seen)
    lost = distributed.lost_processes("convert", "the last finished layer", CheckpointError)
    with lost, reporting(_listener(progress, stage)), opened as checkpoint:
        calibrated = calibrate(checkpoint, plan, calibration, job.out, config.force)
        try:
            if distributed.is_rank_zero():
                result = publish_converted(job, checkpoint, calibrated)
                remove_left(targets_file(job.out))
            else:
                result = convert_result(job, calibrated)
            distributed.barrier()
        finally:
            if calibrated.work is not None:
                calibrated.work.close()
        if calibrated.work is not None:
            calibrated.work.remove()
        return result


def _prepare(config: ConvertConfig, groupings: Groupings | None, reads_text: bool) -> tuple[Job, Plan]:
    """Open the source, plan the conversion, and refuse what can be refused before any work.

    Raises:
        CheckpointError, UnsupportedModelError: With what publishing would refuse too, before a long calibration.
    """
    out = Path(config.out)
    original = open_checkpoint(config.source, config.revision)
    if reads_text:
        check_read(original.config, "--calibration")
    dropped = original.drop(config.drop_extra)
    check_output(original.path, out, config.force)
    sides = find_side_files(original.path, original.config, config.keep)
    seen = as_architecture(original, stored_heads(config.groups, config.wide), config.as_)
    plan = plan_conversion(
        seen.config,
        seen.shapes,
        config.groups,
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
    checks = check_early(plan.config, plan.source, result_tensors(plan, seen.shapes, seen.dtypes))
    checks = settled(checks, plan.config, config.allow_unchecked)
    demand(checks, plan.config, config.source, config.allow_unchecked)
    return Job(config, original, seen, sides, dropped, checks), plan


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
