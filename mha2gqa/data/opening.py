"""The bytes and lines of a file of data, whatever it is compressed with; memory stays bounded."""

from __future__ import annotations

import bz2
import codecs
import contextlib
import gzip
import lzma
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..errors import DataError, Mha2gqaError, reason
from .sniffing import SourceFile

CHUNK = 1 << 20  # bytes read at once
LINE_BYTES = 1 << 27  # a longer line is refused: as a record it takes several times as much memory
PIECE_BYTES = 1 << 26  # a longer text file is read in documents of at most this size

Read = Callable[[int], bytes]


@contextlib.contextmanager
def opened(file: SourceFile) -> Iterator[Any]:
    """The decompressed bytes as an object with `read(size)`.

    Raises:
        DataError: The file is unreadable, truncated or corrupt; also where that shows only while reading.
    """
    try:
        with contextlib.ExitStack() as stack:
            yield stack.enter_context(_opener(file, stack))
    except Mha2gqaError:
        raise
    except Exception as error:  # every library of compression has errors of its own
        raise DataError(
            f"cannot be read ({reason(error)})", where=file, fix="check that it is whole and readable"
        ) from error


def _opener(file: SourceFile, stack: contextlib.ExitStack) -> Any:
    match file.compression:
        case ".gz":
            return gzip.open(file.path, "rb")
        case ".xz":
            return lzma.open(file.path, "rb")
        case ".bz2":
            return bz2.open(file.path, "rb")
        case ".zst":
            import pyarrow  # notices a truncated file and reads on over frames

            return pyarrow.input_stream(str(file.path), compression="zstd")
        case ".zip":
            archive = stack.enter_context(zipfile.ZipFile(file.path))
            return archive.open(str(file.member))
        case _:
            return file.path.open("rb")


@contextlib.contextmanager
def seekable(file: SourceFile) -> Iterator[Path]:
    """A path that can be mapped into memory: the file itself, or a temporary copy of a compressed one."""
    if file.compression is None:
        yield file.path
        return
    with tempfile.NamedTemporaryFile(suffix=f".{file.format}") as copy:
        with opened(file) as source:
            while chunk := source.read(CHUNK):
                copy.write(chunk)
        copy.flush()
        yield Path(copy.name)


def lines(file: SourceFile) -> Iterator[tuple[int, str]]:
    """Numbered lines, line ends untouched, decoded strictly.

    Raises:
        DataError: As `opened`; a line is not UTF-8, or longer than can be held.
    """
    offset = 0
    with opened(file) as source:
        for number, raw in enumerate(_raw_lines(source.read, file), 1):
            where = f"{file}:{number}"
            yield number, _decoded(raw, number == 1, offset, where)
            offset += len(raw)


def _raw_lines(read: Read, file: SourceFile) -> Iterator[bytes]:
    parts: list[bytes] = []  # of a line that is not complete
    held, number = 0, 1
    while chunk := read(CHUNK):
        whole = chunk.split(b"\n")
        for piece in whole[:-1]:
            yield b"".join((*parts, piece, b"\n"))
            parts, held, number = [], 0, number + 1
        if whole[-1]:
            parts.append(whole[-1])
            held += len(whole[-1])
        if held > LINE_BYTES:
            raise DataError(
                f"a line of more than {LINE_BYTES >> 20} MiB",
                where=f"{file}:{number}",
                fix="split it into shorter documents",
            )
    if parts:
        yield b"".join(parts)


def _decoded(raw: bytes, first: bool, offset: int, where: str) -> str:
    try:
        return raw.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"not UTF-8 at byte {offset + error.start}", where=where, fix="convert the file to UTF-8"
        ) from error


def pieces(file: SourceFile, size: int = PIECE_BYTES, *, at_lines: bool = True) -> Iterator[str]:
    """A whole text file, in pieces of at most `size` bytes (a character more where they are few).

    Args:
        file: Of plain text.
        size: Bytes.
        at_lines: Cut at line ends (else at spaces) where there are any; if not, after any character.

    Raises:
        DataError: As `lines`.
    """
    held, offset, number = b"", 0, 1
    with opened(file) as source:
        while True:
            parts, length = [held], len(held)
            while length <= size + 4 and (chunk := source.read(min(CHUNK, size + 5 - length))):
                parts.append(chunk)
                length += len(chunk)
            data = b"".join(parts)
            if not data and offset:
                return
            end = length if length <= size + 4 else _cut_at(data, size, at_lines)
            piece, held = data[:end], data[end:]
            yield _text(piece, offset, number, file)
            offset, number = offset + end, number + piece.count(b"\n")
            if length <= size + 4:
                return


def _cut_at(data: bytes, size: int, at_lines: bool) -> int:
    """Where to cut: after the last line, else the last space, else before a character begins."""
    for mark in (b"\n", b" ") if at_lines else ():
        if end := data.rfind(mark, 0, size) + 1:
            return end
    end = size
    while end < min(len(data), size + 4) and data[end] & 0xC0 == 0x80:  # within a character of UTF-8
        end += 1
    return end


def _text(piece: bytes, offset: int, number: int, file: SourceFile) -> str:
    start = piece.removeprefix(codecs.BOM_UTF8) if offset == 0 else piece
    try:
        return start.decode("utf-8")
    except UnicodeDecodeError as error:
        at = error.start + len(piece) - len(start)
        line = number + piece[:at].count(b"\n")
        raise DataError(
            f"not UTF-8 at byte {offset + at}",
            where=f"{file}:{line}",
            fix="convert the file to UTF-8",
        ) from error
