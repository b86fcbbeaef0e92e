"""Uptraining from a checkpoint to a checkpoint, and the same training on a model in memory."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import torch

from ..checkpoint import MANIFEST, Checkpoint, open_checkpoint, read_json
from ..errors import TrainingError, UsageError
from ..loading import load_config_json, load_model, load_tokenizer, resolve_device, stored_dtype, text_config
from ..results import Result
from ..writer import check_output
from .adapters import add_adapter, merge_adapter, train_attention_only
from .batches import BlockOrder, Blocks, Collate, Collator
from .budget import Budget, UptrainConfig, plan_budget
from .compiling import compile_layers, undo_compile, worth_compiling
from .corpus import Corpus, load_corpus
from .distillation import Teacher, attached, check_teacher, check_tokenizers
from .guard import Interrupted, stop_signals
from .losses import Objective
from .objectives import choose_objective, default_window, make_collator
from .publishing import manifest_with, publish_trained
from .trainer import Run, UptrainTrainer, build_arguments, check_training_args, training_flops, world_size
from .workspace import Workspace, changed_keys, checkpoint_stamp, recipe_keys

logger = logging.getLogger(__name__)


@dataclass
class UptrainResult(Result):
    """What an uptraining run did.

    Args:
        source: The checkpoint it started from.
        output: The checkpoint it wrote (None for a model in memory).
        teacher: The original it distilled from, None for next-token loss.
        train: Which parameters moved.
        budget: `alpha`, `tokens`, `steps`, `batch_tokens`, `window`, `unique_tokens`, `model_flops`, …
        losses: `train` and `held_out`: lists of log entries; `held_out_start`, `held_out_end`.
        throughput: Median `tokens_per_second`, `mfu` and peak `memory_gib` where known.
        skipped_steps: Steps whose gradient was dropped as a spike.
        unlabelled_steps: Steps without a single labelled token.
        resumed_from: Step of the checkpoint this process began with, None if it began at 0.
        seconds: Wall time of this process.
        notices: What the user should know.
        worse: Whether the held-out loss ended above where it started.
        merge: LoRA: largest logit differences between adapter and merged model, see `merge_adapter`.
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
    finished_before: bool = False


def make_config(model: str, out: str, data: Any, options: dict[str, Any]) -> UptrainConfig:
    """An `UptrainConfig` from keyword options; what it does not know goes to TrainingArguments, checked."""
    own = {f.name for f in fields(UptrainConfig)}
    known = {name: value for name, value in options.items() if name in own}
    passed = dict(known.pop("training_args", {})) | {n: v for n, v in options.items() if n not in own}
    check_training_args(passed)
    if isinstance(known.get("eval_data"), str | Path):
        known["eval_data"] = (str(known["eval_data"]),)
    elif known.get("eval_data") is not None:
        known["eval_data"] = tuple(map(str, known["eval_data"])) or None
    paths = (str(data),) if isinstance(data, str | Path) else tuple(map(str, data))
    return UptrainConfig(str(model), str(out), paths, training_args=passed, **known)


def uptrain(model: str | Path, out: str | Path, data: Any, **options: Any) -> UptrainResult:
    """Continue pretraining a converted checkpoint, by default distilling from the original.

    The same call resumes an interrupted run exactly where its last checkpoint was.

    Args:
        model: Checkpoint folder or hub id.
        out: Folder of the result, a plain checkpoint like the input.
        data: One path or several, see `data.read_documents`.
        **options: Fields of `UptrainConfig`; anything else is passed to `transformers.TrainingArguments`.

    Returns:
        Budget, losses, speed and output.

    Raises:
        UsageError: Impossible or contradictory options, changed recipe, another teacher tokenizer.
        DataError: No usable text.
        CheckpointError: Input unreadable or output unwritable.
        TrainingError: Not finite, diverged, out of memory; `Interrupted` (exit 130) after SIGTERM.

    Example:
        >>> uptrain("llama-gqa8", "llama-gqa8-up", "c4.jsonl", tokens=20_000_000).losses["held_out_end"]
    """
    return run_uptrain(make_config(str(model), str(out), data, options))


