"""Kill every command at every event of the file system, and see that nothing is half made, lost or left.

    python tests/kills/run.py [--short] [--out FILE] [--jobs 2] [--only NAME] [--seed 0] [--points N] [--seconds N]

After each kill OUT must be absent, the old or the new, whole; the same command again must end well, give the very
weights of an undisturbed run, and leave nothing behind. The same is tried with a disk that is full from an event on,
and with the signals that end programs, where the first run itself must leave nothing half made. The short form takes
a share of the events of the slow commands; the long one all of them, and moments at random.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from fuzz.ledger import this_run  # noqa: E402

from kills.events import Events  # noqa: E402
from kills.jobs import Job, digest, jobs, make_inputs, names  # noqa: E402

SIGNALS = ("SIGTERM", "SIGHUP", "SIGINT")
# Points of each job in the short form: kills, full disks, signals.
SHORT = {
    "convert": (24, 8, 6), "convert --force": (16, 4, 3), "convert --calibration": (8, 3, 3),
    "convert resumed": (4, 0, 0), "convert generate": (3, 0, 0), "uptrain": (8, 3, 3), "run": (4, 1, 1),
}  # fmt: skip
MEMORY = "/dev/shm"  # where it is there: what is on the disk, and when, is not what is tried here
LIMIT = 300  # seconds a command may take


@dataclass(frozen=True)
class Point:
    """One trial: what happens to which job at which event, or after how many seconds."""

    job: str
    act: str
    at: int
    after: float = 0.0


def in_child(work: Callable[[], int], log: Path, kill_after: float = 0.0) -> int:
    """Run `work` in a forked process; its exit code, negative where a signal ended it."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(handle, 1)
            os.dup2(handle, 2)
            code = work()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    began = time.monotonic()
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        passed = time.monotonic() - began
        if (kill_after and passed > kill_after) or passed > LIMIT:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return -signal.SIGKILL if kill_after else 124
        time.sleep(0.005)


def command(job: Job, folder: Path, events: Events | None = None) -> Callable[[], int]:
    """The command line of a job, watched."""

    def work() -> int:
        import torch

        from mha2gqa.cli.commands import cli
        from mha2gqa.cli.exit_codes import run_command

        torch.manual_seed(0)
        if events is not None:
            events.install()
        run_command(cli, [part.replace("{}", str(folder)) for part in job.argv])

    return work


