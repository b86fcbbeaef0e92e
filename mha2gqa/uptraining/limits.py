"""Options of an uptraining run that cannot be meant, refused by name before anything is read. No torch here."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..errors import UsageError

if TYPE_CHECKING:
    from .budget import UptrainConfig

COUNTS = (
    "window",
    "batch_tokens",
    "original_steps",
    "original_batch_tokens",
    "eval_tokens",
    "eval_steps",
    "save_total_limit",
    "logging_steps",
    "lora_r",
)
LARGEST_SEED = 2**32 - 1


def check_options(config: UptrainConfig) -> None:
    """Check the numbers of a run, and options that exclude each other.

    Raises:
        UsageError: One is impossible (not finite ones among them).
    """
    for name in COUNTS:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise UsageError(f"{value} is too small", where=name, fix="give at least 1")
    rate, warmup, every = config.learning_rate, config.warmup_steps, config.save_steps
    # Each comparison is written so that a NaN fails it.
    wrong = (
        ("learning_rate", rate is not None and not 0 < rate < math.inf, "is no rate", "leave it out"),
        (
            "warmup_steps",
            warmup is not None and not (0 <= warmup < 1 or (warmup >= 1 and _is_whole(warmup))),
            "are no steps",
            "give whole steps, or a fraction below 1",
        ),
        (
            "save_steps",
            not (0 < every < 1 or (every >= 1 and _is_whole(every))),
            "are no steps",
            "give whole steps from 1, or a fraction below 1",
        ),
        ("ce_weight", not 0 <= config.ce_weight <= 1, "is not a share", "give 0 to 1"),
        ("dropout", not 0 <= config.dropout < 1, "is not a probability", "0 is usual"),
        ("lora_dropout", not 0 <= config.lora_dropout < 1, "is not a probability", "0 is usual"),
        ("lora_alpha", not config.lora_alpha > 0, "is not positive", "twice lora_r is usual"),
        ("temperature", not 0 < config.temperature < math.inf, "is not positive", "1 is usual"),
        ("holdout", not 0 <= config.holdout < 1, "is not a share", "give a fraction such as 0.01"),
        ("seed", not 0 <= config.seed <= LARGEST_SEED, "is no seed", f"give 0 to {LARGEST_SEED}"),
    )
    for name, refused, what, fix in wrong:
        if refused:
            raise UsageError(f"{getattr(config, name)} {what}", where=name, fix=fix)
    _check_data(config)
    _check_teacher(config)


def _is_whole(value: float) -> bool:
    return math.isfinite(value) and value == int(value)


def _check_data(config: UptrainConfig) -> None:
    weights = config.data_weights
    if weights is None:
        return
    if len(weights) != len(config.data) or not all(0 < weight < math.inf for weight in weights):
        raise UsageError(
            f"{len(config.data)} sources need as many positive weights", where=f"data_weights {list(weights)}"
        )
    if config.streaming:
        raise UsageError("needs data that is read first", where="data_weights", fix="leave out streaming")


def _check_teacher(config: UptrainConfig) -> None:
    top_k = config.teacher_top_k
    if top_k is not None and top_k < 1:
        raise UsageError(f"{top_k} keeps nothing", where="teacher_top_k", fix="64 is usual")
    if top_k is not None and config.teacher == "none":
        raise UsageError(
            "is of a teacher, and there is none", where="teacher_top_k", fix="leave out one of the two"
        )
    if config.teacher_cache is not None and top_k is None:
        raise UsageError("needs teacher_top_k beside it", where="teacher_cache", fix="teacher_top_k 64")
