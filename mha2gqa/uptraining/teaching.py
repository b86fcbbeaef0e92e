"""Which original teaches a run, and how it does: in each step, or beforehand into a cache."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from ..checkpoints.loading import load_config_json, load_model, text_config
from ..checkpoints.reader import open_checkpoint
from ..errors import UsageError
from .batches import BlockStream
from .budget import Budget, UptrainConfig
from .corpus import Corpus
from .distillation import Teacher, check_teacher, output_width
from .guard import forward_flops
from .objectives import SpanCollator
from .run_dir import checkpoint_fingerprint
from .session import memory_advice
from .sharding import whole_models
from .teacher_cache import Identity, TeacherCache

logger = logging.getLogger(__name__)


def find_teacher(config: UptrainConfig, manifest: dict[str, Any]) -> tuple[str | None, list[str]]:
    """Whom to distil from, and what to tell the user about it.

    Returns:
        A folder or hub id, or None for plain next-token loss; notices.

    Raises:
        UsageError: It is the model that is trained.
        CheckpointError: There is no such model.
    """
    if config.teacher == "none":
        return None, []
    if config.teacher is not None:
        load_config_json(config.teacher)
        if checkpoint_fingerprint(open_checkpoint(config.teacher).path) == checkpoint_fingerprint(
            open_checkpoint(config.model).path
        ):
            raise UsageError(
                "is the model that is trained, which would learn nothing from itself",
                where=f"teacher {config.teacher}",
                fix="name the original, or use teacher none",
            )
        return config.teacher, []
    for key in ("source_path", "source"):
        place = manifest.get(key)
        if place and Path(place).is_dir():
            return str(place), []
    place = manifest.get("source")
    why = f"its original {place} is not here" if place else "no original is recorded in it"
    return None, [f"next-token loss without distillation: {why}; give teacher to distil"]


def check_taught(config: UptrainConfig, taught: bool, notices: list[str]) -> None:
    """Refuse words of distillation where nobody teaches; tell where a teacher would have no share.

    Args:
        config: The run.
        taught: Whether there is a teacher.
        notices: Extended by what comes up.

    Raises:
        UsageError: Such a word is given.
    """
    if taught:
        if config.ce_weight == 1:
            notices.append("ce_weight 1 leaves the teacher no share: teacher none does the same for less")
        return
    words = (
        ("temperature", config.temperature, config.temperature != 1),
        ("ce_weight", config.ce_weight, 0 < config.ce_weight < 1),
        ("teacher_top_k", config.teacher_top_k, config.teacher_top_k is not None),
    )
    for name, value, given in words:
        if given:
            raise UsageError(
                "is of distillation, and there is no teacher",
                where=f"{name} {value:g}",
                fix=f"give teacher, or leave {name} out",
            )


def load_teacher(
    config: UptrainConfig, budget: Budget, args: Any, name: str, student: Any, tokens: int, notices: list[str]
) -> Teacher:
    """The original on its device, checked against the student.

    Args:
        config, budget, args: The run.
        name: Folder or hub id.
        student: The model that learns.
        tokens: Size of the shared tokenizer.
        notices: Extended by what comes up.

    Raises:
        UsageError: See `check_teacher`.
        TrainingError: It does not fit the device.
    """
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    consent = config.trust_remote_code
    with memory_advice(args, budget), whole_models(args):
        original = load_model(name, dtype=dtype, device=args.device, trust_remote_code=consent)
    widths = check_teacher(student, original, tokens)
    notices += [] if widths.note is None else [widths.note]
    return Teacher(original)


def cache_teacher(
    config: UptrainConfig,
    budget: Budget,
    args: Any,
    name: str,
    student: Any,
    tokens: int,
    corpus: Corpus,
    folder: Path,
    notices: list[str],
) -> dict[str, Any]:
    """Have the teacher's top k on disk for every training block; the first process computes what is missing.

    Args:
        config, budget, args, name, student, tokens, notices: As in `load_teacher`.
        corpus: Its training blocks get the caches.
        folder: Where the caches lie, one for each source of data.

    Returns:
        `folder`, `top_k`, `rows`, `computed` rows, `bytes`, and the `flops` of computing them.

    Raises:
        UsageError: The data is a stream or drawn anew each time, or a cache is of something else.
        CheckpointError: No space.
    """
    if isinstance(corpus.train, BlockStream) or isinstance(corpus.collate, SpanCollator):
        streams = isinstance(corpus.train, BlockStream)
        raise UsageError(
            f"is not possible with {'a stream' if streams else 'span corruption, which draws anew each time'}",
            where="teacher_top_k",
            fix="leave it or streaming out" if streams else "leave it out",
        )
    vocabulary = int(text_config(load_config_json(name)).get("vocab_size") or tokens)
    width = min(output_width(student), vocabulary)
    identity = Identity(
        checkpoint_fingerprint(open_checkpoint(name).path),
        min(config.teacher_top_k or width, width),
        config.temperature,
        width,
        budget.window,
        config.isolate_documents,
        "bfloat16" if args.bf16 else "float32",
    )
    caches, computed, flops = [], 0, 0.0
    with args.main_process_first(local=False, desc="asking the teacher"):
        teacher = None
        for number, blocks in enumerate(corpus.train.sources):
            cache = TeacherCache(folder / f"train-{number}", identity)
            if cache.missing(blocks):
                teacher = teacher or load_teacher(config, budget, args, name, student, tokens, notices)
                rows = cache.fill(
                    blocks, teacher, corpus.collate, args.per_device_eval_batch_size, args.device
                )
                computed += rows
                flops += rows * budget.window * forward_flops(teacher.model, budget.window)
            caches.append(cache)
    del teacher
    corpus.train.caches = list(caches)
    return {
        "folder": str(folder),
        "top_k": identity.top_k,
        "rows": sum(cache.rows for cache in caches),
        "computed": computed,
        "bytes": sum(cache.rows * cache.row_bytes for cache in caches),
        "flops": flops,
    }
