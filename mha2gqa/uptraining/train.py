"""One training, from a model ready to be trained to its consolidated weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from ..distributed import world_size
from ..errors import DataError, TrainingError
from ..progress import current
from ..reconstruct.train_state import behind_masks
from .batches import BlockStream
from .budget import Budget, UptrainConfig
from .corpus import Corpus
from .distributed_training import frozen_weights, gather_master_weights, shared_cores
from .interruption import Interrupted, stop_signals
from .loss import Objective
from .model_prep import (
    compile_layers,
    liger_removed_after,
    loss_attached,
    one_document_a_row,
    residual_in_autocast_dtype,
    set_dropout,
    undo_compile,
    worth_compiling,
)
from .prepare import PreparedRun
from .run_dir import RunDirectory
from .teacher import Teacher
from .throughput import training_flops
from .trainer import UptrainTrainer
from .uptrain_result import UptrainResult

logger = logging.getLogger(__name__)


@dataclass
class TrainingRun:
    """A finished training: the model, its consolidated weights, and the trainer's record."""

    model: Any
    trainer: UptrainTrainer
    state: dict[str, torch.Tensor] | None
    corpus: Corpus
    resumed_from: int | None
    start: float | None
    end: float | None
    adapter: Path | None = None
    merge: dict[str, float] | None = None
    teacher_cache: dict[str, Any] | None = None

    def wait(self) -> None:
        """Wait for the other processes."""
        self.trainer.accelerator.wait_for_everyone()


def train(
    run: PreparedRun,
    args: Any,
    student: Any,
    corpus: Corpus,
    teacher: Teacher | None,
    run_dir: RunDirectory | None,
    callbacks: Sequence[TrainerCallback] = (),
) -> TrainingRun:
    """The training itself, common to checkpoints and models in memory.

    Args:
        run: The run.
        args: From `build_arguments`.
        student: The model, float32; trained in place.
        corpus: What it trains on.
        teacher: The original, None without one and where its predictions come with the batches.
        run_dir: Where checkpoints go and resuming starts, None for neither.
        callbacks: Called by the Trainer beside our own.
    """
    config, budget = run.config, run.budget
    before = set_dropout(student, config.dropout)
    if before != config.dropout:
        run.warn(f"dropout {before:g} of the config is {config.dropout:g} in this run")
    frozen = frozen_weights(student) if args.deepspeed else {}
    compiled = _should_compile(student, args, config, budget, teacher)
    distils = teacher is not None or corpus.cached
    liger = args.device.type == "cuda" and bool(args.use_liger_kernel)
    spec = Objective(distils, config.temperature, config.ce_weight if distils else 1.0, compiled, liger)
    one_document = nullcontext() if config.isolate_documents else one_document_a_row()
    stream = residual_in_autocast_dtype(student) if config.residual_dtype == "bfloat16" else nullcontext()
    kernels = liger_removed_after(student) if args.use_liger_kernel else nullcontext()
    attention = behind_masks(_needs_masks(run))
    try:
        with (
            attention,
            kernels,
            loss_attached(student, spec, teacher),
            one_document,
            stream,
            stop_signals() as stop,
        ):
            if compiled:  # after the heads were probed with a few tokens
                compile_layers(student)
                if teacher is not None:
                    compile_layers(teacher.model)
            with memory_advice(args, budget):
                trainer = UptrainTrainer(student, args, run, corpus, teacher, stop, callbacks)
                checkpoint = None if run_dir is None else run_dir.last()
                if checkpoint is not None:
                    trainer.restore(checkpoint)
                    logger.info("resuming from %s", checkpoint)
                with shared_cores(trainer.accelerator):
                    start, end = _fit(trainer, checkpoint)
            state = _consolidated(trainer, frozen)
    finally:
        undo_compile(student)
        if teacher is not None:
            undo_compile(teacher.model)
    _check_ended(trainer, run, corpus, run_dir)
    _warn_of_passes(run, corpus)
    resumed = None if checkpoint is None else int(checkpoint.name.rpartition("-")[2])
    return TrainingRun(student, trainer, state, corpus, resumed, start, end)


def _check_ended(
    trainer: UptrainTrainer, run: PreparedRun, corpus: Corpus, run_dir: RunDirectory | None
) -> None:
    """Refuse to go on with a training that was stopped, or that had nothing to learn from.

    Raises:
        Interrupted: It was stopped.
        DataError: No token of the stream had a label.
    """
    steps = run.budget.steps
    if trainer.state.global_step < steps:
        raise Interrupted(
            f"stopped at step {trainer.state.global_step} of {steps}",
            where=None if run_dir is None else run_dir.root,
            fix="run the same command to continue",
        )
    if isinstance(corpus.train, BlockStream) and len(trainer.guard.unlabelled) == steps:
        raise DataError(
            "no token had a label",
            where="--data",
            fix="give chats with assistant turns, or set assistant_only_loss false",
        )


