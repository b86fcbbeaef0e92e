"""Tables of what the slow suites have tried: `tests/fuzz/run.py` and `tests/kills/run.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from _markdown import markdown, measured_on


def fuzz(record: Mapping[str, Any]) -> str:
    """How many inputs each machine has tried, and what came of them."""
    lines, machines = [], [measured_on(run) for run in record["runs"]]
    for machine in dict.fromkeys(machines):
        rows = [row for row in record["ranges"] if machines[row["run"]] == machine]
        tried = sum(row["to"] - row["from"] for row in rows)
        counts = [tried, *(sum(row[how] for row in rows) for how in ("ok", "refused")), _faulty(rows)]
        lines.append([machine, *(f"{count:,}" for count in counts)])
    found = sorted({name for row in record["ranges"] for name in row["faults"]})
    said = "".join(f"\n- {name}" for name in found)
    return f"{record['inputs']:,} inputs, {record['kinds of faults']} kinds of faults.{said}\n\n" + markdown(
        ["machine", "inputs", "right results", "refused", "faults"], lines
    )


def _faulty(rows: list[Mapping[str, Any]]) -> int:
    return sum(fault["count"] for row in rows for fault in row["faults"].values())


def kills(record: Mapping[str, Any]) -> str:
    """Of each command, how many trials of each kind there were; `n of m` where some were not clean."""
    kinds = sorted({kind for cells in record["jobs"].values() for kind in cells})

    def cell(cells: Mapping[str, Mapping[str, int]], kind: str) -> str:
        if kind not in cells:
            return ""
        tried, clean = cells[kind]["tried"], cells[kind]["clean"]
        return f"{tried}" if tried == clean else f"{clean} of {tried}"

    lines = [[f"`{job}`", *(cell(cells, kind) for kind in kinds)] for job, cells in record["jobs"].items()]
    wrong = "".join(
        f"\n- {row['job']}, {row['act']} before {row['event']}: {row['what']}" for row in record["wrong"]
    )
    return (
        f"{record['clean']:,} of {record['tried']:,} trials clean: a whole result or none, the same command again gives "
        f"the right weights, nothing is left.{wrong}\n\nMeasured on: {measured_on(record)}.\n\n"
        + markdown(["command", *kinds], lines)
    )
