"""How an option is declared: once, as a field of a frozen dataclass, with help, range and panel beside it.

Recipe keys, options of the command line, Python signatures, range checks, the reference page and the JSON
schema of recipes are all derived from these declarations. Imports nothing heavy.
"""

from __future__ import annotations

import dataclasses
import os
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Self, TypeVar

from ..errors import UsageError
from .coerce import Invalid, Range, coerce, short, unknown_key
from .given import require_path

WHAT, CALIBRATION, TEACHER, TRAINING = "What", "Calibration", "Teacher", "Training"
PAIRS = "Encoder-decoders, on pairs"
GATES, OUTPUT, ADVANCED = "Gates", "Output", "Advanced"
PANELS = (
    WHAT,
    CALIBRATION,
    TEACHER,
    TRAINING,
    PAIRS,
    OUTPUT,
    GATES,
    ADVANCED,
)  # in the order of the help page
CLI, RECIPE = "command line", "recipe"
EVERYWHERE = (CLI, RECIPE)


@dataclass(frozen=True)
class Option:
    """What is declared beside a field.

    Args:
        help: One or two sentences. Names of other options stand in backquotes.
        panel: Where the help page of the command lists it.
        metavar: What stands for the value in help.
        range: Bounds such as `> 0, <= 1`.
        unset: What happens where the value is None, for help.
        form: Type in recipes and on the command line, where Python takes more (`Any`, unchecked).
        where: Whether it is an option of the command line, a key of recipes, or both.
        argument: Given by position: an argument of the command line and of the function.
        flags: Names on the command line, where they are not `--name`.
        commas: On the command line, several values stand in one argument with commas between them.
        lenient: Checked where more is known; the command line passes on what was typed.
        verbatim: In Python taken as it is: a text may be the data itself and no path.
        names: Holds names of data; from a command line or a recipe they are never the data itself.
    """

    help: str
    panel: str = ADVANCED
    metavar: str = ""
    range: str = ""
    unset: str = ""
    form: Any = None
    where: tuple[str, ...] = EVERYWHERE
    argument: bool = False
    flags: tuple[str, ...] = ()
    commas: bool = False
    lenient: bool = False
    verbatim: bool = False
    names: bool = False


C = TypeVar("C", bound="Config")


class DataName(str):
    """The name of data as a command line or a recipe gives it: a path or a data set, never the text itself."""


def option(default: Any, help: str, panel: str = ADVANCED, **more: Any) -> Any:
    """A field of a `Config`: its default (`...` for none), its help, and what else `Option` takes."""
    metadata = {"option": Option(help, panel, **more)}
    if default is ...:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Declared:
    """One option of a command, resolved.

    Args:
        name: The field.
        hint: Its type in text: in recipes and on the command line.
        default: Its default; `dataclasses.MISSING` where there is none.
        option: What is declared beside it.
        checked: Whether a value from Python is checked against `hint` too.
    """

    name: str
    hint: Any
    default: Any
    option: Option
    checked: bool

    @property
    def key(self) -> str:
        """As a recipe spells it: `as_` is `as`."""
        return self.name.rstrip("_")

    @property
    def flags(self) -> tuple[str, ...]:
        """As the command line spells it."""
        return self.option.flags or (f"--{self.key.replace('_', '-')}",)

    @property
    def range(self) -> Range:
        """The bounds of a number."""
        return Range(self.option.range)

    @property
    def required(self) -> bool:
        """Whether there is no default."""
        return self.default is dataclasses.MISSING

    def read(self, value: Any) -> Any:
        """A value from a recipe or the command line, checked.

        Raises:
            Invalid: Of the wrong kind, or out of range.
        """
        found = coerce(self.hint, value, self.range)
        return tuple(map(DataName, found)) if self.option.names and found is not None else found

    def default_words(self) -> str:
        """The default for help: the value, or what is done without one."""
        if self.required or self.default in (None, ()):
            return self.option.unset
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        if isinstance(self.default, tuple):
            return ", ".join(map(str, self.default))
        return f"{self.default:,}" if isinstance(self.default, int) else f"{self.default}"


def declared(kind: type[Any]) -> dict[str, Declared]:
    """The options of a `Config`, by the name of the field.

    Args:
        kind: A subclass of `Config`.
    """
    key: Any = kind  # to a type checker a class with fields that compare is not hashable
    return _declared(key)


@cache
def _declared(kind: Any) -> dict[str, Declared]:
    hints = typing.get_type_hints(kind, include_extras=True)
    found = {}
    for field in dataclasses.fields(kind):
        given: Option | None = field.metadata.get("option")
        if given is not None:
            hint = hints[field.name] if given.form is None else given.form
            checked = given.form is None and not given.lenient
            found[field.name] = Declared(field.name, hint, field.default, given, checked)
    return found


