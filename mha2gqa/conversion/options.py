"""What calibrated conversion may use, and which stages it makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ..data import TextSource
from ..errors import UsageError
from ..progress import current
from ..reconstruct import ReconstructConfig
from .plan import Plan

CALIBRATED = ("joint", "align")  # methods that know which heads fit together, and use moments
WINDOW = 512
Stage = Callable[[str, int, int], None]
UNITS = {"statistics": "blocks", "grouping": "layers", "fitting": "layers", "distilling": "steps"}


@dataclass(frozen=True)
class CalibrationOptions:
    """What calibrated conversion may use, and which stages it makes.

    Args:
        texts: Paths and hub names, or a source of texts in memory.
        tokens: How many tokens of them to use, held-out ones included.
        window: Tokens of a block.
        text_column: Column of the text in JSONL and Parquet.
        statistics: File of saved moments: used if it exists, else written.
        grouping: `neighbours`, `search` or a file; None means search for `joint` and `align`; `given` keeps
            what the plan holds.
        refit, reconstruct: Stages after merging; None means both, with text.
        fit: How those stages work.
        device: Where the model runs.
        seed: Of the order of blocks.
        trust_remote_code: Consent to code that the source brings along.
    """

    texts: tuple[str, ...] | TextSource = ()
    tokens: int = 524_288
    window: int = WINDOW
    text_column: str = "text"
    statistics: str | None = None
    grouping: str | None = None
    refit: bool | None = None
    reconstruct: bool | None = None
    fit: ReconstructConfig = field(default_factory=ReconstructConfig)
    device: str = "auto"
    seed: int = 0
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        for word, value, least in (("tokens", self.tokens, 1), ("window", self.window, 2)):
            if value < least:
                raise UsageError(
                    f"{value} is too few", where=f"--calibration-{word}", fix=f"give at least {least}"
                )

    def fitted(self, text: bool) -> ReconstructConfig | None:
        """The stages after merging, or None if there are none.

        Raises:
            UsageError: One was asked for, and there is no text.
        """
        refit = text if self.refit is None else self.refit
        regress = text if self.reconstruct is None else self.reconstruct
        if not (refit or regress):
            return None
        if not text:
            raise UsageError(
                "needs text", where="--refit" if refit else "--reconstruct", fix="give --calibration TEXT"
            )
        return replace(self.fit, refit=refit, regress=regress, seed=self.seed)

    def how(self, plan: Plan) -> str:
        """The grouping asked for, or the method's default.

        Raises:
            UsageError: A search for a method that has no measure of what fits together.
        """
        if self.grouping == "search" and plan.method not in CALIBRATED:
            raise UsageError(
                f"--method {plan.method} has no cost to search by",
                where="--grouping search",
                fix="use joint or align",
            )
        return self.grouping or ("search" if plan.method in CALIBRATED else "neighbours")

    def say(self, stage: str, done: int, total: int) -> None:
        """Report progress."""
        current().report(stage, done, total, UNITS.get(stage, ""))
