"""Uptraining from a checkpoint to a checkpoint."""

from __future__ import annotations

import logging
import tempfile
import time
from contextlib import ExitStack, closing, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from ..checkpoints.fingerprints import checkpoint_fingerprint
from ..checkpoints.hf_config import is_encoder_decoder, load_config_json, stored_dtype, text_config
from ..checkpoints.json_files import read_json
from ..checkpoints.loading import (
    load_model,
    load_tokenizer,
    resolve_device,
)
from ..checkpoints.reader import MANIFEST, Checkpoint, open_checkpoint
from ..checkpoints.writer import check_output
from ..distributed import is_rank_zero
from ..errors import UsageError
from .adapters import add_adapter, merge_adapter, train_attention_only, train_text_only
from .arguments import build_arguments, check_training_args
from .batches import BlockOrder, Blocks, Collate, Collator
from .budget import Budget, UptrainConfig, plan_budget
from .corpus import Corpus, load_corpus
from .distributed_training import lost_processes, whole_models
from .model_prep import require_isolation
from .prepare import check_taught, choose_objective, choose_window, make_collator
from .publish import manifest_with, publish_trained
from .qlora import add_quantised_adapter, merge_quantised, require_bitsandbytes
from .result import UptrainResult, summarise
from .run_dir import TEACHER, RunDirectory, changed_keys, recipe_keys
from .teacher import Teacher, check_teacher, check_tokenizers, find_teacher, load_teacher
from .teacher_cache import cache_teacher
from .train import TrainingRun, memory_advice, train

logger = logging.getLogger(__name__)


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
    if known.get("data_weights") is not None:
        known["data_weights"] = tuple(map(float, known["data_weights"])) or None
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
    if config.teacher_top_k is not None:
        raise UsageError("needs a teacher with files", where="teacher_top_k", fix="use uptrain")
    notices: list[str] = []
    check_taught(config, teacher is not None, notices)
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
        run_dir = RunDirectory.at(Path(place)) if folder else None
        trained = train(model.float(), args, config, budget, corpus, helper, run_dir, notices)
    return summarise(config, budget, trained, None if teacher is None else "in memory", begin)


def run_uptrain(config: UptrainConfig) -> UptrainResult:
    """`uptrain` from a finished config."""
    with lost_processes(), closing(RunDirectory(Path(config.out))) as run_dir:
        return _run(config, run_dir)


def _run(config: UptrainConfig, run_dir: RunDirectory) -> UptrainResult:
    begin = time.perf_counter()
    out = Path(config.out)
    raw = load_config_json(config.model)
    source = open_checkpoint(config.model)
    manifest = read_json(source.path / MANIFEST) if (source.path / MANIFEST).exists() else {}
    choose_objective(config, raw)
    window = choose_window(config.window, raw, config.model)
    budget = plan_budget(config, window=window, name=str(manifest.get("source", config.model)))
    check_training_args(config.training_args)
    teacher_name, notices = find_teacher(config, manifest)
    keys = recipe_keys(config, checkpoint_fingerprint(source.path), _stamp_of(teacher_name))
    gone = teacher_name is None and config.teacher is None
    if (done := _finished(out, keys, gone)) is not None and not config.force:
        run_dir.remove()
        return done
    check_output(source.path, out, config.force)
    begun = _open_workspace(run_dir, keys, config.force)
    logger.info("%s", budget.sentence())
    with ExitStack() as after_failure:
        if not begun:
            after_failure.callback(run_dir.remove_if_empty)  # the corrected command starts afresh
        trained = _train_checkpoint(config, budget, source, run_dir, teacher_name, notices)
        after_failure.pop_all()
    result = summarise(config, budget, trained, teacher_name, begin)
    if trained.state is not None:  # only the first process holds the consolidated weights
        section = result.to_dict() | {"recipe": keys}
        with whole_models(trained.trainer.args):
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
            run_dir.keep_logs()
            run_dir.remove()
    trained.wait()
    return result


def _stamp_of(teacher: str | None) -> str | None:
    return None if teacher is None else checkpoint_fingerprint(open_checkpoint(teacher).path)


