"""The results file of the quality table: rows by key, and what they are comparable with."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from _common import provenance, write_json
from _quality_rows import Row


class Table:
    """The results file: rows by key, runs that measured them, written after each row."""

    def __init__(
        self, args: argparse.Namespace, protocol: dict[str, Any], num_kv_heads: int, device: str
    ) -> None:
        self.path: Path = args.out
        self.device = device
        name = Path(args.model).name
        self.record: dict[str, Any] = {
            "schema_version": 1,
            "command": "benchmarks/quality.py",
            "model": name,
            "num_kv_heads": num_kv_heads,
            "protocol": protocol,
            "runs": [],
            "rows": [],
        }
        self.rows: dict[str, dict[str, Any]] = {}
        for path in [args.out, *args.resume]:
            if path.exists():
                self._take(path, json.loads(path.read_text()))
        self.run = len(self.record["runs"])

    def _take(self, path: Path, other: dict[str, Any]) -> None:
        """Rows of another file that are not known yet, with the runs that measured them."""
        if any(other[key] != self.record[key] for key in ("model", "protocol")):
            sys.exit(f"{path}: holds rows of another model or protocol; choose another --out")
        new = [row for row in other["rows"] if row["key"] not in self.rows]
        for run in sorted({row["run"] for row in new}):
            self.record["runs"].append(other["runs"][run])
            for row in (row for row in new if row["run"] == run):
                self.rows[row["key"]] = row | {"run": len(self.record["runs"]) - 1}
        self.record["rows"] = list(self.rows.values())

    def add(self, row: Row, measured: dict[str, Any]) -> dict[str, Any]:
        """Append a row (with its gap to the original on the same tokens) and write the file."""
        entry = row.to_dict() | {k: _rounded(v) for k, v in measured.items()}
        original = next((r["loss"] for r in self.record["rows"] if r["method"] == "original"), entry["loss"])
        if row.stage != "tune":
            entry["gap"] = round(entry["loss"] - original, 5)
        if self.run == len(self.record["runs"]):
            self.record["runs"].append(provenance(self.device))
        entry["run"] = self.run
        self.rows[row.key] = entry
        self.record["rows"].append(entry)
        self.write()
        return entry

    def write(self) -> None:
        """The file as it stands."""
        write_json(self.path, self.record)

    def chosen_rate(self, row: Row, default: float) -> float:
        """The rate with the lowest loss on the held-out side of the training text.

        Of this recipe at this G and alpha, or, where that was not tuned, at the nearest G and alpha that was.
        """
        recipe = ("tune", row.method, row.variant)
        tuned = [r for r in self.rows.values() if (r["stage"], r["method"], r.get("variant", "")) == recipe]
        if not tuned:
            return default

        def distance(r: dict[str, Any]) -> tuple[float, float, float]:
            return abs(r["alpha"] - (row.alpha or 0.0)), abs(math.log(r["groups"] / row.groups)), r["loss"]

        return min(tuned, key=distance)["lr"]

    def estimate(self, row: Row) -> float:
        """Seconds that a row like this one took before; 0 where there was none."""
        like = [
            r["wall_seconds"]
            for r in self.rows.values()
            if (r["stage"], r.get("variant"), r.get("alpha")) == (row.stage, row.variant or None, row.alpha)
        ]
        return max(like, default=0.0)


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value
