"""Finished batches of hours of work, kept in a file: the same work started again goes on after the last whole one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import UsageError
from .atomic import take_lock, writing_to

MARK = b'{"unfinished": '  # begins a file of ours


class BatchLog:
    """A file of finished batches, one line of JSON each, after a line that says whose they are.

    A batch counts once its line is whole and on the disk. What follows a line that is not whole is dropped.

    Args:
        path: The file; made where there is none.
        work: Everything that decides the batches; a file of other work is begun anew.
        wait: Wait for a process that works on it.

    Raises:
        UsageError: Another process works on it, or there is a file that was not made here.
        CheckpointError: It cannot be written.

    Example:
        >>> with BatchLog(Path("text.batches"), {"seed": 0}) as log:  # doctest: +SKIP
        ...     for number in range(len(log), 10):
        ...         log.append({"texts": made(number)})
        ...     log.remove()
    """

    def __init__(self, path: Path, work: Mapping[str, Any], *, wait: bool = False) -> None:
        self.path = path
        head = MARK + json.dumps(work, sort_keys=True).encode() + b"}\n"
        with writing_to(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b", buffering=0)
            try:
                self._take_over(head, wait)
            except BaseException:
                self._file.close()
                raise

    def _take_over(self, head: bytes, wait: bool) -> None:
        """Go on with the file, or begin it anew."""
        if not take_lock(self._file, wait=wait):
            raise UsageError(
                "in use by another process", where=self.path, fix="wait for it to end, or stop it"
            )
        handle = self._file.fileno()
        first = os.pread(handle, len(head), 0)
        if not (first.startswith(MARK) or MARK.startswith(first)):
            raise UsageError("is in the way and was not made here", where=self.path, fix="move it away")
        self._ends = [len(head)]  # of the head, and of each batch
        if first != head:
            os.ftruncate(handle, 0)
            self._write(head)
            return
        with os.fdopen(os.dup(handle), "rb") as lines:
            lines.seek(len(head))
            for line in lines:
                if not _is_whole(line):
                    break
                self._ends.append(self._ends[-1] + len(line))
        os.ftruncate(handle, self._ends[-1])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __iter__(self) -> Iterator[Any]:
        """The batches in their order, read one at a time."""
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> Any:
        if not 0 <= number < len(self):
            raise IndexError(number)
        start, end = self._ends[number : number + 2]
        return json.loads(os.pread(self._file.fileno(), end - start, start))

    def append(self, batch: Any) -> None:
        """Keep a batch, which JSON can hold.

        Raises:
            CheckpointError: The disk is full, or does not take it for another reason; the batches before it are kept.
        """
        line = json.dumps(batch).encode() + b"\n"
        with writing_to(self.path):
            self._write(line)
        self._ends.append(self._ends[-1] + len(line))

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]
        os.fsync(self._file.fileno())

    def remove(self) -> None:
        """Delete the file: what was made of the batches is published."""
        with writing_to(self.path):
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let other processes in; the batches stay, a file without any goes."""
        if not self._file.closed:
            with suppress(OSError):
                if not self:
                    self.path.unlink()
            self._file.close()

    def __enter__(self) -> BatchLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def remove_left(path: Path) -> None:
    """Delete a file that a process left which was killed when all was published already; no other file."""
    with suppress(OSError), path.open("r+b") as file:
        if file.read(len(MARK)) == MARK and take_lock(file):
            path.unlink()


def _is_whole(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return line.endswith(b"\n")
