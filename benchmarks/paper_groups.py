"""Quality from a sweep beside decoding times from another machine: the third ablation of the GQA paper.

    mha2gqa sweep recipes/paper-groups.yaml --set source=MODEL …          # losses; its result.json
    mha2gqa bench MODEL G8 G4 G2 G1 --json > bench.json                   # times; models of the same shapes
    python benchmarks/paper_groups.py --sweep result.json --bench bench.json --where "CPU, 2 cores" --picture times.svg

A sweep times what it makes itself (`sweep.bench`); this is for losses and times that come from two machines. Times
do not depend on the values of weights, so the models of `bench` need not be trained.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _common import RESULTS, write_json

from mha2gqa.report import standalone
from mha2gqa.report.grids import times_svg

KEPT = (
    *("loss", "perplexity", "bits_per_byte", "tokens", "kv_bytes_per_token", "sha256"),
    *("role", "label", "groups", "method", "alpha"),
)
TIMES = ("milliseconds_per_step", "tokens_per_second")


def joined(swept: Sequence[Mapping[str, Any]], timed: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a sweep with the times of the model whose cache has the same rank in size.

    Args:
        swept: `models` of the sweep; one row for each number of KV heads, the original among them.
        timed: `models` of `bench`.
    """
    times = dict(
        zip(
            sorted({row["kv_bytes_per_token"] for row in swept}),
            sorted(timed, key=lambda row: row["kv_bytes"]),
            strict=True,
        )
    )
    rows = []
    for row in swept:
        found = times[row["kv_bytes_per_token"]]
        own = row.get("decode_milliseconds_per_step")
        rows.append(
            {key: row[key] for key in KEPT if row.get(key) is not None}
            | {f"decode_{key}": found[key] for key in TIMES}
            | ({} if own is None else {"sweep_milliseconds_per_step": own})
        )
    return rows


def picture(rows: Sequence[Mapping[str, Any]]) -> str:
    """The text of an SVG file: time over the number of KV heads."""
    original = next(row for row in rows if row["role"] == "original")
    points = [{**row, "num_kv_heads": row["groups"]} for row in rows if row is not original]
    return standalone(times_svg(points, original))


def main() -> None:
    """Join, write, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sweep", type=Path, required=True, help="result.json of the sweep")
    parser.add_argument("--sweep-command", default="", help="what was typed for it")
    parser.add_argument("--sweep-card", default="", help="where it ran")
    parser.add_argument("--bench", type=Path, required=True, help="what `bench --json` printed")
    parser.add_argument("--where", default="", help="where that ran")
    parser.add_argument("--note", default="")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS / "paper_groups.json")
    args = parser.parse_args()
    swept, timed = (json.loads(path.read_text(encoding="utf-8")) for path in (args.sweep, args.bench))
    rows = joined(swept["models"], timed["models"])
    conditions = ("batch", "context", "new_tokens", "dtype", "device", "versions")
    record = {
        "command": "benchmarks/paper_groups.py",
        "sweep": {"command": args.sweep_command, "hardware": args.sweep_card, "versions": swept["versions"]},
        "bench": {"hardware": args.where} | {key: timed[key] for key in conditions},
        "note": args.note,
        "models": rows,
    }
    write_json(args.out, record)
    if args.picture:
        args.picture.write_text(picture(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
