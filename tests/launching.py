"""Start Python processes on this machine, alone or as torchrun starts the ranks of a job.

They are forks of interpreters that have imported torch and transformers (`warm_interpreter`), which costs a new one four
seconds of processor time. Each rank has an interpreter of its own: like those of torchrun, ranks differ in what
is random about an interpreter, such as the order of sets of strings.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

WARM = Path(__file__).with_name("warm_interpreter.py")
TIMEOUT = 900  # seconds; quiet jobs of these tests take less than a tenth of it
CLOSED, BROKEN = "closed", "broken"  # a stderr that is not open, and a pipe that nobody reads


@dataclass(frozen=True)
class Ended:
    """What a process left: its exit code (`-N` after signal N) and what it wrote."""

    code: int
    stdout: str
    stderr: str


class _Interpreter:
    """A `warm_interpreter`, which does one job after the other."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(WARM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            text=True,
            start_new_session=True,
        )

    def run(self, **job: object) -> int:
        """The exit code of a job; its process and this one are killed where it takes too long."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(job), file=self.process.stdin, flush=True)
        with ThreadPoolExecutor(1) as waiting:
            answer = waiting.submit(self.process.stdout.readline)
            try:
                return int(answer.result(TIMEOUT))
            finally:
                if not answer.done():
                    os.killpg(self.process.pid, signal.SIGKILL)


_idle: list[_Interpreter] = []


def ranks(
    command: Sequence[str], folder: Path, processes: int = 2, environment: Mapping[str, str] | None = None
) -> list[Ended]:
    """Run `python COMMAND…` in each process of a job until all have ended.

    Args:
        command: Arguments of the interpreter.
        folder: Where files with their outputs go.
        processes: How many.
        environment: What is added to this process's.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    own = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    with ThreadPoolExecutor(processes) as each:
        return list(each.map(lambda mine: started(command, folder, environment=common | mine), own))


def started(
    command: Sequence[str],
    folder: Path,
    *,
    environment: Mapping[str, str] | None = None,
    stderr: str | None = None,
    where: Path | None = None,
) -> Ended:
    """Run `python COMMAND…` until it has ended.

    Args:
        command: Arguments of the interpreter.
        folder: Where files with its outputs go.
        environment: What is added to this process's.
        stderr: A file, `CLOSED` or `BROKEN`; None for one of `folder`.
        where: The folder it runs in; this process's by default.
    """
    more = {"OMP_NUM_THREADS": "1", **(environment or {})}
    name = f"process{more.get('RANK', '')}"  # files: a pipe that nobody reads would stop it
    out, said = folder / f"{name}.out", folder / f"{name}.err"
    for path in (out, said):
        path.write_text("")
    interpreter = _idle.pop() if _idle else _Interpreter()
    code = interpreter.run(
        command=list(map(str, command)),
        environment=os.environ | more,
        folder=str(where or Path.cwd()),
        path=sys.path,
        stdout=str(out),
        stderr=stderr or str(said),
    )
    _idle.append(interpreter)
    return Ended(code, out.read_text(), said.read_text())


def launch(command: Sequence[str], folder: Path, processes: int = 2) -> list[str]:
    """What the processes of a job print, all of which must end well: see `ranks`."""
    ended = ranks(command, folder, processes)
    assert not any(end.code for end in ended), "\n".join(end.stderr[-3000:] for end in ended)
    return [end.stdout for end in ended]
