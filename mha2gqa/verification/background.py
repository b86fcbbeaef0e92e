"""Where a result is checked: in a process of its own, which loads transformers while this one copies bytes.

Loading a model class takes longer than copying gigabytes, and the copying does not need it. So whoever
makes a checkpoint starts a `Checker` first and asks for its answer last. Imports nothing heavy: it is to
be started before torch is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .tiny_random import Check

_SERVE = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from mha2gqa.verification.background import serve; serve()"


# Optional, slow to load, and hardly ever needed: losses of object detectors, assisted decoding. A class that
# does need them fails its checks there and is checked again here, with everything that is installed.
_UNUSED = ("scipy", "sklearn")


class Checker:
    """Checks on one result: before and while it is written, and of the finished folder after that.

    A process of its own makes them, or this one where transformers is loaded already or no process can be
    started. That process answers only if every check held. Whatever else happens there, all of them are made
    here: nothing is left out, and no verdict depends on how that process differs from this.

    Example:
        >>> with Checker() as checker:  # doctest: +SKIP
        ...     checker.expect(config, source, tensors, where="model")
        ...     write(folder)
        ...     checker.early()
        ...     checks = checker.check(folder, names)
    """

    def __init__(self) -> None:
        self._process = None if "transformers" in sys.modules else _start()
        self._aside = ThreadPoolExecutor(1)
        self._question: dict[str, Any] = {}
        self._where: object = None
        self._allowed = False
        self._first: Future[str] | None = None  # what that process says before the folder is finished
        self._early: list[Check] | None = None

    def __enter__(self) -> Checker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._aside.shutdown()  # nobody else reads what it says
            self._process.communicate()
        self._aside.shutdown()

    def expect(
        self,
        config: Mapping[str, Any],
        source: Mapping[str, Any],
        tensors: Mapping[str, Sequence[Any]],
        *,
        where: object = None,
        allow_unchecked: bool = False,
        known: list[Check] | None = None,
    ) -> None:
        """Say what is going to be made, so that what can be known of it is known before, or early.

        Args:
            config: Raw config of the result.
            source: Raw config of the source.
            tensors: Tensors of the result: name -> (dtype, shape).
            where: What an error names.
            allow_unchecked: Whether checks that cannot be made are allowed.
            known: The early checks, where they have been made.

        Raises:
            CheckpointError, UnsupportedModelError: As `demand`, where no other process is asked.
        """
        self._question = {"config": config, "source": source, "tensors": tensors}
        self._where, self._allowed, self._early = where, allow_unchecked, known
        if known is not None:
            return
        if self._process is None:
            self.early()
            return
        # From a thread: a long message is only taken when it is read.
        self._aside.submit(_send, self._process, self._question)
        assert self._process.stdout is not None
        self._first = self._aside.submit(self._process.stdout.readline)

    @property
    def doubtful(self) -> bool:
        """Whether the other process has ended without a word: `early` will say why."""
        return self._first is not None and self._first.done() and not self._first.result()

    def early(self) -> list[Check]:
        """The checks that need no finished folder; empty where the other process has made them and they held.

        Raises:
            CheckpointError, UnsupportedModelError: As `demand`.
        """
        if self._early is None:
            if self._first is not None and self._first.result():
                self._early = []
            else:
                from .preflight import check_early, demand, settled

                config = self._question["config"]
                found = settled(check_early(**self._question), config, self._allowed)
                demand(found, config, self._where, self._allowed)
                self._early = found
        return self._early

    def check(self, folder: Path, expected: Sequence[str]) -> list[Check]:
        """Every check on the finished folder, and that of the twin.

        Args:
            folder: Where the result lies.
            expected: Names of its tensors.
        """
        if self._process is not None and self._first is not None and self._first.result():
            finished = {"folder": str(folder.resolve()), "expected": list(expected)}
            self._aside.submit(_send, self._process, finished)
            if (answer := _answer(self._process)) is not None:
                return answer
        from .checks import verify_folder
        from .preflight import settled
        from .tiny_random import TWIN, check_tiny_random

        config, source = self._question["config"], self._question["source"]
        twin = [check for check in self.early() if check.name == TWIN] or [check_tiny_random(config, source)]
        return [*settled(verify_folder(folder, expected=expected), config, self._allowed), *twin]


def _start() -> subprocess.Popen[str] | None:
    """A process that runs `serve` on this one's import path; None where none can be started or gain time."""
    if not sys.executable or os.cpu_count() == 1:
        return None
    try:
        return subprocess.Popen(
            [sys.executable, "-c", _SERVE, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # whatever fails there is done again here, where it can be seen
            encoding="utf-8",
        )
    except OSError:
        return None


def _send(process: subprocess.Popen[str], message: Mapping[str, Any]) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()
    except OSError:  # it has died; so much for its answer, too
        return


def _answer(process: subprocess.Popen[str]) -> list[Check] | None:
    """What the process found; None if it ended without a word."""
    from .tiny_random import Check

    assert process.stdout is not None
    line = process.stdout.readline()
    return [Check(**check) for check in json.loads(line)] if line.endswith("\n") else None


def serve() -> None:
    """The other process: read what is going to be made and check it, read a folder and check it, answer, end."""
    import gc
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is for the process that asks, and ends this one
    gc.disable()  # a short life: collecting garbage would be a sixth of it
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # a library that prints must not answer
    for name in _UNUSED:  # None stands for "not installed"
        sys.modules[name] = None  # type: ignore[assignment]
    import torch
    from transformers import PreTrainedModel  # noqa: F401  (most of the time: before the question is known)

    from .checks import verify_folder
    from .preflight import check_early

    torch.set_num_threads(1)  # the copying has the other cores
    if not (question := sys.stdin.readline()):
        return
    early = check_early(**json.loads(question))
    if not all(check.ok for check in early):
        return  # they are made again there, where it can be said what is wrong
    answers.write("\n")
    answers.flush()
    if finished := sys.stdin.readline():
        asked = json.loads(finished)
        checks = [*verify_folder(Path(asked["folder"]), expected=asked["expected"]), early[-1]]
        if all(check.ok for check in checks):
            answers.write(json.dumps([vars(check) for check in checks]) + "\n")
            answers.flush()
