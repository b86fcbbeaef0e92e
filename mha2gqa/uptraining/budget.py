"""How long to uptrain: alpha -> tokens -> steps, and the learning-rate curve. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import UsageError
from .limits import check_options
from .pretraining_tokens import known_pretraining

Train = Literal["all", "attention", "lora", "qlora"]
SCHEDULES = ("linear", "cosine", "wsd", "inverse_sqrt", "constant")
OBJECTIVES = ("auto", "next-token", "span-corruption")
# Steps of a budget that does not say: see `default_batch_tokens`.
SMALL_BATCH, LARGE_BATCH, ENOUGH_STEPS, FEWEST_BLOCKS = 16_384, 65_536, 1_200, 16
TRAINED = ("all", "attention", "lora", "qlora")
RESIDUALS = ("float32", "bfloat16")


@dataclass(frozen=True)
class UptrainConfig:
    """Everything an uptraining run needs; the recipe's `uptrain:` block and the CLI fill the same fields.

    Args:
        model: Checkpoint to train (a folder or a hub id).
        out: Folder of the result; `<out>.uptrain` beside it holds the run while it lasts.
        data: Text files, folders or hub data sets.
        alpha: Fraction of the original pretraining tokens (0.05 is the paper's).
        original_tokens: Pretraining tokens of the original model; known for many public families.
        original_steps, original_batch_tokens: The same, as steps of that many tokens.
        tokens: Train this many tokens instead of a fraction.
        data_weights: Share of the run that each entry of `data` gets; by default all documents are shuffled
            together.
        text_column: Column of JSONL, parquet and hub data: text, or chat messages.
        assistant_only_loss: In chats, only the assistant's tokens carry loss (distillation included).
        window: Tokens per block; default: the model's positions, at most 2048.
        batch_tokens: Tokens per optimiser step over all processes; default `default_batch_tokens`.
        learning_rate: Peak rate; default `default_learning_rate`.
        warmup_steps: Steps of linear warm-up, or a fraction below 1; default `min(50, steps / 5)`.
        lr_scheduler_type: `linear`, `cosine`, `wsd` (constant, last 30 % down to 0), `inverse_sqrt` (T5's,
            constant during warm-up) or `constant`.
        objective: `next-token`, `span-corruption` (T5's, for encoder-decoders) or `auto`, what fits the model.
        dropout: Probability of every dropout layer; 0, as most models were pretrained (T5 v1.1 among them,
            though its config says 0.1).
        teacher: The original model, `none` for plain next-token loss, or None for the manifest's source.
        temperature: Distillation temperature.
        ce_weight: Share of the next-token loss beside distillation, 0 to 1.
        teacher_top_k: Ask the teacher beforehand, once for each training block, and keep its k likeliest
            tokens on disk; the loss is the KL over those and one bucket for all others. Further runs on the
            same blocks need no teacher.
        teacher_cache: Folder of what it said, for further runs; by default it goes with `<out>.uptrain`.
        train: `all` parameters, `attention` only, `lora` (pooled K/V in full, q and o low-rank), or `qlora`
            (the same over frozen weights in 4 bits).
        lora_r, lora_alpha, lora_dropout: Adapter rank, scale and dropout.
        eval_data: Held-out text; by default a share of `data`.
        holdout: Share of documents of `data` held out by content hash when `eval_data` is None.
        eval_tokens: At most this many held-out tokens are scored each time.
        streaming: Read the data as it comes, unshuffled, instead of shuffling it first.
        isolate_documents: Keep packed documents from attending to each other.
        seed: Order of the data, dropout, adapters.
        device: `auto`, `cpu`, `cuda`, …
        residual_dtype: What hidden states are carried in from layer to layer under bf16: `float32`, or
            `bfloat16`, which moves and keeps half the bytes and rounds after every layer.
        torch_compile: Compile the decoder layers; default: on a GPU when the run is long enough to pay.
        save_steps: Steps between resumable checkpoints (a fraction below 1 is of all steps).
        save_total_limit: How many of them are kept.
        logging_steps: Steps between log entries.
        eval_steps: Steps between held-out evaluations; default: ten in all.
        keep_checkpoints: Leave `<out>.uptrain` in place at the end.
        force: Replace an `out` that one of our commands wrote.
        trust_remote_code: Run model code that comes with a checkpoint.
        training_args: Further `transformers.TrainingArguments`, by their own names.
    """

    model: str
    out: str
    data: tuple[str, ...]
    alpha: float | None = None
    original_tokens: int | None = None
    original_steps: int | None = None
    original_batch_tokens: int | None = None
    tokens: int | None = None
    data_weights: tuple[float, ...] | None = None
    text_column: str = "text"
    assistant_only_loss: bool = True
    window: int | None = None
    batch_tokens: int | None = None
    learning_rate: float | None = None
    warmup_steps: float | None = None
    lr_scheduler_type: str = "linear"
    objective: str = "auto"
    dropout: float = 0.0
    teacher: str | None = None
    temperature: float = 1.0
    ce_weight: float = 0.0
    teacher_top_k: int | None = None
    teacher_cache: str | None = None
    train: str = "all"
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.0
    eval_data: tuple[str, ...] | None = None
    holdout: float = 0.01
    eval_tokens: int = 262_144
    streaming: bool = False
    isolate_documents: bool = False
    seed: int = 0
    device: str = "auto"
    residual_dtype: str = "float32"
    torch_compile: bool | None = None
    save_steps: float = 0.1
    save_total_limit: int = 2
    logging_steps: int = 10
    eval_steps: int | None = None
    keep_checkpoints: bool = False
    force: bool = False
    trust_remote_code: bool = False
    training_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        choices = (
            ("lr_scheduler_type", SCHEDULES),
            ("objective", OBJECTIVES),
            ("train", TRAINED),
            ("residual_dtype", RESIDUALS),
        )
        for name, allowed in choices:
            if getattr(self, name) not in allowed:
                raise UsageError(
                    f"{getattr(self, name)!r} is not known",
                    where=name,
                    fix=f"use one of {', '.join(allowed)}",
                )
        check_options(self)


@dataclass(frozen=True)
class Budget:
    """The bill of a run, in tokens.

    Args:
        alpha: Fraction of the original tokens, None where those are unknown.
        tokens: Tokens that will be trained (`steps * batch_tokens`).
        steps: Optimiser steps.
        batch_tokens: Tokens per step, over all processes.
        window: Tokens per block.
        original_tokens: Pretraining tokens of the original.
        original_source: Where that number comes from.
    """

    alpha: float | None
    tokens: int
    steps: int
    batch_tokens: int
    window: int
    original_tokens: int | None
    original_source: str | None

    @property
    def blocks_per_step(self) -> int:
        """Blocks of `window` tokens per optimiser step."""
        return self.batch_tokens // self.window

    def sentence(self) -> str:
        """One line for the log: what will be trained."""
        share = "alpha unknown" if self.alpha is None else f"alpha {self.alpha:.4g}"
        origin = (
            "" if self.original_tokens is None else f" of {self.original_tokens:,} ({self.original_source})"
        )
        return (
            f"{share}{origin}: {self.tokens:,} tokens = {self.steps:,} steps of {self.batch_tokens:,} "
            f"({self.blocks_per_step} blocks of {self.window})"
        )


def _original(config: UptrainConfig, name: str | None) -> tuple[int | None, str | None]:
    """Pretraining tokens of the original and where the number comes from."""
    steps, batch = config.original_steps, config.original_batch_tokens
    if (steps is None) != (batch is None):
        given, missing = (
            ("original_steps", "original_batch_tokens")
            if batch is None
            else ("original_batch_tokens", "original_steps")
        )
        raise UsageError(f"needs {missing} beside it", where=given, fix="or give original_tokens alone")
    if steps is not None and batch is not None:
        if config.original_tokens not in (None, steps * batch):
            raise UsageError(
                f"{config.original_tokens:,} is not {steps:,} steps x {batch:,} tokens",
                where="original_tokens",
                fix="give one of the two",
            )
        return steps * batch, "given as steps x tokens"
    if config.original_tokens is not None:
        if config.original_tokens < 1:
            raise UsageError(f"{config.original_tokens} is not a token count", where="original_tokens")
        return config.original_tokens, "given"
    known = known_pretraining(name)
    return (known.tokens, known.source) if known else (None, None)


def _check_alpha(alpha: float) -> None:
    if not alpha > 0 or not math.isfinite(alpha):
        raise UsageError(f"{alpha} trains nothing", where="alpha", fix="give a fraction such as 0.05")
    if alpha > 1:
        meant = f"did you mean {alpha / 100:g} ({alpha:g} %)?" if alpha <= 100 else "give one such as 0.05"
        raise UsageError(
            f"{alpha:g} is more than the whole pretraining",
            where="alpha",
            fix=f"alpha is a fraction: {meant}",
        )


def plan_budget(config: UptrainConfig, *, window: int, name: str | None = None) -> Budget:
    """Turn alpha (or a token count) into optimiser steps.

    Args:
        config: The run; `alpha`, `original_*`, `tokens` and `batch_tokens` are read.
        window: Tokens per block.
        name: Hub id or folder name of the *original* model, to look its pretraining up.

    Returns:
        The budget, rounded to whole steps (at least half a step must be asked for).

    Raises:
        UsageError: Contradictory, missing or impossible numbers; a budget that rounds to 0 steps.

    Example:
        >>> run = UptrainConfig("m", "o", ("d",), alpha=0.05, original_steps=6000, original_batch_tokens=65536)
        >>> plan_budget(run, window=512).steps  # of 16,384 tokens
        1200
    """
    if window < 1:
        raise UsageError(f"{window} is not a length", where="window", fix="give a number of tokens")
    if (config.alpha is None) == (config.tokens is None):
        what = "give one of alpha and tokens, not both" if config.alpha is not None else "how long to train?"
        raise UsageError(
            what, where="alpha / tokens", fix="alpha 0.05 with original_tokens, or tokens 20000000"
        )
    original, source = _original(config, name)
    if config.alpha is not None:
        _check_alpha(config.alpha)
        if original is None:
            raise UsageError(
                "the pretraining tokens of the original are not known",
                where="alpha",
                fix="give original_tokens (or original_steps and original_batch_tokens), or tokens",
            )
        wanted = config.alpha * original
    else:
        assert config.tokens is not None
        if config.tokens < 1:
            raise UsageError(f"{config.tokens} trains nothing", where="tokens", fix="give a token count")
        wanted = float(config.tokens)
    batch = default_batch_tokens(wanted, window) if config.batch_tokens is None else config.batch_tokens
    blocks = batch // window
    if blocks < 1:
        raise UsageError(
            f"{batch:,} tokens a step is less than one block of {window:,}",
            where="batch_tokens",
            fix=f"give at least {window:,}, or a smaller window",
        )
    batch_tokens = blocks * window
    steps = round(wanted / batch_tokens)
    if steps < 1:
        raise UsageError(
            f"{wanted:,.0f} tokens round to 0 steps of {batch_tokens:,}",
            where="alpha" if config.alpha is not None else "tokens",
            fix=f"ask for at least {batch_tokens:,} tokens or lower batch_tokens",
        )
    tokens = steps * batch_tokens
    alpha = config.alpha if config.alpha is not None else (tokens / original if original else None)
    return Budget(alpha, tokens, steps, batch_tokens, window, original, source)


def default_batch_tokens(tokens: float, window: int) -> int:
    """65,536 tokens a step, as few as 16,384 where the budget would give less than 1,200 steps.

    On the 512-wide reference model 16,384 beat 65,536 at budgets of 4M and 20M tokens (240 and 1,200 steps
    against 60 and 300) from every start, with either objective and at every number of KV heads. A step has
    at least 16 blocks, so that several processes can share it.

    Args:
        tokens: The budget.
        window: Tokens per block.
    """
    smallest = max(SMALL_BATCH // window, FEWEST_BLOCKS) * window
    batch = smallest
    while 2 * batch <= LARGE_BATCH and tokens >= 2 * batch * ENOUGH_STEPS:
        batch *= 2
    return batch


def default_learning_rate(hidden_size: int, batch_tokens: int = LARGE_BATCH) -> float:
    """1e-3 at a width of 512 and 65,536 tokens a step; as 1 / width above, as the root of the step down to 16,384.

    Of 5e-4, 1e-3, 2e-3 and 3e-3, tried on the 512-wide reference model from a calibrated start, judged on
    held-out training text: 1e-3 or 5e-4 at 65,536 tokens a step, 5e-4 at 16,384 with every number of KV heads.
    There 2.5e-4 is ahead by 0.002 to 0.008 on that text with two KV heads and more, and behind on unseen text.
    Mean-pooled starts want two to four times as much.

    Args:
        hidden_size: Width of the model.
        batch_tokens: Tokens per step.
    """
    step = min(max(batch_tokens, SMALL_BATCH), LARGE_BATCH)
    return 1e-3 * min(1.0, 512 / hidden_size) * (step / LARGE_BATCH) ** 0.5


def warmup_count(warmup: float | None, steps: int) -> int:
    """Warm-up in steps from a count, a fraction below 1, or None (`min(50, steps / 5)`)."""
    if warmup is None:
        return min(50, steps // 5)
    return round(warmup * steps) if warmup < 1 else int(warmup)


def learning_rate_factor(step: int, steps: int, warmup: int, schedule: str) -> float:
    """The multiple of the peak learning rate at a step.

    Args:
        step: 0 for the first optimiser step.
        steps: All steps of the run.
        warmup: Steps of linear warm-up; the first step already moves.
        schedule: `linear` or `cosine` to 0, `wsd` (constant, last 30 % linear to 0), `constant`,
            `inverse_sqrt`: 1 during warm-up, then sqrt(warmup / step), as in T5's pretraining.
    """
    if schedule == "inverse_sqrt":
        return math.sqrt(max(1, warmup) / max(step, warmup, 1))
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    if schedule == "linear":
        return 1 - done
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    if schedule == "wsd":
        decay = max(1, round(0.3 * steps))
        return min(1.0, max(0.0, (steps - step) / decay))
    return 1.0
