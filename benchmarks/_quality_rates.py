"""The rates that a ledger's rows use: those of least loss on the tuning part."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from _quality_cells import DEFAULT_RATES, PLAIN_FITS, Cell

Entries = Mapping[str, Mapping[str, Any]]  # finished rows by key


def chosen_rate(cell: Cell, kind: str, entries: Entries) -> float:
    """The rate of least loss on the tuning part: of this start, at the nearest G that was tuned.

    Wide heads take the rate of wide heads, if one was tuned, and steps of another size that of such steps. A start that
    was not tuned takes the default.
    """
    if cell.tunes == kind:
        return cell.rate
    tuned = [
        e for e in entries.values() if e.get("tunes") == kind and e["start"] == cell.start and "loss" in e
    ]
    if kind == "fit":
        tuned = [e for e in tuned if _way(e.get("fit", "")) == _way(cell.fit)]
    if not tuned:
        return DEFAULT_RATES[kind]
    tuned = [e for e in tuned if e.get("batch", 0) == _batch(cell, kind)] or tuned
    alike = [e for e in tuned if (e.get("wide", 1) > 1) == (cell.wide > 1)] or tuned
    return min(alike, key=lambda e: (abs(math.log(e["groups"] / cell.groups)), e["loss"]))["rate"]


def _way(fit: str) -> str:
    """What has a rate of fits of its own."""
    return "" if fit in PLAIN_FITS else fit


def _batch(cell: Cell, kind: str) -> int:
    """Tokens per step where a rate depends on them."""
    return cell.batch if kind == cell.objective else 0


def rates_pending(
    cell: Cell, cells: Sequence[Cell], entries: Entries, failed: set[str], plan: Sequence[Cell] = ()
) -> bool:
    """Whether a rate that `cell` uses is still being tuned by `cells`, or was never tuned though `plan` does."""
    kinds = set(cell.kinds) - {cell.tunes}
    if cell.tunes:  # a rate is tuned on top of those before it
        kinds &= {"fit"} if cell.tunes in ("kd", "e2e") else set()

    def left(kind: str, those: Sequence[Cell]) -> tuple[list[Cell], list[Cell]]:
        wanted = kind, cell.start, cell.wide > 1, _batch(cell, kind)
        alike = [c for c in those if (c.tunes, c.start, c.wide > 1, c.batch) == wanted]
        alike = [c for c in alike if kind != "fit" or _way(c.fit) == _way(cell.fit)]
        return alike, [c for c in alike if c.key not in entries and c.key not in failed]

    for kind in kinds:
        all_of_it, missing = left(kind, plan)
        if left(kind, cells)[1] or (all_of_it and missing == all_of_it):
            return True
    return False


def rates_of(cell: Cell, entries: Entries) -> dict[str, float]:
    """The rate of each kind of training that a cell uses."""
    return {kind: chosen_rate(cell, kind, entries) for kind in cell.kinds}


def superseded(entries: Entries) -> set[str]:
    """Keys of rows of the table whose rates are not those that the tuning rows choose by now."""
    table = [entry for entry in entries.values() if not entry.get("tunes")]
    return {e["key"] for e in table if "rates" in e and e["rates"] != rates_of(Cell.of(e), entries)}