def run_uptrain(config: UptrainConfig) -> UptrainResult:
    """`uptrain` from a finished config."""
    begin = time.perf_counter()
    out = Path(config.out)
    raw = load_config_json(config.model)
    source = open_checkpoint(config.model)
    manifest = read_json(source.path / MANIFEST) if (source.path / MANIFEST).exists() else {}
    choose_objective(config, raw)
    window = config.window or default_window(raw)
    budget = plan_budget(config, window=window, name=str(manifest.get("source", config.model)))
    check_training_args(config.training_args)
    keys = recipe_keys(config, checkpoint_stamp(source.path))
    workspace = Workspace(out)
    if (done := _finished(out, keys)) is not None and not config.force:
        workspace.remove()
        return done
    check_output(source.path, out, config.force)
    _open_workspace(workspace, keys, config.force)
    logger.info("%s", budget.sentence())
    teacher_name, notices = find_teacher(config, manifest)
    trained = _train_checkpoint(config, budget, source, workspace, teacher_name, notices)
    result = _result(config, budget, trained, teacher_name, begin)
    if trained.state is not None:  # only the first process holds the consolidated weights
        section = result.to_dict() | {"recipe": keys}
        publish_trained(
            trained.model,
            trained.state,
            source,
            out,
            manifest_with(source, config.model, section),
            force=config.force,
            adapter=trained.adapter,
        )
        if not config.keep_checkpoints:
            workspace.remove()
    trained.wait()
    return result


def _open_workspace(workspace: Workspace, keys: dict[str, Any], force: bool) -> None:
    """The first process creates or checks the folder, the others only check it."""
    import os

    if int(os.environ.get("RANK", "0")) == 0:
        if workspace.open(keys, restart=force):
            logger.info("continuing the run in %s", workspace.root)
        workspace.discard_incomplete()


def _finished(out: Path, keys: dict[str, Any]) -> UptrainResult | None:
    """The recorded result if `out` already is this very run's."""
    if not (out / MANIFEST).exists():
        return None
    section = dict(read_json(out / MANIFEST).get("uptrain") or {})
    if not section or changed_keys(section.get("recipe") or {}, keys):
        return None
    logger.info("%s is already the result of this run", out)
    names = {f.name for f in fields(UptrainResult)}
    result = UptrainResult(**{k: v for k, v in section.items() if k in names})
    result.finished_before = True
    return result


def find_teacher(config: UptrainConfig, manifest: dict[str, Any]) -> tuple[str | None, list[str]]:
    """Whom to distil from, and what to tell the user about it.

    Returns:
        A folder or hub id, or None for plain next-token loss; notices.
    """
    if config.teacher == "none":
        return None, []
    if config.teacher is not None:
        return config.teacher, []
    for key in ("source_path", "source"):
        place = manifest.get(key)
        if place and Path(place).is_dir():
            return str(place), []
    place = manifest.get("source")
    why = f"its original {place} is not here" if place else "no original is recorded in it"
    return None, [f"next-token loss without distillation: {why}; give teacher to distil"]


@dataclass
class Trained:
    """A finished training: the model, its consolidated weights, and the trainer's record."""

    model: Any
    trainer: UptrainTrainer
    state: dict[str, torch.Tensor] | None
    corpus: Corpus
    notices: list[str]
    resumed_from: int | None
    start: float | None
    end: float | None
    adapter: Path | None = None
    merge: dict[str, float] | None = None

    def wait(self) -> None:
        """Wait for the other processes."""
        self.trainer.accelerator.wait_for_everyone()


