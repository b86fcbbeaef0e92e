"""A row of the quality ledger at learning rates other than the tuned one, on the tuning part and on the validation set.

    python benchmarks/quality_at_rate.py --row 'joint/G8/fits300/kd-as[joint/G8/fits/kd-13.6M/seed0]/seed0' --rates 1e-3 2e-3 \\
        --out rates.json --model MODEL --text SHARD.jsonl.xz --valid VALID.jsonl --resume LEDGER.jsonl --any-code …

All other options are those of `quality_ledger.py`. The rows stand in a file of their own: tuning for other rows does not
read them, and a rate is to be chosen by the loss of the tuning part.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import quality_ledger
import transformers
from _common import write_json
from _quality_bench import Bench


def main(words: list[str] | None = None) -> None:
    """Measure the row at each rate; a row for each part and rate is added to `--out`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--row", required=True, help="key of a row of the ledger's plan with an uptraining")
    parser.add_argument("--rates", required=True, type=float, nargs="+", help="peak rates of the uptraining")
    parser.add_argument("--out", type=Path, required=True, help="a JSON file")
    given, rest = parser.parse_known_args(words)
    args = quality_ledger.parse_args(rest)
    plan = {cell.key: cell for cell in quality_ledger.cells_of(args)[1]}
    if given.row not in plan or not plan[given.row].objective:
        parser.error(f"--row {given.row}: no row with an uptraining is planned under this key")
    transformers.utils.logging.disable_progress_bar()
    ledger, bench, cell = quality_ledger.ledger_of(args), Bench(args), plan[given.row]
    record = {"command": "benchmarks/quality_at_rate.py", "rows": []}
    if given.out.exists():
        record = json.loads(given.out.read_text(encoding="utf-8"))
    for rate in given.rates:
        for part in ("tuning", "valid"):
            began = time.monotonic()
            tried = replace(cell, tunes=cell.objective, rate=rate, part=part)
            measured = bench.measure(tried, ledger.entries(), ledger.flops())
            row = quality_ledger.row_of(tried, measured, round(time.monotonic() - began, 1), args, bench)
            record["rows"].append(row)
            write_json(given.out, record)
            quality_ledger.log(f"{row['key']}, {part}: {row['loss']:.4f}")


if __name__ == "__main__":
    main()
