"""An interpreter that has imported torch and transformers and forks for each job that it reads: see `launching`.

Nothing of the package is imported here: a job imports its own state of it, runs as `python …` would, and ends as an
interpreter ends. No backward pass has run either, after which autograd refuses to work in a fork.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import sys
from typing import Any

IMPORTED = (
    "torch._dynamo",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
)


def next_job() -> dict[str, Any]:
    """Fork for each job and answer with its exit code; returns in the forks, with their job.

    Raises:
        SystemExit: In the first process, when there are no more.
    """
    for line in sys.stdin:
        if not (child := os.fork()):
            return json.loads(line)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    raise SystemExit


def redirect(job: dict[str, Any]) -> None:
    """What a shell and a new interpreter do with `< /dev/null > STDOUT 2> STDERR`."""
    places = [(os.devnull, os.O_RDONLY), *((job[name], os.O_WRONLY) for name in ("stdout", "stderr"))]
    for number, (place, mode) in enumerate(places):
        if place == "closed":
            os.close(number)
            sys.stderr = sys.__stderr__ = None  # type: ignore[assignment, misc]
        elif place == "broken":
            reader, writer = os.pipe()
            os.close(reader)
            os.dup2(writer, number)
            os.close(writer)
        else:
            opened = os.open(place, mode | (os.O_CREAT if mode else 0))
            os.dup2(opened, number)
            os.close(opened)


def run(command: list[str]) -> None:
    """`python COMMAND…`."""
    first, *rest = command
    if first in ("-c", "-m"):
        code, *rest = rest
        sys.argv = [first, *rest]
        if first == "-m":
            runpy.run_module(code, run_name="__main__", alter_sys=True)
        else:
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = command
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    job = next_job()
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["folder"])
    sys.path[:] = job["path"]
    redirect(job)
    run(job["command"])