def _train_checkpoint(
    config: UptrainConfig,
    budget: Budget,
    source: Checkpoint,
    workspace: Workspace,
    teacher_name: str | None,
    notices: list[str],
) -> Trained:
    text = text_config(source.config)
    args = build_arguments(
        config, budget, workspace.root, int(text.get("hidden_size") or text.get("d_model") or 512), True
    )
    consent = config.trust_remote_code
    tokenizer = load_tokenizer(source.path, consent)
    student = load_model(source.path, dtype=torch.float32, device="cpu", trust_remote_code=consent)
    if config.train == "attention":
        moving = train_attention_only(student, source.config)
        logger.info("training %d attention tensors: %s, …", len(moving), ", ".join(moving[:4]))
    elif config.train == "lora":
        if args.fsdp:
            raise UsageError("is not possible with fsdp", where="train lora", fix="use torchrun without fsdp")
        student = add_adapter(student, source.config, config)
    teacher = None
    if teacher_name is not None:
        check_tokenizers(tokenizer, load_tokenizer(teacher_name, consent), teacher_name)
        original = load_model(
            teacher_name,
            dtype=torch.bfloat16 if args.bf16 else torch.float32,
            device=args.device,
            trust_remote_code=consent,
        )
        widths = check_teacher(student, original, len(tokenizer))
        notices += [] if widths.note is None else [widths.note]
        teacher = Teacher(original)
    with args.main_process_first(desc="cutting the data into blocks"):
        collate = make_collator(config, source.config, tokenizer, budget.window)
        vocabulary = source_vocabulary(student)
        corpus = load_corpus(config, budget, tokenizer, workspace.root, vocabulary, collate)
    if corpus.held_out is None:
        args.eval_strategy = "no"
    trained = train(student, args, config, budget, corpus, teacher, workspace, notices)
    if config.train == "lora" and trained.state is not None:
        trained.adapter = workspace.root / "adapter"
        trained.model, trained.merge = merge_adapter(
            student, trained.adapter, config.model, stored_dtype(source.config)
        )
        trained.state = trained.model.state_dict()
    return trained


def source_vocabulary(model: Any) -> int:
    """Rows of the input embedding: ids are below this."""
    return int(model.get_input_embeddings().weight.shape[0])


def train(
    student: Any,
    args: Any,
    config: UptrainConfig,
    budget: Budget,
    corpus: Corpus,
    teacher: Teacher | None,
    workspace: Workspace | None,
    notices: list[str],
) -> Trained:
    """The training itself, common to checkpoints and models in memory.

    Args:
        student: The model, float32; trained in place.
        args: From `build_arguments`.
        config, budget, corpus, teacher: The run.
        workspace: Where checkpoints go and resuming starts, None for neither.
        notices: Extended by what comes up.
    """
    notices += corpus.notices
    for notice in notices:
        logger.warning("%s", notice)
    compiled = _should_compile(student, args, config, budget, teacher)
    spec = Objective(teacher is not None, config.temperature, config.ce_weight if teacher else 1.0, compiled)
    try:
        with attached(student, spec, teacher), stop_signals() as stop:
            if compiled:  # after the heads were probed with a few tokens
                compile_layers(student)
                if teacher is not None:
                    compile_layers(teacher.model)
            masked = corpus.collate.counts_labels
            run = Run(config, budget, corpus.train, corpus.held_out, teacher, masked, stop, corpus.collate)
            trainer = UptrainTrainer(student, args, run)
            checkpoint = None if workspace is None else workspace.last()
            if checkpoint is not None:
                trainer.restore(checkpoint)
                logger.info("resuming from %s", checkpoint)
            start, end = _fit(trainer, checkpoint)
            state = _consolidated(trainer)
    finally:
        undo_compile(student)
        if teacher is not None:
            undo_compile(teacher.model)
    if trainer.state.global_step < budget.steps:
        raise Interrupted(
            f"stopped at step {trainer.state.global_step} of {budget.steps}",
            where=None if workspace is None else workspace.root,
            fix="run the same command to continue",
        )
    resumed = None if checkpoint is None else int(checkpoint.name.rpartition("-")[2])
    return Trained(student, trainer, state, corpus, notices, resumed, start, end)


def _should_compile(
    student: Any, args: Any, config: UptrainConfig, budget: Budget, teacher: Teacher | None
) -> bool:
    if config.torch_compile is not None:
        return config.torch_compile
    flops = training_flops(student, teacher, budget.window) * budget.tokens
    return worth_compiling(flops, args.device, world_size())


