"""Records of each format, one at a time, each with the place it comes from."""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import DataError, Mha2gqaError, reason
from .opening import LINE_BYTES, PIECE_BYTES, lines, pieces, seekable
from .sniffing import SourceFile

Record = tuple[Mapping[str, Any], str]  # columns by name, and `file:line`
BATCH_ROWS = 256  # rows of a columnar file decoded at once


def records(file: SourceFile, columns: Sequence[str]) -> Iterator[Record]:
    """The records of a file that is not plain text.

    Args:
        file: Of any format but `text`.
        columns: Those that are read; a format that knows its columns is checked for them.

    Raises:
        DataError: The file is corrupt, or lacks a column.
    """
    return READERS[file.format](file, columns)


def texts(file: SourceFile, rows: bool, limit: int | None = None) -> Iterator[tuple[str, str]]:
    """The documents of a plain-text file with their places: the whole file, or each of its lines.

    A file of more than 64 MiB gives several documents. Where only `limit` bytes are wanted, little more is read.
    """
    if rows:
        for number, line in lines(file):
            yield line if line.strip() else "", f"{file}:{number}"
    elif limit is not None and limit < PIECE_BYTES:
        yield next(pieces(file, limit + 4, at_lines=False)), str(file)
    else:
        for piece in pieces(file, PIECE_BYTES):
            yield piece, str(file)


def require_columns(columns: Sequence[str], names: Iterable[str], where: object) -> None:
    """Refuse data without the columns asked for.

    Raises:
        DataError: The first missing column, and those that are there.
    """
    there = list(names)
    for column in columns:
        if column not in there:
            raise DataError(
                f"no column {column!r}; the columns are {shown_columns(there)}",
                where=where,
                fix="choose one with --text-column",
            )


def utf8_bytes(text: str, where: str) -> int:
    """How many bytes a text has in UTF-8.

    Raises:
        DataError: It holds half of a surrogate pair, which no tokenizer takes.
    """
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise DataError(
            f"invalid UTF-16 surrogate \\u{ord(text[error.start]):04x}", where=where, fix="repair the text"
        ) from error


def shown_columns(names: Iterable[object]) -> str:
    """Names of columns for a message, in quotes where a space before or behind would not be seen."""
    shown = (name if name == name.strip() else repr(name) for name in map(str, names))
    return ", ".join(sorted(shown)) or "none"


def _read_jsonl(file: SourceFile, columns: Sequence[str]) -> Iterator[Record]:
    for number, line in lines(file):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        if number == 1 and line.lstrip().startswith("["):
            raise DataError(
                "holds a JSON array, not a JSON object a line",
                where=where,
                fix="jq -c '.[]' FILE makes lines of it",
            )
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
            raise DataError(
                f"this line is not JSON ({reason(error)})",
                where=where,
                fix="each line must be one JSON object",
            ) from error
        if not isinstance(record, dict):
            raise DataError(
                f"this line is a JSON {type(record).__name__}, not an object",
                where=where,
                fix="each line must be one JSON object",
            )
        yield record, where


def _read_csv(file: SourceFile, columns: Sequence[str]) -> Iterator[Record]:
    with _csv_rows(file) as rows:
        header: list[str] = next(rows, [])
        require_columns(columns, header, file)
        if twice := [column for column in columns if header.count(column) > 1]:
            raise DataError(f"two columns {twice[0]!r}", where=file, fix="give each a name of its own")
        for row in rows:
            if not row:
                continue
            if len(row) != len(header):
                raise DataError(
                    f"a row of {len(row)} fields under a header of {len(header)}",
                    where=f"{file}:{rows.line_num}",
                    fix="check quotes and delimiters",
                )
            yield dict(zip(header, row, strict=True)), f"{file}:{rows.line_num}"


@contextlib.contextmanager
def _csv_rows(file: SourceFile) -> Iterator[Any]:
    """The rows of a CSV or TSV file, as `csv.reader` gives them.

    Raises:
        DataError: One is not CSV.
    """
    csv.field_size_limit(LINE_BYTES)
    delimiter = "\t" if file.format == "tsv" else ","
    rows = csv.reader((line for _, line in lines(file)), delimiter=delimiter, strict=True)
    try:
        yield rows
    except csv.Error as error:
        raise DataError(
            f"not {file.format.upper()} ({reason(error)})", where=f"{file}:{rows.line_num}"
        ) from error


def _read_parquet(file: SourceFile, columns: Sequence[str]) -> Iterator[Record]:
    import pyarrow.parquet

    with _mapped(file) as path, pyarrow.parquet.ParquetFile(path) as table:
        require_columns(columns, table.schema_arrow.names, file)
        yield from _rows(table.iter_batches(batch_size=BATCH_ROWS, columns=list(columns)), columns, file)


