"""Try inputs FROM to TO: each number is an input, the same in every run.

    python tests/fuzz/run.py --from 0 --to 8000 [--jobs 2] [--out benchmarks/results/fuzz.json] [--faults DIR] [--only KIND]

A fault is an exception that is not ours, a message that is long or that no terminal can show, more time or memory than
an input may take, a file left behind, or a success that an independent reading contradicts. With --out the ranges that
were tried add up in one file, so that a long run can go on where the last one stopped.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import random
import resource
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "TRANSFORMERS_VERBOSITY": "critical",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from fuzz import configs, recipes, texts, weights  # noqa: E402
from fuzz.trial import Room, Trial, attempt  # noqa: E402

MEMORY = 8 << 30  # bytes of addresses that a process may take
SHM = "/dev/shm"
# Kind -> its share of the inputs, in thousandths.
KINDS: tuple[tuple[Callable[[random.Random, Room], Trial], int], ...] = (
    (weights.header, 250),
    (weights.shard, 20),
    (weights.index, 80),
    (weights.pickled, 70),
    (configs.config, 90),
    (configs.manifest, 20),
    (configs.grouping, 30),
    (configs.statistics, 15),
    (texts.text, 140),
    (texts.table, 60),
    (recipes.recipe, 150),
    (recipes.number, 25),
    (recipes.count, 50),
)


def input_of(number: int, room: Room, only: str = "") -> Trial:
    """The input of a number."""
    rng = random.Random(number)
    kinds = [(kind, share) for kind, share in KINDS if only in ("", kind.__name__)]
    (kind,) = rng.choices([kind for kind, _ in kinds], [share for _, share in kinds])
    return kind(rng, room)


def work(numbers: range, only: str, faults: Path | None, place: Path) -> dict[str, Any]:
    """Try inputs in this process; what came of them."""
    room = Room(place)
    endings: Counter[str] = Counter()
    found: dict[str, dict[str, Any]] = {}
    slow: list[tuple[float, int, str]] = []
    for number in numbers:
        began = time.monotonic()
        trial = input_of(number, room, only)
        verdict = attempt(trial, room)
        endings[f"{verdict.kind}|{verdict.ending}"] += 1
        slow.append((time.monotonic() - began, number, trial.kind))
        if verdict.fault:
            name = f"{verdict.kind}: {verdict.fault}"
            first = found.setdefault(name, {"count": 0, "number": number, "input": trial.said[:300]})
            first["count"] += 1
            if faults is not None and first["count"] == 1:
                _keep(faults / str(number), name, trial)
    return {"endings": endings, "faults": found, "slow": sorted(slow, reverse=True)[:10]}


def _keep(folder: Path, name: str, trial: Trial) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "fault.txt").write_text(f"{name}\n{trial.said}\n", errors="backslashreplace")
    for file, data in trial.files.items():
        (folder / file).write_bytes(data)


def in_processes(numbers: range, jobs: int, only: str, faults: Path | None) -> list[dict[str, Any]]:
    """Share inputs out to forked processes."""
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=SHM if os.access(SHM, os.W_OK) else None) as name:
        work_folder, children = Path(name).resolve(), []
        for job in range(jobs):
            if (child := os.fork()) == 0:
                place = work_folder / str(job)
                place.mkdir()
                resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
                share = range(numbers.start + job, numbers.stop, jobs)
                found = work(share, only, faults, place)
                (work_folder / f"{job}.json").write_text(json.dumps(found))
                os._exit(0)
            children.append(child)
        for child in children:
            if os.waitpid(child, 0)[1]:
                raise SystemExit("a process died: see above")
        return [json.loads((work_folder / f"{job}.json").read_text()) for job in range(jobs)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--from", type=int, default=0, dest="first")
    parser.add_argument("--to", type=int, default=8000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, help="add the result to this JSON file")
    parser.add_argument("--faults", type=Path, help="keep the first input of each fault here")
    parser.add_argument(
        "--only", default="", help="one kind of input: " + ", ".join(k.__name__ for k, _ in KINDS)
    )
    options = parser.parse_args()
    began = time.monotonic()
    load_everything()
    parts = in_processes(range(options.first, options.to), options.jobs, options.only, options.faults)
    seconds = time.monotonic() - began
    endings, faults = Counter[str](), dict[str, dict[str, Any]]()
    for part in parts:
        endings.update(part["endings"])
        for name, fault in part["faults"].items():
            known = faults.setdefault(name, fault | {"count": 0})
            known["count"] += fault["count"]
    show(endings, faults, sorted((row for part in parts for row in part["slow"]), reverse=True)[:3])
    print(f"{options.to - options.first:,} inputs, {len(faults)} kinds of faults, {seconds:.0f} s")
    if options.out:
        record(options.out, options.first, options.to, seconds, endings, faults)
    if faults:
        raise SystemExit(1)


def load_everything() -> None:
    """Import before processes are forked."""
    warnings.filterwarnings("ignore")
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, Trainer

    import mha2gqa.commands.run_recipe  # noqa: F401

    del LlamaForCausalLM, PreTrainedTokenizerFast, Trainer
    torch.set_num_threads(1)


def show(endings: Counter[str], faults: dict[str, dict[str, Any]], slow: list[Any]) -> None:
    for kind in sorted({name.partition("|")[0] for name in endings}):
        ok, refused, bad = (endings[f"{kind}|{ending}"] for ending in ("ok", "refused", "fault"))
        print(f"{kind:24} ok {ok:6} refused {refused:6} fault {bad:4}")
    print("slowest:", "; ".join(f"{seconds:.1f} s {kind} {number}" for seconds, number, kind in slow))
    for name, fault in sorted(faults.items(), key=lambda item: -item[1]["count"]):
        print(f"FAULT {fault['count']:4} {name} [input {fault['number']}: {fault['input'][:160]!r}]")


def record(
    path: Path, first: int, to: int, seconds: float, endings: Counter[str], faults: dict[str, Any]
) -> None:
    """Add a range to a file of results."""
    known = json.loads(path.read_text()) if path.exists() else {"ranges": []}
    known["ranges"] = [row for row in known["ranges"] if (row["from"], row["to"]) != (first, to)]
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "safetensors")}
    known["ranges"].append(
        {
            "from": first,
            "to": to,
            "seconds": round(seconds),
            "ok": sum(n for name, n in endings.items() if name.endswith("|ok")),
            "refused": sum(n for name, n in endings.items() if name.endswith("|refused")),
            "faults": faults,
            "python": platform.python_version(),
            "versions": versions,
        }
    )
    known["ranges"].sort(key=lambda row: row["from"])
    known["inputs"] = sum(row["to"] - row["from"] for row in known["ranges"])
    known["kinds of faults"] = len({name for row in known["ranges"] for name in row["faults"]})
    path.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
