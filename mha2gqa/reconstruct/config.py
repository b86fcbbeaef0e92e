"""Knobs of the stages after merging. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import UsageError

Mode = Literal["parallel", "sequential"]
Scope = Literal["attention", "block"]
Schedule = Literal["cosine", "linear", "constant"]


@dataclass(frozen=True)
class ReconstructConfig:
    """What happens after merging, and how hard.

    Args:
        refit: Solve for each output projection in closed form.
        ridge: Strength of the pull towards the merged output projection, in mean diagonals.
        regress: Then train each module's projections on the original's output.
        steps: Optimiser steps per module; 0 is no regression.
        batch_size: Rows of text per step.
        lr: Peak learning rate of Adam.
        relative_lr: Whether `lr` is a fraction of each tensor's RMS instead of an absolute rate.
        schedule: Of the learning rate after warm-up, down to zero (`constant` stays).
        warmup: Fraction of the steps the rate rises.
        betas: Of Adam.
        mode: `parallel` gives each module the original's inputs, `sequential` those of the student, with
            every earlier module done.
        scope: Match the output of the attention module, or of the block around it (its feed-forward part
            runs along, unchanged).
        average: Share of the last steps whose weights are averaged; 0 takes the last ones.
        holdout: Share of the calibration rows (at least one batch) kept back to judge by.
        check_every: Steps between looks at the held-out rows; the best weights seen are kept.
        patience: Looks without improvement after which a module is done.
        seed: Of the order of rows.
    """

    refit: bool = True
    ridge: float = 1e-3
    regress: bool = True
    steps: int = 1000
    batch_size: int = 16
    lr: float = 3e-3
    relative_lr: bool = False
    schedule: Schedule = "cosine"
    warmup: float = 0.05
    betas: tuple[float, float] = (0.9, 0.99)
    mode: Mode = "parallel"
    scope: Scope = "attention"
    average: float = 0.0
    holdout: float = 0.0625
    check_every: int = 100
    patience: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        for name, good in (
            ("ridge", self.ridge > 0),
            ("steps", self.steps >= 0),
            ("batch_size", self.batch_size >= 1),
            ("lr", self.lr > 0),
            ("warmup", 0 <= self.warmup < 1),
            ("average", 0 <= self.average <= 1),
            ("holdout", 0 < self.holdout < 1),
            ("check_every", self.check_every >= 1),
            ("patience", self.patience >= 1),
        ):
            if not good:
                raise UsageError(
                    f"{getattr(self, name)!r} is not possible",
                    where=f"reconstruct.{name}",
                    fix="see its range",
                )