def _needs_masks(run: PreparedRun) -> bool:
    """Whether attention may be given masks over lengths that are not whole multiples of 128."""
    return run.objective != "next-token" or run.config.isolate_documents or run.budget.window % 128 > 0


@contextmanager
def memory_advice(args: Any, budget: Budget) -> Iterator[None]:
    """Say what to lower where the device's memory does not suffice.

    Raises:
        TrainingError: Out of memory inside.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        what = f"blocks of {budget.window} tokens" if budget.pairs is None else "pairs"
        raise TrainingError(
            f"out of memory with {args.per_device_train_batch_size} {what} at a time",
            where=str(args.device),
            fix="lower per_device_train_batch_size or window, set gradient_checkpointing, use train lora or qlora, "
            "or more GPUs with fsdp",
        ) from error


def _should_compile(
    student: Any, args: Any, config: UptrainConfig, budget: Budget, teacher: Teacher | None
) -> bool:
    if config.torch_compile is not None:
        return config.torch_compile
    if config.train == "qlora" or args.deepspeed:  # opaque kernels; hooks in every module of a layer
        return False
    flops = training_flops(student, teacher, budget.window, budget.pairs) * budget.tokens
    return worth_compiling(flops, args.device, world_size())


def _warn_of_passes(run: PreparedRun, corpus: Corpus) -> None:
    """Tell of a stream that was shorter than the run; only the process that reads it knows."""
    if not isinstance(corpus.train, BlockStream):
        return
    end = corpus.train.positions.get(run.budget.steps * run.budget.blocks_per_step)
    if end is not None and end.turn > 0:
        run.warn(f"the data ended early: {end.turn} whole passes over it, then again from its beginning")


class StepProgress(TrainerCallback):
    """Reports every step, with the last loss that was logged."""

    def __init__(self) -> None:
        self.note = ""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the stage where the run begins or goes on."""
        current().stage("training", state.max_steps, "steps", state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Keep the loss."""
        if "loss" in (logs or {}):
            self.note = f"loss {logs['loss']:.4f}"

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report a step."""
        current().advance(state.global_step, self.note)


def _fit(trainer: UptrainTrainer, checkpoint: Path | None) -> tuple[float | None, float | None]:
    """Train; held-out loss before and after."""
    scored = trainer.corpus.held_out is not None
    trainer.args.eval_on_start = scored and checkpoint is None
    trainer.meter.reset(trainer.meter.tokens)
    trainer.add_callback(StepProgress())
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    trainer.finish_step()
    history: list[dict[str, Any]] = trainer.state.log_history
    step = trainer.state.global_step
    scored_now = any(e.get("step") == step and "eval_loss" in e for e in history)
    if scored and step >= trainer.run.budget.steps and not scored_now:
        trainer.evaluate()
    losses = [e["eval_loss"] for e in history if "eval_loss" in e]
    return (losses[0], losses[-1]) if losses else (None, None)


def _consolidated(trainer: UptrainTrainer, frozen: dict[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """The whole state dict on the first process, None on the others."""
    if trainer.is_deepspeed_enabled:
        state = gather_master_weights(trainer.accelerator.unwrap_model(trainer.model_wrapped), frozen)
    elif trainer.is_fsdp_enabled:
        state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    else:
        state = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    return state if trainer.is_world_process_zero() else None


def summarise(run: PreparedRun, trained: TrainingRun, teacher: str | None, begin: float) -> UptrainResult:
    """The result of a finished run, from its log and its budget.

    Args:
        run: The run.
        trained: How it went.
        teacher: What to call the teacher.
        begin: When it began, by `time.perf_counter`.
    """
    config, budget = run.config, run.budget
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
        source=config.model,
        output=config.out or None,
        teacher=teacher,
        train=config.train,
        budget=bill,
        losses=losses,
        throughput=throughput,
        skipped_steps=trainer.guard.skipped,
        unlabelled_steps=trainer.guard.unlabelled,
        resumed_from=trained.resumed_from,
        seconds=time.perf_counter() - begin,
        warnings=run.warnings,
        worse=worse,
        merge=trained.merge,
        teacher_cache=trained.teacher_cache,
    )
