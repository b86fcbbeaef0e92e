"""The training of `uptrain` on a model in memory and blocks already cut; needs neither files nor data sets."""

from __future__ import annotations

import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ..checkpoints.loading import resolve_device
from ..errors import UsageError
from .arguments import build_arguments
from .batches import BlockOrder, Blocks, Collate, Collator
from .budget import plan_budget
from .corpus import Corpus
from .distillation import Teacher, check_teacher
from .result import UptrainResult, summarise
from .run import make_config
from .run_dir import RunDirectory
from .session import train
from .teaching import check_taught


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
