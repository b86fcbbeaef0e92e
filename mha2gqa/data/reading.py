"""Read documents from files and datasets, one at a time, with errors that name file and line."""

from __future__ import annotations

import glob
import gzip
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ..errors import DataError

Paths = str | Path | Sequence[str | Path]
Messages = tuple[Mapping[str, Any], ...]

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".raw")
OPENERS: dict[str, Callable[..., IO[bytes]]] = {".gz": gzip.open, ".xz": lzma.open}  # type: ignore[dict-item]


@dataclass(frozen=True)
class Document:
    """One document.

    Args:
        text: Its text; empty when it is a chat.
        source: Where it came from, `file:line`, for error messages and reports.
        messages: The chat (`role`, `content`, …) when the column holds messages, else None.
    """

    text: str
    source: str
    messages: Messages | None = None


def read_documents(
    paths: Paths, *, text_column: str = "text", limit_bytes: int | None = None
) -> Iterator[str]:
    """Stream the texts of files, folders, globs or Hub datasets, in order; empty texts are skipped.

    Args:
        paths: One or several of: `.txt` (any other suffix also reads as text; a whole file is one
            document), `.jsonl`, either with `.gz` or `.xz`; `.parquet`; a folder or glob of these;
            a Hub dataset `NAME[:CONFIG[:SPLIT]]`.
        text_column: Key or column that holds the text.
        limit_bytes: Stop after the document that reaches this many UTF-8 bytes.

    Yields:
        The text of each document.

    Raises:
        DataError: A file is missing, corrupt or not UTF-8, the column is absent, or there is no text.

    Example:
        >>> texts = read_documents("corpus/*.jsonl.xz", limit_bytes=10_000_000)
    """
    for document in read_records(paths, text_column=text_column, limit_bytes=limit_bytes):
        if document.messages is not None:
            raise DataError(
                f"column {text_column!r} holds chat messages, not text",
                where=document.source,
                fix="name a column of plain text with --text-column",
            )
        yield document.text


def read_records(
    paths: Paths, *, text_column: str = "text", limit_bytes: int | None = None, rows: bool = False
) -> Iterator[Document]:
    """`read_documents` with the source of each document, and chats as `messages`.

    Args:
        paths, text_column, limit_bytes: As in `read_documents`.
        rows: Read as the WikiText dataset does: a text file gives one document a line (a blank line an
            empty one), and empty documents are kept.

    Yields:
        The documents.

    Raises:
        DataError: As `read_documents`.
    """
    sources = [paths] if isinstance(paths, str | Path) else list(paths)
    if not sources:
        raise DataError("no evaluation or training text was named", where="--data")
    seen, found = 0, False
    if not all(map(str, sources)):
        raise DataError("an empty name", where="--data", fix="name a file, a folder or a data set")
    for source in sources:
        for document in _open_source(str(source), text_column, rows):
            if not rows and document.messages is None and not document.text.strip():
                continue
            found = True
            try:
                seen += len(document.text.encode())
            except UnicodeEncodeError as error:
                raise DataError(
                    f"half a character (\\u{ord(document.text[error.start]):04x}) without its other half",
                    where=document.source,
                    fix="repair the text",
                ) from error
            yield document
            if limit_bytes is not None and seen >= limit_bytes:
                return
    if not found:
        raise DataError("there is no text in it", where=", ".join(map(str, sources)))


def _open_source(source: str, column: str, rows: bool) -> Iterator[Document]:
    files = local_files(source)
    if files is None:
        yield from _read_hub(source, column)
        return
    for file in files:
        kind = _kind(file)
        if kind == ".parquet":
            yield from _read_parquet(file, column)
        elif kind in JSON_SUFFIXES:
            yield from _read_jsonl(file, column)
        elif rows:
            for number, line in _lines(file):
                yield Document(line if line.strip() else "", f"{file}:{number}")
        else:
            yield Document("".join(line for _, line in _lines(file)), str(file))