def _read_arrow(file: SourceFile, columns: Sequence[str]) -> Iterator[Record]:
    with _arrow(file) as (schema, batches):
        require_columns(columns, schema.names, file)
        yield from _rows(batches, columns, file)


@contextlib.contextmanager
def _arrow(file: SourceFile) -> Iterator[tuple[Any, Iterable[Any]]]:
    """Schema and batches of an Arrow file or stream."""
    import pyarrow

    with _mapped(file) as path, pyarrow.memory_map(str(path)) as source:
        if source.read(6) == b"ARROW1":
            table = pyarrow.ipc.open_file(source)
            yield table.schema, (table.get_batch(i) for i in range(table.num_record_batches))
        else:  # as `datasets` writes it
            source.seek(0)
            stream = pyarrow.ipc.open_stream(source)
            yield stream.schema, stream


@contextlib.contextmanager
def _mapped(file: SourceFile) -> Iterator[Path]:
    """A path to map; whatever the reader of the format raises becomes an error of the file."""
    try:
        with seekable(file) as path:
            yield path
    except Mha2gqaError:
        raise
    except Exception as error:
        raise DataError(
            f"cannot be read ({reason(error)})", where=file, fix="check that it is whole and readable"
        ) from error


def _rows(batches: Iterable[Any], columns: Sequence[str], file: SourceFile) -> Iterator[Record]:
    row = 0
    for batch in batches:
        for start in range(0, batch.num_rows, BATCH_ROWS):
            for record in batch.slice(start, BATCH_ROWS).select(list(columns)).to_pylist():
                row += 1
                yield record, f"{file}:{row}"


def _read_saved(file: SourceFile, columns: Sequence[str]) -> Iterator[Record]:
    """A folder of `Dataset.save_to_disk`."""
    import datasets

    with _mapped(file) as path:
        table = undecoded(datasets.load_from_disk(str(path)))
        require_columns(columns, table.column_names, file)
        for number, record in enumerate(table.select_columns(list(columns)), 1):
            yield record, f"{file}:{number}"


def hub_records(name: str, columns: Sequence[str]) -> Iterator[Record]:
    """Records of a data set of the Hub, `NAME[:CONFIG[:SPLIT]]`, streamed.

    Raises:
        DataError: There is none of that name, or it cannot be loaded.
    """
    repository, _, rest = name.partition(":")
    config, _, split = rest.partition(":")
    try:
        import datasets
        from datasets import packaged_modules

        # Under the name of a format `datasets` reads every such file below the current folder.
        if repository in getattr(packaged_modules, "_PACKAGED_DATASETS_MODULES", ()):
            raise ValueError(f"{repository} names a format")
        rows = datasets.load_dataset(repository, config or None, split=split or "train", streaming=True)
        for number, record in enumerate(undecoded(rows), 1):
            require_columns(columns, record, name)
            yield record, f"{name}:{number}"
    except Mha2gqaError:
        raise
    except Exception as error:  # not found, offline, unknown config or split, a data-set script
        raise DataError(
            f"neither a local file nor a dataset that can be loaded ({reason(error)})",
            where=name,
            fix="check the path, or give NAME:CONFIG:SPLIT of a Hub dataset",
        ) from error


def undecoded(rows: Any) -> Any:
    """A data set whose recordings come as bytes: `datasets` would decode them with another library."""
    for name, feature in (getattr(rows, "features", None) or {}).items():
        if type(feature).__name__ == "Audio":
            import datasets

            rows = rows.cast_column(name, datasets.Audio(decode=False))
    return rows


def column_names(file: SourceFile) -> list[str]:
    """The columns of a table; of JSONL those of its first record.

    Raises:
        DataError: As `records`.
    """
    if file.format == "saved":
        import datasets

        with _mapped(file) as path:
            return list(datasets.load_from_disk(str(path)).column_names)
    if file.format == "parquet":
        import pyarrow.parquet

        with _mapped(file) as path:
            return list(pyarrow.parquet.read_schema(path).names)
    if file.format == "arrow":
        with _arrow(file) as (schema, _):
            return list(schema.names)
    if file.format in ("csv", "tsv"):
        with _csv_rows(file) as rows:
            return list(next(rows, []))
    first = next(records(file, ()), None)
    return [] if first is None else list(first[0])


READERS: dict[str, Callable[[SourceFile, Sequence[str]], Iterator[Record]]] = {
    "jsonl": _read_jsonl,
    "csv": _read_csv,
    "tsv": _read_csv,
    "parquet": _read_parquet,
    "arrow": _read_arrow,
    "saved": _read_saved,
}
