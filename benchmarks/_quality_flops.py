"""Where a FLOP goes: steps of fits against distillation, beside mean pooling, for the same FLOPs and on the same tokens."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import _ledger
from _markdown import markdown, measured_on
from _quality_cells import Cell
from _quality_frontier import NOT_RUN, RESULTS, Rows, at_any_rate, by_configuration, key_of, spread
from _quality_summaries import LARGE, SIZES, SMALL

STEPS = {"refit": "no steps", "fits100": "100 steps", "fits300": "300 steps", "fits": "1,000 steps"}


def ways(groups: int, tokens: int) -> dict[str, Cell]:
    """Mean pooling and `joint` with so many steps of fits, each distilled for the FLOPs of the last on `tokens`."""
    plain = Cell("joint", groups, "fits", objective="kd", tokens=tokens)
    shorter = replace(plain, tokens=0, equal_to=plain.key)
    found = {"mean pooling": replace(shorter, start="mean", fit="merged")}
    found |= {f"joint, {name}": replace(shorter, fit=fit) for fit, name in STEPS.items() if fit != "fits"}
    return found | {f"joint, {STEPS['fits']}": plain}


def against_mean(record: Mapping[str, Any]) -> str:
    """Gap and closeness of every share of fits and distillation for the FLOPs of 1,000 steps and 2.71M tokens."""
    rows, heads = by_configuration(record["entries"]), record["num_kv_heads"]
    names = list(ways(SIZES[0], SMALL))
    parts = []
    for title, figure in (("Gap to the original.", "gap"), ("KL to the original.", "kl")):
        lines = []
        for g in SIZES:
            found = [rows.get(key_of(cell), []) for cell in ways(g, SMALL).values()]
            lines.append([f"{heads // g}:1", *(_figure(those, figure) for those in found)])
        parts.append(f"{title}\n\n{markdown(['', *names], lines)}")
    cells = ways(SIZES[1], SMALL).values()
    read = [
        f"{rows[key_of(c)][0]['unique_tokens'] / 1e6:.1f}M" if key_of(c) in rows else NOT_RUN for c in cells
    ]
    plain = (key_of(ways(g, SMALL)[names[-1]]) for g in SIZES)
    flops = [rows[key][0]["flops"] for key in plain if key in rows]
    about = (
        f"All distilled, for the FLOPs of 1,000 steps of fits and 2.71M tokens: {min(flops) / 1e15:.1f}e15 to "
        f"{max(flops) / 1e15:.1f}e15. Unique tokens at {heads // SIZES[1]}:1, in the order of the columns: {', '.join(read)}."
    )
    return "\n\n".join([about, *parts])


def _figure(rows: Sequence[Mapping[str, Any]], name: str) -> str:
    """The gap with its spread, or the mean KL."""
    if name == "gap" or not rows:
        return spread(rows)
    return f"{statistics.mean(row[name] for row in rows):.3f}"


def shorter_fits(record: Mapping[str, Any]) -> str:
    """300 steps of fits beside 1,000 on the same tokens of uptraining: gaps and FLOPs."""
    rows, heads = by_configuration(record["entries"]), record["num_kv_heads"]
    budgets = {
        f"{name} {tokens / 1e6:.3g}M": {"objective": objective, "tokens": tokens}
        for objective, name in (("kd", "distilled on"), ("mix", "half text, on"))
        for tokens in (SMALL, LARGE)
    }
    lines = []
    for g in SIZES:
        for fit in ("fits300", "fits"):
            cells = [replace(Cell("joint", g, fit), **words) for words in budgets.values()]  # type: ignore[arg-type]
            flops = (f"{rows[key_of(c)][0]['flops'] / 1e15:.1f}e15" for c in cells if key_of(c) in rows)
            gaps = [at_any_rate(rows, key_of(cell)) for cell in cells]
            lines.append([f"{heads // g}:1", STEPS[fit], *gaps, " to ".join(_ends(list(flops)))])
    return f"Gap to the original.\n\n{markdown(['', 'fits', *budgets, 'FLOPs'], lines)}"


def _ends(values: Sequence[str]) -> list[str]:
    """The least and the largest, once where they are the same."""
    return sorted({min(values), max(values)}, key=values.index) if values else [NOT_RUN]


def larger_budget(record: Mapping[str, Any]) -> str:
    """Ways to spend the FLOPs of 1,000 steps and 13.6M tokens: rows of the ledger, and the same at further rates."""
    ledger = _ledger.record(RESULTS / "quality_ledger.jsonl")
    rows, heads = by_configuration(ledger["entries"]), ledger["num_kv_heads"]
    lines = []
    for g in SIZES[:2]:
        for name, cell in ways(g, LARGE).items():
            found = [
                *_of_the_ledger(rows, cell),
                *_further(record["rows"], cell, rows[f"original/G{heads}"][0]["loss"]),
            ]
            for rate, row, tuning in sorted(found, key=lambda run: run[0]):
                figures = [f"{row['gap']:+.4f}", f"{row['kl']:.3f}", f"{row['unique_tokens'] / 1e6:.1f}M"]
                flops = f"{row['flops'] / 1e15:.1f}e15"
                lines.append([f"{heads // g}:1", name, f"{rate:g}", tuning, *figures, flops])
    return markdown(
        ["", "distilled after", "rate", "loss, tuning part", "gap", "KL", "unique tokens", "FLOPs"], lines
    )


_Run = tuple[float, Mapping[str, Any], str]  # rate, row, loss of the tuning part


def _of_the_ledger(rows: Rows, cell: Cell) -> Iterator[_Run]:
    for key, found in rows.items():
        if key == key_of(cell) or key.startswith(f"{key_of(cell)} at "):
            yield found[0]["rates"]["kd"], found[0], ""


def _further(extra: Sequence[Mapping[str, Any]], cell: Cell, original: float) -> Iterator[_Run]:
    tuning = {row["key"]: row["loss"] for row in extra if row["part"] == "tuning"}
    for row in extra:
        if row["part"] == "valid" and key_of(
            replace(Cell.of(row), tunes="", rate=0.0, part="valid")
        ) == key_of(cell):
            yield row["rate"], {**row, "gap": row["loss"] - original}, f"{tuning[row['key']]:.4f}"


def windows(record: Mapping[str, Any]) -> str:
    """Gaps after fits by the window of calibration, beside the rows of the ledger."""
    ledger = _ledger.record(RESULTS / "quality_ledger.jsonl")
    rows, heads = by_configuration(ledger["entries"]), ledger["num_kv_heads"]
    long, gaps = ledger["protocol"]["window"], window_gaps(record, rows, heads)
    lines = []
    for row, short in zip(record["rows"], gaps.values(), strict=True):
        fits = rows[f"joint/G{row['groups']}/fits"]
        usual = next(found["gap"] for found in fits if found["seed"] == record["seed"])
        lines.append(
            [f"{heads // row['groups']}:1", f"{short:+.4f}", f"{usual:+.4f}", f"{short / usual:.1f}"]
        )
    shorter = record["rows"][0]["window"]
    head = ["gap after fits", f"windows of {shorter:,}", f"of {long:,}", "times the gap"]
    return f"{markdown(head, lines)}\n\nMeasured on: {measured_on(record['provenance'])}."


def window_gaps(record: Mapping[str, Any], rows: Rows, num_kv_heads: int) -> dict[str, float]:
    """Gaps after fits on other windows, by what the probes call these conversions.

    Args:
        record: `quality_windows.json`.
        rows: Of the ledger.
        num_kv_heads: Of the original.
    """
    original = rows[f"original/G{num_kv_heads}"][0]["loss"]
    return {
        f"GQA-{row['groups']}, fits on windows of {row['window']}": row["loss"] - original
        for row in record["rows"]
    }


def rates_tried(record: Mapping[str, Any]) -> str:
    """Every rate that was tried on the tuning part, the best of each kind in bold."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in record.get("tuning", ()):
        kind = row["start"], row["groups"], row.get("wide", 1), row["tunes"], row.get("fit", "")
        groups.setdefault((*kind, row.get("batch", 0)), []).append(row)
    lines = []
    for (start, g, wide, tunes, fit, batch), found in groups.items():
        best = min(found, key=lambda row: row["loss"])
        tried = sorted(found, key=lambda row: row["rate"])
        losses = (f"**{r['loss']:.4f}**" if r is best else f"{r['loss']:.4f}" for r in tried)
        form = f"{start}, GQA-{g}" + (f", wide R={wide}" if wide > 1 else "") + (f", {fit}" if fit else "")
        kind = KINDS[tunes] + (f", steps of {batch:,}" if batch else "")
        said = ", ".join(f"{row['rate']:g}: {loss}" for row, loss in zip(tried, losses, strict=True))
        lines.append([form, kind, said])
    if not lines:
        return ""
    return "Rates tried, by loss on the tuning part.\n\n" + markdown(["", "rate of", "rate: loss"], lines)


KINDS = {
    "fit": "fits",
    "e2e": "`distill_steps`",
    "kd": "distillation",
    "mix": "half distillation, half text",
    "ce": "next-token loss",
}
