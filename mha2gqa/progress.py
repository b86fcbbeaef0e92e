"""What a long job says while it works: its stages, how much of each is done, the time left. Imports nothing heavy.

Code that does the work reports to `current()`, which is silent unless the command line (or a caller from Python)
has set a listener with `reporting`. Nothing here prints on stdout.

Example:
    >>> progress = current()
    >>> progress.announce("reading", "fitting")
    >>> progress.stage("reading", total=3, unit="files")
    >>> progress.advance(1)
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, TextIO

EVERY = 30.0  # seconds between lines where no bar can be drawn


class Progress:
    """The stages of a job. This base class keeps them and shows nothing; subclasses show them.

    Args:
        label: What the job is called, such as the name of the command.

    Example:
        >>> progress = Progress("convert")
        >>> progress.announce("reading", "fitting")
        >>> progress.stage("fitting", total=32, unit="layers")
        >>> progress.advance(8)
        >>> progress.place(), progress.amount(), progress.fraction()
        ('fitting (2 of 2)', '8 of 32 layers', 0.625)
    """

    def __init__(self, label: str = "") -> None:
        self.label, self.began = label, time.monotonic()
        self.name, self.unit, self.note = "", "", ""
        self.done, self.total = 0, None  # type: tuple[int, int | None]
        self._first, self._stage_began = 0, self.began
        self._announced: tuple[str, ...] = ()
        self._parts: list[tuple[str, int, int]] = []

    # --- for the code that does the work ---

    def announce(self, *names: str) -> None:
        """Say which stages will follow, so that `stage` can be shown as i of n and the bar covers the job."""
        self._announced = names

    def stage(self, name: str, total: int | None = None, unit: str = "", start: int = 0) -> None:
        """Begin a stage.

        Args:
            name: What is done, such as `fitting`.
            total: How much of it there is; None where that is not known.
            unit: Of `total` and of `advance`: `layers`, `steps`, `tokens`; `B` for bytes.
            start: What is done already, in a job that is resumed.
        """
        self.name, self.total, self.unit, self.note = name, total, unit, ""
        self.done = self._first = start
        self._stage_began = time.monotonic()
        self.changed(True)

    def advance(self, done: int, note: str = "") -> None:
        """Say how much of the stage is done in all (not how much has been added).

        Args:
            done: In the stage's unit.
            note: A few words to show beside it, such as `loss 3.21`.
        """
        self.done, self.note = done, note
        self.changed(False)

    def report(self, name: str, done: int, total: int | None = None, unit: str = "") -> None:
        """`stage` and `advance` in one: a stage of another name begins."""
        if name != self.name or total != self.total:
            self.stage(name, total, unit)
        if done:
            self.advance(done)

    @contextmanager
    def part(self, name: str, number: int = 0, count: int = 0) -> Iterator[None]:
        """A job inside this one, with stages of its own.

        Args:
            name: Of the part.
            number, count: Which part (from 1) of how many; 0 where that is not known.
        """
        outer, self._announced = self._announced, ()
        self._parts.append((name, number, count))
        try:
            yield
        finally:
            self._parts.pop()
            self._announced = outer

    # --- for the code that shows it ---

    def changed(self, new_stage: bool) -> None:
        """Called after every change; `new_stage` where a stage began."""

    def close(self) -> None:
        """The job has ended, well or not."""

    def place(self) -> str:
        """Where the job is: `convert 1/4: fitting (2 of 3)`."""
        parts = "".join(f"{name} {n}/{of}: " if of else f"{name}: " for name, n, of in self._parts)
        if self.name in self._announced:
            return f"{parts}{self.name} ({self._announced.index(self.name) + 1} of {len(self._announced)})"
        return f"{parts}{self.name}"

    def amount(self) -> str:
        """How much of the stage is done: `12 of 32 layers`; empty where there is nothing to say."""
        if self.total is None and not self.done:
            return ""
        show = _bytes if self.unit == "B" else lambda n: f"{n:,}"
        unit = "" if self.unit in ("", "B") else f" {self.unit}"
        return f"{show(self.done)}{'' if self.total is None else f' of {show(self.total)}'}{unit}"

    def heading(self) -> str:
        """The job and where it is."""
        return ": ".join(part for part in (self.label, self.place()) if part)

    def details(self) -> str:
        """What is done of the stage, the note beside it, and the time left."""
        left = None if self.done == self.total else self.left()
        details = [self.amount(), self.note, "" if left is None else f"{duration(left)} left"]
        return ", ".join(part for part in details if part)

    def left(self) -> float | None:
        """Seconds that the stage will still take at the speed it has had; None before that is known."""
        moved, spent = self.done - self._first, time.monotonic() - self._stage_began
        if self.total is None or moved <= 0 or spent <= 0:
            return None
        return max(0.0, (self.total - self.done) * spent / moved)

    def fraction(self) -> float | None:
        """How much of the whole job is done, each stage and part counted alike; None where unknown."""
        inner = None if not self.total else min(1.0, self.done / self.total)
        if self.name in self._announced:
            inner = (self._announced.index(self.name) + (inner or 0.0)) / len(self._announced)
        for _, number, count in reversed(self._parts):
            if not count:
                continue
            inner = (number - 1 + (inner or 0.0)) / count
        return inner


class Callback(Progress):
    """Hands every change to a function, as `function(stage, done, total)`; an unknown total is 0."""

    def __init__(self, function: Callable[[str, int, int], Any]) -> None:
        super().__init__()
        self._function = function

    def changed(self, new_stage: bool) -> None:
        """Call the function."""
        self._function(self.name, self.done, self.total or 0)


class Lines(Progress):
    """Plain lines: one at every stage, and one every `every` seconds even while nothing moves.

    Args:
        label: Name of the job.
        stream: Where lines go; the standard error stream of the moment by default.
        every: Seconds.
    """

    def __init__(self, label: str = "", stream: TextIO | None = None, every: float = EVERY) -> None:
        super().__init__(label)
        self._stream, self._every = stream, every
        self._last = self.began
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._clock = threading.Thread(target=self._tick, name="progress", daemon=True)
        self._clock.start()

    def changed(self, new_stage: bool) -> None:
        """Write a line, if it is time for one."""
        if new_stage or time.monotonic() - self._last >= self._every:
            self._write()

    def close(self) -> None:
        """Write no more."""
        self._ended.set()
        self._clock.join()

    def line(self) -> str:
        """The line of this moment: elapsed time, job, stage, amount, time left."""
        head, details = f"[{duration(time.monotonic() - self.began)}] {self.heading()}", self.details()
        return f"{head}: {details}" if details else head

    def _tick(self) -> None:
        while not self._ended.wait(max(0.05, self._last + self._every - time.monotonic())):
            if time.monotonic() - self._last >= self._every:
                self._write()

    def _write(self) -> None:
        with self._lock:
            if not self._ended.is_set():
                self._last = time.monotonic()
                with suppress(OSError, ValueError):  # a full disk or a closed stream ends no job
                    print(self.line(), file=self._stream or sys.stderr, flush=True)


class Bar(Progress):
    """One bar for the whole job on a terminal, with stage, amount, elapsed time and time left."""

    def __init__(self, label: str = "") -> None:
        super().__init__(label)
        from rich.console import Console
        from rich.live import Live

        self._live = Live(
            console=Console(stderr=True),
            get_renderable=self._render,
            refresh_per_second=10,
            transient=True,
            redirect_stdout=False,
        )
        self._live.start()

    def changed(self, new_stage: bool) -> None:
        """Draw a new stage at once; what moves within it is drawn ten times a second anyway."""
        if new_stage:
            self._live.refresh()

    def close(self) -> None:
        """Take the bar away."""
        self._live.stop()

    def _render(self) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        fraction = self.fraction()
        bar = ProgressBar(1.0, fraction or 0.0, width=24, pulse=fraction is None)
        elapsed = duration(time.monotonic() - self.began)
        line = Table.grid(padding=(0, 1))
        line.add_row(Text(self.heading()), bar, Text(elapsed), Text(self.details(), style="dim"))
        return line


SILENT = Progress()
_current: ContextVar[Progress] = ContextVar("progress", default=SILENT)


def current() -> Progress:
    """Whom to report to: what `reporting` has set, else one that shows nothing."""
    return _current.get()


@contextmanager
def reporting(progress: Progress | None) -> Iterator[Progress]:
    """Let `current()` be this one inside the block.

    Args:
        progress: A listener; None keeps the present one.
    """
    if progress is None:
        yield current()
        return
    token = _current.set(progress)
    try:
        yield progress
    finally:
        _current.reset(token)


def duration(seconds: float) -> str:
    """Seconds as people read them: `0:07`, `12:30`, `3:04:05`."""
    whole = int(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"
