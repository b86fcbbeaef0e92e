"""Atomic writes, and file locks that the operating system releases however a process ends."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from ..errors import CheckpointError

PARTIAL = ".partial"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to: it becomes `path`, synced to disk, if the block ends well, else it goes.

    Example:
        >>> with replacing(Path("a.json")) as partial:  # doctest: +SKIP
        ...     partial.write_text("{}")
    """
    partial = path.with_name(path.name + PARTIAL)
    try:
        yield partial
        sync_file(partial)
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def touch(path: Path) -> Path:
    """The name that `path` is written under until it is whole; made and removed once, to see that it can be.

    Raises:
        OSError: It cannot be written.
    """
    partial = path.with_name(path.name + PARTIAL)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial.touch()
    partial.unlink()
    return partial


def holds_only(folder: Path, *names: str) -> bool:
    """Whether a folder holds nothing but these files, whole or as `replacing` in a killed process left them."""
    own = {known for name in names for known in (name, name + PARTIAL)}
    return all(entry.name in own for entry in folder.iterdir())


@contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """Name what cannot be written, and what to do.

    Args:
        path: What is written inside the block, where the system names no file.

    Raises:
        CheckpointError: It cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot be written ({error.strerror or error})",
            where=error.filename or path,
            fix="free space or fix permissions, and run the same command again",
        ) from error


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that the file is there whole or not at all.

    Raises:
        CheckpointError: It cannot be written.
    """
    try:
        with replacing(path) as partial, partial.open("w", encoding="utf-8") as file:
            json.dump(value, file, indent=2, ensure_ascii=False, default=str)
            file.write("\n")
    except OSError as error:
        raise CheckpointError(f"cannot be written ({error.strerror})", where=path) from error


def write_text(path: Path, text: str) -> None:
    """Write `text` into a folder that is not published yet, and sync it to disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path, flags: int = os.O_RDWR) -> None:
    """Return when a file (or, opened to be read, a folder) is on the disk."""
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(path: Path) -> None:
    """Return when the names in a folder are on the disk."""
    with suppress(OSError):  # some file systems cannot sync a folder
        sync_file(path, os.O_RDONLY)


def take_lock(file: IO[Any], *, wait: bool = False) -> bool:
    """Lock an open file until it is closed; False if another process has it (and `wait` is not set).

    Where the file system has no locks, everybody gets it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


class FileLock:
    """A lock on a file, held until `release` or the end of the process.

    Where the file system has no locks, everybody gets it.

    Args:
        path: The file; made if it is not there. It holds the id of the process that had the lock last.

    Example:
        >>> lock = FileLock(Path("run/lock"))
        >>> lock.acquire()  # doctest: +SKIP
        True
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[str] | None = None

    def acquire(self, *, wait: bool = False) -> bool:
        """Take the lock; False if another process has it (and `wait` is not set)."""
        file = self.path.open("a+", encoding="utf-8")
        if not take_lock(file, wait=wait):
            file.close()
            return False
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        self._file = file
        return True

    @property
    def held(self) -> bool:
        """Whether this object has the lock."""
        return self._file is not None

    @property
    def owner(self) -> str:
        """Id of the process that has, or last had, the lock; empty if nobody had."""
        try:
            return self.path.read_text(encoding="utf-8", errors="replace").strip()[:20]
        except OSError:
            return ""

    def release(self) -> None:
        """Let others in."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> FileLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
