"""What calibrated conversion may use, and which stages it makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..checkpoints.output import check_name
from ..config import ConvertConfig, OptionError, ReconstructConfig
from ..data import PairOptions, TextSource
from ..errors import no_effect
from ..progress import current
from .plan import Groupings, Plan

CALIBRATED = ("joint", "align")  # methods that know which heads fit together, and use moments
FLOAT32_PARAMETERS = 10**9  # models up to this size are worked on in float32
Stage = Callable[[str, int, int], None]
# Options that say how text is read.
ABOUT_TEXT = {
    "tokens": "--calibration-tokens",
    "window": "--calibration-window",
    "text_column": "--text-column",
}
GIVEN = "given"  # the groupings that the plan holds
UNITS = {"statistics": "blocks", "grouping": "layers", "fitting": "layers", "distilling": "steps"}


def grouping_asked(grouping: str | None, groupings: Groupings | None) -> str | None:
    """How heads are grouped, `given` where the groupings are given by module.

    Raises:
        OptionError: Both are asked for.
    """
    if groupings is None:
        return grouping
    if grouping is not None:
        raise OptionError("grouping", "decides what groupings gives, too", "leave one of them out")
    return GIVEN


@dataclass(frozen=True)
class CalibrationOptions:
    """What calibrated conversion may use, and which stages it makes: options of `ConvertConfig`.

    Args:
        texts: Paths and Hub names, or a source of texts in memory.
        tokens, window: `calibration_tokens` and `calibration_window`.
        grouping: As there, or `given`, which keeps what the plan holds.
        text_column, statistics, refit, reconstruct, fit, device, seed, trust_remote_code: As there.
        pairs: How pairs are read for an encoder-decoder.
        weights: What all weights are, by their files or in memory: kept with the statistics.
        original: Fingerprint of the source as it was given, which is the writer of sampled text.

    Raises:
        UsageError: `statistics` is a name that no file can have.
    """

    texts: tuple[str, ...] | TextSource = ()
    tokens: int = ConvertConfig.calibration_tokens
    window: int | None = ConvertConfig.calibration_window
    text_column: str = ConvertConfig.text_column
    statistics: str | None = None
    grouping: str | None = None
    refit: bool | None = None
    reconstruct: bool | None = None
    fit: ReconstructConfig | None = None
    device: Any = ConvertConfig.device
    seed: int = ConvertConfig.seed
    trust_remote_code: bool = False
    pairs: PairOptions = field(default_factory=PairOptions)
    weights: str = ""
    original: str | None = None

    def __post_init__(self) -> None:
        """Refuse a file of statistics that cannot have its name."""
        if self.statistics:
            check_name(Path(self.statistics))

    def text_only(self) -> list[str]:
        """A warning of options about text, where pairs are read."""
        return self._unread("pairs are read, no text", "window", "text_column")

    def _unread(self, why: str, *names: str) -> list[str]:
        """A warning of those of these options that were given."""
        flags = [flag for name, flag in ABOUT_TEXT.items() if name in names and self._asked(name)]
        return [f"{why}: {no_effect(flags)}"] if flags else []

    def _asked(self, name: str) -> bool:
        """Whether an option differs from its default."""
        return bool(getattr(self, name) != type(self).__dataclass_fields__[name].default)

    def cut(self, window: int, tokens: int) -> list[str]:
        """Warnings of sizes that were asked for, where model or text have less.

        Args:
            window: Tokens of a block.
            tokens: Of all blocks.
        """
        found = []
        if self.window is not None and window < min(self.window, tokens):
            found.append(
                f"--calibration-window {self.window:,}: the model was built for {window:,} tokens, and so long are the blocks"
            )
        if self._asked("tokens") and tokens + window <= self.tokens:
            found.append(
                f"--calibration-tokens {self.tokens:,}: the text has {tokens:,}, all of which are used"
            )
        return found

    @classmethod
    def of(
        cls, config: ConvertConfig, texts: tuple[str, ...] | TextSource, groupings: Groupings | None = None
    ) -> CalibrationOptions:
        """What the options of `convert` say about calibration.

        Args:
            config: Those options.
            texts: Its `calibration`, as it is read.
            groupings: Those that are given, by module.

        Raises:
            OptionError: `grouping` is given, too.
        """
        return cls(
            texts=texts,
            tokens=config.calibration_tokens,
            window=config.calibration_window,
            text_column=config.text_column,
            statistics=config.statistics,
            grouping=grouping_asked(config.grouping, groupings),
            refit=config.refit,
            reconstruct=config.reconstruct,
            fit=config.fitting,
            device=config.device,
            seed=config.seed,
            trust_remote_code=config.trust_remote_code,
            pairs=PairOptions.of(config),
        )

    def without_effect(self, plan: Plan, fit: ReconstructConfig | None) -> list[str]:
        """Warnings of options that were given and have no effect.

        Args:
            plan: The conversion.
            fit: The stages after merging, None for none.
        """
        found = []
        if not self.texts:
            found += [*self.pairs.without_effect(), *self._unread("no text is read", *ABOUT_TEXT)]
        if self.fit is not None and fit is None:
            found.append(
                "no module is fitted (there is no calibration data, or the fits are off): --fit and --effort have no effect"
            )
        if fit is not None:
            found += [f"--fit {sentence}" for sentence in fit.unread()]
        if self.statistics and plan.method not in CALIBRATED:
            found.append(f"method {plan.method} uses no statistics: --statistics has no effect")
        return found

    def fitting(self, text: bool) -> ReconstructConfig | None:
        """The stages after merging, or None if there are none.

        Raises:
            OptionError: One was asked for, and there is no text.
        """
        refit = text if self.refit is None else self.refit
        regress = text if self.reconstruct is None else self.reconstruct
        if not (refit or regress):
            return None
        if not text:
            raise OptionError("refit" if refit else "reconstruct", "needs text", "give `calibration`")
        return replace(self.fit or ReconstructConfig(), refit=refit, regress=regress, seed=self.seed)

    def reads_text(self, plan: Plan) -> bool:
        """Whether text runs through the model: heads are shared, and modules are fitted or moments still unknown."""
        if not self.texts or all(module.unchanged for module in plan.modules):
            return False
        known = plan.method in CALIBRATED and self.statistics is not None and Path(self.statistics).exists()
        return not known or self.fitting(text=True) is not None

    def how(self, plan: Plan) -> str:
        """The grouping asked for, or the method's default.

        Raises:
            OptionError: A search for a method that has no measure of what fits together.
        """
        if self.grouping == "search" and plan.method not in CALIBRATED:
            raise OptionError(
                "grouping", f"search needs a cost, and method {plan.method} has none", "use joint or align"
            )
        return self.grouping or ("search" if plan.method in CALIBRATED else "neighbours")

    def say(self, stage: str, done: int, total: int) -> None:
        """Report progress."""
        current().report(stage, done, total, UNITS.get(stage, ""))
