"""Uptraining from a checkpoint to a checkpoint."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Unpack

import torch
from transformers import TrainerCallback

from ..checkpoints.batch_log import remove_left
from ..checkpoints.hf_config import is_encoder_decoder, stored_dtype, text_config, vocabulary_size
from ..checkpoints.in_memory_model import digest, position_table, require_language_model
from ..checkpoints.loading import load_model, load_tokenizer, resolve_device
from ..checkpoints.output import targets_file
from ..config import TrainerOptions, UptrainConfig
from ..config.keywords import TrainModelKeywords, UptrainKeywords
from ..config.signature import takes_options
from ..data import require_blocks
from ..data.memory import names_or_items
from ..data.seq2seq import Example, PairEncoder
from ..distributed import barrier, is_rank_zero, lost_processes
from ..errors import TrainingError, UsageError, quoted
from ..progress import Progress, reporting
from .adapters import add_adapter, freeze_constants, merge_adapter, train_attention_only, train_text_only
from .arguments import build_arguments
from .batches import BlockOrder, Collate, Collator, IdBlocks
from .corpus import Corpus, load_corpus
from .distributed_training import whole_models
from .model_prep import require_document_masking
from .pair_checks import PAIRS
from .pair_corpus import corpus_in_memory, load_pair_corpus
from .pair_store import PairsInMemory
from .prepare import PreparedRun, prepare, prepare_in_memory
from .publish import manifest_with, publish_trained
from .qlora import add_quantised_adapter, merge_quantised
from .run_dir import TEACHER, RunDirectory, recipe_keys
from .sampled_data import check_generated, with_generated
from .teacher import Teacher, check_teacher, check_tokenizers, load_teacher, model_inputs
from .teacher_cache import cache_teacher
from .train import TrainingRun, memory_advice, summarise, train
from .uptrain_result import UptrainResult

logger = logging.getLogger(__name__)
EXAMPLES = 256  # of pairs in memory that say whether a run goes on with the same ones


def make_config(model: str, out: str, data: Any, options: Mapping[str, Any]) -> UptrainConfig:
    """An `UptrainConfig` from keyword options; what is not its own goes to TrainingArguments."""
    own = {field.name for field in fields(UptrainConfig)}
    known = {name: value for name, value in options.items() if name in own and name != "training_args"}
    further = {name: value for name, value in options.items() if name not in own}
    return UptrainConfig(
        model, out, data, training_args={**options.get("training_args", {}), **further}, **known
    )


@takes_options(UptrainConfig, TrainerOptions)
def uptrain(
    model: str | Path,
    out: str | Path,
    data: str | Path | Sequence[str | Path],
    *,
    progress: Progress | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    **options: Unpack[UptrainKeywords],
) -> UptrainResult:
    """Continue pretraining a converted checkpoint, by default distilling from the original.

    The same call resumes an interrupted run exactly where its last checkpoint was.

    Args:
        model: Checkpoint folder or hub id.
        out: Folder of the result, a plain checkpoint like the input.
        data: One path or several, see `data.read_documents`.
        progress: Whom to report to.
        callbacks: `transformers.TrainerCallback`s, called beside our own; on resuming too.
        **options: See `UptrainConfig`, and `TrainerOptions` for what is passed to
            `transformers.TrainingArguments`.

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
    if names_or_items(data)[1] is not None:
        raise UsageError(
            "must be names of files or data sets, which an interrupted run reads again, not the data itself",
            where="data",
            fix="write it to a JSONL file, or cut it into blocks for train_model",
        )
    with reporting(progress):
        return run_uptrain(make_config(str(model), str(out), data, options), callbacks)


