"""Tables of the probes: shares of right answers of the original, and what results lose of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import _ledger
from _markdown import markdown, measured_on
from _quality_cells import Cell
from _quality_flops import window_gaps
from _quality_frontier import NOT_RUN, RESULTS, by_configuration, gap_of, listed, row_name


def probes(record: Mapping[str, Any]) -> str:
    """Shares of right answers of the original, then what each result loses of them where the probe counts."""
    rows = record["rows"]
    lines = [
        [
            _probe_name(row),
            f"{row['original']:.1%} ± {row['standard_error']:.1%}",
            "yes" if row["counts"] else "no",
        ]
        for row in rows
    ]
    counted = [row for row in rows if row["counts"]]
    text = (
        f"`{record['model']}`, {rows[0]['texts']:,} texts of each kind and length, every question a choice among "
        f"{record['choices']} tokens (chance {1 / record['choices']:.1%}). {len(counted)} of {len(lines)} probes count: the "
        "original is at least three standard errors above chance (its own or those of single guesses, the larger).\n\n"
        f"Measured on: {measured_on(record['provenance'])}.\n\n"
        + markdown(["probe", "original", "counts"], lines)
    )
    names = list(dict.fromkeys(name for row in counted for name in row["results"]))
    if not names:
        return f"{text}\n\nOnly the original has answered: no conversion was asked."
    gaps = _gaps(record["model"])
    table = [
        [name, *_gap(gaps, name), *(_lost(row["results"].get(name)) for row in counted)] for name in names
    ]
    head = ["", *(["gap in loss"] if gaps else []), *map(_probe_name, counted)]
    return (
        f"{text}\n\nShare of right answers beside the original's, question by question; bold where it is three standard "
        f"errors or more below.\n\n{markdown(head, table)}" + listed(_losers(counted, names, gaps))
    )


def _gaps(model: str) -> dict[str, float]:
    """Gaps in loss to an original by the names of rows, means over seeds; empty where it has no ledger."""
    ledger = _ledger.record(RESULTS / "quality_ledger.jsonl")
    if ledger["model"] != model:
        return {}
    rows = by_configuration(ledger["entries"])
    gaps = {
        row_name(Cell.of(found[0])): gap_of(found)
        for found in rows.values()
        if found[0].get("fit") == "fits" and not (found[0].get("equal_to") or found[0].get("at_rate"))
    }
    windows = RESULTS / "quality_windows.json"
    if not windows.exists():
        return gaps
    return gaps | window_gaps(json.loads(windows.read_text(encoding="utf-8")), rows, ledger["num_kv_heads"])


def _gap(gaps: Mapping[str, float], name: str) -> list[str]:
    """A cell with the gap in loss of a result; none without a ledger."""
    return ([f"{gaps[name]:+.4f}"] if name in gaps else [NOT_RUN]) if gaps else []


def _losers(
    counted: Sequence[Mapping[str, Any]], names: Sequence[str], gaps: Mapping[str, float]
) -> list[str]:
    """On how many probes results are below the original by three standard errors, and which of them have a lower loss."""
    low = {name: sum(_is_below(row["results"].get(name)) for row in counted) for name in names}
    if not any(low.values()):
        return [
            f"none of the {len(names)} results is below the original by three standard errors on any probe"
        ]
    by_count: dict[int, list[str]] = {}
    for name in names:
        by_count.setdefault(low[name], []).append(name)
    said = [f"{count or 'none'}: {'; '.join(by_count[count])}" for count in sorted(by_count, reverse=True)]
    sentences = [
        f"three standard errors below the original, of {len(counted)} probes, on {'. On '.join(said)}"
    ]
    better = [f"{name}, on {low[name]}" for name in names if low[name] and gaps.get(name, 0) < 0]
    return sentences + [f"of a lower loss than the original, and below it: {'; '.join(better)}"] * bool(
        better
    )


def _probe_name(row: Mapping[str, Any]) -> str:
    return f"{row['probe']}, {row['length']:,} tokens"


def _lost(result: Mapping[str, float] | None) -> str:
    """`-1.5% ± 0.8%`, in bold where that is more than chance."""
    if result is None:
        return NOT_RUN
    mark = "**" if _is_below(result) else ""
    return f"{mark}{0 - result['lost']:+.1%} ± {result['standard_error']:.1%}{mark}"


def _is_below(result: Mapping[str, float] | None) -> bool:
    """Whether a result is below the original by three standard errors."""
    return result is not None and result["lost"] >= 3 * result["standard_error"] > 0
