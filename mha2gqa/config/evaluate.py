"""Options of `evaluate`, and the gates on its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from .option import ADVANCED, CLI, GATES, OUTPUT, PAIRS, RECIPE, WHAT, Config, option
from .pair_options import PairConfig

Protocol = Literal["blocks", "window", "wikitext2", "rolling", "span-corruption", "pairs"]
Metric = Literal["auto", "wer", "cer", "bleu", "chrf", "exact_match"]
Bos = Literal["auto", "always", "never"]


@dataclass(frozen=True)
class EvaluateConfig(PairConfig):
    """Every option of `evaluate`, as command line, recipe and Python take it; docs/options.md describes the fields."""

    models: Any = option(
        ...,
        "Folders, Hub ids or models in memory (`LoadedModel`); the first is the one the others are compared "
        "with, unless `against` names another.",
        WHAT,
        argument=True,
        form=tuple[str, ...],
        where=(CLI,),
    )
    data: Any = option(
        ...,
        "Held-out text: file, folder, glob or NAME[:CONFIG[:SPLIT]] of the Hub. Repeatable.",
        WHAT,
        metavar="DATA",
        form=tuple[str, ...],
        verbatim=True,
        names=True,
    )
    protocol: Protocol = option(
        "window", "How text becomes scored tokens; its name stands beside every figure.", WHAT
    )
    against: Any = option(
        None,
        "The original: agreement of the other models with it is measured, which costs a second forward pass "
        "and holds two models at once.",
        WHAT,
        metavar="MODEL",
        form=str | None,
        where=(CLI,),
        unset="not measured",
    )
    agreement: bool = option(
        False, "Measure agreement with the original on the same tokens.", WHAT, where=(RECIPE,)
    )
    window: int | None = option(
        None,
        "Tokens a model sees at once.",
        WHAT,
        metavar="TOKENS",
        range=">= 1",
        unset="2048, or the models' context if shorter",
    )
    stride: int | None = option(
        None,
        "New tokens per window of the window protocol.",
        ADVANCED,
        metavar="TOKENS",
        range=">= 1",
        unset="half a window",
    )
    text_column: str = option("text", "Column of the text in JSONL, Parquet and Hub data.", metavar="NAME")
    batch_size: int = option(8, "Full windows per forward pass (more of shorter ones).", range=">= 1")
    max_tokens: int | None = option(
        None, "Stop after this many scored tokens.", metavar="TOKENS", range=">= 1", unset="all"
    )
    dtype: Any = option("auto", "Of the weights while scored: auto, float32, bfloat16, …", form=str)
    device: Any = option("auto", "Where the models run: auto, cpu, cuda, cuda:1, …", form=str)
    bos: Bos = option(
        "auto",
        "Whether a BOS stands before what is scored; auto: where the tokenizer's own post-processor puts one.",
    )
    seed: int = option(0, "Seed of the bootstrap intervals.", range=">= 0, <= 4294967295")
    worst: int = option(10, "How many of the worst documents to list.", range=">= 0")
    tasks: tuple[str, ...] = option(
        (),
        "Tasks of lm-eval to run as well: names or YAML files, with commas between them.",
        metavar="NAME,…",
        commas=True,
        unset="none",
    )
    task_limit: int | None = option(
        None, "At most this many examples of each task.", range=">= 1", unset="all"
    )
    metrics: tuple[Metric, ...] = option(
        (),
        "Metrics of generated text, with commas between them; auto chooses by what the pairs are.",
        PAIRS,
        metavar="NAME,…",
        commas=True,
        unset="none, nothing is generated",
    )
    max_examples: int | None = option(None, "Read at most this many pairs.", PAIRS, range=">= 1", unset="all")
    trust_remote_code: bool = option(False, "Run the models' own code (dangerous).", where=(CLI,))


@dataclass(frozen=True)
class OutputConfig(Config):
    """Where the command line writes the result of an evaluation, besides to stdout."""

    output: str | None = option(
        None, "Also write the JSON to a file.", OUTPUT, metavar="FILE", where=(CLI,), unset="none"
    )


@dataclass(frozen=True)
class GateConfig(Config):
    """Quality gates: an evaluation that does not pass ends with exit code 3."""

    max_ppl_ratio: float | None = option(
        None,
        "Fail if perplexity over the first model's exceeds this.",
        GATES,
        metavar="RATIO",
        range="> 0",
        where=(CLI,),
        unset="no gate",
    )
    min_agreement: float | None = option(
        None,
        "Fail if top-1 agreement with `against` is below this.",
        GATES,
        metavar="FRACTION",
        range=">= 0, <= 1",
        where=(CLI,),
        unset="no gate",
    )
    max_wer_delta: float | None = option(
        None,
        "Fail if the word error rate is more percentage points above the first model's.",
        GATES,
        metavar="POINTS",
        range=">= 0",
        where=(CLI,),
        unset="no gate",
    )
    max_bleu_drop: float | None = option(
        None,
        "Fail if BLEU is more points below the first model's.",
        GATES,
        metavar="POINTS",
        range=">= 0",
        where=(CLI,),
        unset="no gate",
    )
    fail_if_worse: bool = option(
        False, "Fail if the loss of a model is above the first one's.", GATES, where=(CLI,)
    )
