"""A ledger of `quality_ledger.py` and `quality_floor.py` (JSON lines) in the form of a file of `quality.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from _loss_tables import label
from _quality_cells import OVER, Cell
from _quality_rates import rates_of

# What a fit of `_quality_cells.FITS` is called, as a variant of `quality.py`.
VARIANTS = {
    "merged": "merged",
    "refit": "refit",
    "fits": "refit+reconstruct",
    "fits100": "refit+reconstruct+100 steps",
    "fits300": "refit+reconstruct+300 steps",
    "fits1340": "refit+reconstruct+1,340 steps",
    "layer03": "refit+reconstruct+whole layers",
    "layer": "refit+reconstruct+whole layers, rest at 0.1",
    "layer30": "refit+reconstruct+whole layers, rest at 0.3",
    "e2e": "refit+reconstruct+distill",
}
SCRATCH = "trained from scratch with G heads"
KEPT = ("groups", "seed", "loss", "kl", "unique_tokens", "token_visits", "flops")


def record(path: Path) -> dict[str, Any]:
    """The rows of the table, the runs that measured them, and the protocol.

    Args:
        path: The ledger. Of several rows with one key and the same rates the last counts; a row whose rates are not
            those that the tuning rows choose says so (`at_rate`), and is a row of its own. `tuning` has the tuning rows.

    Raises:
        StopIteration: It holds no row of the original.
    """
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = [entry for entry in lines if "error" not in entry]
    tuned = {entry["key"]: entry for entry in found if entry.get("tunes")}
    last = {(entry["key"], _at_rate(entry, tuned)): entry for entry in found if entry["part"] == "valid"}
    table = [entry | ({"at_rate": rate} if rate else {}) for (_, rate), entry in last.items()]
    entries = {entry["key"]: entry for entry in found}
    original = next(
        e for e in table if e["start"] == "original" and not (e.get("objective") or e.get("cache"))
    )
    # One table for all cards and states of the code: a ledger is filled over months, and its lines name both.
    cards = " and ".join(sorted({entry["gpu"] for entry in table}))
    runs = [{"hardware": {"gpu": cards}, "versions": {}}]
    rows = [_row(entry, entries) | {"run": 0, "gap": entry["loss"] - original["loss"]} for entry in table]
    return {
        "model": original["model"],
        "num_kv_heads": original["groups"],
        "protocol": {
            "name": "blocks",
            "window": original["window"],
            "tokens": original["blocks"] * original["window"],
            "dtype": "float32",
        },
        "runs": runs,
        "rows": rows,
        "entries": table,
        "tuning": list(tuned.values()),
    }


def _at_rate(entry: dict[str, Any], tuned: dict[str, dict[str, Any]]) -> str:
    """`rate 0.001` where an entry was not made at the rates that tuning chose, else nothing; so where none were tuned."""
    if not tuned:
        return ""
    chosen = rates_of(Cell.of(entry), tuned)
    other = {kind: rate for kind, rate in entry.get("rates", chosen).items() if rate != chosen.get(kind)}
    names = {kind: "fit rate" if kind == "fit" else "rate" for kind in other}
    return ", ".join(f"{names[kind]} {rate:g}" for kind, rate in other.items())


def _row(entry: dict[str, Any], entries: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One line as a row of `quality.py`."""
    start = SCRATCH if entry["start"] == "scratch" else entry["start"]
    variant = VARIANTS.get(entry.get("fit", ""), entry.get("fit", ""))
    if entry.get("text"):
        variant += f"+{entry['text']}" if entry["text"] != "calibration" else ""
    if entry.get("wide", 1) > 1:
        start += f", wide heads R={entry['wide']}"
    if entry.get("cache"):
        start += f", {entry['cache']} cache"
    row = {key: entry[key] for key in KEPT if key in entry}
    row |= {
        "stage": "uptrain" if entry.get("objective") else "convert",
        "method": f"{start}+{entry['objective']}" if entry.get("objective") else start,
        "variant": variant,
        "seconds": entry["wall_seconds"],
    }
    if entry.get("tokens"):
        row["tokens"] = entry["tokens"]
    if entry.get("over"):
        row["over"] = OVER[entry["over"]][1]
    if entry.get("batch"):
        row["step_tokens"] = entry["batch"]
    if entry.get("at_rate"):
        row["at_rate"] = entry["at_rate"]
    if other := entries.get(entry.get("equal_to", "")):
        row["as_much_as"] = label(_row(other, entries))
    return row
