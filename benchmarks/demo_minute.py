"""The demo as a new user runs it, on two cores: its table, and how long it took.

    python benchmarks/demo_minute.py --out benchmarks/results/demo.json

Run it on an idle machine: `load_average_before` in the result says whether it was.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _common import provenance, write_json


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cores", type=int, default=2)
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[: args.cores]
    os.sched_setaffinity(0, cores)
    before = os.getloadavg()[0]
    env = os.environ | {"OMP_NUM_THREADS": str(len(cores)), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        words = [sys.executable, "-m", "mha2gqa", "demo", "--out", f"{folder}/demo", "--json"]
        printed = subprocess.run(words, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
        seconds = time.monotonic() - began
    made = json.loads(printed)
    keys = ("role", "label", "loss", "perplexity", "perplexity_ratio", "tokens", "kv_bytes_per_token")
    rows = [{key: row[key] for key in keys if key in row} for row in made["models"]]
    record = {
        "command": "mha2gqa demo",
        "setup": provenance() | {"cores_used": len(cores), "load_average_before": before},
        "seconds": round(seconds, 1),
        "headline": made["headline"],
        "rows": rows,
    }
    write_json(args.out, record)
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
