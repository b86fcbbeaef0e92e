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
    """Checks on one result: the small twin while it is written, the finished folder after that.

    A process of its own makes them, or a thread of this one where transformers is loaded already or no
    process can be started. That process answers only if every check held. Whatever else happens there, all of
    them are made here: nothing is left out, and no verdict depends on how that process differs from this.

    Example:
        >>> with Checker() as checker:  # doctest: +SKIP
        ...     checker.expect(config, source)
        ...     write(folder)
        ...     checks = checker.check(folder, names)
    """

    def __init__(self) -> None:
        self._process = None if "transformers" in sys.modules else _start()
        self._aside = ThreadPoolExecutor(1)
        self._configs: dict[str, Any] = {}
        self._twin: Future[Check] | None = None

    def __enter__(self) -> Checker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._aside.shutdown()

    def expect(self, config: Mapping[str, Any], source: Mapping[str, Any]) -> None:
        """Say what is being made, so that its twin can be tried meanwhile.

        Args:
            config: Raw config of the result.
            source: Raw config of the source.
        """
        self._configs = {"config": config, "source": source}
        if self._process is not None:  # from a thread: a long message is only taken when it is read
            self._aside.submit(_send, self._process, self._configs)
        else:
            self._twin = self._try_twin()

    def check(self, folder: Path, expected: Sequence[str]) -> list[Check]:
        """Every check on the finished folder, and that of the twin.

        Args:
            folder: Where the result lies.
            expected: Names of its tensors.
        """
        if self._process is not None:
            finished = {"folder": str(folder.resolve()), "expected": list(expected)}
            self._aside.submit(_send, self._process, finished)
            if (answer := _answer(self._process)) is not None:
                return answer
        from .checks import verify_folder

        twin = (
            self._twin or self._try_twin()
        ).result()  # first: to load a model is no matter for two threads
        return [*verify_folder(folder, expected=expected), twin]

    def _try_twin(self) -> Future[Check]:
        from .tiny_random import check_tiny_random

        return self._aside.submit(check_tiny_random, **self._configs)


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
    """The other process: read configs and try their twin, read a folder and check it, answer, end."""
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
    from .tiny_random import check_tiny_random

    torch.set_num_threads(1)  # the copying has the other cores
    if configs := sys.stdin.readline():
        twin = check_tiny_random(**json.loads(configs))
        if finished := sys.stdin.readline():
            asked = json.loads(finished)
            checks = [*verify_folder(Path(asked["folder"]), expected=asked["expected"]), twin]
            if all(check.ok for check in checks):
                answers.write(json.dumps([vars(check) for check in checks]) + "\n")
                answers.flush()
