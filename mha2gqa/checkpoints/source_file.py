"""A file of a source: read by position, never mapped, and the same at the end as at the beginning."""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CheckpointError, quoted
from .dtypes import torch_dtype

_FIX = "let nothing write to the source while it is read, and run again"


@dataclass(frozen=True)
class _Identity:
    """What tells that a file is still what it was."""

    inode: int
    size: int
    modified: int

    @classmethod
    def of(cls, status: os.stat_result) -> _Identity:
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)


class SourceFile:
    """An open file of a checkpoint.

    A mapped file that somebody truncates ends the process by a signal; a read by position ends as an error.

    Args:
        path: The file; a link is followed.

    Raises:
        CheckpointError: It cannot be opened, or is not a regular file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        _refuse_system(path)
        try:
            handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe must not hold us up
        except FileNotFoundError as error:
            what = f"a link to {path.readlink()}, which does not exist" if path.is_symlink() else "missing"
            raise CheckpointError(what, where=path, fix="download it again") from error
        except (OSError, ValueError) as error:
            said = getattr(error, "strerror", None) or error
            raise CheckpointError(f"cannot be read ({said})", where=path, fix="check the path") from error
        self._file = os.fdopen(handle, "rb", buffering=0)  # closed with this object
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError("not a regular file", where=path, fix="download it again")
        self._identity = _Identity.of(status)
        self._seen: dict[tuple[int, int], bytes] = {}

    @property
    def size(self) -> int:
        """Bytes of the file when it was opened."""
        return self._identity.size

    def fileno(self) -> int:
        """Descriptor, for calls that take a position: its own position is not kept."""
        return self._file.fileno()

    def read(self, begin: int, count: int) -> bytes:
        """`count` bytes from `begin`, remembered by their digest for `check_unchanged`.

        Raises:
            CheckpointError: They cannot be read.
        """
        data = bytearray(count)
        self.read_into(memoryview(data), begin)
        self._seen[begin, count] = hashlib.sha256(data).digest()
        return bytes(data)

    def read_into(self, buffer: memoryview, begin: int) -> None:
        """Fill `buffer` with the bytes from `begin`.

        Raises:
            CheckpointError: The file is shorter than it was, or cannot be read.
        """
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self.fileno(), [buffer[done : done + (1 << 30)]], begin + done)
            except OSError as error:
                raise CheckpointError(
                    f"cannot be read ({error.strerror})", where=self.path, fix="check the disk it lies on"
                ) from error
            if not count:
                raise CheckpointError("ends too early: it was truncated", where=self.path, fix=_FIX)
            done += count

    def tensor(self, dtype: str, shape: tuple[int, ...], begin: int, end: int) -> Tensor:
        """A tensor whose bytes are `[begin, end)`.

        Args:
            dtype: Its safetensors name.
            shape: Its shape.
            begin, end: Place in the file.
        """
        flat = torch.empty(end - begin, dtype=torch.uint8)
        if end > begin:
            self.read_into(flat.numpy().data, begin)
        kind = torch_dtype(dtype)
        return flat.view(kind).view(shape) if end > begin else torch.empty(shape, dtype=kind)

    def check_unchanged(self) -> None:
        """Refuse a file that was written to, or replaced, since it was opened.

        Raises:
            CheckpointError: Its size, time, inode, or what was read of it by `read` is another now.
        """
        try:
            now = _Identity.of(self.path.stat())
            same = now == self._identity == _Identity.of(os.fstat(self.fileno()))
        except FileNotFoundError as error:
            raise CheckpointError("is gone since it was opened", where=self.path, fix=_FIX) from error
        except OSError:
            same = False
        if same:
            buffers = {place: bytearray(place[1]) for place in self._seen}
            for (begin, _), data in buffers.items():
                self.read_into(memoryview(data), begin)
            same = all(hashlib.sha256(d).digest() == self._seen[place] for place, d in buffers.items())
        if not same:
            raise CheckpointError("changed while it was read", where=self.path, fix=_FIX)


def _refuse_system(path: Path) -> None:
    """Refuse a link into what the system shows of itself.

    Raises:
        CheckpointError: It leads to /proc, /sys or /dev (but for memory that serves as a disk).
    """
    try:
        target = path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, among others
        raise CheckpointError(f"cannot be read ({error})", where=path, fix="check the path") from error
    parts = target.parts[1:3]
    if parts[:1] in (("proc",), ("sys",), ("dev",)) and parts != ("dev", "shm"):
        raise CheckpointError(f"a link to {quoted(str(target))}", where=path, fix="download the file again")
