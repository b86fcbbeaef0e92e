"""How long a command is silent: seconds to its first line on stderr, on a terminal and into a file, and of `--help`.

    python benchmarks/first_line.py --out benchmarks/results/first_line.json

Each command is given the embedded model and is ended as soon as it has said something. `load_average_before` in the
result says whether the machine was idle.
"""

from __future__ import annotations

import argparse
import os
import pty
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _common import provenance, write_json

from mha2gqa.assets import heldout_path, recipe_paths, tiny_model_path

LIMIT = 60.0


def commands(out: Path) -> dict[str, list[str]]:
    """What is typed, by name."""
    model, text = str(tiny_model_path()), str(heldout_path())
    return {
        "plan": ["plan", model],
        "convert": ["convert", model, str(out / "gqa"), "--groups", "2", "--calibration", text],
        "evaluate": ["evaluate", model, "--data", text],
        "uptrain": ["uptrain", model, str(out / "up"), "--data", text, "--tokens", "100000"],
        "run": ["run", str(recipe_paths()["tiny"]), "--set", f"output={out / 'run'}"],
        "demo": ["demo", "--out", str(out / "demo")],
    }


def first_line(words: list[str], terminal: bool) -> float:
    """Seconds until the first bytes on stderr."""
    read, write = pty.openpty() if terminal else os.pipe()
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "mha2gqa", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=write,
    )
    os.close(write)
    try:
        if not select.select([read], [], [], LIMIT)[0] or not os.read(read, 1):
            raise SystemExit(f"{words[0]}: nothing on stderr in {LIMIT:.0f} s")
        return time.monotonic() - began
    finally:
        process.kill()
        process.wait()
        os.close(read)


def help_seconds() -> float:
    """Seconds of `--help`, the least of five."""
    words, found = [sys.executable, "-m", "mha2gqa", "--help"], []
    for _ in range(5):
        began = time.monotonic()
        subprocess.run(words, stdout=subprocess.DEVNULL, check=True)
        found.append(time.monotonic() - began)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    before = os.getloadavg()[0]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, words in commands(Path(folder)).items():
            seconds = {
                where: round(first_line(words, where == "terminal"), 2) for where in ("terminal", "file")
            }
            rows.append({"command": name} | seconds)
    setup = provenance() | {"load_average_before": before}
    record = {
        "command": "benchmarks/first_line.py",
        "setup": setup,
        "help": round(help_seconds(), 2),
        "rows": rows,
    }
    write_json(args.out, record)
    print(record["help"], *rows, sep="\n")


if __name__ == "__main__":
    main()
