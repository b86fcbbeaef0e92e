"""Options of `convert`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .coerce import Bytes
from .option import ADVANCED, CALIBRATION, CLI, OUTPUT, WHAT, OptionError, option
from .pair_options import GENERATE, PairConfig
from .reconstruct import EFFORT_HELP, Effort, ReconstructConfig, effort_conflicts, with_effort

Method = Literal["mean", "first", "random", "align", "joint"]
Attention = Literal["self", "cross"]
DEFAULT_METHOD: Method = "joint"
MOST_RECORDINGS = (
    1_000  # to calibrate on: an encoder's states of 30 seconds are some MB, whatever is said in them
)


@dataclass(frozen=True)
class ConvertConfig(PairConfig):
    """Every option of `convert`, as command line, recipe and Python take it; docs/options.md describes the fields."""

    source: Any = option(..., "Folder or Hub id of the model.", WHAT, argument=True, form=str, where=(CLI,))
    out: Any = option(
        ...,
        "Folder to make; it appears only when complete and checked.",
        WHAT,
        argument=True,
        form=str,
        where=(CLI,),
    )
    groups: int = option(
        ...,
        "Key/value heads G of the result (GQA-G), not the group size.",
        WHAT,
        metavar="G",
        flags=("--groups", "--kv-heads"),
        lenient=True,
    )
    method: Method | None = option(
        DEFAULT_METHOD,
        "How the heads of a group become one: joint merges what attention computes with them, mean averages their "
        "weights (the GQA paper's recipe), first, random and align are controls.",
        WHAT,
    )
    calibration: Any = option(
        (),
        "Text to calibrate on, or pairs for an encoder-decoder: file, folder, glob or NAME[:CONFIG[:SPLIT]] of the "
        "Hub. Repeatable. generate: the model samples the text itself.",
        WHAT,
        metavar="DATA",
        form=tuple[str, ...],
        verbatim=True,
        names=True,
        unset="none, which uses the weights only",
    )
    wide: int = option(
        1,
        "Wide heads: G/R KV heads that are R times as wide, which hold the cache of G and more of the model. R divides "
        "G.",
        WHAT,
        metavar="R",
        range=">= 1",
    )
    as_: str = option(
        "auto",
        "Model type to write the result as. auto converts a class that cannot hold fewer KV heads to one that "
        "computes the same and can; none never does.",
        WHAT,
        metavar="TYPE",
        flags=("--as",),
    )
    untie: bool = option(
        False, "Store the output head as a tensor of its own where it is the embedding.", OUTPUT
    )
    attention: tuple[Attention, ...] = option(
        ("self", "cross"),
        "Kinds of decoder attention to convert, of those the model has.",
        WHAT,
        metavar="KINDS",
        commas=True,
    )
    calibration_tokens: int = option(
        524_288,
        "How many tokens of the calibration text to use, held-out ones included; of pairs their target tokens, of "
        f"at most {MOST_RECORDINGS:,} recordings.",
        CALIBRATION,
        metavar="TOKENS",
        range=">= 1",
    )
    calibration_window: int | None = option(
        None,
        "Tokens of one calibration block.",
        CALIBRATION,
        metavar="TOKENS",
        range=">= 2",
        unset="the model's positions, at most 2048; less for little text",
    )
    text_column: str = option(
        "text", "Column of the text in JSONL, Parquet and Hub data.", CALIBRATION, metavar="NAME"
    )
    statistics: str | None = option(
        None,
        "File of second moments: used if it exists, else written.",
        CALIBRATION,
        metavar="FILE",
        unset="none",
    )
    grouping: str | None = option(
        None,
        "Which heads share: neighbours, search, or a file of partitions.",
        CALIBRATION,
        metavar="NAME|FILE",
        unset="search for joint and align, else neighbours",
    )
    refit: bool | None = option(
        None,
        "Closed-form refit of the output projections.",
        CALIBRATION,
        unset="on with calibration text",
    )
    reconstruct: bool | None = option(
        None,
        "Layer-local regression after merging.",
        CALIBRATION,
        unset="on with calibration text",
    )
    effort: Effort | None = option(None, EFFORT_HELP, CALIBRATION, unset="normal")
    fit: ReconstructConfig | Mapping[str, Any] | None = option(
        None,
        "Settings of refit and reconstruct, such as steps=300. `--fit help` lists them.",
        CALIBRATION,
        metavar="KEY=VALUE",
        unset="see --fit help",
    )
    max_shard_size: Bytes | None = option(
        None,
        "Largest size of one output file, such as 5GB.",
        OUTPUT,
        metavar="SIZE",
        range="> 0",
        unset="the source's files",
    )
    keep: tuple[str, ...] = option(
        (),
        "Further files beside the weights to copy, such as 'notes/*.txt'. Repeatable.",
        OUTPUT,
        metavar="GLOB",
        unset="files that are known to belong to a model",
    )
    drop_extra: tuple[str, ...] = option(
        (),
        "Tensors of the source to leave out, which its class does not know, such as 'v_head.*'. Repeatable.",
        OUTPUT,
        metavar="NAMES",
        unset="none",
    )
    allow_unchecked: bool = option(
        False, "Publish a result that cannot be checked, and say so in it.", OUTPUT
    )
    force: bool = option(False, "Replace an output that mha2gqa wrote.", OUTPUT, where=(CLI,))
    device: Any = option("auto", "Where the model runs: auto, cpu, cuda, cuda:1, …", ADVANCED, form=str)
    seed: int = option(
        0,
        "Seed of everything random: methods that draw numbers, the order of blocks.",
        ADVANCED,
        range=">= 0, <= 4294967295",
    )
    revision: str | None = option(
        None, "Branch, tag or commit of a model on the Hub.", ADVANCED, metavar="REV", unset="main"
    )
    trust_remote_code: bool = option(False, "Run the model's own code (dangerous).", ADVANCED, where=(CLI,))

    def conflicts(self) -> Iterator[OptionError]:
        """Stages that need text, wide heads of another method, and an empty list of attention kinds."""
        if self.wide > 1 and self.method not in (None, "joint"):
            yield OptionError("wide", f"not possible with method {self.method}", "use method joint")
        if not self.attention:
            yield OptionError("attention", "must name a kind of attention", "use self, cross or both")
        texts = self.calibration if isinstance(self.calibration, list | tuple) else ()
        if len(texts) > 1 and any(isinstance(text, str) and text == GENERATE for text in texts):
            yield OptionError(
                "calibration",
                "generate cannot be combined with other data",
                "give generate, or files, or ./generate for a file",
            )
        if isinstance(self.fit, ReconstructConfig):
            yield from effort_conflicts(self.effort, self.fit)
        if not self.has_text:
            for name in ("refit", "reconstruct"):
                if getattr(self, name):
                    yield OptionError(name, "needs text", "give `calibration`")

    @property
    def fitting(self) -> ReconstructConfig | None:
        """How the fits work, as `effort` and `fit` say; None where neither does."""
        return with_effort(self.effort, self.fit if isinstance(self.fit, ReconstructConfig) else None)

    @property
    def has_text(self) -> bool:
        """Whether there is text to calibrate on."""
        return (
            not (isinstance(self.calibration, list | tuple) and not self.calibration)
            and self.calibration is not None
        )
