"""Everything an uptraining run depends on, checked once, before a weight is loaded or a file is written."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..architectures import check_read
from ..calibration.sampling import DATA, check_decoder
from ..checkpoints.fingerprints import checkpoint_fingerprint
from ..checkpoints.hf_config import is_encoder_decoder, load_config_json, longest_context, text_config
from ..checkpoints.manifest import MANIFEST, original_place, read_manifest
from ..checkpoints.output import check_output
from ..checkpoints.reader import Checkpoint, open_checkpoint
from ..checkpoints.side_files import find_side_files
from ..data import eos_id, span_corruption
from ..data.seq2seq import is_audio
from ..data.windows import default_window
from ..errors import CheckpointError, UsageError
from .batches import Collator, SpanCollator
from .budget import Budget, UptrainConfig, default_learning_rate, plan_budget, plan_pair_budget
from .pair_checks import (
    PAIRS,
    UNKNOWN_PAIRS,
    check_data_options,
    check_pairs,
    check_sentinels,
    pairs_multiple,
    reads_pairs,
)
from .qlora import require_bitsandbytes
from .run_dir import recipe_keys
from .uptrain_result import UptrainResult, recorded_result

logger = logging.getLogger(__name__)

DEFAULT_WIDTH = 512  # of a model whose config does not tell


@dataclass(frozen=True)
class TeacherSource:
    """The model to distil from.

    Args:
        name: Folder or hub id.
        fingerprint: Of its files, wherever they lie.
    """

    name: str
    fingerprint: str


@dataclass(frozen=True)
class PreparedRun:
    """A run that has been checked: what will be trained, for how long, and on what terms.

    Args:
        config: What was asked.
        budget: How long it trains.
        objective: `next-token`, `span-corruption` or `pairs`.
        width: Hidden size of the model.
        distils: Whether a teacher takes part.
        source: The checkpoint, None for a model in memory.
        manifest: Its `mha2gqa.json`, empty where it has none.
        teacher: Where the teacher comes from, None without one and in memory.
        keys: What identifies the run, see `recipe_keys`.
        finished: The result, where OUT holds it already.
        speech: Whether its data are recordings.
        warnings: What the user should know; grows while the run goes on.
    """

    config: UptrainConfig
    budget: Budget
    objective: str
    width: int
    distils: bool
    source: Checkpoint | None = None
    manifest: Mapping[str, Any] = field(default_factory=dict)
    teacher: TeacherSource | None = None
    keys: Mapping[str, Any] = field(default_factory=dict)
    finished: UptrainResult | None = None
    speech: bool = False
    warnings: list[str] = field(default_factory=list)

    @property
    def default_rate(self) -> float:
        """Peak learning rate where none is given."""
        return default_learning_rate(self.width, self.budget.batch_tokens, self.speech)

    def warn(self, text: str) -> None:
        """Tell the user something, now and in the result."""
        logger.warning("%s", text)
        self.warnings.append(text)

    def collator(self, tokenizer: Any) -> Collator | SpanCollator:
        """What makes batches of this run's blocks; those of pairs come with their encoder, see `pair_corpus`.

        Raises:
            DataError: The tokenizer lacks the sentinels of span corruption, or an end-of-text token.
        """
        if self.objective == "span-corruption":
            assert self.source is not None
            raw, config = self.source.config, self.config
            return SpanCollator(span_corruption(tokenizer, raw, self.budget.window, config.seed))
        return Collator(eos_id(tokenizer) if self.config.isolate_documents else None)


def prepare(config: UptrainConfig) -> PreparedRun:
    """Check a run on a checkpoint.

    Args:
        config: The run.

    Returns:
        The run; `finished` is set where there is nothing left to do, and nothing else was checked then.

    Raises:
        UsageError: Options that do not fit the model or each other, or an original that is gone.
        CheckpointError: There is no such model, or OUT cannot be written.
    """
    raw = load_config_json(config.model)  # before a checkpoint of the Hub is fetched whole
    check_read(raw, config.model)
    if config.generates:
        check_decoder(raw, DATA)
    objective = choose_objective(config, raw, lambda: reads_pairs(config, raw))
    check_data_options(config, objective)
    if config.objective == "span-corruption":
        check_sentinels(config)
    source = open_checkpoint(config.model)
    manifest = read_manifest(source.path) if (source.path / MANIFEST).exists() else {}
    name = str(manifest.get("source", config.model))
    if objective == PAIRS:
        budget = plan_pair_budget(config, UNKNOWN_PAIRS, name=name, multiple=pairs_multiple(config))
    else:
        budget = plan_budget(config, window=choose_window(config.window, raw, config.model), name=name)
    fingerprint = checkpoint_fingerprint(source.path)
    teacher, missing = find_teacher(config, manifest, fingerprint)
    stamp = None if teacher is None else teacher.fingerprint
    keys = recipe_keys(config, fingerprint, stamp, objective == PAIRS)
    text = text_config(source.config)
    width = int(text.get("hidden_size") or text.get("d_model") or DEFAULT_WIDTH)
    taught = teacher is not None
    run = PreparedRun(
        config=config,
        budget=budget,
        objective=objective,
        width=width,
        distils=taught,
        source=source,
        manifest=manifest,
        teacher=teacher,
        keys=keys,
        speech=is_audio(raw),
    )
    if not config.force:
        finished = recorded_result(Path(config.out), keys, any_teacher=missing is not None)
        if finished is not None:
            return replace(run, finished=finished)
    if missing is not None:
        raise missing
    if teacher is None and config.teacher is None:
        loss = "loss on the targets" if objective == PAIRS else "next-token loss"
        run.warn(f"{loss} without distillation: no original is recorded in the model; see --teacher")
    _check_distillation(run)
    _check_adapters(config)
    if objective == PAIRS:
        check_pairs(run)
    check_output(source.path, Path(config.out), config.force)
    find_side_files(source.path, source.config)  # what publishing will ask of them is asked now
    return run


def prepare_in_memory(config: UptrainConfig, model: Any, window: int | None, distils: bool) -> PreparedRun:
    """Check a run on a model in memory and blocks already cut, or pairs already encoded.

    Args:
        config: The run; what is about files is not read.
        model: The model.
        window: Inputs per block; None for pairs, which have lengths of their own.
        distils: Whether a teacher takes part.

    Raises:
        UsageError: Options that do not fit each other, or need a checkpoint.
    """
    for name, value, wrong in (
        ("train", config.train, config.train != "all"),
        ("teacher_dtype", config.teacher_dtype, config.teacher_dtype is not None),
        ("teacher_top_k", config.teacher_top_k, config.teacher_top_k is not None),
    ):
        if wrong:
            raise UsageError("requires a checkpoint", where=f"{name} {value}", fix="use uptrain")
    seq2seq = getattr(model.config, "is_encoder_decoder", False)
    objective = PAIRS if window is None else "span-corruption" if seq2seq else "next-token"
    if window is None and not seq2seq:
        raise UsageError("pairs need an encoder-decoder", where="encoder", fix="give blocks of token ids")
    width = int(getattr(model.config.get_text_config(), "hidden_size", DEFAULT_WIDTH))
    if window is None:
        budget = plan_pair_budget(config, UNKNOWN_PAIRS, multiple=pairs_multiple(config))
    else:
        budget = plan_budget(config, window=window)
    speech = objective == PAIRS and is_audio(model.config.to_dict())
    run = PreparedRun(config, budget, objective, width, distils, speech=speech)
    _check_distillation(run)
    return run


def choose_window(requested: int | None, raw: Mapping[str, Any], name: str) -> int:
    """Tokens of text per block: by default the decoder's context up to 2,048, or T5's for encoder-decoders.

    Args:
        requested: What the user names.
        raw: The raw config.
        name: The model, for the message.

    Raises:
        UsageError: More than the model has positions.
    """
    seq2seq = is_encoder_decoder(raw)
    limit = None if seq2seq else longest_context(raw)
    if requested is None:
        return default_window(raw)
    if limit is not None and requested > limit:
        raise UsageError(
            f"longer than the context of {name}", where=f"window {requested}", fix=f"use at most {limit}"
        )
    return requested


def choose_objective(
    config: UptrainConfig, raw: Mapping[str, Any], has_pairs: Callable[[], bool] = lambda: False
) -> str:
    """`next-token`, `span-corruption` or `pairs`, from what the model is and what the data holds.

    Args:
        config: The run.
        raw: The raw config.
        has_pairs: Whether the data is pairs; called only for encoder-decoders whose objective is not given.

    Raises:
        UsageError: The objective asked for is not one the model can have.
    """
    possible = ("span-corruption", PAIRS) if is_encoder_decoder(raw) else ("next-token",)
    asked = config.objective
    if asked not in ("auto", *possible):
        raise UsageError(
            f"not supported for {raw.get('model_type')}",
            where=f"objective {asked}",
            fix=f"use {' or '.join(possible)}",
        )
    if len(possible) > 1 and config.isolate_documents:
        raise UsageError("requires a decoder-only model", where="isolate_documents", fix="leave it out")
    if asked != "auto":
        return asked
    return PAIRS if len(possible) > 1 and has_pairs() else possible[0]


def find_teacher(
    config: UptrainConfig, manifest: Mapping[str, Any], student: str
) -> tuple[TeacherSource | None, UsageError | None]:
    """Where the teacher of a run is.

    Args:
        config: The run.
        manifest: Of the model that is trained, which names its original.
        student: Fingerprint of that model.

    Returns:
        The teacher, or None for plain next-token loss; and the error of an original that is not where it was
        (to be raised unless the run turns out to be finished).

    Raises:
        UsageError: It is the model that is trained.
        CheckpointError: There is no such model.
    """
    if config.teacher == "none":
        return None, None
    if config.teacher is not None:
        load_config_json(config.teacher)  # says what is wrong with the name before anything is fetched
        teacher = _teacher_source(config.teacher)
        if teacher.fingerprint == student:
            raise UsageError(
                "is the model being trained, which would learn nothing from itself",
                where=f"teacher {config.teacher}",
                fix="name the original, or use teacher none",
            )
        return teacher, None
    try:
        place = original_place(manifest)
        if place is None:
            return None, None
        if not Path(place).is_dir():  # on the Hub, in the very state that was converted
            place = str(open_checkpoint(place, str(manifest["source_revision"])).path)
        return _teacher_source(place), None
    except CheckpointError as error:
        return None, UsageError(
            f"the original that the model was converted from cannot be opened: {error}",
            where="teacher",
            fix="give --teacher PATH to distil from it, or --teacher none for next-token loss alone",
        )


def _teacher_source(name: str) -> TeacherSource:
    return TeacherSource(name, checkpoint_fingerprint(open_checkpoint(name).path))


def _check_distillation(run: PreparedRun) -> None:
    """Refuse options of distillation without a teacher, and a teacher's cache where nothing is repeated.

    Raises:
        UsageError: Such an option is given.
    """
    config = run.config
    if run.distils and config.ce_weight == 1:
        run.warn("ce_weight 1 gives the teacher no weight: teacher none does the same for less")
    unused = (
        ("temperature", config.temperature, config.temperature != 1),
        ("ce_weight", config.ce_weight, 0 < config.ce_weight < 1),
        ("teacher_dtype", config.teacher_dtype, config.teacher_dtype is not None),
        ("teacher_top_k", config.teacher_top_k, config.teacher_top_k is not None),
    )
    for name, value, given in unused:
        if given and not run.distils:
            said = value if isinstance(value, str) else f"{value:g}"
            raise UsageError(
                "requires a teacher", where=f"{name} {said}", fix=f"give teacher, or leave {name} out"
            )
    if config.teacher_top_k is None:
        return
    if config.streaming:
        raise UsageError("not possible with streaming", where="teacher_top_k", fix="leave one of the two out")
    if run.objective != "next-token":
        why = "span corruption, which draws other spans in each pass"
        raise UsageError(
            f"not possible with {PAIRS if run.objective == PAIRS else why}",
            where="teacher_top_k",
            fix="leave it out",
        )


def _check_adapters(config: UptrainConfig) -> None:
    if config.train not in ("lora", "qlora"):
        return
    for name in ("fsdp", "deepspeed"):
        if config.training_args.get(name):
            raise UsageError(
                f"not possible with {name}", where=f"train {config.train}", fix="use torchrun alone"
            )
    if config.train == "qlora":
        require_bitsandbytes()
