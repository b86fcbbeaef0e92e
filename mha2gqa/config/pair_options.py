"""How pairs of an encoder-decoder are read: options that every command on pairs has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .option import PAIRS, Config, option

Task = Literal["transcribe", "translate"]
Targets = Literal["data", "generate"]
GENERATE = "generate"  # instead of a path: the original samples the text


@dataclass(frozen=True, kw_only=True)
class PairConfig(Config):
    """How pairs are read for a model."""

    source_column: str | None = option(
        None,
        "Column of the source text, or of the recording, of pairs.",
        PAIRS,
        metavar="NAME",
        unset="found by name",
    )
    target_column: str | None = option(
        None, "Column of their target text.", PAIRS, metavar="NAME", unset="found by name"
    )
    source_lang: str | None = option(
        None,
        "Language of the sources as the tokenizer spells it (eng_Latn, ro_RO, en); for Whisper the one spoken.",
        PAIRS,
        metavar="CODE",
        unset="the tokenizer's",
    )
    target_lang: str | None = option(
        None, "Language of the targets, likewise.", PAIRS, metavar="CODE", unset="the tokenizer's"
    )
    task: Task = option("transcribe", "Task of Whisper.", PAIRS)
    source_prefix: str = option(
        "", "Text before each source, such as 'translate English to German: ' for T5.", PAIRS, metavar="TEXT"
    )
    targets: Targets = option(
        "data", "Where the targets come from: the original model can write them.", PAIRS
    )
    beams: int = option(1, "Width of the search where text is generated; 1 is greedy.", PAIRS, range=">= 1")
    retry_temperatures: tuple[float, ...] = option(
        (),
        "Temperatures at which a generated text that repeats itself (zlib makes it 2.4 times shorter: Whisper's rule) is "
        "written again, one after the other until it does not; 0.2,0.4,0.6,0.8,1.0 are Whisper's.",
        PAIRS,
        metavar="T,…",
        range="> 0",
        commas=True,
        unset="none, it stays as it is",
    )
