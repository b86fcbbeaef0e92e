"""The model that a walk made, and the settings of its fits."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from ..reconstruct import ReconstructConfig
from .inputs import Inputs
from .plan import Plan


class NotAChain(Exception):
    """The blocks of a model do not simply feed each other: all of it must be in memory."""


@dataclass
class Converted:
    """A converted model.

    Args:
        model: Complete where the original was in memory; otherwise its blocks are in the work folder.
        plan: How, in the names of the original's state dict.
        reports: By module path.
        about: Tokens, losses, seconds: for the result and the manifest.
        warnings: What the user should know.
    """

    model: Any
    plan: Plan
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @property
    def fitted_layers(self) -> bool:
        """Whether whole layers were trained (text may have been too short for any fit)."""
        fit = self.about.get("fit")
        return fit is not None and ReconstructConfig(**fit).trains_layer


def fit_config(config: ReconstructConfig, inputs: Inputs) -> ReconstructConfig:
    """The stages with a batch of so many blocks as a step's tokens make, which the text fills several times."""
    config = config.for_window(inputs.window)
    return replace(config, batch_size=min(config.batch_size, most_blocks(inputs)))


def most_blocks(inputs: Inputs) -> int:
    """Blocks of a step, at most."""
    return max(1, len(inputs) // 8)


def small_batches(asked: ReconstructConfig, made: ReconstructConfig, inputs: Inputs) -> list[str]:
    """A warning of a batch that was asked for and is more than the text can fill several times."""
    wanted = asked.for_window(inputs.window).batch_size
    if made.batch_size >= wanted or not {"batch_size", "batch_tokens"} & asked.given:
        return []
    return [f"--fit: there are {inputs.counted}: steps of {made.batch_size} are made, not of {wanted}"]
