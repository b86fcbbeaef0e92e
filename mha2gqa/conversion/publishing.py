"""The last step of `convert`: new tensors are streamed beside OUT, the folder is checked, and only then it appears."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..arch_conversion import ArchConvertedCheckpoint, carry_tokenizer
from ..checkpoints.hf_config import dtype_bytes, vocabulary_size
from ..checkpoints.manifest import DIGESTS, write_manifest
from ..checkpoints.output import publish
from ..checkpoints.reader import Checkpoint
from ..checkpoints.side_files import SideFiles, copy_side_files
from ..checkpoints.writer import (
    NewTensor,
    Shard,
    Written,
    entry_nbytes,
    plan_shards,
    write_shards,
)
from ..config import ConvertConfig
from ..errors import CheckpointError
from ..progress import current
from ..report import write_card
from ..results import Check
from ..verification.checks import failed, verify_folder
from ..verification.preflight import settled, unchecked
from ..verification.tiny_random import EQUIVALENCE, check_arch_conversion
from .convert_result import ConvertResult
from .plan import Plan
from .recommended import next_command
from .result_files import move_alignment_heads, write_config
from .through_model import Calibrated
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


@dataclass(frozen=True)
class Job:
    """From where to where.

    Args:
        config: What was asked.
        original: The checkpoint to convert.
        seen: The same, as the architecture of the result.
        sides: Its files beside the weights.
        dropped: Names of tensors that are left out.
        early: Checks that were made before the work.
    """

    config: ConvertConfig
    original: Checkpoint
    seen: Checkpoint
    sides: SideFiles
    dropped: Sequence[str] = ()
    early: Sequence[Check] = ()

    @property
    def out(self) -> Path:
        """The folder to make."""
        return Path(self.config.out)


def publish_converted(job: Job, checkpoint: Checkpoint, calibrated: Calibrated) -> ConvertResult:
    """Stream the new checkpoint beside OUT, check it, and let it appear only if it holds.

    Args:
        job: From where to where.
        checkpoint: The source as tensors are read from it: in the architecture of the result.
        calibrated: Its new tensors.

    Raises:
        CheckpointError: The result failed a check, or cannot be written; nothing is published.
    """
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
    shards = plan_shards(
        checkpoint, new, [name for r in converters for name in r.removed], job.config.max_shard_size
    )
    total = sum(entry_nbytes(entry) for shard in shards for entry in shard.entries.values())
    progress, done = current(), 0  # not in `advance`: that is called in other threads
    progress.stage(WRITING, total, "B")

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress.advance(done)

    with publish(job.out, job.config.force, calibrated.work.root if calibrated.work else None) as folder:
        written = write_shards(checkpoint, shards, folder, advance)
        return _finish(job, calibrated, shards, folder, written)


def _finish(
    job: Job,
    calibrated: Calibrated,
    shards: Sequence[Shard],
    folder: Path,
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
        *settled(verify_folder(folder, expected=names), plan.config, job.config.allow_unchecked),
        *(check for check in job.early if check.name == EQUIVALENCE),
        *_arch_conversion_checks(job, folder),
    ]
    if broken := failed(checks):
        raise CheckpointError(
            f"the result failed its check: {broken}", where=job.out, fix="nothing was published"
        )
    result = convert_result(job, calibrated, checks, written.odd)
    write_manifest(folder, _manifest(result, job, plan) | {DIGESTS: written.digests}, job.out)
    write_card(folder)
    return result


def convert_result(
    job: Job, calibrated: Calibrated, checks: Sequence[Check] = (), odd: Sequence[str] = ()
) -> ConvertResult:
    """What was done; `odd` are tensors that hold NaN or infinity."""
    plan, converters = calibrated.plan, calibrated.converters
    return ConvertResult(
        source=job.config.source,
        output=str(job.out),
        num_kv_heads=dict(zip(("before", "after"), plan.num_kv_heads, strict=True)),
        method=plan.method,
        reexpression=job.seen.found.summary if isinstance(job.seen, ArchConvertedCheckpoint) else {},
        attention=list(plan.attention),
        layers=[c.report for c in converters if c.report],
        verification=list(checks),
        warnings=[
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
        calibration=calibrated.about,
        kv_bytes_per_token=cache_sizes(plan),
        groups=plan.groups,
        wide=plan.wide,
        head_dim={"before": plan.modules[0].geometry.head_dim, "after": plan.modules[0].result.head_dim},
        recommended=next_command(job.config, job.original.config, not plan.spec.unread),
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


def _arch_conversion_checks(job: Job, folder: Path) -> list[Check]:
    """Another architecture must compute the same, and the tokenizer must read as before under its name."""
    if not isinstance(job.seen, ArchConvertedCheckpoint):
        return []
    tokenizer = carry_tokenizer(job.original.path, folder, job.config.trust_remote_code)
    return [check_arch_conversion(job.original.config, job.seen.found), Check("tokenizer", *tokenizer)]


def _manifest(result: ConvertResult, job: Job, plan: Plan) -> dict[str, Any]:
    """Everything needed to say where the checkpoint comes from."""
    manifest = result.to_dict() | {
        "source_revision": job.original.revision,
        "source_path": str(job.original.path.resolve()),
        "seed": plan.seed,
        "grouping": {module.path: [list(group) for group in module.grouping] for module in plan.modules},
    }
    if job.config.keep:
        manifest["keep"] = list(job.config.keep)
    if job.dropped:
        manifest["dropped"] = sorted(job.dropped)
    del manifest["output"], manifest["recommended"]
    return manifest
