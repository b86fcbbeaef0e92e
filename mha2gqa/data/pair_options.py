"""How pairs are read for a model, as the options of a command say it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ..config.pair_options import PairConfig
from ..errors import UsageError, no_effect
from .pairs import PairSource


def _flag(name: str) -> str:
    """The option of the command line that a field of `PairOptions` has."""
    return f"--{name.replace('language', 'lang').replace('_', '-')}"


@dataclass(frozen=True)
class PairOptions:
    """How pairs are read for a model.

    Args:
        source_column, target_column: See `PairSource`.
        source_language, target_language: Codes as the tokenizer spells them (`eng_Latn`, `ro_RO`, `en`); for
            Whisper the source language is the one that is spoken.
        task: Of Whisper: `transcribe` or `translate`.
        source_prefix: Put before each source text (`translate English to German: ` for T5).
        targets: `data`, or `generate`: the original model writes them.
        beams: Width of the search where text is generated; 1 is greedy.
        retry_temperatures: At which a text that repeats itself is written again.
    """

    source_column: str | None = None
    target_column: str | None = None
    source_language: str | None = None
    target_language: str | None = None
    task: str = "transcribe"
    source_prefix: str = ""
    targets: str = "data"
    beams: int = 1
    retry_temperatures: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.targets not in ("data", "generate"):
            raise UsageError("must be data or generate", where=f"--targets {self.targets}")
        if self.beams < 1:
            raise UsageError("must be at least 1", where=f"--beams {self.beams}")
        if any(t <= 0 for t in self.retry_temperatures):
            given = ",".join(map(str, self.retry_temperatures))
            raise UsageError("must be > 0", where=f"--retry-temperatures {given}")

    @classmethod
    def of(cls, config: PairConfig) -> PairOptions:
        """What the options of a command say about pairs."""
        return cls(
            config.source_column,
            config.target_column,
            config.source_lang,
            config.target_lang,
            config.task,
            config.source_prefix,
            config.targets,
            config.beams,
            tuple(config.retry_temperatures),
        )

    @property
    def generated(self) -> dict[str, Any] | None:
        """How the original writes the targets, for manifests; None for those of the data."""
        if self.targets != "generate":
            return None
        return {"beams": self.beams, "retry_temperatures": list(self.retry_temperatures)}

    def check_used(self, generates: bool = False) -> None:
        """Refuse temperatures, and a width of the search, where no text is generated.

        Args:
            generates: Whether the command generates text besides targets.

        Raises:
            UsageError: It does not.
        """
        if self.targets == "generate" or generates:
            return
        for name in sorted(self._given() & {"beams", "retry_temperatures"}):
            raise UsageError(
                "nothing is generated here",
                where=_flag(name),
                fix="add --targets generate, or --metrics of evaluate, or leave it out",
            )

    def without_effect(self) -> list[str]:
        """A warning of options that were given, where no pairs are read."""
        flags = sorted(map(_flag, self._given()))
        return [f"no pairs are read: {no_effect(flags)}"] if flags else []

    def _given(self) -> set[str]:
        return {option.name for option in fields(self) if getattr(self, option.name) != option.default}

    def open(self, data: Any, audio: bool, limit: int | None = None) -> PairSource:
        """The pairs of `data`, at most `limit`."""
        return PairSource(
            data,
            audio=audio,
            limit=limit,
            source_column=self.source_column,
            target_column=self.target_column,
            targets=self.targets == "data",
        )