def count_events(job: Job, folder: Path, log: Path) -> list[str]:
    """The events of an undisturbed run, whose result stays in `folder`."""
    seen = folder.with_suffix(".events")
    handle = os.open(seen, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    events = Events(folder, "count", -1, lambda name: os.write(handle, (name + "\n").encode()) and None)
    code = in_child(command(job, folder, events), log)
    if code != 0:
        raise SystemExit(f"{job.name}: the undisturbed run ends with {code}: {log.read_text()[-600:]}")
    return seen.read_text().split("\n")[:-1]


def start(job: Job, folder: Path) -> str | None:
    """Make the folder of a job; the digest of what its product is before."""
    folder.mkdir()
    if job.prepare is not None:
        job.prepare(folder)
    return digest(folder / job.product)


def try_point(point: Point, job: Job, right: Right, folder: Path) -> str:
    """Empty, or what is wrong."""
    before = start(job, folder)
    log = folder.with_suffix(".log")
    events = None if point.after else Events(folder, point.act, point.at)
    code = in_child(command(job, folder, events), log, point.after)
    said = log.read_text(errors="replace")
    try:
        between = digest(folder / job.product)
    except FileNotFoundError as error:
        return f"half made: {error}"
    if between not in (None, before, right.digest):
        return "neither the old result nor the new"
    if before is not None and between is None:
        return "the old result is gone"
    if point.act != "kill" and (wrong := ending(point, code, said, between == right.digest, folder, job)):
        return wrong
    again = in_child(command(job, folder), log)
    said = log.read_text(errors="replace")
    if again != 0 and not (between == right.digest and again == 2 and "is not empty" in said):
        return f"the same command again ends with {again}: {said[-300:]}"
    if digest(folder / job.product) != right.digest:
        return "the same command again gives another result"
    if names(folder) != right.names:
        return f"left behind: {sorted(set(names(folder)) ^ set(right.names))}"
    return ""


def ending(point: Point, code: int, said: str, published: bool, folder: Path, job: Job) -> str:
    """What is wrong with the end of a run that was not killed; empty if nothing is."""
    lines = [line for line in said.splitlines() if line.startswith(("error", "mha2gqa: "))]
    if point.act == "full":
        if code == 0:  # the event was one that may fail
            return "" if published else "says that all is well, and nothing is published"
        if code != 1 or len(lines) != 1 or "(-v shows where)" in lines[0]:
            return f"a full disk ends with {code}: {lines or said[-300:]}"
        if published and not job.more:
            return f"published, and yet: {lines[0]}"
    elif code not in (0, 130):
        return f"{point.act} ends with {code}: {said[-300:]}"
    half = [name for name in names(folder) if ".partial" in name or ".replaced" in name]
    return f"left behind at once: {half}" if half else ""


@dataclass(frozen=True)
class Right:
    """What an undisturbed run gives: the digest of its product, what lies beside it, its events, its seconds."""

    digest: str
    names: list[str]
    events: list[str]
    seconds: float


def undisturbed(job: Job, work: Path) -> Right:
    folder = work / f"right-{job.name.replace(' ', '_')}"
    start(job, folder)
    began = time.monotonic()
    events = count_events(job, folder, folder.with_suffix(".log"))
    found = digest(folder / job.product)
    assert found is not None, job.name
    return Right(found, names(folder), events, time.monotonic() - began)


def halfway(job: Job, right: Right, inputs: Path, work: Path) -> None:
    """Keep what a conversion killed after its first layer has left, for the job that goes on with it."""
    for at in range(len(right.events) // 3, len(right.events)):
        folder = work / f"halfway-{at}"
        start(job, folder)
        in_child(command(job, folder, Events(folder, "kill", at)), folder.with_suffix(".log"))
        if list(folder.glob("out.convert/block-*.safetensors")):
            shutil.copytree(folder, inputs / "halfway")
            return
    raise SystemExit("no kill leaves a finished layer")


def points_of(job: Job, right: Right, short: bool, rng: random.Random) -> Iterator[Point]:
    total = len(right.events)
    kills, full, signals = SHORT[job.name] if short else (total, total, 3 * len(SIGNALS))

    def spread(count: int) -> list[int]:
        return sorted(rng.sample(range(total), min(count, total)))

    yield from (Point(job.name, "kill", at) for at in spread(kills))
    yield from (Point(job.name, "full", at) for at in spread(full))
    for i, at in enumerate(spread(signals)):
        yield Point(job.name, SIGNALS[i % 3], at)
    for _ in range(2 if short else 20):
        yield Point(job.name, "kill", -1, rng.uniform(0.02, right.seconds))


def work_through(
    points: list[Point], known: dict[str, Job], right: dict[str, Right], work: Path, until: float
) -> None:
    """Try points while there is time, and note each in a file as soon as it is done."""
    notes = (work / f"found-{os.getpid()}.jsonl").open("a")
    for number, point in enumerate(points):
        if time.monotonic() > until:
            return
        folder = work / f"{os.getpid()}-{number}"
        wrong = try_point(point, known[point.job], right[point.job], folder)
        event = right[point.job].events[point.at] if point.at >= 0 else f"{point.after:.2f} s"
        notes.write(json.dumps([point.job, point.act, point.at, event, wrong]) + "\n")
        notes.flush()
        if wrong:
            print(f"{point.job}, {point.act} before {event} ({point.at}): {wrong}", flush=True)
        else:
            shutil.rmtree(folder)


def in_processes(
    shares: list[list[Point]], do: Callable[[list[Point]], None], look: Callable[[], None]
) -> None:
    """Each share in a process of its own; `look` is called while they work.

    Raises:
        SystemExit: One of them died.
    """
    children = []
    for share in shares:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                do(share)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    while children:
        time.sleep(1)
        look()
        for child in list(children):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid and status:
                raise SystemExit("a process died: see above")
            if pid:
                children.remove(child)


def noted(work: Path) -> list[Any]:
    """What has been tried so far."""
    lines = [
        line for file in work.glob("found-*.jsonl") for line in file.read_text().splitlines(keepends=True)
    ]
    return [json.loads(line) for line in lines if line.endswith("\n")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="a share of the events, for every change")
    parser.add_argument("--out", type=Path, help="record the result as JSON")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--only", default="", help="names of jobs, with commas")
    parser.add_argument("--points", type=int, default=0, help="try so many of all points, drawn by the seed")
    parser.add_argument("--seconds", type=float, default=0, help="begin no further point after so long")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began = time.monotonic()
    load_everything()
    with tempfile.TemporaryDirectory(
        prefix="kills-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None
    ) as name:
        work = Path(name).resolve()
        inputs = work / "inputs"
        if in_child(lambda: make_inputs(inputs) or 0, work / "inputs.log") != 0:
            raise SystemExit((work / "inputs.log").read_text())
        known = {job.name: job for job in jobs(inputs)}
        if options.only:
            known = {n: job for n, job in known.items() if n in options.only.split(",")}
        rng, right, points = random.Random(options.seed), {}, list[Point]()
        for each, job in known.items():
            if each == "convert resumed":
                first = right.get("convert --calibration") or undisturbed(job, work)
                halfway(job, first, inputs, work)
                shutil.rmtree(work / "right-convert_resumed", ignore_errors=True)
            right[each] = undisturbed(job, work)
            points += points_of(job, right[each], options.short, rng)
        rng.shuffle(points)
        points = points[: options.points or len(points)]
        shares = [points[i :: options.jobs] for i in range(options.jobs)]
        until = began + (options.seconds or math.inf)
        in_processes(
            shares,
            lambda share: work_through(share, known, right, work, until),
            lambda: record(noted(work), options, time.monotonic() - began),
        )
        finish(noted(work), len(points), options, time.monotonic() - began)


def load_everything() -> None:
    """Import what commands import, so that a child need not."""
    import torch
    import transformers

    for name in ("LlamaForCausalLM", "PreTrainedTokenizerFast", "Trainer"):
        getattr(transformers, name)
    for name in ("datasets", "safetensors.torch", "mha2gqa.commands.run_recipe", "mha2gqa.uptraining"):
        importlib.import_module(name)
    torch.set_num_threads(1)


def finish(rows: list[Any], planned: int, options: argparse.Namespace, seconds: float) -> None:
    """Print what came out, record it, and fail where anything is wrong."""
    for job, kinds in sorted(counted(rows).items()):
        print(f"{job:24}", "  ".join(f"{kind} {n - bad}/{n}" for kind, (n, bad) in sorted(kinds.items())))
    wrong = [row for row in rows if row[4]]
    rest = f" ({planned - len(rows)} not tried: no time left)" if len(rows) < planned else ""
    print(f"{len(rows) - len(wrong)} of {len(rows)} clean{rest}, {seconds:.0f} s")
    record(rows, options, seconds)
    if wrong:
        raise SystemExit(1)


def counted(rows: list[Any]) -> dict[str, dict[str, list[int]]]:
    """Job -> kind of trial -> how many, and how many of them wrong."""
    table: dict[str, dict[str, list[int]]] = {}
    for job, act, at, _, wrong in rows:
        kind = "random moment" if at < 0 else "signal" if act.startswith("SIG") else act
        cell = table.setdefault(job, {}).setdefault(kind, [0, 0])
        cell[0] += 1
        cell[1] += bool(wrong)
    return table


def record(rows: list[Any], options: argparse.Namespace, seconds: float) -> None:
    """Write what has been tried so far, where that is asked for."""
    if not options.out:
        return
    wrong = [row for row in rows if row[4]]
    about = {
        **this_run("tests/kills/run.py"),
        "form": "short" if options.short else "long",
        "seed": options.seed,
        "seconds": round(seconds),
        "tried": len(rows),
        "clean": len(rows) - len(wrong),
        "jobs": {
            job: {kind: {"tried": n, "clean": n - bad} for kind, (n, bad) in kinds.items()}
            for job, kinds in sorted(counted(rows).items())
        },
        "wrong": [dict(zip(("job", "act", "at", "event", "what"), row, strict=True)) for row in wrong],
    }
    partial = options.out.with_suffix(".partial")
    partial.write_text(json.dumps(about, indent=1) + "\n")
    partial.replace(options.out)


if __name__ == "__main__":
    main()