@takes_options(UptrainConfig, TrainerOptions, without=("model", "out", "data"))
def train_model(
    model: Any,
    blocks: IdBlocks | Sequence[Example],
    *,
    teacher: Any = None,
    held_out: IdBlocks | Sequence[Example] | None = None,
    folder: str | Path | None = None,
    collate: Collate | None = None,
    encoder: PairEncoder | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    **options: Unpack[TrainModelKeywords],
) -> UptrainResult:
    """The training of `uptrain` on a model in memory and blocks already cut, or pairs already encoded.

    Args:
        model: A float32 model of transformers (other dtypes are widened); trained in place.
        blocks: Token ids `[N, T + 1]`; with `encoder`, examples of pairs as its `encode` makes them.
        teacher: The original, another model, in the dtype it should run in; it is frozen.
        held_out: Held-out ids `[M, T + 1]`, or examples.
        folder: Where checkpoints go, and where the same call goes on after an interruption; None saves none.
        collate: Makes batches: next-token ones by default, a `SpanCollator` for encoder-decoders on corrupted spans.
        encoder: Of an encoder-decoder on pairs, see `data.seq2seq.open_encoder`; `tokens` are target tokens then.
        callbacks: As `uptrain` takes them.
        **options: As `uptrain` takes them (`tokens` or `alpha`, `batch_tokens`, `learning_rate`, …).

    Returns:
        As `uptrain`, without an output.

    Raises:
        UsageError: `blocks` are of another kind, options that do not fit, a model that cannot be trained, or a
            `folder` of another run; what differs is named.
        DataError: No pair, or one without a target.

    Example:
        >>> train_model(student, blocks, teacher=original, tokens=2_000_000, batch_tokens=65_536)
        >>> train_model(student, examples, encoder=encoder, teacher=original, tokens=100_000)
    """
    begin = time.perf_counter()
    require_language_model("model", model)
    if teacher is not None:
        require_language_model("teacher", teacher)
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError("no parameter asks for a gradient", where="model", fix="model.requires_grad_(True)")
    config = make_config("", "", (), options)
    run, corpus = _in_memory(config, model, blocks, held_out, teacher is not None, collate, encoder)
    resolve_device(config.device)
    training = model.training
    with ExitStack() as stack:
        place = Path(folder or stack.enter_context(tempfile.TemporaryDirectory()))
        args = build_arguments(config, run.budget, place, run.default_rate, held_out is not None)
        helper = None
        if teacher is not None:
            check_teacher(model, teacher, None)
            helper = Teacher(teacher.to(args.device))
        run_dir = None
        if folder is None:
            args.save_strategy = type(args.save_strategy)("no")
        else:
            run = replace(run, keys=_keys_in_memory(config, model, teacher, blocks, encoder is not None))
            run_dir = stack.enter_context(closing(RunDirectory.at(place)))
            stack.enter_context(_opened(run_dir, run))
            barrier()
        trained = train(run, args, model.float(), corpus, helper, run_dir, callbacks)
    model.train(training)
    return summarise(run, trained, None if teacher is None else "in memory", begin)


