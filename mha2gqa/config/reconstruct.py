"""Options of the stages after merging: closed-form refit, layer-local regression, distillation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from ..errors import no_effect
from .coerce import Invalid, coerce, short
from .option import CALIBRATION, RECIPE, Config, OptionError, option

Effort = Literal["quick", "normal", "thorough"]
# What a word for the effort sets; all else stays as it is.
EFFORTS: Mapping[Effort, Mapping[str, Any]] = {
    "quick": {"steps": 300},
    "normal": {},
    "thorough": {"train": "layer"},
}
# Settings that nothing but the regression reads.
OF_THE_REGRESSION = (
    "steps",
    "learning_rate",
    "relative",
    "schedule",
    "warmup",
    "betas",
    "check_every",
    "patience",
    "distill_steps",
)
EFFORT_HELP = (
    "How hard the fits try: quick makes 300 steps a layer in place of 1,000, thorough trains all parameters of each "
    "decoder layer in place of its attention projections alone. mha2gqa plan prices each."
)


@dataclass(frozen=True)
class ReconstructConfig(Config):
    """What happens to each attention module after merging, and how hard to try."""

    REMOVED: ClassVar[Mapping[str, Any]] = {"refit_inputs": False, "weighting": "plain", "average": 0}

    refit: bool = option(True, "Solve for the output projection in closed form.", CALIBRATION, where=())
    ridge: float = option(
        1e-3,
        "Ridge strength towards the merged projection, in mean diagonals of the second moment. Where it makes "
        "held-out blocks worse, they choose among stronger ones and no refit.",
        CALIBRATION,
        range="> 0",
        where=(RECIPE,),
    )
    regress: bool = option(
        True, "Train each module's projections on the original's output.", CALIBRATION, where=()
    )
    steps: int = option(1000, "Optimiser steps per module.", CALIBRATION, range=">= 0", where=(RECIPE,))
    batch_tokens: int = option(
        16_384,
        "Tokens of text per step, whatever the length of a block.",
        CALIBRATION,
        range=">= 1",
        where=(RECIPE,),
    )
    batch_size: int = option(
        0,
        "Blocks of text per step instead; 0 lets `batch_tokens` decide.",
        CALIBRATION,
        range=">= 0",
        where=(RECIPE,),
    )
    learning_rate: float = option(3e-3, "Peak rate of Adam.", CALIBRATION, range="> 0", where=(RECIPE,))
    relative: bool = option(
        False,
        "Take the rate as a fraction of each tensor's RMS instead of absolute.",
        CALIBRATION,
        where=(RECIPE,),
    )
    schedule: Literal["cosine", "linear", "constant"] = option(
        "linear", "Course of the rate after warm-up: down to zero, or constant.", CALIBRATION, where=(RECIPE,)
    )
    warmup: float = option(
        0.02,
        "Fraction of the steps in which the rate rises.",
        CALIBRATION,
        range=">= 0, < 1",
        where=(RECIPE,),
    )
    train: Literal["attention", "layer"] = option(
        "attention",
        "What the regression trains: the projections of attention, or all parameters of the decoder layer, "
        "feed-forward part and norms included, which takes the memory of training one layer.",
        CALIBRATION,
        where=(RECIPE,),
    )
    rest_rate: float = option(
        0.03,
        "Rate of what `train=layer` trains beside attention, as a share of `learning_rate`.",
        CALIBRATION,
        range="> 0",
        where=(RECIPE,),
    )
    betas: tuple[float, float] = option(
        (0.9, 0.99), "Betas of Adam.", CALIBRATION, range=">= 0, < 1", where=(RECIPE,)
    )
    unit: Literal["attention", "layer"] = option(
        "layer",
        "Whose output is matched: that of the attention module, or of the whole decoder layer with its "
        "feed-forward part frozen.",
        CALIBRATION,
        where=(RECIPE,),
    )
    inputs: Literal["student", "teacher"] = option(
        "student",
        "Whose hidden states a module reads while it is fitted: the student's own repair the drift of the "
        "layers before it, too.",
        CALIBRATION,
        where=(RECIPE,),
    )
    holdout: float = option(
        0.05,
        "Share of the blocks held out; the best state on them wins.",
        CALIBRATION,
        range="> 0, < 1",
        where=(RECIPE,),
    )
    check_every: int = option(
        50, "Steps between validations on the held-out blocks.", CALIBRATION, range=">= 1", where=(RECIPE,)
    )
    patience: int = option(
        6,
        "Validations without improvement after which a module is done.",
        CALIBRATION,
        range=">= 1",
        where=(RECIPE,),
    )
    distill_steps: int = option(
        0,
        "Afterwards, steps that train the projections of all modules together, end to end, on the original's "
        "predictions. Needs the memory of such training; 0 leaves it out.",
        CALIBRATION,
        range=">= 0",
        where=(RECIPE,),
    )
    distill_rate: float = option(
        1e-3, "Peak rate of Adam in these.", CALIBRATION, range="> 0", where=(RECIPE,)
    )
    seed: int = option(0, "Seed of the order of the blocks.", CALIBRATION, where=())

    def conflicts(self) -> Iterator[OptionError]:
        """A whole layer that is to match the output of its attention."""
        if self.train == "layer" and self.unit == "attention":
            yield OptionError("train", "layer needs the layer's output to match", "leave out unit=attention")

    @property
    def trains_layer(self) -> bool:
        """Whether the regression trains whole decoder layers."""
        return self.regress and self.steps > 0 and self.train == "layer"

    def unread(self) -> Iterator[str]:
        """Settings that were given and have no effect, each with what it needs."""
        if self.train == "layer" and not self.trains_layer:
            yield "train=layer has no effect without the regression"
        unused = [key for key in OF_THE_REGRESSION if key in self.given and not self.regress]
        if unused:
            yield f"{no_effect(unused)} without the regression"
        if "ridge" in self.given and not self.refit:
            yield "ridge has no effect without the refit"
        if "rest_rate" in self.given and self.train != "layer":
            yield "rest_rate has no effect without train=layer"
        if "distill_rate" in self.given and not (self.regress and self.distill_steps):
            yield "distill_rate has no effect without distill_steps"

    def for_window(self, window: int) -> ReconstructConfig:
        """A copy with a `batch_size`: as it is, or as many blocks of `window` tokens as `batch_tokens` holds."""
        return replace(self, batch_size=self.batch_size or max(1, self.batch_tokens // window))


def effort_conflicts(effort: Effort | None, fit: ReconstructConfig | None) -> Iterator[OptionError]:
    """Settings of the fits that a word for the effort sets, too, or that do not go with what it sets."""
    if effort is None or fit is None:
        return
    decided = {key for words in EFFORTS.values() for key in words}
    if both := sorted(decided & fit.given):
        names = " and ".join(f"{name}=" for name in both)
        yield OptionError("effort", f"decides what `fit` gives, too: {names}", "leave one of them out")
    try:
        replace(fit, **EFFORTS.get(effort, {}))
    except OptionError as error:
        yield OptionError("effort", f"{effort} sets {error.name}: {error.rule}", error.advice)


def with_effort(
    effort: Effort | None, fit: ReconstructConfig | Mapping[str, Any] | None
) -> ReconstructConfig | None:
    """The settings of the fits with what a word for the effort sets; None where nothing is asked.

    Raises:
        OptionError: No such word, no such settings, or the settings have what it sets.
    """
    try:
        settings: ReconstructConfig | None = None if fit is None else coerce(ReconstructConfig, fit)
    except Invalid as error:
        raise OptionError("fit", str(error)) from error
    if effort is None:
        return settings
    if effort not in EFFORTS:
        raise OptionError("effort", f"must be one of {', '.join(EFFORTS)}, not {short(effort)}")
    for conflict in effort_conflicts(effort, settings):
        raise conflict
    return replace(settings or ReconstructConfig(), **EFFORTS[effort])
