"""Pairs for encoder-decoders: source and target text, or recordings and transcripts, read one at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from ..checkpoints.hf_config import is_encoder_decoder
from ..errors import DataError, Mha2gqaError, reason
from ..modeling import PREFIX
from .audio import Audio, to_audio
from .formats import column_names, hub_records, records, shown_columns, undecoded, utf8_bytes
from .memory import IN_MEMORY, names_or_items
from .recordings import recordings, sniff_recordings, tables_beside, unread
from .sniffing import Sniffed, SourceFile, sniff

AUDIO_COLUMNS = ("audio", "file_name", "path")
TRANSCRIPT_COLUMNS = ("text", "transcription", "transcript", "sentence", "target")
SOURCE_COLUMNS, TARGET_COLUMNS = ("source",), ("target",)
TEXT_COLUMNS = ("source", "text")  # where the original writes the targets, text alone is a source
SPAN_CORRUPTED = ("t5", "mt5", "umt5")  # pretrained so, on plain text: their tokenizers have the sentinels


@dataclass(frozen=True)
class Pair:
    """One example.

    Args:
        source: Text, or a recording.
        target: What the model should say; None where it is still to be written.
        place: Where it comes from, `file:line`.
        target_ids: The target as ids of the decoder (after its prompt, with the end), where a model wrote it.
    """

    source: str | Audio
    target: str | None
    place: str
    target_ids: tuple[int, ...] | None = None


class PairSource:
    """Pairs from wherever they come: looked at once, then read as often as needed, always from the start.

    Args:
        data: Tables as in `TextSource` (JSONL, CSV, Parquet, …, a Hub dataset), a folder of recordings with
            `metadata.csv` or `metadata.jsonl` (the layout of `datasets`' AudioFolder), for `targets=False` also
            recordings alone. In Python a `datasets.Dataset`, rows with columns, `Pair`s or `(source, target)`.
        audio: Whether it is a speech model.
        source_column, target_column: Names of the columns, `a.b` for a field of a column; None for
            `source` and `target`, with audio `audio` (or `file_name`) and `text` (or `transcription`, `sentence`).
        targets: Whether targets are read; without, the original writes them.
        limit: Give at most so many pairs.

    Attributes:
        warnings: What the reader should know.
        empty: Rows without source or target that the last reading skipped.

    Raises:
        DataError: There are no such files or columns; while reading: a row that is not a pair, or nothing at all.

    Example:
        >>> for pair in PairSource("train.jsonl", audio=False): print(pair.source, pair.target)  # doctest: +SKIP
    """

    def __init__(
        self,
        data: Any,
        *,
        audio: bool,
        source_column: str | None = None,
        target_column: str | None = None,
        targets: bool = True,
        limit: int | None = None,
    ) -> None:
        self.audio, self.targets, self.limit = audio, targets, limit
        self._written: list[Pair] | None = None
        self._asked = (source_column, target_column)
        names, self._items = names_or_items(data)
        self._parts = [(name, self._sniffed(name)) for name in names]
        self.warnings = [w for _, found in self._parts if found for w in found.warnings]
        self.warnings += [w for name, found in self._parts if audio and found is None for w in unread(name)]
        self.empty = 0
        if not all(file.path.is_file() or file.path.is_dir() for file in self.files):
            raise DataError(
                "a pipe can be read only once, pairs are looked at before they are used",
                where=", ".join(self.names),
                fix="write them to a file first",
            )

    def _sniffed(self, name: str) -> Sniffed | None:
        """The tables of a name; None for a data set of the Hub, and for recordings alone."""
        if not self.audio:
            return sniff(name)
        return None if recordings(name) else sniff_recordings(name)

    @property
    def names(self) -> list[str]:
        """What results call the data."""
        return [IN_MEMORY] if self._items is not None else [name for name, _ in self._parts]

    @property
    def files(self) -> list[SourceFile]:
        """The tables, in the order of reading."""
        return [file for _, found in self._parts if found for file in found.files]

    def fits(self) -> bool:
        """Whether the data has the columns of pairs, going by its first row."""
        try:
            return next(self._pairs(), None) is not None
        except DataError:
            return False

    def keep(self, pairs: Iterable[Pair]) -> None:
        """Give these pairs from now on, whose targets a model wrote."""
        self._written = list(pairs)
        if not self._written:
            raise DataError("the model writes nothing for any of it", where=", ".join(self.names))

    def __iter__(self) -> Iterator[Pair]:
        return islice(self._kept() if self._written is None else iter(self._written), self.limit)

    def _kept(self) -> Iterator[Pair]:
        self.empty = found = 0
        for pair in self._pairs():
            if (isinstance(pair.source, str) and not pair.source.strip()) or self._lacks_target(pair):
                self.empty += 1
                continue
            found += 1
            yield pair
        if not found:
            where = ", ".join(self.names)
            if self.empty:
                generate = "; the original can write the targets: --targets generate" if self.targets else ""
                nested = " and ".join(repr(name) for name in self._asked if name and "." in name)
                raise DataError(
                    f"all its {self.empty} rows lack a source or a target",
                    where=where,
                    fix=f"{f'see that they have {nested}' if nested else 'fill its columns'}{generate}",
                )
            raise DataError("there are no pairs in it", where=where)

    def _lacks_target(self, pair: Pair) -> bool:
        return self.targets and pair.target_ids is None and not (pair.target or "").strip()

    def _pairs(self) -> Iterator[Pair]:
        if self._items is not None:
            yield from self._from_items(self._items)
        for name, found in self._parts:
            if found is not None:
                for file in found.files:
                    yield from self._from_table(file)
            elif alone := recordings(name) if self.audio else []:
                yield from self._from_recordings(name, alone)
            else:
                yield from self._from_hub(name)

    def _from_table(self, file: SourceFile) -> Iterator[Pair]:
        if file.format == "text":
            raise self._text_only(file)
        names = column_names(file)
        if not names:
            return
        source, target = self._columns(names, file)
        columns = [_stored(column, names) for column in (source, target) if column]
        for record, place in records(file, columns):
            yield self._pair(record, source, target, place, file.path.parent)

    def _from_hub(self, name: str) -> Iterator[Pair]:
        columns: tuple[str, str | None] | None = None
        for record, place in hub_records(name, ()):
            columns = columns or self._columns(list(record), name)
            yield self._pair(record, *columns, place, None)

    def _from_recordings(self, name: str, files: list[Path]) -> Iterator[Pair]:
        if self.targets:
            there = tables_beside(name)
            table = f"name {there[0]} itself" if there else "add metadata.csv"
            raise DataError(
                "recordings without transcripts",
                where=name,
                fix=f"{table}, with the columns file_name and text, or let the original write them: "
                "--targets generate",
            )
        for file in files:
            yield Pair(Audio(str(file), file), None, str(file))

    def _from_items(self, items: Iterable[Any]) -> Iterator[Pair]:
        columns: tuple[str, str | None] | None = None
        try:
            for number, item in enumerate(undecoded(items), 1):
                place = f"{IN_MEMORY}:{number}"
                if isinstance(item, Pair):
                    yield item
                elif isinstance(item, Mapping):
                    columns = columns or self._columns(list(item), place)
                    yield self._pair(item, *columns, place, None)
                elif isinstance(item, tuple | list) and len(item) == 2:
                    yield self._pair(dict(zip("st", item, strict=True)), "s", "t", place, None)
                elif isinstance(item, str) and not self.targets and not self.audio:
                    yield Pair(item, None, place)
                else:
                    raise self._text_only(place)
        except Mha2gqaError:
            raise
        except Exception as error:  # of the caller's own iterable
            raise DataError(
                f"cannot be drawn ({type(error).__name__}: {reason(error)})", where="data"
            ) from error

    def _columns(self, names: list[str], where: object) -> tuple[str, str | None]:
        """The columns of source and target.

        Raises:
            DataError: One is missing.
        """
        sources = AUDIO_COLUMNS if self.audio else SOURCE_COLUMNS if self.targets else TEXT_COLUMNS
        targets = TRANSCRIPT_COLUMNS if self.audio else TARGET_COLUMNS
        found = []
        for asked, known in zip(self._asked, (sources, targets), strict=True):
            column = asked or next((name for name in known if name in names), None)
            if column is None or _stored(column, names) not in names:
                column = None
            found.append((column, asked or known[0]))
        (source, _), (target, _) = found
        missing = [
            name
            for (column, name), needed in zip(found, (True, self.targets), strict=True)
            if needed and not column
        ]
        if source is None or missing:
            raise DataError(
                f"no column {' or '.join(map(repr, missing))}; the columns are {shown_columns(names)}",
                where=where,
                fix=self._needed(source is None, "translation" in names),
            )
        return source, target if self.targets else None

    def _needed(self, lacks_source: bool = True, nested: bool = False) -> str:
        generate = "let the original write the targets with --targets generate"
        if self.audio and lacks_source:
            return (
                "a speech model: give a folder of recordings with metadata.csv (file_name, text), or name the "
                "columns with --source-column and --target-column"
            )
        if not self.targets:
            return "give a table (JSONL, CSV, Parquet) with a column source or text, or name it with --source-column"
        kinds = "audio and text" if self.audio else "source and target"
        named = "--source-column and --target-column" + (", such as translation.en" if nested else "")
        return f"an encoder-decoder needs the columns {kinds}: name them with {named}, or {generate}"

    def _text_only(self, where: object) -> DataError:
        return DataError("plain text is not a pair", where=where, fix=self._needed())

    def _pair(
        self, record: Mapping[str, Any], source: str, target: str | None, place: str, folder: Path | None
    ) -> Pair:
        said = _text(_field(record, target), target, place) if target else None
        value = _field(record, source)
        if self.audio and not _is_empty(value):
            return Pair(value if isinstance(value, Audio) else to_audio(value, place, folder), said, place)
        return Pair("" if self.audio else _text(value, source, place), said, place)


def trained_on(config: Mapping[str, Any]) -> Literal["text", "pairs", "audio"]:
    """The kind of data that a model is calibrated, uptrained and scored on, by its raw config."""
    if not is_encoder_decoder(config) or stock_type(config) in SPAN_CORRUPTED:
        return "text"
    return "audio" if is_audio(config) else "pairs"


def is_audio(config: Mapping[str, Any]) -> bool:
    """Whether an encoder-decoder's sources are recordings, by its raw config."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES as SPEECH

    return stock_type(config) in SPEECH


def stock_type(config: Mapping[str, Any]) -> str:
    """The model type, for a converted model that brings its own code that of its original."""
    return str(config.get("model_type")).removeprefix(PREFIX)


def _is_empty(value: Any) -> bool:
    """Whether a value of a column of recordings holds none."""
    if isinstance(value, Mapping):
        return all(_is_empty(part) for part in value.values())
    return value is None or (isinstance(value, str | bytes) and not value.strip())


def _stored(column: str, names: Collection[str]) -> str:
    """The column of a table that `column` is, or is a field of."""
    return column if column in names else column.partition(".")[0]


def _field(record: Mapping[str, Any], column: str) -> Any:
    if column in record:
        return record[column]
    value: Any = record
    for part in column.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _text(value: Any, column: str | None, place: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        utf8_bytes(value, place)
        return value
    raise DataError(
        f"column {column!r} holds a {type(value).__name__}, not text",
        where=place,
        fix="name another with --source-column or --target-column",
    )
