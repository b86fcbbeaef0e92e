"""JSON from files that anybody may have written: whole, small enough to hold, and an object."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, quoted

LARGEST = 100_000_000  # bytes; safetensors allows its headers as much
DEEPEST = 100  # levels of objects and arrays; Python's own limit depends on its version and on who is reading
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
RESTORE = "restore the original file"


def parse_json(data: bytes | str, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """JSON as Python data, whatever was written.

    Args:
        data: The text.
        pairs: Makes an object of its pairs; a dict, where of two equal names the last counts, by default.

    Raises:
        ValueError: With a short reason: broken, nested too deeply, numbers too long, an invalid surrogate.
    """
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
        value = json.loads(text, object_pairs_hook=pairs)
        _check_depth(value)
        if "\\ud" in text or "\\uD" in text:  # half a surrogate pair cannot be written again
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("an unpaired UTF-16 surrogate") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    except MemoryError:
        raise ValueError("too large for the memory") from None
    except ValueError as error:
        raise ValueError(str(error).split("; use")[0][:120]) from None  # Python's advice on long integers
    return value


def _check_depth(value: Any) -> None:
    """Refuse more than `DEEPEST` levels, which functions that call themselves could not follow."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(DEEPEST + 1):
        parts = (part.values() if isinstance(part, dict) else part for part in level)
        level = [child for children in parts for child in children if isinstance(child, (dict, list))]
        if not level:
            return
    raise ValueError("nested too deeply")


def read_bytes(path: Path, limit: int = LARGEST) -> bytes:
    """The content of a small regular file.

    Raises:
        FileNotFoundError: There is none.
        CheckpointError: A dangling link, a Git LFS pointer, no regular file, larger than `limit`, unreadable.
    """
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe must not hold us up
    except FileNotFoundError:
        if path.is_symlink():
            raise CheckpointError(
                f"a link to {quoted(path.readlink())}, which does not exist",
                where=path,
                fix="download the file again",
            ) from None
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"cannot be read ({getattr(error, 'strerror', None) or error})", where=path, fix="check the path"
        ) from error
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError("not a regular file", where=path, fix=RESTORE)
        try:
            data = file.read(limit + 1)
        except OSError as error:
            raise CheckpointError(
                f"cannot be read ({error.strerror})", where=path, fix="check the disk"
            ) from error
    if len(data) > limit:
        raise CheckpointError(f"larger than {limit // 10**6} MB", where=path, fix=RESTORE)
    check_pointer(data, path)
    return data


def check_pointer(data: bytes, path: Path) -> None:
    """Refuse what a clone without Git LFS leaves in place of a file.

    Raises:
        CheckpointError: `data`, the beginning of the file, is such a pointer.
    """
    if data.startswith(LFS_POINTER):
        raise CheckpointError(
            "a Git LFS pointer, not the file itself", where=path, fix="run `git lfs pull` in its repository"
        )


def read_json(path: Path, *, fix: str = RESTORE) -> dict[str, Any]:
    """A JSON object from a file.

    Args:
        path: The file.
        fix: What to do where it is broken.

    Raises:
        CheckpointError: It is missing, broken, no regular file, or no object.
    """
    try:
        value = parse_json(read_bytes(path))
    except FileNotFoundError:
        raise CheckpointError("missing", where=path, fix="a checkpoint folder needs it") from None
    except ValueError as error:
        raise CheckpointError(f"not valid JSON ({error})", where=path, fix=fix) from error
    if not isinstance(value, dict):
        raise CheckpointError("not a JSON object", where=path, fix=fix)
    return value
