"""A whole job as data: the keys that were set, section by section. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .convert import ConvertConfig
from .evaluate import EvaluateConfig
from .option import OUTPUT, RECIPE, WHAT, Config, Declared, declared, option, plain
from .report import ReportConfig, SweepConfig
from .uptrain import UptrainConfig


def keys(kind: type[Any]) -> dict[str, Declared]:
    """The keys of a section, as recipes spell them.

    Args:
        kind: The `Config` of its command.
    """
    return {item.key: item for item in declared(kind).values() if RECIPE in item.option.where}


class Section(Mapping[str, Any]):
    """The keys of one section that were set; as an attribute, one that was not is None (or an empty tuple).

    Args:
        kind: The `Config` of its command.
        values: By field, already of their types.

    Example:
        >>> section = Section(ConvertConfig, {"groups": 8})
        >>> section.groups, section.method, section.calibration, dict(section)
        (8, None, (), {'groups': 8})
    """

    def __init__(self, kind: type, values: Mapping[str, Any] | None = None) -> None:
        self.kind, self._values = kind, dict(values or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in {f.name for f in dataclasses.fields(self.kind)}:
            raise AttributeError(name)
        missing: Any = None
        if name == "training_args":
            missing = {}
        elif getattr(plain(declared(self.kind)[name].hint), "__origin__", None) is tuple:
            missing = ()
        return self._values.get(name, missing)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Section) and (self.kind, self._values) == (other.kind, other._values)

    def __hash__(self) -> int:
        return hash((self.kind, tuple(self._values)))

    def __repr__(self) -> str:
        return f"Section({self.kind.__name__}, {self._values!r})"

    def options(self) -> dict[str, Any]:
        """What was set, as keyword arguments of the command's function."""
        return {name: dict(value) if isinstance(value, Section) else value for name, value in self.items()}

    def replaced(self, **changes: Any) -> Section:
        """The section with other values; None unsets a key."""
        values = {name: value for name, value in (self._values | changes).items() if value is not None}
        return Section(self.kind, values)


@dataclass(frozen=True)
class Recipe(Config):
    """A whole job: convert, evaluate, uptrain, evaluate, report.

    An absent section `uptrain` ends it after the first evaluation; a section `sweep` makes it a grid.
    """

    source: str = option("", "Folder or Hub id of the model.", WHAT, where=(RECIPE,))
    output: str = option("", "Folder that receives checkpoints, results and report.", OUTPUT, where=(RECIPE,))
    description: str = option("", "One line for people.", WHAT, where=(RECIPE,))
    trust_remote_code: bool = option(
        False, "Run code that comes with the model (dangerous).", WHAT, where=(RECIPE,)
    )
    convert: Section = field(default_factory=lambda: Section(ConvertConfig))
    evaluate: Section = field(default_factory=lambda: Section(EvaluateConfig))
    uptrain: Section | None = None
    report: ReportConfig = field(default_factory=ReportConfig)
    sweep: SweepConfig | None = None

    def to_dict(self) -> dict[str, Any]:
        """The recipe as plain YAML data: every value that is set."""
        return _plain({f.name: getattr(self, f.name) for f in dataclasses.fields(self)})

    def to_yaml(self) -> str:
        """The effective recipe; reading it back gives an equal `Recipe`."""
        import yaml  # not at the top: `mha2gqa --help` reads this module

        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)


SECTIONS: dict[str, type[Config]] = {
    "convert": ConvertConfig,
    "evaluate": EvaluateConfig,
    "uptrain": UptrainConfig,
    "report": ReportConfig,
    "sweep": SweepConfig,
}


def _plain(value: Any) -> Any:
    if isinstance(value, Config):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        out: dict[str, Any] = {}
        for name, item in value.items():
            if name == "training_args":
                out |= _plain(item)
            elif item is not None and item != ():
                out[str(name).rstrip("_")] = _plain(item)
        return out
    if isinstance(value, str):
        return str(value)  # of a `DataName`, which YAML does not know
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value