def _fit(trainer: UptrainTrainer, checkpoint: Path | None) -> tuple[float | None, float | None]:
    """Train; held-out loss before and after."""
    scored = trainer.run.held_out is not None
    history: list[dict[str, Any]] = []
    try:
        trainer.args.eval_on_start = scored and checkpoint is None
        trainer.meter.reset(trainer.meter.tokens)
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        history = trainer.state.log_history
        done = trainer.state.global_step >= trainer.run.budget.steps
        if (
            scored
            and done
            and not any(e.get("step") == trainer.state.global_step and "eval_loss" in e for e in history)
        ):
            trainer.evaluate()
    except torch.OutOfMemoryError as error:
        size = trainer.args.per_device_train_batch_size
        raise TrainingError(
            f"out of memory with {size} blocks of {trainer.run.budget.window} tokens at a time",
            where=str(trainer.args.device),
            fix="lower per_device_train_batch_size or window, set gradient_checkpointing, use train lora, "
            "or more GPUs with fsdp",
        ) from error
    losses = [e["eval_loss"] for e in history if "eval_loss" in e]
    return (losses[0], losses[-1]) if losses else (None, None)


def _consolidated(trainer: UptrainTrainer) -> dict[str, torch.Tensor] | None:
    """The whole state dict on the first process, None on the others."""
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    else:
        state = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    return state if trainer.is_world_process_zero() else None


def _result(
    config: UptrainConfig, budget: Budget, trained: Trained, teacher: str | None, begin: float
) -> UptrainResult:
    trainer = trained.trainer
    history = trainer.state.log_history
    rates = sorted(trainer.meter.rates)
    throughput: dict[str, float] = {}
    if rates:
        throughput["tokens_per_second"] = rates[len(rates) // 2]
        if trainer.meter.peak is not None:
            throughput["mfu"] = rates[len(rates) // 2] * trainer.meter.flops / trainer.meter.peak
        throughput |= {"memory_gib": max(e.get("memory_gib", 0) for e in history if "loss" in e)}
    losses = {
        "train": [e for e in history if "loss" in e],
        "held_out": [e for e in history if "eval_loss" in e],
        "held_out_start": trained.start,
        "held_out_end": trained.end,
    }
    bill = asdict(budget) | {
        "unique_tokens": trained.corpus.unique_tokens,
        "model_flops": trainer.meter.flops * budget.tokens,
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
    )


def train_model(
    model: Any,
    blocks: Blocks,
    *,
    teacher: Any = None,
    held_out: Blocks | None = None,
    folder: str | Path | None = None,
    collate: Collate | None = None,
    **options: Any,
) -> UptrainResult:
    """The training of `uptrain` on a model in memory and blocks already cut.

    Args:
        model: A float32 model of transformers (other dtypes are widened); trained in place.
        blocks: Token ids `[N, T + 1]`.
        teacher: The original, another model, in the dtype it should run in; it is frozen.
        held_out: Held-out ids `[M, T + 1]`.
        folder: Where checkpoints go; None saves none.
        collate: Makes batches: next-token ones by default, a `SpanCollator` for encoder-decoders.
        **options: Fields of `UptrainConfig` (`tokens` or `alpha`, `batch_tokens`, `learning_rate`, …) and
            TrainingArguments.

    Returns:
        As `uptrain`, without an output.

    Example:
        >>> train_model(student, blocks, teacher=original, tokens=2_000_000, batch_tokens=65_536)
    """
    begin = time.perf_counter()
    config = make_config("", "", (), options)
    budget = plan_budget(config, window=int(blocks.shape[1]) - 1)
    if config.train != "all":
        raise UsageError("only `all` is possible for a model in memory", where=f"train {config.train}")
    resolve_device(config.device)
    with nullcontext(str(folder)) if folder else tempfile.TemporaryDirectory() as place:
        hidden = int(getattr(model.config.get_text_config(), "hidden_size", 512))
        args = build_arguments(config, budget, Path(place), hidden, held_out is not None)
        if folder is None:
            args.save_strategy = type(args.save_strategy)("no")
        helper = None
        if teacher is not None:
            check_teacher(model, teacher, None)
            helper = Teacher(teacher.to(args.device))
        collate = collate or Collator()
        count = budget.steps * budget.blocks_per_step
        order = BlockOrder(blocks, count, config.seed, collate)
        corpus = Corpus(order, held_out, len(blocks) * budget.window, collate)
        workspace = Workspace.at(Path(place)) if folder else None
        trained = train(model.float(), args, config, budget, corpus, helper, workspace, [])
    return _result(config, budget, trained, None if teacher is None else "in memory", begin)


__all__: Sequence[str] = ("UptrainResult", "run_uptrain", "train_model", "uptrain")