def _open_workspace(run_dir: RunDirectory, keys: dict[str, Any], force: bool) -> bool:
    """Create or check the folder on the first process; whether the run was begun before (others: True)."""
    if not is_rank_zero():
        return True
    begun = run_dir.open(keys, restart=force)
    if begun:
        logger.info("continuing the run in %s", run_dir.root)
    run_dir.discard_incomplete()
    return begun


def _finished(out: Path, keys: dict[str, Any], gone: bool) -> UptrainResult | None:
    """The recorded result if `out` already is this very run's, though its teacher may be gone."""
    if not (out / MANIFEST).exists():
        return None
    section = dict(read_json(out / MANIFEST).get("uptrain") or {})
    if not section:
        return None
    recipe = dict(section.get("recipe") or {})
    if changed_keys(recipe, keys | ({"teacher": recipe.get("teacher")} if gone else {})):
        return None
    logger.info("%s is already the result of this run", out)
    names = {f.name for f in fields(UptrainResult)}
    result = UptrainResult(**{k: v for k, v in section.items() if k in names})
    result.finished_before = True
    return result


def _train_checkpoint(
    config: UptrainConfig,
    budget: Budget,
    source: Checkpoint,
    run_dir: RunDirectory,
    teacher_name: str | None,
    notices: list[str],
) -> TrainingRun:
    check_taught(config, teacher_name is not None, notices)
    text = text_config(source.config)
    width = int(text.get("hidden_size") or text.get("d_model") or 512)
    args = build_arguments(config, budget, run_dir.root, width, evaluates=True)
    if config.train in ("lora", "qlora") and (args.fsdp or args.deepspeed):
        raise UsageError(
            "is not possible with fsdp or deepspeed", where=f"train {config.train}", fix="use torchrun alone"
        )
    if config.train == "qlora":
        require_bitsandbytes()
    if args.deepspeed:
        notices.append(
            "deepspeed steps in its backward pass: divergence stops the run, but no spike is skipped"
        )
    consent = config.trust_remote_code
    tokenizer = load_tokenizer(source.path, consent)
    if teacher_name is not None:
        check_tokenizers(tokenizer, load_tokenizer(teacher_name, consent), teacher_name)
    collate = make_collator(config, source.config, tokenizer, budget.window)
    with args.main_process_first(desc="cutting the data into blocks"):
        corpus = load_corpus(config, budget, tokenizer, run_dir.root, collate, text.get("vocab_size"))
    if corpus.held_out is None:
        args.eval_strategy = type(args.eval_strategy)("no")
    with whole_models(args):
        student = load_model(source.path, dtype=torch.float32, device="cpu", trust_remote_code=consent)
    if config.isolate_documents:
        require_isolation(student)
    if config.train == "all" and text is not source.config and not is_encoder_decoder(source.config):
        kept = train_text_only(student)
        notices.append(
            f"{len(kept)} tensors outside the text model keep their values: text does not train them"
        )
    if config.train == "attention":
        moving = train_attention_only(student, source.config)
        logger.info("training %d attention tensors: %s, …", len(moving), ", ".join(moving[:4]))
    elif config.train == "lora":
        student = add_adapter(student, source.config, config)
    elif config.train == "qlora":
        compute = torch.bfloat16 if args.bf16 else torch.float32
        student = add_quantised_adapter(student, source.config, config, args.device, compute)
    teacher, cached = None, None
    if teacher_name is not None and config.teacher_top_k is not None:
        folder = Path(config.teacher_cache) if config.teacher_cache else run_dir.root / TEACHER
        with memory_advice(args, budget):
            cached = cache_teacher(
                config, budget, args, teacher_name, student, len(tokenizer), corpus, folder, notices
            )
    elif teacher_name is not None:
        with memory_advice(args, budget):
            teacher = load_teacher(config, budget, args, teacher_name, student, len(tokenizer), notices)
    trained = train(student, args, config, budget, corpus, teacher, run_dir, notices)
    trained.teacher_cache = cached
    if config.train in ("lora", "qlora") and trained.state is not None:
        trained.adapter = folder = run_dir.root / "adapter"
        if config.train == "lora":
            merged = merge_adapter(student, folder, config.model, stored_dtype(source.config))
        else:
            merged = merge_quantised(student, config, source.path, source.config, folder)
        trained.model, trained.merge = merged
        trained.state = trained.model.state_dict()
    return trained