class OptionError(UsageError):
    """An option with a value that cannot be used. Knows its option, so that it can be spelled as it was typed.

    Args:
        name: The field.
        what: The rule, such as `must be > 0`; names of other options in backquotes.
        fix: What to do instead, likewise.
        shown: The value for the place, such as ` 5` or `=1.5`; empty where `what` names it.
    """

    def __init__(self, name: str, what: str, fix: str | None = None, shown: str = "") -> None:
        self.name, self.rule, self.advice, self.shown = name, what, fix, shown
        plain = re.sub(r"`(\w+)`", lambda match: match[1].rstrip("_"), what)
        super().__init__(plain, where=f"{name.rstrip('_')}{shown}", fix=fix and fix.replace("`", ""))

    def at(self, place: str, flags: Mapping[str, str] | None = None) -> UsageError:
        """The same error with another name for the option.

        Args:
            place: What the user typed, or file and line.
            flags: Field -> its name where the user is, for those in backquotes.
        """

        def spell(text: str) -> str:
            return re.sub(r"`(\w+)`", lambda match: (flags or {}).get(match[1], match[1].rstrip("_")), text)

        return UsageError(spell(self.rule), where=place, fix=self.advice and spell(self.advice))


@dataclass(frozen=True)
class Config:
    """Base of the options of a command: values are checked and given their types when an instance is made.

    Numbers may be text with a unit (`"1.4T"`), one text may stand for a tuple of one, paths become text.

    `REMOVED` holds options of earlier versions and the value that says what is done now: that one is still
    accepted in recipes and dictionaries.

    Raises:
        OptionError: A value of the wrong kind, out of range, or contradicting another.
    """

    REMOVED: ClassVar[Mapping[str, Any]] = {}

    def __post_init__(self) -> None:
        for name, item in declared(type(self)).items():
            value = getattr(self, name)
            if item.option.argument and item.option.form is str:
                require_path(name, value)
            object.__setattr__(self, name, _as_declared(item, value))
        for conflict in self.conflicts():
            raise conflict

    def conflicts(self) -> Iterator[OptionError]:
        """Options that exclude or need each other."""
        yield from ()

    @property
    def given(self) -> frozenset[str]:
        """Names of the fields that were asked for: those that were typed, else those that differ from their defaults."""
        typed: frozenset[str] | None = self.__dict__.get("_typed")
        return frozenset(self.changed()) if typed is None else typed

    @classmethod
    def typed(cls, values: Mapping[str, Any]) -> Self:
        """An instance that remembers which fields were given, those at their default included."""
        made = cls(**values)
        object.__setattr__(made, "_typed", frozenset(values))
        return made

    def changed(self) -> dict[str, Any]:
        """The fields that differ from their defaults."""
        values = {name: getattr(self, name) for name in declared(type(self))}
        return {name: value for name, value in values.items() if value != declared(type(self))[name].default}


def build(kind: type[C], command: str, values: Mapping[str, Any]) -> C:
    """An instance from keyword arguments of a command's function.

    Args:
        kind: Its `Config`.
        command: Its name, for the message.
        values: By field.

    Raises:
        UsageError: A name that is not an option; the nearest one is given.
        OptionError: As the `Config` raises it.
    """
    names = [field.name for field in dataclasses.fields(kind)]
    for name in values:
        if name not in names:
            unknown_key(name, name, names, f"{command}()")
    return kind(**values)


def taken(kind: type[Config], values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of some options as a `Config` takes them, for a function that has its arguments in common with one.

    Args:
        kind: The `Config` that declares them.
        values: By field.

    Raises:
        OptionError: A value of the wrong kind, or out of range.

    Example:
        >>> from mha2gqa.config import ConvertConfig
        >>> taken(ConvertConfig, {"attention": "self", "seed": 1})
        {'attention': ('self',), 'seed': 1}
    """
    return {name: _as_declared(declared(kind)[name], value) for name, value in values.items()}


def _as_declared(item: Declared, value: Any) -> Any:
    """A value from Python as the type of its option.

    Raises:
        OptionError: A value of the wrong kind, or out of range.
    """
    loose = item.option.lenient or item.option.verbatim
    if not item.checked and (loose or not is_text(value)):
        return value
    try:
        return item.read(value)
    except Invalid as error:
        raise OptionError(item.name, f"{error}, not {short(value)}") from error


def is_text(value: Any) -> bool:
    """Whether a value is what a recipe could hold too: text, a path, or a list of them."""
    one = (str, os.PathLike)
    return isinstance(value, one) or (
        isinstance(value, (list, tuple)) and all(isinstance(item, one) for item in value)
    )


def optional(hint: Any) -> bool:
    """Whether None is allowed."""
    return typing.get_origin(hint) in (types.UnionType, typing.Union) and type(None) in typing.get_args(hint)


def plain(hint: Any) -> Any:
    """A type without `None`."""
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return hint
    return next(part for part in typing.get_args(hint) if part is not type(None))