def _kind(file: Path) -> str:
    return (file.with_suffix("") if file.suffix in OPENERS else file).suffix.lower()


def local_files(source: str) -> list[Path] | None:
    """The files a source stands for, or None when it can only be a Hub dataset."""
    path = Path(source).expanduser()
    if path.is_dir():
        known = (*JSON_SUFFIXES, *TEXT_SUFFIXES, ".parquet")
        files = sorted(p for p in path.rglob("*") if p.is_file() and _kind(p) in known)
        if not files:
            raise DataError(f"no {', '.join(known)} file in this folder", where=source)
        return files
    if path.exists():
        return [path]
    if glob.has_magic(source):
        matches = glob.glob(str(path), recursive=True)  # noqa: PTH207 - Path.glob refuses absolute patterns
        files = sorted(p for p in map(Path, matches) if p.is_file())
        if not files:
            raise DataError("no file matches", where=source)
        return files
    suffixes = (*JSON_SUFFIXES, *TEXT_SUFFIXES, ".parquet", *OPENERS)
    if path.suffix.lower() in suffixes or source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise DataError("no such file or folder", where=source)
    return None


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines of a text file, line ends untouched, decoded strictly."""
    opener = OPENERS.get(file.suffix, open)
    offset = 0
    try:
        with opener(file, "rb") as handle:
            for number, raw in enumerate(handle, 1):
                try:
                    text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise DataError(
                        f"not UTF-8 at byte {offset + error.start}",
                        where=f"{file}:{number}",
                        fix="convert the file to UTF-8",
                    ) from error
                offset += len(raw)
                yield number, text
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise DataError(
            f"cannot be read ({error})", where=file, fix="check that it is whole and readable"
        ) from error


def _read_jsonl(file: Path, column: str) -> Iterator[Document]:
    for number, line in _lines(file):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise DataError(
                f"this line is not JSON ({error})", where=where, fix="each line must be one JSON object"
            ) from error
        if not isinstance(record, dict):
            raise DataError(
                f"this line is a JSON {type(record).__name__}, not an object",
                where=where,
                fix="each line must be one JSON object",
            )
        yield _document(record, column, where)


def _read_parquet(file: Path, column: str) -> Iterator[Document]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            names = table.schema_arrow.names
            if column not in names:
                raise _no_column(column, names, str(file))
            row = 0
            for batch in table.iter_batches(batch_size=256, columns=[column]):
                for record in batch.to_pylist():
                    yield _document(record, column, f"{file}:{(row := row + 1)}")
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"cannot be read ({error})", where=file, fix="check that it is whole and readable"
        ) from error


def _read_hub(source: str, column: str) -> Iterator[Document]:
    name, _, rest = source.partition(":")
    config, _, split = rest.partition(":")
    try:
        import datasets

        rows = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
        for number, record in enumerate(rows, 1):
            yield _document(record, column, f"{source}:{number}")
    except (ImportError, OSError, ValueError) as error:  # not found, offline, unknown config or split
        raise DataError(
            f"neither a local file nor a dataset that can be loaded ({error})",
            where=source,
            fix="check the path, or give NAME:CONFIG:SPLIT of a Hub dataset",
        ) from error


def _no_column(column: str, names: Iterable[str], where: str) -> DataError:
    return DataError(
        f"no column {column!r}; the columns are {', '.join(sorted(names)) or 'none'}",
        where=where,
        fix="choose one with --text-column",
    )


def _document(record: Mapping[str, Any], column: str, where: str) -> Document:
    if column not in record:
        raise _no_column(column, map(str, record), where)
    value = record[column]
    if value is None or isinstance(value, str):
        return Document(value or "", where)
    if isinstance(value, list) and value and all(isinstance(m, dict) and "role" in m for m in value):
        return Document("", where, tuple(value))
    raise DataError(
        f"column {column!r} holds a {type(value).__name__}, not text",
        where=where,
        fix="choose another with --text-column",
    )
