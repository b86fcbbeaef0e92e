"""What a report says, before it takes a shape: rows, headline, limits. Plain data in, plain data out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .cache import cache_sentences
from .generation_scores import (
    generation_cells,
    generation_columns,
    generation_differences,
    generation_metrics,
)
from .numbers import (
    finite,
    fixed,
    human_bytes,
    human_count,
    number,
    perplexity_text,
    ratio_text,
    significant,
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
    parts += [f"{data['tokens']:,} tokens"] if data.get("tokens") else []
    parts += [f"sha256 {str(data['sha256'])[:12]}"] if data.get("sha256") else []
    return ", ".join(parts)


def name_of(row: Row) -> str:
    """How a row is called: its label, or role, or path."""
    return printable(str(row.get("label") or row.get("role") or row.get("path") or ""))


def best_rows(models: Sequence[Row]) -> list[Row]:
    """Of a sweep's rows, the one of least loss at each number of KV heads; nothing for other reports."""
    best: dict[int, Row] = {}
    for row in models:
        groups, loss = row.get("groups"), finite(row.get("loss"))
        if groups is None or loss is None:
            continue
        if groups not in best or loss < best[groups]["loss"]:
            best[groups] = row
    return [best[groups] for groups in sorted(best, reverse=True)]


def headline(report: Report) -> str:
    """One sentence that says what was gained and what it costs, in measured figures only."""
    original, final = report.original, report.final
    if not report.models:
        return _unevaluated(report)
    if original is not None and (best := best_rows(report.models)):
        found = (
            f"{name_of(row)}: {perplexity_text(row.get('perplexity'))} ({compare(row, original)})"
            for row in best
        )
        start = f"Perplexity {perplexity_text(original.get('perplexity'))} before"
        return f"{start}; best of {len(report.models) - 1} results at each G: {'; '.join(found)}."
    if original is None or final is None:
        return f"{len(report.models)} model(s) evaluated on the same text."
    cost = compare(final, original)
    stage = "uptraining" if final.get("role") == "uptrained" else "conversion, without any training"
    before, after = original.get("kv_bytes_per_token"), final.get("kv_bytes_per_token")
    cache = f"The KV cache is {significant(before / after)}× smaller" if before and after else "Converted"
    figures = f"{perplexity_text(original.get('perplexity'))} → {perplexity_text(final.get('perplexity'))}"
    return f"{cache}; perplexity {figures} ({cost}) after {stage}."


def _unevaluated(report: Report) -> str:
    """The same where no text was scored: what is known from the conversion alone."""
    parts = [f"merged by method {report.method}"] if report.method else []
    if found := calibration_losses(report.calibration):
        parts.append(found)
    if report.budget.get("tokens"):
        alpha = report.budget.get("alpha")
        share = f" (alpha {significant(alpha)})" if alpha else ""
        parts.append(f"uptrained on {human_count(report.budget['tokens'])} tokens{share}")
    parts += [
        f"{name} {fixed(first, 4)} → {fixed(last, 4)}"
        for name, first, last in training_losses(report.training)
    ]
    text = "; ".join([*parts, "not evaluated yet"])
    return f"{text[0].upper()}{text[1:]}."


def calibration_losses(calibration: Row) -> str:
    """The losses that a calibrated conversion measured on text it held out, in the order of the stages."""
    losses = calibration.get("losses") or {}
    figures = ", ".join(f"{stage} {fixed(losses[stage], 4)}" for stage in in_order(losses, LOSS_STAGES))
    return f"loss on held-out calibration text: {figures}" if figures else ""


def training_losses(losses: Row) -> Iterator[tuple[str, Any, Any]]:
    """First and last loss of whatever a run scored while it trained: name, first, last."""
    if measured := losses.get("evaluation"):
        yield "evaluation loss", measured[0]["loss"], measured[-1]["loss"]
    start, end = losses.get("held_out_start"), losses.get("held_out_end")
    if start is not None and end is not None:
        yield "validation loss", start, end


