"""Knobs of the stages after merging. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ..errors import UsageError


@dataclass(frozen=True)
class ReconstructConfig:
    """What happens to each module after merging, and how hard to try.

    Args:
        refit: Solve for the output projection in closed form.
        ridge: Pull towards the merged projection, in mean diagonals of the moment; where that makes held-out
            blocks worse, they choose among stronger pulls and no refit.
        regress: Then train the module's projections on the original's output.
        steps: Optimiser steps per module.
        batch_tokens: Tokens of text per step, whatever the length of a block.
        batch_size: Blocks of text per step, instead; 0 lets `batch_tokens` decide.
        learning_rate: Peak rate of Adam.
        relative: Whether the rate is a fraction of each tensor's RMS instead of absolute.
        schedule: Of the rate after warm-up, down to zero (`constant` stays).
        warmup: Fraction of the steps the rate rises.
        betas: Of Adam.
        unit: Whose output is matched: the `attention` module's, or that of the whole decoder `layer` (its
            feed-forward part frozen), which weighs an error by what the layer makes of it.
        inputs: What a module reads while it is fitted: the `student`'s own stream, so that it also repairs
            the drift of the layers before it, or the `teacher`'s.
        holdout: Share of the blocks kept aside; the best state on them wins.
        check_every: Steps between looks at the held-out blocks.
        patience: Looks without improvement after which a module is done.
        distill_steps: Afterwards, steps that train the projections of all modules together, end to end, on
            the original's predictions for the same text. Needs the memory of such training; 0 leaves it out.
        distill_rate: Peak rate of Adam in these.
        seed: Order of the blocks.
    """

    refit: bool = True
    ridge: float = 1e-3
    regress: bool = True
    steps: int = 1000
    batch_tokens: int = 16_384
    batch_size: int = 0
    learning_rate: float = 3e-3
    relative: bool = False
    schedule: Literal["cosine", "linear", "constant"] = "linear"
    warmup: float = 0.02
    betas: tuple[float, float] = (0.9, 0.99)
    unit: Literal["attention", "layer"] = "layer"
    inputs: Literal["student", "teacher"] = "student"
    holdout: float = 0.05
    check_every: int = 50
    patience: int = 6
    distill_steps: int = 0
    distill_rate: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        for name, good in (
            ("ridge", self.ridge > 0),
            ("steps", self.steps >= 0),
            ("batch_tokens", self.batch_tokens >= 1),
            ("batch_size", self.batch_size >= 0),
            ("learning_rate", self.learning_rate > 0),
            ("warmup", 0 <= self.warmup < 1),
            ("holdout", 0 < self.holdout < 1),
            ("check_every", self.check_every >= 1),
            ("patience", self.patience >= 1),
            ("distill_steps", self.distill_steps >= 0),
            ("distill_rate", self.distill_rate > 0),
        ):
            if not good:
                raise UsageError(
                    f"{getattr(self, name)!r} is not possible",
                    where=f"reconstruct.{name}",
                    fix="see its range",
                )

    def for_window(self, window: int) -> ReconstructConfig:
        """A copy with a `batch_size`: as it is, or as many blocks of `window` tokens as `batch_tokens` holds."""
        return replace(self, batch_size=self.batch_size or max(1, self.batch_tokens // window))
