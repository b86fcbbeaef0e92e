"""What a walk reports: figures of every attention module as they come, and what the result says of the whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from ..reconstruct import LayerFit, ReconstructConfig
from ..reconstruct.ranks import Ranks
from .clock import Clock
from .inputs import Inputs


class WalkReport:
    """Figures of a walk, gathered as it goes.

    Attributes:
        modules: Figures by module path: of the search, the merge and the fits.
        warnings: What the user should know.
        last: The fit that was made last.
    """

    def __init__(self) -> None:
        self.modules: dict[str, dict[str, Any]] = {}
        self.warnings: list[str] = []
        self.last: LayerFit | None = None

    def begin(self, modules: Mapping[str, Mapping[str, Any]]) -> None:
        """Take what a search said of modules, or all that an earlier run did, in place of what there was."""
        for path, figures in modules.items():
            self.modules[path] = dict(figures)

    def merged(self, path: str, figures: Mapping[str, Any]) -> None:
        """Take what merging said of a module; a search's figures stay."""
        if figures:
            self.modules[path] = dict(figures) | self.modules.get(path, {})

    def fitted(self, fit: LayerFit) -> None:
        """Take what a fit said of its module."""
        self.last = fit
        errors = {"error_merged": fit.before, "error_refitted": fit.refitted, "error_fitted": fit.after}
        self.modules[fit.path] |= {name: x for name, x in errors.items() if x is not None}
        self.modules[fit.path] |= {"steps": fit.steps}

    def clipped(self, path: str, count: Tensor) -> None:
        """Take how often a bound on q, k and v acts in the result: `[3, 2]`, entries beyond it and all."""
        if bool(count[:, 0].any()):
            shares = (count[:, 0] / count[:, 1].clamp_min(1)).tolist()
            self.modules[path]["clipped_result"] = dict(zip("qkv", shares, strict=True))

    def note(self) -> str:
        """The error of the last fit, for a line of progress."""
        return "" if self.last is None else f"error {self.last.before:.3f} -> {self.last.after:.3f}"

    def about(
        self,
        inputs: Inputs,
        config: ReconstructConfig | None,
        losses: Mapping[str, float],
        clock: Clock,
        ranks: Ranks,
    ) -> dict[str, Any]:
        """Tokens, losses, stages, seconds and memory, for the result and the manifest.

        Args:
            inputs: The rows that were learnt from.
            config: The stages after merging; None for none.
            losses: On validation rows, by stage.
            clock: Of the walk.
            ranks: Its processes, which must all call this.
        """
        about: dict[str, Any] = {"unique_tokens": inputs.tokens, "window": inputs.window}
        about |= {"losses": dict(losses)} if losses else {}
        if config is not None:
            steps = max((figures.get("steps", 0) for figures in self.modules.values()), default=0)
            about |= {"fit": asdict(config), "token_visits": steps * config.batch_size * inputs.window}
        about["seconds"] = clock.seconds
        if ranks.count > 1:
            about["seconds_by_rank"] = ranks.gather(clock.seconds)
        about |= {"peak_device_bytes": clock.peak} if clock.peak else {}
        about |= {"peak_pinned_bytes": pinned} if (pinned := clock.pinned()) else {}
        return about
