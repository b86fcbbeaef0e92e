"""What a report says, before it takes a shape: rows, headline, limits. Plain data in, plain data out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config.pair_options import GENERATE
from .cache import cache_sentences
from .generation_scores import (
    generation_cells,
    generation_columns,
    generation_differences,
    generation_metrics,
)
from .numbers import (
    fixed,
    human_bytes,
    human_count,
    number,
    perplexity_text,
    ratio_text,
)
from .text import printable

Row = Mapping[str, Any]
Column = tuple[str, str]  # heading, alignment: "<" or ">"


@dataclass(frozen=True)
class Table:
    """A table before it takes a shape: text for a terminal, Markdown or a page.

    Args:
        columns: Heading and alignment of each column.
        rows: Cells, one for each column.
    """

    columns: Sequence[Column]
    rows: Iterable[Sequence[Any]]


@dataclass(frozen=True)
class Report:
    """Everything a report shows. Only `title`, `source` and `models` are always there.

    Args:
        title: Headline of the page and of the model card.
        source: Path or hub id of the original model.
        models: Rows as in `evaluate`'s `models[]`, original first, each with a `role`
            (`original`, `converted`, `uptrained`); empty where nothing was evaluated. A row with `part` was
            scored on a part of the text and is compared with no other.
        protocol: How the text was scored; stands beside every figure.
        settings: `evaluate`'s `settings{}` (window, stride, BOS policy …).
        data: `evaluate`'s `data{}` (tokens, sha256, paths …).
        num_heads, num_kv_heads: Query heads; KV heads before and after.
        wide: What `wide_heads` says of the result; empty where its heads are plain.
        method: How heads were merged.
        layers: `convert`'s `layers[]`: errors, grouping.
        calibration: `convert`'s `calibration{}`: text, tokens, losses on held-out calibration text.
        budget: `uptrain`'s `budget{}`.
        training: `uptrain`'s `losses{}`, for a card without an evaluation.
        curves: Name -> list of `(tokens, loss)`: `evaluation` is on the text and by the protocol of `models`;
            `training` and `training CE` are terms of the objective on training batches; `held-out` is on the
            validation split of the training run.
        frontier: Points of a sweep: `label`, `method`, `alpha`, `num_kv_heads`, `kv_bytes_per_token`,
            `loss`, `perplexity`, and where decoding was timed `decode_milliseconds_per_step`.
        batch, context: The decoding situation KV-cache sizes are quoted for.
        license: Of the source; None where unknown.
        license_details: `license_name` and `license_link` of a licence that the Hub has no name for.
        datasets: Hub names of text used for calibration or uptraining.
        provenance: Ordered label -> text.
        warnings: What the reader should know about the result.
        auto_class: The class of transformers that loads the result.
        own_code: Whether modelling code travels with the result.
        unread: Whether no data can be read for the result, which is neither scored nor uptrained then.
        recipe: The effective recipe as YAML.
        command: What was typed.
    """

    title: str
    source: str
    models: Sequence[Row]
    protocol: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    num_heads: int | None = None
    num_kv_heads: tuple[int, int] | None = None
    wide: Mapping[str, int] = field(default_factory=dict)
    method: str = ""
    layers: Sequence[Row] = ()
    calibration: Mapping[str, Any] = field(default_factory=dict)
    budget: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    curves: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    frontier: Sequence[Row] = ()
    batch: int = 1
    context: int = 4096
    license: str | None = None
    license_details: Mapping[str, str] = field(default_factory=dict)
    datasets: Sequence[str] = ()
    provenance: Mapping[str, str] = field(default_factory=dict)
    warnings: Sequence[str] = ()
    auto_class: str = "AutoModelForCausalLM"
    own_code: bool = False
    unread: bool = False
    recipe: str = ""
    command: str = ""

    @property
    def wide_text(self) -> str:
        """What its wide heads are; empty where heads are plain."""
        return wide_sentence(self.wide) if self.wide else ""

    @property
    def original(self) -> Row | None:
        """The row every other one is compared with."""
        return next((row for row in self.models if row.get("role") == "original"), None)

    @property
    def final(self) -> Row | None:
        """The last converted or uptrained row: what would be shipped."""
        made = (row for row in reversed(self.models) if row.get("role") != "original")
        return next((row for row in made if not row.get("part")), None)

    @property
    def uptrained(self) -> bool:
        """Whether any result was trained."""
        return bool(self.budget.get("tokens")) or any(is_uptrained(row) for row in self.models)


def is_uptrained(row: Row) -> bool:
    """Whether a row is of an uptrained checkpoint."""
    return row.get("role") == "uptrained" or bool(row.get("alpha"))


COLUMNS: tuple[Column, ...] = (
    ("model", "<"),
    ("loss", ">"),
    ("perplexity", ">"),
    ("vs original", ">"),
    ("bits/byte", ">"),
    ("tokens", ">"),
    ("KV/token", ">"),
)


def model_rows(models: Sequence[Row], decimals: int = 4) -> list[list[str]]:
    """Cells of `COLUMNS` for rows of `models[]`; the first original is the reference.

    Models that count different tokens (another tokenizer) are compared by bits per byte.
    """
    original = next((row for row in models if row.get("role") == "original"), None)
    return [
        [
            name_of(row),
            fixed(row.get("loss"), decimals),
            perplexity_text(row.get("perplexity")),
            "" if row is original or original is None or row.get("part") else compare(row, original),
            fixed(row.get("bits_per_byte"), decimals),
            human_count(row.get("tokens")),
            human_bytes(row.get("kv_bytes_per_token")),
        ]
        for row in models
    ]


def compare(row: Row, original: Row) -> str:
    """Change of perplexity, or of bits per byte where the two models count different tokens.

    Their number may be the same by chance: rows that cannot be compared by tokens have no perplexity.
    """
    rows = (row, original)
    if row.get("tokens") == original.get("tokens") and all(r.get("perplexity") is not None for r in rows):
        return ratio_text(row.get("perplexity"), original.get("perplexity"))
    return f"{ratio_text(row.get('bits_per_byte'), original.get('bits_per_byte'))} (bits/byte)"


def models_table(models: Sequence[Row]) -> Table:
    """The table original / converted / uptrained, with the metrics of what they generated."""
    metrics = generation_metrics(models)
    rows = [
        [*cells, *generation_cells(row, metrics)]
        for row, cells in zip(models, model_rows(models), strict=True)
    ]
    return Table([*COLUMNS, *generation_columns(metrics)], rows)


def becomes(model_type: str, result_type: str) -> str:
    """A model type, and the one the result has where it is another."""
    return model_type if model_type == result_type else f"{model_type} -> {result_type}"


def differences(models: Sequence[Row]) -> list[str]:
    """One sentence for each model that was compared with another unit by unit."""
    found = []
    for row in models:
        test = row.get("paired")
        if test:
            unit = "bits/byte" if row.get("loss") is None else "nats/token"
            difference, low, high = (fixed(test[key], 4, "+") for key in ("difference", "low", "high"))
            found.append(
                f"{name_of(row)}: {difference} {unit} against the original, 95 % interval "
                f"{low} to {high} (paired over {test['units']} documents or blocks)"
            )
        if row.get("kl") is not None:
            share = number(row.get("top1_agreement"))
            found.append(
                f"{name_of(row)}: KL {fixed(row['kl'], 4)} nats/token from the original, the same most likely "
                f"token at {'–' if share is None else f'{share:.1%}'} of positions"
            )
        found += generation_differences(name_of(row), row)
    caches = [
        (name_of(row), row["kv_bytes_per_sequence"]) for row in models if row.get("kv_bytes_per_sequence")
    ]
    return [*found, *cache_sentences(caches)]


def scoring(report_or_result: Any) -> str:
    """How the text was scored, for people: protocol, window, stride, BOS, tokens, hash."""
    get = (
        report_or_result.get
        if isinstance(report_or_result, Mapping)
        else lambda k: getattr(report_or_result, k)
    )
    protocol, settings, data = get("protocol"), get("settings") or {}, get("data") or {}
    parts = [f"protocol {protocol}"] if protocol else []
    parts += [f"{key} {settings[key]}" for key in ("window", "stride") if settings.get(key)]
    parts += [f"BOS: {settings['bos']}"] if settings.get("bos") else []
    written = (settings.get("pairs") or {}).get("targets") == GENERATE
    parts += ["targets that the original wrote"] if written else []
    parts += [f"{data['tokens']:,} tokens"] if data.get("tokens") else []
    parts += [f"sha256 {str(data['sha256'])[:12]}"] if data.get("sha256") else []
    return ", ".join(parts)


def name_of(row: Row) -> str:
    """How a row is called: its label, or role, or path."""
    return printable(str(row.get("label") or row.get("role") or row.get("path") or ""))


def wide_heads(data: Mapping[str, Any]) -> dict[str, int]:
    """`groups`, `wide` and `head_dim` of a result with wide heads, from what `convert` said; else empty."""
    times = data.get("wide") or 1
    if not isinstance(times, int) or times < 2:
        return {}
    return {"groups": data["groups"], "wide": times, "head_dim": data["head_dim"]["after"]}


def wide_sentence(wide: Mapping[str, int]) -> str:
    """What wide heads are, as part of a sentence."""
    return (
        f"{wide['wide']} times as wide (head_dim {wide['head_dim']}), with the cache of GQA-{wide['groups']}"
    )


LOSS_STAGES = ("original", "merged", "refitted", "fitted", "distilled")


def in_order(found: Iterable[str], order: Sequence[str]) -> list[str]:
    """Names in the order of the stages that they belong to; unknown ones behind, as they come."""
    names = list(found)
    return [name for name in order if name in names] + [name for name in names if name not in order]
