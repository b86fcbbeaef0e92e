"""One input: how it is tried, and what counts as a fault."""

from __future__ import annotations

import contextlib
import io
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mha2gqa.errors import LONGEST, Mha2gqaError, printable

SECONDS = (
    20  # of processor time an input may take; ten times that by the clock, whatever else the machine does
)


class TooLong(BaseException):
    """An input takes longer than it may."""


@dataclass(frozen=True)
class Trial:
    """An input and the call that meets it.

    Args:
        kind: Of the input.
        said: What was done to it.
        run: Meets it; gives a word where it succeeds and the result is wrong.
        files: What to keep where it is a fault.
        allowed: Exceptions of the command line's library that are no faults.
    """

    kind: str
    said: str
    run: Callable[[], str]
    files: dict[str, bytes] = field(default_factory=dict)
    allowed: tuple[type[BaseException], ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What came of an input: `ok`, `refused`, or a fault, named so that equal faults have equal names."""

    kind: str
    ending: str
    fault: str = ""


class Room:
    """Where inputs lie: sources are made once and put right again before the next input.

    Args:
        folder: Its own.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._good: dict[Path, bytes] = {}

    def made(self, name: str, make: Callable[[Path], Any]) -> Path:
        """A folder that `make` has filled, in its good state."""
        folder = self.folder / name
        if not folder.exists():
            make(folder)
        for path, data in self._good.items():
            if path.is_relative_to(folder) and (not path.exists() or path.read_bytes() != data):
                path.unlink(missing_ok=True)
                path.write_bytes(data)
        return folder

    def kept(self, path: Path) -> bytes:
        """The good bytes of a file that is going to be changed."""
        return self._good.setdefault(path, path.read_bytes())

    @staticmethod
    def keep_out(path: Path) -> None:
        """Make room for a new file: handles of the old one stay valid."""
        path.unlink(missing_ok=True)

    def fresh(self, name: str) -> Path:
        """A path where nothing is."""
        path = self.folder / "results" / name
        shutil.rmtree(path, ignore_errors=True)
        path.parent.mkdir(exist_ok=True)
        return path

    def leftovers(self) -> list[str]:
        """What lies beside results that are no longer made."""
        folder = self.folder / "results"
        found = [path.name for path in folder.glob("*.*")] if folder.exists() else []
        for name in found:
            shutil.rmtree(folder / name, ignore_errors=True)
        return found


def attempt(trial: Trial, room: Room) -> Verdict:
    """Meet an input under limits of time."""
    try:
        with _limited(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            wrong = trial.run()
        found = Verdict(trial.kind, "ok", f"wrong: {wrong}" if wrong else "")
    except Mha2gqaError as error:
        found = Verdict(trial.kind, "refused", _of_message(str(error)))
    except trial.allowed:
        found = Verdict(trial.kind, "refused")
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        found = Verdict(trial.kind, "fault", f"{type(error).__name__} in {_frame(error)}")
    if not found.fault and (left := room.leftovers()):
        found = Verdict(trial.kind, found.ending, f"left behind: {[name.partition('-')[0] for name in left]}")
    return found


def _of_message(message: str) -> str:
    if len(message) > LONGEST:
        return f"a message of {len(message)} characters"
    return "" if message == printable(message) else "a message that a terminal cannot show"


def _frame(error: BaseException) -> str:
    """The deepest place in our code."""
    trace = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in trace if "/mha2gqa/" in frame.filename] or list(trace)
    return f"{ours[-1].filename.rpartition('/mha2gqa/')[2]}:{ours[-1].name}"


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def late(*_: Any) -> None:
        raise TooLong

    clocks = {
        signal.ITIMER_PROF: (signal.SIGPROF, SECONDS),
        signal.ITIMER_REAL: (signal.SIGALRM, 10 * SECONDS),
    }
    before = {name: signal.signal(name, late) for name, _ in clocks.values()}
    try:
        for clock, (_, seconds) in clocks.items():
            signal.setitimer(clock, seconds)
        yield
    finally:
        for clock in clocks:
            signal.setitimer(clock, 0)
        for name, handler in before.items():
            signal.signal(name, handler)
