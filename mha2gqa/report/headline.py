"""What a report says of its figures: the sentence on top, figures worth a glance, and what the figures do not show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .content import LOSS_STAGES, Report, Row, compare, in_order, name_of
from .numbers import finite, fixed, human_bytes, human_count, perplexity_text, significant


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


def limits(report: Report) -> list[str]:
    """What the figures do not show. Stated in every report."""
    if report.unread:
        return ["Nothing of it was scored: hold what it writes against the original.", _arithmetic(report)]
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
            "No uptraining was done; a small budget on the model's own kind of text may lower the loss further."
        )
    return out


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
