"""The bars of a ledger: what was to be reached, what was measured, and whether that is met."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import _ledger
from _markdown import markdown
from _quality_frontier import (
    NOT_RUN,
    RESULTS,
    Rows,
    alike,
    by_configuration,
    gap_of,
    mean_gap,
    on_the_same_seeds,
    spread,
)


def _gap(rows: Rows, bar: Mapping[str, Any]) -> tuple[str, bool | None]:
    (key,), said = alike(rows, bar["row"]) if alike(rows, bar["row"])[0] else ([""], "")
    gap = mean_gap(rows, key)
    return spread(rows.get(key, [])) + said, None if gap is None else gap <= bar["at_most"]


def _two(rows: Rows, bar: Mapping[str, Any]) -> tuple[float, float, str] | None:
    """Two gaps on the same seeds, and what to say of seeds and rates; None where one was not run."""
    keys, said = alike(rows, bar["row"], bar["other"])
    if not keys:
        return None
    ours, theirs = on_the_same_seeds(rows, *keys)
    seeds = f" ({len(ours)} seeds)" if len(ours) > 1 else ""
    return gap_of(ours), gap_of(theirs), f"{seeds}{said}"


def _not_behind(rows: Rows, bar: Mapping[str, Any]) -> tuple[str, bool | None]:
    found = _two(rows, bar)
    if found is None:
        return NOT_RUN, None
    ours, theirs, said = found
    return f"{ours:+.4f} against {theirs:+.4f}{said}", ours <= theirs


def _share(rows: Rows, bar: Mapping[str, Any]) -> tuple[str, bool | None]:
    found = _two(rows, bar)
    if found is None:
        return NOT_RUN, None
    ours, plain, said = found
    share = (plain - ours) / plain
    return f"{share:.0%} of {plain:+.4f}{said}", share >= bar["at_least"]


MEASURES: dict[str, Callable[[Rows, Mapping[str, Any]], tuple[str, bool | None]]] = {
    "gap": _gap,
    "not behind": _not_behind,
    "share taken": _share,
}


def wanted(bar: Mapping[str, Any]) -> str:
    """What a bar asks for."""
    if bar["measure"] == "gap":
        return f"≤ {bar['at_most']:+.3f}" if bar["at_most"] else "≤ 0"
    return f"≥ {bar['at_least']:.0%}" if bar["measure"] == "share taken" else "not behind"


def verdict(rows: Rows, bar: Mapping[str, Any]) -> tuple[str, str]:
    """What was measured, and `met`, `missed` or `not run`."""
    measured, met = MEASURES[bar["measure"]](rows, bar)
    return measured, NOT_RUN if met is None else "met" if met else "**missed**"


def bars(record: Mapping[str, Any]) -> str:
    """The bars of a file with what its ledger measured."""
    ledger = _ledger.record(RESULTS / record["ledger"])
    rows = by_configuration(ledger["entries"])
    lines, verdicts = [], dict[tuple[str, int], list[str]]()
    for bar in record["bars"]:
        measured, said = verdict(rows, bar)
        verdicts.setdefault((bar["name"], bar["groups"]), []).append(said)
        way = bar.get("way", "")
        lines.append(
            [bar["name"], way, f"{ledger['num_kv_heads'] // bar['groups']}:1", wanted(bar), measured, said]
        )
    met = sum(found[0] == "met" for found in verdicts.values())
    other = sum("met" in found for found in verdicts.values()) - met
    none = sum(set(found) == {NOT_RUN} for found in verdicts.values())
    return (
        f"{len(verdicts)} bars: {met} met in the way named first, {other} more in another way, "
        f"{len(verdicts) - met - other - none} missed in every way that was run, {none} not run.\n\n"
        + markdown(["what was to be reached", "way", "", "bar", "measured", ""], lines)
    )