LOSS_STAGES = ("original", "merged", "refitted", "fitted", "distilled")


def in_order(found: Iterable[str], order: Sequence[str]) -> list[str]:
    """Names in the order of the stages that they belong to; unknown ones behind, as they come."""
    names = list(found)
    return [name for name in order if name in names] + [name for name in names if name not in order]


def tiles(report: Report) -> list[tuple[str, str, str]]:
    """Figures worth a glance: (value, what it is, detail)."""
    original, final = report.original, report.final
    if original is None or final is None:
        return []
    if best := best_rows(report.models):
        return [(compare(row, original), name_of(row), "perplexity, best at this G") for row in best]
    out = [(compare(final, original), "perplexity against the original", report.protocol)]
    before, after = original.get("kv_bytes_per_token"), final.get("kv_bytes_per_token")
    if before and after:
        detail = _cache_sizes(report, original, final)
        out.append((f"{significant(before / after)}×", "smaller KV cache", detail))
    if report.num_kv_heads:
        was, now = report.num_kv_heads
        grouped = f"groups of {was // now}, method {report.method or 'unknown'}"
        wide = f"; {report.wide_text}" if report.wide else ""
        out.append((f"{was} → {now}", "KV heads", grouped + wide))
    if report.budget.get("tokens"):
        alpha = report.budget.get("alpha")
        share = f"alpha {significant(alpha)}" if alpha else "share of the original budget unknown"
        out.append((human_count(report.budget["tokens"]), "uptraining tokens", share))
    return out


def _cache_sizes(report: Report, original: Row, final: Row) -> str:
    """Bytes of the cache before and after: of a sequence of an encoder-decoder, of a batch at a context else."""
    caches = [row.get("kv_bytes_per_sequence") for row in (original, final)]
    if all(caches):
        sizes = (human_bytes(cache["self"] + cache["cross"]) for cache in caches if cache)
        return f"{' → '.join(sizes)} a sequence"
    total = report.batch * report.context
    sizes = (human_bytes(row["kv_bytes_per_token"] * total) for row in (original, final))
    return f"{' → '.join(sizes)} at batch {report.batch} × {report.context:,}"


def limits(report: Report) -> list[str]:
    """What the figures do not show. Stated in every report."""
    out = [
        "Perplexity on held-out text does not measure every ability: long contexts, retrieval, other "
        "languages and chat behaviour need their own tests.",
        _arithmetic(report),
    ]
    if not report.models:
        out.insert(0, "No text was scored beside the calibration text: see mha2gqa evaluate.")
    elif worse := _worse_than_original(report):
        out.insert(0, worse)
    if not report.uptrained:
        out.append(
            "No uptraining was done; a small budget on the model's own kind of text lowers the loss further."
        )
    return out


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


def _arithmetic(report: Report) -> str:
    """What decoding costs beside memory."""
    shrinks = "what shrinks is the KV cache and the memory traffic of decoding."
    if report.wide:
        times = report.wide["wide"]
        return f"Query and output projections, and the arithmetic of attention, are {times} times as large; {shrinks}"
    return f"FLOPs per token are unchanged; {shrinks}"


def _worse_than_original(report: Report) -> str:
    """The sentence about results that lost something, empty where none did."""
    original, final, best = report.original, report.final, best_rows(report.models)
    if original is None or final is None:
        return ""
    worse = [row for row in best or [final] if _worse(row, original)]
    if not worse:
        return ""
    if not best:
        return "The result is worse than the original on this text: see the table."
    if len(worse) == len(best):
        return "Every result is worse than the original on this text: see the table."
    names = ", ".join(str(row["groups"]) for row in worse)
    return f"At G = {names} every result is worse than the original on this text: see the table."


def _worse(row: Row, original: Row) -> bool:
    ours, theirs = (finite(r.get("bits_per_byte", r.get("loss"))) for r in (row, original))
    return ours is None or theirs is None or ours > theirs
