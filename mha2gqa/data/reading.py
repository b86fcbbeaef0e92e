"""Documents from files, data sets and Python values, one at a time, with errors that name file and line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError, Mha2gqaError, reason
from .formats import hub_records, records, require_columns, texts, utf8_bytes
from .memory import ACCEPTED, IN_MEMORY, names_or_items
from .sniffing import Sniffed, SourceFile, sniff

Messages = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Document:
    """One document.

    Args:
        text: Its text; empty when it is a chat or token ids.
        source: Where it came from, `file:line`, for error messages and reports.
        messages: The chat (`role`, `content`, …) when the column holds messages, else None.
        ids: Token ids `[n]` where the data is already tokenised, else None.
        row: Rows read up to and with this one, empty ones included.
    """

    text: str
    source: str
    messages: Messages | None = None
    ids: np.ndarray | None = None
    row: int = 0


class TextSource:
    """Text from wherever it comes: looked at once, then read as often as needed, always from the start.

    Args:
        data: Paths: `.txt` (a whole file is one document), `.jsonl`, `.json` (one object a line), `.csv`,
            `.tsv`, `.parquet`, `.arrow`, each also `.gz`, `.xz`, `.bz2`, `.zst` or `.zip`; a folder or glob of
            these; a folder of `Dataset.save_to_disk`; `FOLDER::SPLIT`; a Hub dataset `NAME[:CONFIG[:SPLIT]]`.
            Or, in Python: a list of paths, a `datasets.Dataset`, an iterable of texts, of token ids, of
            `Document`s, or of rows with columns. A bare `str` is one path.
        text_column: Key or column that holds the text.
        rows: Read as the WikiText dataset does: a text file gives one document a line (a blank line an
            empty one), and empty documents are kept.
        limit_bytes: Stop after the document that reaches this many UTF-8 bytes; one that alone has more
            is cut there.

    Attributes:
        files: The files it reads.
        warnings: What the reader should know: files left out, splits chosen, text read in pieces.
        empty: Empty rows that the last reading skipped.

    Raises:
        DataError: A file is missing or of a kind that is not read; while reading: it is corrupt or not UTF-8,
            the column is absent, or there is no text.
        UsageError: A folder holds several splits.

    Example:
        >>> source = TextSource("corpus/*.jsonl.xz", limit_bytes=10_000_000)  # doctest: +SKIP
        >>> for document in source: print(document.source, len(document.text))  # doctest: +SKIP
    """

    def __init__(
        self, data: Any, text_column: str = "text", *, rows: bool = False, limit_bytes: int | None = None
    ) -> None:
        self.column, self.rows, self.limit = text_column, rows, limit_bytes
        names: list[str]
        self._items: Iterable[Any] | None
        if isinstance(data, TextSource):
            names, self._items = data.names if data._items is None else [], data._items
        else:
            names, self._items = names_or_items(data)
        given = isinstance(data, list | tuple) and all(isinstance(item, Document) for item in data)
        self._keeps_empty = rows or given
        self._parts: list[tuple[str, Sniffed | None]] = [(name, sniff(name)) for name in names]
        self.warnings = [w for _, found in self._parts if found for w in found.warnings]
        self.empty = 0

    @property
    def files(self) -> list[SourceFile]:
        """The local files, in the order of reading."""
        return [file for _, found in self._parts if found for file in found.files]

    @property
    def names(self) -> list[str]:
        """What results call the data."""
        return [IN_MEMORY] if self._items is not None else [name for name, _ in self._parts]

    @property
    def can_be_reread(self) -> bool:
        """Whether a second reading gives the same text: not for a pipe."""
        return all(file.path.is_file() or file.path.is_dir() for file in self.files)

    def __iter__(self) -> Iterator[Document]:
        self.empty = seen = 0
        number = 0
        for number, document in enumerate(self._documents(), 1):
            is_text = document.messages is None and document.ids is None
            if is_text and not self._keeps_empty and not document.text.strip():
                self.empty += 1
                continue
            size = _size(document)
            if self.limit is not None and size > self.limit:
                yield replace(document, text=_cut(document.text, self.limit), row=number)
                return
            seen += size
            yield replace(document, row=number)
            if self.limit is not None and seen >= self.limit:
                return
        if number == self.empty:
            raise DataError("holds no text", where=", ".join(self.names))

    def _documents(self) -> Iterator[Document]:
        if self._items is not None:
            yield from _from_items(self._items, self.column)
        for name, found in self._parts:
            if found is None:
                for record, where in hub_records(name, (self.column,)):
                    yield _document(record, self.column, where)
                continue
            for file in found.files:
                yield from self._read(file)

    def _read(self, file: SourceFile) -> Iterator[Document]:
        if file.format != "text":
            for record, where in records(file, (self.column,)):
                yield _document(record, self.column, where)
            return
        for number, (text, where) in enumerate(texts(file, self.rows, self.limit), 1):
            if number == 2 and not self.rows:
                self._warn(f"{file}: longer than one document can be: read in pieces of at most 64 MiB")
            yield Document(text, where)

    def _warn(self, message: str) -> None:
        if message not in self.warnings:
            self.warnings.append(message)


def paths_or_source(data: Any, text_column: str = "text") -> tuple[str, ...] | TextSource:
    """Data as options keep it: the paths it names, which may be none, or a source of values in memory.

    Raises:
        DataError: As `TextSource`.
    """
    if isinstance(data, TextSource):
        return data
    if data is None or (isinstance(data, list | tuple) and not data):
        return ()
    names, items = names_or_items(data)
    return tuple(names) if items is None else TextSource(data, text_column)


def read_documents(paths: Any, *, text_column: str = "text", limit_bytes: int | None = None) -> Iterator[str]:
    """Stream the texts of files, folders, globs or Hub datasets, in order; empty texts are skipped.

    Args:
        paths, text_column, limit_bytes: As in `TextSource`.

    Yields:
        The text of each document.

    Raises:
        DataError: As `TextSource`, and where the column holds chats.

    Example:
        >>> texts = read_documents("corpus/*.jsonl.xz", limit_bytes=10_000_000)
    """
    for document in TextSource(paths, text_column, limit_bytes=limit_bytes):
        if document.messages is not None:
            raise DataError(
                f"column {text_column!r} holds chat messages, not text",
                where=document.source,
                fix="name a column of plain text with --text-column",
            )
        yield document.text


def read_records(
    paths: Any, *, text_column: str = "text", limit_bytes: int | None = None, rows: bool = False
) -> Iterator[Document]:
    """The documents of a `TextSource`, read once."""
    return iter(TextSource(paths, text_column, rows=rows, limit_bytes=limit_bytes))


def local_files(source: str) -> list[Path] | None:
    """The files a name stands for, or None when it can only be a Hub dataset."""
    found = sniff(source)
    return None if found is None else list(dict.fromkeys(file.path for file in found.files))


def _from_items(items: Iterable[Any], column: str) -> Iterator[Document]:
    """Documents of values in memory."""
    try:
        for number, item in enumerate(items, 1):
            yield _from_item(item, column, f"{IN_MEMORY}:{number}")
    except Mha2gqaError:
        raise
    except Exception as error:  # of the caller's own iterable
        raise DataError(f"cannot be drawn ({type(error).__name__}: {reason(error)})", where="data") from error


def _from_item(item: Any, column: str, where: str) -> Document:
    if isinstance(item, Document):
        return item
    if item is None or isinstance(item, str):
        return Document(item or "", where)
    if isinstance(item, Mapping):
        return _document(item, column, where)
    if isinstance(item, Iterable) and not isinstance(item, bytes):
        ids = np.asarray(item if hasattr(item, "__array__") else list(item))
        if ids.ndim == 1 and (ids.dtype.kind in "iu" or not ids.size):
            if ids.size and not 0 <= ids.min() <= ids.max() < 2**31:
                raise DataError("holds a number that is not a token id", where=where)
            return Document("", where, ids=ids.astype(np.int32))
    raise DataError(f"a {type(item).__name__} is not a document", where=where, fix=ACCEPTED)


def _document(record: Mapping[str, Any], column: str, where: str) -> Document:
    require_columns((column,), record, where)
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


def _size(document: Document) -> int:
    """UTF-8 bytes of the text."""
    return utf8_bytes(document.text, document.source)


def _cut(text: str, limit: int) -> str:
    """As much of a text as fits into so many UTF-8 bytes."""
    return text.encode()[:limit].decode(errors="ignore")
