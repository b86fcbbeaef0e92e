"""The header of a safetensors file, never trusted: every offset is checked before a byte is used."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, listed, quoted, reason
from .dtypes import stored_nbytes
from .json_files import LARGEST, LFS_POINTER, check_pointer, parse_json
from .source_file import SourceFile

_FIX = "download it again"


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: its file, dtype name, shape, and byte range (none where no file holds it as it is)."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int = 0
    end: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        return stored_nbytes(self.dtype, self.shape)

    @property
    def plain(self) -> bool:
        """Whether its bytes lie in the file as they are: not inside a .bin, not made from other tensors."""
        return self.end > self.begin


def read_header(file: SourceFile, name: str) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Tensor table and metadata of a safetensors file.

    Args:
        file: The file.
        name: What the table calls it.

    Raises:
        CheckpointError: No such file, truncated, or a header that contradicts itself or the file's size:
            a dtype nobody knows, offsets that do not span dtype x shape, gaps, overlaps.
    """
    path, start, header = file.path, *_header(file)
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not _all_strings(metadata):
        raise CheckpointError("__metadata__ must map strings to strings", where=path, fix=_FIX)
    table: dict[str, TensorInfo] = {}
    end = 0
    for tensor, entry in sorted(header.items(), key=lambda item: _offsets(path, *item)):
        info = _entry(path, tensor, entry)
        if info.begin != end:
            kind = "overlaps with the tensor before it" if info.begin < end else "leaves a gap before it"
            raise CheckpointError(f"tensor {quoted(tensor)} {kind}", where=path, fix=_FIX)
        end = info.end
        table[tensor] = replace(info, file=name, begin=start + info.begin, end=start + info.end)
    if start + end > file.size:
        raise CheckpointError(f"truncated: {file.size} of {start + end} bytes", where=path, fix=_FIX)
    if start + end < file.size:
        raise CheckpointError(f"{file.size - start - end} bytes too many at its end", where=path, fix=_FIX)
    _ask_safetensors(path)
    return {tensor: table[tensor] for tensor in header}, metadata or {}


def _header(file: SourceFile) -> tuple[int, dict[str, Any]]:
    """Where the tensors begin, and the header as data."""

    def broken(what: object) -> CheckpointError:
        return CheckpointError(f"no safetensors file ({what})", where=file.path, fix=_FIX)

    check_pointer(file.read(0, min(file.size, len(LFS_POINTER))), file.path)
    if file.size < 8:
        raise broken(f"{file.size} bytes")
    (length,) = struct.unpack("<Q", file.read(0, 8))
    if length > file.size - 8:
        raise broken("the header is longer than the file")
    if length > LARGEST:
        raise broken(f"a header of {length} bytes")
    try:
        header = parse_json(file.read(8, length), pairs=_no_duplicates)
    except ValueError as error:
        raise broken(error) from error
    if not isinstance(header, dict):
        raise broken("its header is not a JSON object")
    return 8 + length, header


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{quoted(next(n for n in names if names.count(n) > 1))} is there twice")
    return found


def _all_strings(metadata: Any) -> bool:
    return isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _offsets(path: Path, tensor: str, entry: Any) -> tuple[int, int]:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(map(_whole, offsets))):
        raise CheckpointError(
            f"tensor {quoted(tensor)} has no usable data_offsets ({quoted(offsets)})", where=path, fix=_FIX
        )
    return offsets[0], offsets[1]


def _entry(path: Path, tensor: str, entry: dict[str, Any]) -> TensorInfo:
    """One tensor of the header, its offsets still counted from the end of the header."""
    (begin, end), dtype, shape = _offsets(path, tensor, entry), entry.get("dtype"), entry.get("shape")
    if not isinstance(dtype, str) or not (isinstance(shape, list) and all(map(_whole, shape))):
        raise CheckpointError(
            f"tensor {quoted(tensor)} has no usable dtype or shape ({quoted(dtype)}, {quoted(shape)})",
            where=path,
            fix=_FIX,
        )
    try:
        needed = stored_nbytes(dtype, shape)
    except CheckpointError as error:
        raise CheckpointError(f"tensor {quoted(tensor)}: {error.what}", where=path, fix=error.fix) from error
    if end - begin != needed:
        raise CheckpointError(
            f"tensor {quoted(tensor)} has {end - begin} bytes, {dtype} of shape {quoted(shape)} needs {needed}",
            where=path,
            fix=_FIX,
        )
    return TensorInfo("", dtype, tuple(shape), begin, end)


def _ask_safetensors(path: Path) -> None:
    """Let the library of the format have the last word on a file."""
    from safetensors import safe_open

    try:
        with safe_open(str(path), framework="pt"):
            pass
    except Exception as error:  # whatever it says, it does not take this file
        raise CheckpointError(f"safetensors refuses it ({reason(error)})", where=path, fix=_FIX) from error


def can_store(dtype: str) -> bool:
    """Whether the installed safetensors knows a dtype by this name."""
    import safetensors

    head = json.dumps({"x": {"dtype": dtype, "shape": [0], "data_offsets": [0, 0]}}).encode()
    try:
        return bool(safetensors.deserialize(struct.pack("<Q", len(head)) + head))
    except safetensors.SafetensorError:
        return False


def check_distinct(tables: dict[str, dict[str, TensorInfo]], where: Path) -> None:
    """Refuse tensors that lie in several files: readers differ in which one they take.

    Raises:
        CheckpointError: There are such tensors; they are named.
    """
    home: dict[str, str] = {}
    for file, table in tables.items():
        if twice := sorted(home.keys() & table.keys()):
            raise CheckpointError(
                f"{listed(twice, 3)}: in {home[twice[0]]} and in {file}", where=where, fix="keep one of them"
            )
        home |= dict.fromkeys(table, file)
