"""Data given in Python: which values stand for paths, and documents from the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..config.option import DataName
from ..errors import DataError, UsageError
from .sniffing import exists, looks_like_file

IN_MEMORY = "(in memory)"
ACCEPTED = "give a path, a list of paths, a datasets.Dataset, or an iterable of texts or of token ids"


class Replayed:
    """An iterator made readable as often as needed: what has been drawn is kept."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items, self._drawn = items, []  # type: ignore[var-annotated]

    def __iter__(self) -> Iterator[Any]:
        index = 0
        while True:
            if index == len(self._drawn):
                try:
                    self._drawn.append(next(self._items))
                except StopIteration:
                    return
            yield self._drawn[index]
            index += 1


def names_or_items(data: Any) -> tuple[list[str], Iterable[Any] | None]:
    """The paths that `data` names, or the items it holds.

    A list of `str` is one of paths, unless none of them is a file or has the form of a name.

    Raises:
        DataError: It is empty, or of a kind that is not read.
        UsageError: Several splits, of which one must be chosen.
    """
    if isinstance(data, str | Path):
        return [_checked(str(data))], None
    if isinstance(data, Mapping):
        _refuse_mapping(data)
    if hasattr(data, "to_dict") and hasattr(data, "itertuples"):  # pandas
        return [], data.to_dict("records")
    if not isinstance(data, Iterable):
        raise DataError(f"{type(data).__name__} is not data", where="data", fix=ACCEPTED)
    if not isinstance(data, list | tuple):
        return [], Replayed(iter(data)) if isinstance(data, Iterator) else data
    if not data:
        raise DataError("no evaluation or training text was named", where="--data")
    if all(isinstance(item, DataName) for item in data):
        return [_checked(str(item)) for item in data], None
    if not all(isinstance(item, str | Path) for item in data):
        return [], data
    kinds = {_kind(item): item for item in reversed(data)}
    if "file" in kinds and "text" in kinds:
        raise DataError(
            f"{str(kinds['file'])[:80]!r} is a path, {kinds['text'][:80]!r} is not",
            where="data",
            fix="give paths or texts, not both",
        )
    if "text" in kinds:
        return [], data
    return [_checked(str(item)) for item in data], None


def _checked(name: str) -> str:
    """A name that stays one wherever it is read again."""
    if not name.strip():
        raise DataError("an empty name", where="--data", fix="name a file, a folder or a data set")
    if not _possible(name):
        raise DataError(
            f"{name[:40]!r} … cannot be a path; a str is one path",
            where="data",
            fix="check it; in Python give texts as a list",
        )
    return DataName(name)


def _possible(name: str) -> bool:
    """Whether a file can have this name."""
    return (
        not {"\n", "\0"} & set(name)
        and max(map(len, _encoded(name).split(b"/"))) < 256
        and len(_encoded(name)) < 4096
    )


def _encoded(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")


def _kind(item: str | Path) -> str:
    """`file` for a path, `text` for what cannot be one, `name` for what may be a data set of the Hub."""
    if not isinstance(item, Path) and not item.strip():
        return "name"
    if isinstance(item, Path) or (_possible(item) and exists(Path(item).expanduser())):
        return "file"
    if not _possible(item):
        return "text"
    spaces = any(map(str.isspace, item))
    return (
        "file" if looks_like_file(item) and not (spaces and len(item) > 80) else "text" if spaces else "name"
    )


def _refuse_mapping(data: Mapping[Any, Any]) -> None:
    names = ", ".join(map(str, list(data)[:8]))
    if all(hasattr(value, "column_names") for value in data.values()):  # datasets.DatasetDict
        raise UsageError(
            f"several splits ({names}), which are not mixed", where="data", fix="give data[SPLIT]"
        )
    raise DataError(f"a mapping with the keys {names} is not data", where="data", fix=ACCEPTED)
