"""Which inputs were tried, by what command and machine, and what came of them: a file that adds up."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mha2gqa.results import versions

Faults = dict[str, dict[str, Any]]


class Ledger:
    """Ranges of inputs, each with the run that tried it.

    Args:
        path: The JSON file; None keeps everything in memory.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        known = json.loads(path.read_text()) if path is not None and path.exists() else {}
        self.runs: list[dict[str, Any]] = known.get("runs", [])
        self.ranges: list[dict[str, Any]] = known.get("ranges", [])
        self._began = time.monotonic()

    def begin(self) -> None:
        """Note a run of this very command."""
        self.runs.append(this_run("tests/fuzz/run.py"))

    def add(self, begin: int, end: int, endings: Mapping[str, int], faults: Faults) -> None:
        """Note what came of inputs `[begin, end)`; what was known of any of them is forgotten."""
        self._forget(begin, end)
        row = {"from": begin, "to": end, "run": len(self.runs) - 1}
        row |= {
            how: sum(n for name, n in endings.items() if name.endswith(f"|{how}"))
            for how in ("ok", "refused")
        }
        self.ranges.append(row | {"faults": faults})
        self.runs[-1]["seconds"] = round(time.monotonic() - self._began)

    def take_over(self, other: Ledger) -> None:
        """Add what another file says; where both know of an input, the other counts."""
        for row in other.ranges:
            self._forget(row["from"], row["to"])
        self.ranges += [row | {"run": row["run"] + len(self.runs)} for row in other.ranges]
        self.runs += other.runs

    def _forget(self, begin: int, end: int) -> None:
        self.ranges = [row for row in self.ranges if row["to"] <= begin or row["from"] >= end]

    def missing(self, begin: int, end: int) -> list[range]:
        """The inputs of `[begin, end)` that were not tried."""
        found = []
        for row in sorted(self.ranges, key=lambda row: row["from"]):
            if row["to"] > begin and row["from"] < end:
                found.append(range(begin, max(begin, row["from"])))
                begin = row["to"]
        return [part for part in (*found, range(begin, max(begin, end))) if part]

    def write(self) -> None:
        """Put the file in place, whole."""
        if self.path is None:
            return
        rows = list(_joined(sorted(self.ranges, key=lambda row: row["from"])))
        used = sorted({row["run"] for row in rows})
        record = {
            "command": self.runs[-1]["command"],
            "inputs": sum(row["to"] - row["from"] for row in rows),
            "kinds of faults": len({name for row in rows for name in row["faults"]}),
            "runs": [self.runs[i] for i in used],
            "ranges": [row | {"run": used.index(row["run"])} for row in rows],
        }
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(record, indent=1) + "\n")
        partial.replace(self.path)


def this_run(script: str) -> dict[str, Any]:
    """Command line (paths shortened to their names), day, machine and versions of what is running."""
    words = [Path(word).name if os.sep in word else word for word in sys.argv[1:]]
    return {
        "command": " ".join(["python", script, *words]),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": {"cpu": _processor(), "cores": os.cpu_count()},
        "versions": versions(),
    }


def _joined(rows: Iterable[Mapping[str, Any]]) -> Iterable[dict[str, Any]]:
    """Neighbours of one run without faults, as one."""
    last: dict[str, Any] | None = None
    for row in rows:
        if (
            last
            and last["to"] == row["from"]
            and last["run"] == row["run"]
            and not (last["faults"] or row["faults"])
        ):
            last |= {
                "to": row["to"],
                "ok": last["ok"] + row["ok"],
                "refused": last["refused"] + row["refused"],
            }
            continue
        if last:
            yield last
        last = dict(row)
    if last:
        yield last


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
