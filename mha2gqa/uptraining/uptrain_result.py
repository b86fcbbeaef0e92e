"""What an uptraining run reports."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from ..checkpoints.manifest import MANIFEST, read_manifest
from ..results import Result
from .run_dir import changed_keys

logger = logging.getLogger(__name__)


@dataclass
class UptrainResult(Result):
    """What an uptraining run did.

    Args:
        source: The checkpoint it started from.
        output: The checkpoint it wrote (None for a model in memory).
        teacher: The original it distilled from, None for next-token loss.
        train: Which parameters moved.
        budget: `alpha`, `tokens`, `steps`, `batch_tokens`, `window`, `unique_tokens`, `model_flops`,
            `tokens_at_equal_flops` (of plain training, for what distillation cost).
        losses: `train` and `held_out`: lists of log entries; `held_out_start`, `held_out_end`.
        throughput: Median `tokens_per_second`, `mfu` and peak `memory_gib` where known.
        skipped_steps: Steps whose gradient was dropped as a spike.
        unlabelled_steps: Steps without a single labelled token.
        resumed_from: Step of the checkpoint this process began with, None if it began at 0.
        seconds: Wall time of this process.
        warnings: What the user should know.
        worse: Whether the held-out loss ended above where it started.
        merge: LoRA: largest logit differences between adapter and merged model, see `merge_adapter` and
            `merge_quantised`.
        teacher_cache: With `teacher_top_k`: `folder`, `top_k`, `rows`, rows `computed` by this run, `bytes`,
            `flops`.
        finished_before: Whether this call only read the result of an earlier one.
    """

    command: ClassVar[str] = "uptrain"
    renamed: ClassVar[dict[str, str]] = {"notices": "warnings"}
    table: ClassVar[str] = "losses"
    source: str
    output: str | None
    teacher: str | None
    train: str
    budget: dict[str, Any]
    losses: dict[str, Any]
    throughput: dict[str, float]
    skipped_steps: list[int] = field(default_factory=list)
    unlabelled_steps: list[int] = field(default_factory=list)
    resumed_from: int | None = None
    seconds: float = 0.0
    warnings: list[str] = field(default_factory=list)
    worse: bool | None = None
    merge: dict[str, float] | None = None
    teacher_cache: dict[str, Any] | None = None
    finished_before: bool = False

    def _rows(self) -> list[dict[str, Any]]:
        """The log entries of training and of every evaluation meanwhile, by step."""
        logged = [entry for entries in self.losses.values() if isinstance(entries, list) for entry in entries]
        return sorted(logged, key=lambda entry: float(entry.get("step", 0)))


def recorded_result(out: Path, keys: Mapping[str, Any], *, any_teacher: bool = False) -> UptrainResult | None:
    """The result that `out` holds, where it is that of this very run.

    Args:
        out: A folder that may be there.
        keys: What identifies the run, see `recipe_keys`.
        any_teacher: Whether its teacher does not count, being gone.
    """
    if not (out / MANIFEST).exists():
        return None
    section = dict(read_manifest(out).get("uptrain") or {})
    if not section:
        return None
    recipe = dict(section.get("recipe") or {})
    if changed_keys(recipe, {**keys, "teacher": recipe.get("teacher")} if any_teacher else keys):
        return None
    logger.info("%s is already the result of this run", out)
    names = {f.name for f in fields(UptrainResult)}
    return UptrainResult(**{k: v for k, v in section.items() if k in names} | {"finished_before": True})
