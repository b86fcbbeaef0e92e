"""How long to uptrain: alpha -> tokens -> steps, and the learning-rate curve. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..config import OptionError, UptrainConfig
from ..errors import UsageError
from .pretraining_tokens import known_pretraining

SPEECH_RATE = 3e-5  # largest default learning rate of speech models
# Steps of a budget that does not say: see `default_batch_tokens`.
SMALL_BATCH, LARGE_BATCH, ENOUGH_STEPS, FEWEST_BLOCKS = 16_384, 65_536, 1_200, 16
MOST_PAIRS = 256  # of a step that the budget does not fix


@dataclass(frozen=True)
class PairBudget:
    """The steps of a run on pairs, whose lengths differ.

    Args:
        per_step: Pairs per optimiser step, over all processes.
        encoder: Mean positions of the encoder.
        decoder: Mean positions of the decoder.
        targets: Mean target tokens, which carry the loss.
    """

    per_step: int
    encoder: float
    decoder: float
    targets: float


@dataclass(frozen=True)
class Budget:
    """The bill of a run, in tokens; of a run on pairs in target tokens.

    Args:
        alpha: Fraction of the original tokens, None where those are unknown.
        tokens: Tokens that will be trained (`steps * batch_tokens`; of pairs, those that the steps really have).
        steps: Optimiser steps.
        batch_tokens: Tokens per step, over all processes; of pairs, on average.
        window: Tokens per block; of pairs, mean positions of encoder and decoder together.
        original_tokens: Pretraining tokens of the original.
        original_source: Where that number comes from.
        pairs: How many and how long, where the run is on pairs.
    """

    alpha: float | None
    tokens: int
    steps: int
    batch_tokens: int
    window: int
    original_tokens: int | None
    original_source: str | None
    pairs: PairBudget | None = None

    @property
    def blocks_per_step(self) -> int:
        """Blocks of `window` tokens, or pairs, per optimiser step."""
        return self.batch_tokens // self.window if self.pairs is None else self.pairs.per_step

    def counting(self, tokens: int) -> Budget:
        """The same, its steps having so many target tokens in all."""
        implied = tokens / self.original_tokens if self.original_tokens else None
        alpha = self.alpha if self.alpha is not None else implied
        return replace(self, alpha=alpha, tokens=tokens, batch_tokens=round(tokens / self.steps))

    def sentence(self) -> str:
        """One line for the log: what will be trained."""
        share = "alpha unknown" if self.alpha is None else f"alpha {self.alpha:.4g}"
        origin = (
            "" if self.original_tokens is None else f" of {self.original_tokens:,} ({self.original_source})"
        )
        if self.pairs is not None:
            return (
                f"{share}{origin}: {self.tokens:,} target tokens = {self.steps:,} steps of "
                f"{self.pairs.per_step} pairs ({self.pairs.targets:.1f} targets each)"
            )
        return (
            f"{share}{origin}: {self.tokens:,} tokens = {self.steps:,} steps of {self.batch_tokens:,} "
            f"({self.blocks_per_step} blocks of {self.window})"
        )


def _original(config: UptrainConfig, name: str | None) -> tuple[int | None, str | None]:
    """Pretraining tokens of the original and where the number comes from."""
    if config.original_steps is not None and config.original_batch_tokens is not None:
        return config.original_steps * config.original_batch_tokens, "given as steps x tokens"
    if config.original_tokens is not None:
        return config.original_tokens, "given"
    known = known_pretraining(name)
    return (known.tokens, known.source) if known else (None, None)


def wanted_tokens(config: UptrainConfig, name: str | None) -> tuple[float, int | None, str | None]:
    """Tokens asked for, those of the original, and where that number comes from.

    Raises:
        UsageError: No budget, or a fraction of what is not known.
    """
    original, source = _original(config, name)
    if config.alpha is not None:
        if original is None:
            raise OptionError(
                "alpha",
                "needs the pretraining tokens of the original, which are not known",
                "give `original_tokens` (or `original_steps` and `original_batch_tokens`), or `tokens`",
            )
        wanted = config.alpha * original
    elif config.tokens is not None:
        wanted = float(config.tokens)
    else:
        raise UsageError(
            "one of alpha and tokens is required",
            where="budget",
            fix="give alpha 0.05 with original_tokens, or tokens 20M",
        )
    return wanted, original, source


def plan_budget(config: UptrainConfig, *, window: int, name: str | None = None) -> Budget:
    """Turn alpha (or a token count) into optimiser steps.

    Args:
        config: The run; `alpha`, `original_*`, `tokens` and `batch_tokens` are read.
        window: Tokens per block.
        name: Hub id or folder name of the *original* model, to look its pretraining up.

    Returns:
        The budget, rounded to whole steps (at least half a step must be asked for).

    Raises:
        UsageError: No budget, the original's tokens are not known, or it rounds to 0 steps.

    Example:
        >>> run = UptrainConfig("m", "o", ("d",), alpha=0.05, original_steps=6000, original_batch_tokens=65536)
        >>> plan_budget(run, window=512).steps  # of 16,384 tokens
        1200
    """
    wanted, original, source = wanted_tokens(config, name)
    batch = default_batch_tokens(wanted, window) if config.batch_tokens is None else config.batch_tokens
    blocks = batch // window
    if blocks < 1:
        raise OptionError(
            "batch_tokens",
            f"must be at least one block of {window:,}, not {batch:,}",
            "or give a smaller `window`",
        )
    batch_tokens = blocks * window
    steps = round(wanted / batch_tokens)
    if steps < 1:
        raise OptionError(
            "alpha" if config.alpha is not None else "tokens",
            f"gives {wanted:,.0f} tokens, which round to 0 steps of {batch_tokens:,}",
            f"give at least {batch_tokens:,} tokens, or lower `batch_tokens`",
        )
    tokens = steps * batch_tokens
    alpha = config.alpha if config.alpha is not None else (tokens / original if original else None)
    return Budget(alpha, tokens, steps, batch_tokens, window, original, source)


def plan_pair_budget(
    config: UptrainConfig, lengths: PairBudget, *, multiple: int = 1, name: str | None = None
) -> Budget:
    """Turn alpha (or a token count) into steps of pairs.

    Args:
        config: The run, as in `plan_budget`.
        lengths: Mean lengths of its pairs; `per_step` is chosen here.
        multiple: Of which the pairs of a step are one: processes and micro-batch share them out.
        name: As in `plan_budget`.

    Returns:
        The budget; its `tokens` are those of pairs of mean length until `Budget.counting` says which they are.

    Raises:
        UsageError: As `plan_budget`.
    """
    wanted, original, source = wanted_tokens(config, name)
    mean = lengths.targets
    pairs = _default_pairs(wanted, mean) if config.batch_tokens is None else round(config.batch_tokens / mean)
    pairs = max(1, round(pairs / multiple)) * multiple
    steps = round(wanted / (pairs * mean))
    if steps < 1:
        raise OptionError(
            "alpha" if config.alpha is not None else "tokens",
            f"gives {wanted:,.0f} target tokens, which round to 0 steps of {pairs * mean:,.0f}",
            f"give at least {math.ceil(pairs * mean):,} tokens, or lower `batch_tokens`",
        )
    window = math.ceil(lengths.encoder + lengths.decoder)
    return Budget(
        config.alpha,
        round(steps * pairs * mean),
        steps,
        round(pairs * mean),
        window,
        original,
        source,
        replace(lengths, per_step=pairs),
    )


def _default_pairs(tokens: float, targets: float) -> int:
    """16 pairs a step, up to 256 where the budget gives 1,200 steps of them, as `default_batch_tokens` does."""
    pairs = FEWEST_BLOCKS
    while 2 * pairs <= MOST_PAIRS and tokens >= 2 * pairs * targets * ENOUGH_STEPS:
        pairs *= 2
    return pairs


def default_batch_tokens(tokens: float, window: int) -> int:
    """65,536 tokens a step, as few as 16,384 where the budget would give less than 1,200 steps.

    On the 512-wide reference model 16,384 beat 65,536 at budgets of 4M and 20M tokens (240 and 1,200 steps
    against 60 and 300) from every start, with either objective and at every number of KV heads. A step has
    at least 16 blocks, so that several processes can share it: steps of 4 blocks of 2,048 end lower on unseen text by
    about what seeds differ by, and at half the rate alone.

    Args:
        tokens: The budget.
        window: Tokens per block.
    """
    smallest = max(SMALL_BATCH // window, FEWEST_BLOCKS) * window
    batch = smallest
    while 2 * batch <= LARGE_BATCH and tokens >= 2 * batch * ENOUGH_STEPS:
        batch *= 2
    return batch


def default_learning_rate(hidden_size: int, batch_tokens: int = LARGE_BATCH, speech: bool = False) -> float:
    """1e-3 at a width of 512 and 65,536 tokens a step; as 1 / width above, as the root of the step down to 16,384.

    At most 3e-5 for speech models: of 1e-4, at which Distil-Whisper trains (Gandhi et al. 2023, arXiv:2311.00430), and
    3e-5, tried on Whisper tiny.en at half and at a third of its KV heads with an hour of synthetic speech, 3e-5 stayed
    closer to the original, fell into fewer loops and erred less on human speech; 1e-4 learnt the synthetic voices.

    Of 5e-4, 1e-3, 2e-3 and 3e-3, tried on the 512-wide reference model from a calibrated start, judged on
    held-out training text: 1e-3 or 5e-4 at 65,536 tokens a step, 5e-4 at 16,384 with every number of KV heads.
    There 2.5e-4 is ahead by 0.002 to 0.008 on that text with two KV heads and more, and behind on unseen text.
    Mean-pooled starts want two to four times as much.

    Args:
        hidden_size: Width of the model.
        batch_tokens: Tokens per step.
        speech: Whether its data are recordings.
    """
    step = min(max(batch_tokens, SMALL_BATCH), LARGE_BATCH)
    rate = 1e-3 * min(1.0, 512 / hidden_size) * (step / LARGE_BATCH) ** 0.5
    return min(rate, SPEECH_RATE) if speech else rate


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
