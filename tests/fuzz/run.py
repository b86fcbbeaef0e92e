"""Try inputs FROM to TO: each number is an input, the same in every run.

    python tests/fuzz/run.py --from 0 --to 8000 [--jobs 2] [--out benchmarks/results/fuzz.json] [--seconds N]
        [--faults DIR] [--only KIND]

A fault is an exception that is not ours, a message that is long or that no terminal can show, more time or memory than
an input may take, a file left behind, or a success that an independent reading contradicts. With --out the ranges that
were tried add up in one file, piece by piece: a run that is stopped loses nothing, and the next one goes on after it.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TRANSFORMERS_VERBOSITY": "critical",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from fuzz import configs, recipes, texts, weights  # noqa: E402
from fuzz.ledger import Ledger  # noqa: E402
from fuzz.trial import Room, Trial, attempt  # noqa: E402

MEMORY = 8 << 30  # bytes of addresses that a process may take, beyond what its libraries have
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


def work(numbers: range, only: str, faults: Path | None, room: Room, now: Path) -> dict[str, Any]:
    """Try inputs in this process; what came of them. `now` holds the number that is being tried."""
    endings: Counter[str] = Counter()
    found: dict[str, dict[str, Any]] = {}
    slow: list[tuple[float, int, str]] = []
    for number in numbers:
        began = time.monotonic()
        now.write_text(str(number))
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
    return {"endings": endings, "faults": found, "slow": sorted(slow, reverse=True)[:3]}


def _keep(folder: Path, name: str, trial: Trial) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "fault.txt").write_text(f"{name}\n{trial.said}\n", errors="backslashreplace")
    for file, data in trial.files.items():
        (folder / file).write_bytes(data)


class Turns:
    """Hands out pieces of the work to processes, each once.

    Args:
        file: Where the number of pieces taken is kept.
        pieces: The inputs of each.
        until: No piece is handed out later than that (`time.monotonic`).
    """

    def __init__(self, file: Path, pieces: Sequence[range], until: float) -> None:
        self.file, self.pieces, self.until = file, pieces, until
        file.write_text("0")

    def take(self) -> range | None:
        """The next piece, or None."""
        with self.file.open("r+") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            number = int(handle.read())
            if number >= len(self.pieces) or time.monotonic() > self.until:
                return None
            handle.seek(0)
            handle.write(str(number + 1))
        return self.pieces[number]


class Workers:
    """Processes that try inputs, piece by piece; one that dies is a fault, and another goes on after it.

    Args:
        folder: Theirs.
        only: A kind of input, or all.
        faults: Where to keep the first input of each fault.
    """

    def __init__(self, folder: Path, only: str, faults: Path | None) -> None:
        self.folder, self.only, self.faults = folder, only, faults
        (folder / "done").mkdir()
        self.busy: dict[int, Path] = {}

    def start(self, turns: Turns, first: range | None = None) -> None:
        """Fork one; it begins with `first`."""
        place = self.folder / f"work-{time.monotonic_ns()}"
        place.mkdir()
        child = os.fork()
        if child:
            self.busy[child] = place
            return
        code = 1
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            most = MEMORY + _addresses()
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
            self._work(turns, first, place)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _work(self, turns: Turns, piece: range | None, place: Path) -> None:
        room = Room(place / "room")
        room.folder.mkdir()
        piece = turns.take() if piece is None else piece
        while piece is not None:
            (place / "piece").write_text(json.dumps([piece.start, piece.stop]))
            found = work(piece, self.only, self.faults, room, place / "now")
            partial = self.folder / "done" / f"{piece.start}.partial"
            partial.write_text(json.dumps({"from": piece.start, "to": piece.stop, **found}))
            partial.rename(partial.with_suffix(".json"))
            piece = turns.take()

    def finished(self) -> Iterator[dict[str, Any]]:
        """What has been done since the last call."""
        for file in sorted((self.folder / "done").glob("*.json")):
            yield json.loads(file.read_text())
            file.unlink()

    def reap(self, turns: Turns) -> Iterator[dict[str, Any]]:
        """Faults of processes that have died; what they left is given to others."""
        for child in list(self.busy):
            pid, status = os.waitpid(child, os.WNOHANG)
            if not pid:
                continue
            place = self.busy.pop(child)
            if status:
                begin, end = json.loads((place / "piece").read_text())
                number = int((place / "now").read_text())
                name = f"the process ended with {os.waitstatus_to_exitcode(status)}"
                fault = {name: {"count": 1, "number": number, "input": ""}}
                yield {"from": number, "to": number + 1, "endings": {}, "faults": fault, "slow": []}
                for rest in (range(begin, number), range(number + 1, end)):
                    if rest:
                        self.start(turns, rest)
            shutil.rmtree(place, ignore_errors=True)

    def stop(self) -> None:
        """End them all."""
        for child in self.busy:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def in_processes(
    pieces: Sequence[range], options: argparse.Namespace, tell: Callable[[dict[str, Any]], None]
) -> None:
    """Share inputs out to forked processes; `tell` hears of every piece that is done."""
    until = time.monotonic() + options.seconds if options.seconds else math.inf
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=SHM if os.access(SHM, os.W_OK) else None) as name:
        folder = Path(name).resolve()
        workers, turns = Workers(folder, options.only, options.faults), Turns(folder / "turn", pieces, until)
        try:
            for _ in range(min(options.jobs, len(pieces))):
                workers.start(turns)
            while workers.busy:
                time.sleep(0.2)
                for found in (*workers.reap(turns), *workers.finished()):
                    tell(found)
        finally:
            workers.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--from", type=int, default=0, dest="first")
    parser.add_argument("--to", type=int, default=8000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0, help="begin no further piece after so long")
    parser.add_argument("--piece", type=int, default=500, help="inputs a process takes at once")
    parser.add_argument(
        "--out", type=Path, help="add the result to this JSON file; what it holds is not tried again"
    )
    parser.add_argument("--again", action="store_true", help="try also what the file holds")
    parser.add_argument(
        "--add", type=Path, action="append", help="take over what a run elsewhere has written"
    )
    parser.add_argument("--faults", type=Path, help="keep the first input of each fault here")
    parser.add_argument(
        "--only", default="", help="one kind of input: " + ", ".join(k.__name__ for k, _ in KINDS)
    )
    options = parser.parse_args()
    ledger = Ledger(options.out)
    if options.add:
        for path in options.add:
            ledger.take_over(Ledger(path))
        ledger.write()
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    load_everything()
    try_all(options, ledger)


def try_all(options: argparse.Namespace, ledger: Ledger) -> None:
    """Try what is asked for and is not known yet; exit 1 where there is a fault."""
    began = time.monotonic()
    parts = ledger.missing(options.first, options.to)
    parts = [range(options.first, options.to)] if options.again or options.only else parts
    pieces = [part[i : i + options.piece] for part in parts for i in range(0, len(part), options.piece)]
    ledger.begin()
    endings, faults, slow = Counter[str](), dict[str, dict[str, Any]](), list[Any]()

    def tell(found: dict[str, Any]) -> None:
        endings.update(found["endings"])
        slow.extend(found["slow"])
        slow[:] = sorted(slow, reverse=True)[:3]
        for name, fault in found["faults"].items():
            known = faults.setdefault(name, fault | {"count": 0})
            known["count"] += fault["count"]
        ledger.add(found["from"], found["to"], found["endings"], found["faults"])
        if not options.only:
            ledger.write()

    in_processes(pieces, options, tell)
    show(endings, faults, slow)
    print(f"{endings.total():,} inputs, {len(faults)} kinds of faults, {time.monotonic() - began:.0f} s")
    if faults:
        raise SystemExit(1)


def _addresses() -> int:
    """Bytes of addresses that this process takes."""
    sizes = Path("/proc/self/statm")
    return int(sizes.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") if sizes.exists() else 0


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


if __name__ == "__main__":
    main()
