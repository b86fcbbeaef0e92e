"""What every result carries: schema version, command, versions. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
import json
import math
import platform
from collections.abc import Mapping
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from .errors import UsageError

if TYPE_CHECKING:
    import pandas

SCHEMA_VERSION = 1
_PACKAGES = ("mha2gqa", "torch", "transformers", "safetensors", "peft", "datasets", "accelerate")


def versions() -> dict[str, str]:
    """Versions of Python and of every package that can change a figure; absent ones are left out."""
    return dict(_versions())


@cache
def _versions() -> dict[str, str]:
    """`versions`, read once: each is a search of what is installed and a parse of its description."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if "mha2gqa" not in found:  # run from a source tree that is not installed
        from . import __version__

        found["mha2gqa"] = __version__
    return found


def jsonable(value: Any) -> Any:
    """`value` as plain JSON data; paths become strings, non-finite floats become `"inf"`, `"nan"`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.repr}
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return str(value) if isinstance(value, Path) else value


def headed(command: str, data: dict[str, Any]) -> dict[str, Any]:
    """`data` behind what every result begins with: schema version, command, versions."""
    return {"schema_version": SCHEMA_VERSION, "command": command, "versions": versions()} | data


@dataclasses.dataclass(frozen=True)
class Check:
    """One check of a checkpoint: its name, whether it held (None: not made, `detail` says why)."""

    name: str
    ok: bool | None
    detail: str


class Result:
    """Base of the result dataclasses; `command` names the command that makes it.

    Fields declared with `field(repr=False)` stay out of the JSON.
    """

    command: ClassVar[str] = ""
    table: ClassVar[str] = ""  # the field that `to_dataframe` returns: a list of rows
    renamed: ClassVar[
        Mapping[str, str]
    ] = {}  # older name of a field -> field; both hold for this schema version

    def to_dict(self) -> dict[str, Any]:
        """The result as plain JSON data, with schema version, command and versions first."""
        data = jsonable(self)
        return headed(self.command, data | {old: data[new] for old, new in self.renamed.items()})

    def __getattr__(self, name: str) -> Any:
        """A field under its older name."""
        if name in type(self).renamed:
            return getattr(self, type(self).renamed[name])
        raise AttributeError(f"{type(self).__name__} has no attribute {name}")

    def write_json(self, path: str | Path) -> Path:
        """Write `to_dict()` to `path`, indented."""
        path = Path(path)
        path.write_text(json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        return path

    def to_dataframe(self) -> pandas.DataFrame:
        """The rows of the result as a pandas table: models, layers, options, checks or log entries.

        Returns:
            One row for each; nested figures become columns with dots (`paired.difference`).

        Raises:
            UsageError: The result holds no table, or pandas is not installed.

        Example:
            >>> evaluate([original, converted], "valid.jsonl").to_dataframe()[["path", "loss"]]  # doctest: +SKIP
        """
        if not self.table:
            raise UsageError("this result holds no table", where=type(self).__name__, fix="use to_dict()")
        try:
            import pandas
        except ImportError as error:
            raise UsageError(
                "pandas is not installed", where="to_dataframe", fix="pip install pandas"
            ) from error
        return pandas.json_normalize([_plain_row(row) for row in self._rows()])

    def _rows(self) -> list[Any]:
        """What `to_dataframe` makes rows of."""
        return list(getattr(self, self.table))

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        # Found by name: results stand above the report in the order of imports, and it knows how each looks.
        found: str = import_module(f"{__package__}.report.notebook").html(self.to_dict())
        return found


def _plain_row(row: Any) -> dict[str, Any]:
    """A row as nested dictionaries, its numbers as they are."""
    if dataclasses.is_dataclass(row) and not isinstance(row, type):
        return dataclasses.asdict(row)
    return dict(row)