def _keys_in_memory(
    config: UptrainConfig, model: Any, teacher: Any, blocks: Any, pairs: bool
) -> dict[str, Any]:
    """What identifies a run of `train_model`: its options, and what its models and data are."""
    taught = None if teacher is None else digest(teacher.state_dict())
    rows = {"blocks": blocks}
    if pairs:
        some = range(0, len(blocks), max(1, len(blocks) // EXAMPLES))
        rows = {
            f"{len(blocks)} {i} {side}": getattr(blocks[i], side)
            for i in some
            for side in ("encoder", "decoder")
        }
    return recipe_keys(config, digest(model.state_dict()), taught, pairs) | {"blocks": digest(rows)}


def _in_memory(
    config: UptrainConfig,
    model: Any,
    blocks: Any,
    held_out: Any,
    distils: bool,
    collate: Collate | None,
    encoder: PairEncoder | None,
) -> tuple[PreparedRun, Corpus]:
    """The run of `train_model`, and what it trains on."""
    if encoder is not None:
        if collate is not None:
            raise UsageError("has no meaning with encoder, which makes the batches", where="collate")
        for name, rows in (("blocks", blocks), ("held_out", held_out)):
            if rows is not None and not all(isinstance(row, Example) for row in rows):
                raise UsageError(
                    f"must be examples of pairs, not {quoted(rows)}",
                    where=name,
                    fix="encode them: [encoder.encode(pair) for pair in pairs]",
                )
        run = prepare_in_memory(config, model, None, distils)
        freeze_constants(model)
        kept = None if held_out is None else PairsInMemory(held_out, encoder)
        return corpus_in_memory(run, PairsInMemory(blocks, encoder), kept)
    collate = collate or Collator()
    raw = model.config.to_dict()
    embeddings, positions = vocabulary_size(raw), position_table(model, raw)
    for name, ids in (("blocks", blocks), ("held_out", held_out)):
        if ids is not None:
            require_blocks(name, ids, embeddings, masked=collate.counts_labels, positions=positions)
    run = prepare_in_memory(config, model, int(blocks.shape[1]) - 1, distils)
    count = run.budget.steps * run.budget.blocks_per_step
    order = BlockOrder(blocks, count, config.seed, collate)
    return run, Corpus(order, held_out, len(blocks) * run.budget.window, collate)


def run_uptrain(config: UptrainConfig, callbacks: Sequence[TrainerCallback] = ()) -> UptrainResult:
    """`uptrain` from a finished config."""
    begin = time.perf_counter()
    lost = lost_processes("uptrain", "the last checkpoint", TrainingError)
    with lost, closing(RunDirectory(Path(config.out))) as run_dir:
        run = prepare(config)
        if run.finished is not None:
            remove_left(targets_file(run_dir.out))
            run_dir.remove()
            return run.finished
        if config.generates:
            check_generated(run)
        args = build_arguments(config, run.budget, run_dir.root, run.default_rate, evaluates=True)
        with _opened(run_dir, run):
            trained = _train_checkpoint(run, args, run_dir, callbacks)
        run = trained.trainer.run
        result = summarise(run, trained, None if run.teacher is None else run.teacher.name, begin)
        if trained.state is not None:  # only rank 0 holds the consolidated weights
            _publish(run, trained, result, run_dir)
        trained.wait()
        return result


@contextmanager
def _opened(run_dir: RunDirectory, run: PreparedRun) -> Iterator[None]:
    """Create or check the folder on rank 0; a failure inside leaves none where nothing would be lost with it.

    Raises:
        UsageError: See `RunDirectory.open`.
    """
    begun = True
    if is_rank_zero():
        begun = run_dir.open(run.keys, restart=run.config.force)
        if begun:
            logger.info("continuing the run in %s", run_dir.root)
        run_dir.discard_incomplete()
    if run.objective != PAIRS:  # whose lengths are not known yet
        logger.info("%s", run.budget.sentence())
    with ExitStack() as after_failure:
        if not begun:
            after_failure.callback(run_dir.remove_if_empty)  # the corrected command starts afresh
        yield
        after_failure.pop_all()


def _train_checkpoint(
    run: PreparedRun, args: Any, run_dir: RunDirectory, callbacks: Sequence[TrainerCallback]
) -> TrainingRun:
    """Load, train, and put adapters into the weights."""
    config, source = run.config, run.source
    assert source is not None
    if args.deepspeed:
        run.warn("deepspeed steps in its backward pass: divergence stops the run, but no spike is skipped")
    tokenizer = load_tokenizer(source.path, config.trust_remote_code)
    if run.teacher is not None:
        theirs = load_tokenizer(run.teacher.name, config.trust_remote_code)
        check_tokenizers(tokenizer, theirs, run.teacher.name)
    run = with_generated(run, args.device)
    config = run.config
    if run.objective == PAIRS:
        with args.main_process_first(local=False, desc="encoding the pairs"):
            run, corpus = load_pair_corpus(run, args, tokenizer, run_dir.root)
        logger.info("%s", run.budget.sentence())
        args = build_arguments(config, run.budget, run_dir.root, run.default_rate, evaluates=True)
    else:
        embeddings, collate = text_config(source.config).get("vocab_size"), run.collator(tokenizer)
        with args.main_process_first(desc="cutting the data into blocks"):
            corpus = load_corpus(config, run.budget, tokenizer, run_dir.root, collate, run.warn, embeddings)
    if corpus.held_out is None:
        args.eval_strategy = type(args.eval_strategy)("no")
    student = _load_student(run, args)
    teacher, cached = None, None
    with memory_advice(args, run.budget):
        if run.teacher is not None and config.teacher_top_k is not None:
            folder = Path(config.teacher_cache) if config.teacher_cache else run_dir.root / TEACHER
            cached = cache_teacher(run, args, student, len(tokenizer), corpus, folder)
        elif run.teacher is not None:
            teacher = load_teacher(run, args, student, len(tokenizer))
    trained = train(run, args, student, corpus, teacher, run_dir, callbacks)
    trained.teacher_cache = cached
    if config.train in ("lora", "qlora") and trained.state is not None:
        _merge_adapter(run, trained, run_dir.root / "adapter")
    return trained


def _load_student(run: PreparedRun, args: Any) -> Any:
    """The model in float32, with the parameters that train marked and its adapters in place."""
    config, source = run.config, run.source
    assert source is not None
    raw, consent = source.config, config.trust_remote_code
    with whole_models(args):
        student = load_model(source.path, dtype=torch.float32, device="cpu", trust_remote_code=consent)
    if config.isolate_documents:
        require_document_masking(student)
    if config.train == "attention":
        moving = train_attention_only(student, raw)
        logger.info("training %d attention tensors: %s, …", len(moving), ", ".join(moving[:4]))
    elif config.train == "lora":
        student = add_adapter(student, raw, config)
    elif config.train == "qlora":
        compute = torch.bfloat16 if args.bf16 else torch.float32
        student = add_quantised_adapter(student, raw, config, args.device, compute)
    elif is_encoder_decoder(raw):
        freeze_constants(student)
    elif text_config(raw) is not raw:
        kept = train_text_only(student)
        run.warn(f"{len(kept)} tensors outside the text model keep their values: text does not train them")
    return student


def _merge_adapter(run: PreparedRun, trained: TrainingRun, folder: Path) -> None:
    """Put the trained adapter into the weights, and keep it beside them."""
    config, source, batch = run.config, run.source, None
    assert source is not None
    if run.objective == PAIRS and isinstance(trained.corpus.train, BlockOrder):
        batch = model_inputs(trained.corpus.train[0])
    if config.train == "lora":
        merged = merge_adapter(trained.model, folder, config.model, stored_dtype(source.config), batch)
    else:
        merged = merge_quantised(trained.model, config, source.path, source.config, folder, batch)
    trained.adapter = folder
    trained.model, trained.merge = merged
    trained.state = trained.model.state_dict()


def _publish(run: PreparedRun, trained: TrainingRun, result: UptrainResult, run_dir: RunDirectory) -> None:
    """Write OUT, and remove the run directory."""
    config, source = run.config, run.source
    assert source is not None and trained.state is not None
    manifest = manifest_with(source, config.model, result.to_dict() | {"recipe": dict(run.keys)})
    logs = (run_dir.root / "runs").is_dir()  # of a tracker: they are moved once OUT is there
    with whole_models(trained.trainer.args):
        publish_trained(
            trained.model,
            trained.state,
            source,
            Path(config.out),
            manifest,
            force=config.force,
            adapter=trained.adapter,
            work=None if config.keep_checkpoints or logs else run_dir.root,
        )
    remove_left(targets_file(run_dir.out))
    if not config.keep_checkpoints:
        run_dir.keep_logs()
        run_dir.remove()
