"""Options of reports and sweeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .convert import Method
from .option import GATES, OUTPUT, RECIPE, WHAT, Config, option

Format = Literal["json", "markdown", "html", "card"]


@dataclass(frozen=True)
class ReportConfig(Config):
    """What is written beside the checkpoints."""

    title: str | None = option(None, "Headline.", OUTPUT, where=(RECIPE,), unset="made from source and G")
    formats: tuple[Format, ...] = option(
        ("json", "markdown", "html", "card"), "What is written.", OUTPUT, where=(RECIPE,)
    )
    batch: int = option(
        1,
        "Sequences decoded at once, for the sizes of KV caches.",
        OUTPUT,
        where=(RECIPE,),
        range=">= 1",
    )
    context: int = option(4096, "Tokens per sequence, for the same.", OUTPUT, where=(RECIPE,), range=">= 1")
    max_ppl_ratio: float | None = option(
        None,
        "Quality gate: largest perplexity over the original's that still passes.",
        GATES,
        where=(RECIPE,),
        range="> 0",
        unset="no gate",
    )
    max_wer_delta: float | None = option(
        None,
        "Quality gate: most percentage points that the word error rate may be above the original's.",
        GATES,
        where=(RECIPE,),
        range=">= 0",
        unset="no gate",
    )
    max_bleu_drop: float | None = option(
        None,
        "Quality gate: most points that BLEU may be below the original's.",
        GATES,
        where=(RECIPE,),
        range=">= 0",
        unset="no gate",
    )
    license: str | None = option(
        None,
        "Licence of the source, for the model card, where its own card does not say.",
        OUTPUT,
        where=(RECIPE,),
        unset="the source's card",
    )


@dataclass(frozen=True)
class SweepConfig(Config):
    """The grid of a sweep; the other sections hold what all its cells share."""

    groups: tuple[int, ...] = option((), "Values of G.", WHAT, where=(RECIPE,), unset="convert.groups")
    methods: tuple[Method, ...] = option(
        (), "Values of convert.method.", WHAT, where=(RECIPE,), unset="convert.method"
    )
    alphas: tuple[float, ...] = option(
        (0.0,),
        "Uptraining fractions; 0 is the conversion alone.",
        WHAT,
        where=(RECIPE,),
        range=">= 0, <= 1",
    )
    groupings: tuple[str, ...] = option(
        (), "Values of convert.grouping.", WHAT, where=(RECIPE,), unset="convert.grouping"
    )
    bench: bool = option(
        False,
        "Also time cached decoding of every cell, at the report's batch and context.",
        WHAT,
        where=(RECIPE,),
    )
