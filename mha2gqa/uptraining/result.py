"""What an uptraining run reports."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from ..results import Result
from .budget import Budget, UptrainConfig
from .train import TrainingRun


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
        notices: What the user should know.
        worse: Whether the held-out loss ended above where it started.
        merge: LoRA: largest logit differences between adapter and merged model, see `merge_adapter` and
            `merge_quantised`.
        teacher_cache: With `teacher_top_k`: `folder`, `top_k`, `rows`, rows `computed` by this run, `bytes`,
            `flops`.
        finished_before: Whether this call only read the result of an earlier one.
    """

    command: ClassVar[str] = "uptrain"
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
    notices: list[str] = field(default_factory=list)
    worse: bool | None = None
    merge: dict[str, float] | None = None
    teacher_cache: dict[str, Any] | None = None
    finished_before: bool = False


def summarise(
    config: UptrainConfig, budget: Budget, trained: TrainingRun, teacher: str | None, begin: float
) -> UptrainResult:
    """The result of a finished run, from its log and its budget."""
    trainer = trained.trainer
    history = trainer.state.log_history
    rates = sorted(trainer.meter.rates)
    throughput: dict[str, float] = {}
    if rates:
        throughput["tokens_per_second"] = rates[len(rates) // 2]
        if trainer.meter.peak is not None:
            throughput["mfu"] = rates[len(rates) // 2] * trainer.meter.flops / trainer.meter.peak
        throughput |= {"memory_gib": max(e.get("memory_gib", 0) for e in history if "loss" in e)}
    asked = (trained.teacher_cache or {}).get("flops", 0.0)
    flops = trainer.meter.flops * budget.tokens + asked
    losses = {
        "train": [e for e in history if "loss" in e],
        "held_out": [e for e in history if "eval_loss" in e],
        "held_out_start": trained.start,
        "held_out_end": trained.end,
    }
    bill = asdict(budget) | {
        "unique_tokens": trained.corpus.unique_tokens,
        "model_flops": flops,
        # What next-token training alone could have visited for the same FLOPs.
        "tokens_at_equal_flops": round(flops / trainer.student_flops),
    }
    worse = None if trained.start is None or trained.end is None else trained.end > trained.start
    return UptrainResult(
        config.model,
        config.out or None,
        teacher,
        config.train,
        bill,
        losses,
        throughput,
        trainer.guard.skipped,
        trainer.guard.unlabelled,
        trained.resumed_from,
        time.perf_counter() - begin,
        trained.notices,
        worse,
        trained.merge,
        trained.teacher_cache,
    )
