"""Tables of the probes: shares of right answers of the original, and what results lose of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from _markdown import markdown, measured_on
from _quality_frontier import NOT_RUN, listed


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
    table = [[name, *(_lost(row["results"].get(name)) for row in counted)] for name in names]
    return (
        f"{text}\n\nShare of right answers beside the original's, question by question; bold where it is three standard "
        "errors or more below.\n\n"
        + markdown(["", *map(_probe_name, counted)], table)
        + listed(_losers(counted, names))
    )


def _losers(counted: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """On how many probes each result is below the original by three standard errors, and that the others are not."""
    low = {name: sum(_is_below(row["results"].get(name)) for row in counted) for name in names}
    least = {name: count for name, count in low.items() if count}
    if not least:
        return [
            f"none of the {len(names)} results is below the original by three standard errors on any probe"
        ]
    said = ", ".join(f"{name} on {count}" for name, count in least.items())
    return [
        f"{len(names) - len(least)} of {len(names)} results are below the original by three standard errors on none of "
        f"{len(counted)} probes; below it are {said}"
    ]


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
