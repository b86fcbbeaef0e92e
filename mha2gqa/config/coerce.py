"""Values from recipes, the command line and Python, as the types that options are declared with."""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
import os
import re
import reprlib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args, get_origin

from ..errors import UsageError

Bytes = Annotated[int, "bytes"]  # `5GB`, `512MiB` or a number
Steps = Annotated[float, "steps"]  # a number of steps, or a fraction of all steps below 1

LARGEST = 10**18  # of a count: more than anybody's tokens or bytes, and exact in every library


class Invalid(ValueError):
    """The rule that a value breaks, such as `must be > 0`."""


_COUNT = re.compile(r"^(\d{1,40}(?:\.\d{1,40})?(?:[eE]\+?\d{1,3})?)\s*([kKMGBT]?)$")
_SCALE = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}


def parse_count(text: str | float) -> int:
    """A count such as `65536`, `1e9`, `100B` or `1.4T` as an int.

    Raises:
        ValueError: No whole number, or one above 10^18.

    Example:
        >>> parse_count("1.4T")
        1400000000000
    """
    match = None if isinstance(text, bool) else _COUNT.match(_text(text).replace("_", "").replace(",", ""))
    if match is None:
        raise Invalid("must be a whole number (65536, 1e9 and 100B are)")
    exact = match[1].isdigit()
    value = (int(match[1]) if exact else float(match[1])) * _SCALE[match[2]]
    if value > LARGEST:
        raise Invalid("must be at most 1e18")
    if value != int(value):
        raise Invalid("must be a whole number")
    return int(value)


_SIZE = re.compile(r"^(\d{1,40}(?:\.\d{1,40})?)\s*(?:([kKMGT])(i?)[bB]?|[bB])?$")


def parse_size(text: str | float) -> int:
    """Bytes such as `5GB` (decimal, as on a box) or `512MiB` (binary) as an int.

    Raises:
        ValueError: No size, or one above 10^18.

    Example:
        >>> parse_size("5GB"), parse_size("1MiB")
        (5000000000, 1048576)
    """
    match = None if isinstance(text, bool) else _SIZE.match(_text(text))
    if match is None:
        raise Invalid("must be a size such as 5GB or 512MiB")
    power = " kMGT".index((match[2] or " ").replace("K", "k"))
    value = float(match[1]) * (1024 if match[3] else 1000) ** power
    if match[0] == match[1]:
        _check_unit(value)
    if value > LARGEST:
        raise Invalid("must be at most 1e18 bytes")
    return int(value)


def _check_unit(value: float) -> None:
    """Refuse a bare number of few bytes: `24` of a card's memory is meant as 24GB."""
    if 0 < value < 1000:
        raise Invalid(f"must name its unit, as in {value:g}GB")


def _text(value: str | float) -> str:
    """A number as text; a whole one of thousands of digits, which Python will not write, as far too large."""
    if isinstance(value, int) and abs(value) > LARGEST:
        return "1e99"
    return str(value).strip()


class Range:
    """Bounds of a number, read from a text such as `> 0, <= 1`.

    Example:
        >>> Range("> 0, <= 1").words, Range(">= 0").holds(-1)
        ('> 0 and <= 1', False)
    """

    _CHECKS: typing.ClassVar[dict[str, Callable[[float, float], bool]]] = {
        ">": operator.gt,
        ">=": operator.ge,
        "<": operator.lt,
        "<=": operator.le,
    }

    def __init__(self, text: str = "") -> None:
        parts = [part.split() for part in text.split(",") if part.strip()]
        self.bounds = [(sign, float(bound)) for sign, bound in parts]
        self.words = " and ".join(f"{sign} {bound}" for sign, bound in parts if bound != "inf")

    def holds(self, value: float) -> bool:
        """Whether a number is inside."""
        return all(
            self._CHECKS[sign](value, bound) for sign, bound in self.bounds
        )  # no comparison with NaN holds


def coerce(hint: Any, value: Any, bounds: Range | None = None) -> Any:
    """`value` as the type `hint` of an option.

    Args:
        hint: The annotation: bool, int, float, str, `Bytes`, `Steps`, a Literal, a tuple of those, a dataclass
            of options, a dict, or one of them or None.
        value: From YAML, the command line or Python.
        bounds: Of numbers.

    Raises:
        Invalid: With the rule that it breaks.
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, typing.Union):
        kinds = [kind for kind in args if kind is not type(None)]
        empty = isinstance(value, (list, tuple)) and not value  # as if absent
        if (value is None or empty) and len(kinds) < len(args):
            return None
        return _first(kinds, value, bounds)
    if value is None:
        raise Invalid("needs a value")
    if origin is Literal:
        return _choice(args, value)
    if origin is tuple:
        return _items(args, value, bounds)
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _config(hint, value)
    if hint is dict or origin in (dict, Mapping):
        if isinstance(value, Mapping):
            return dict(value)
        raise Invalid("must hold keys")
    return _scalar(hint, value, bounds or Range())


def _first(kinds: Sequence[Any], value: Any, bounds: Range | None) -> Any:
    """The value as the first of several types that takes it."""
    if isinstance(value, Mapping) and dataclasses.is_dataclass(kinds[0]):
        return coerce(kinds[0], value)
    for kind in kinds[:-1]:
        try:
            return coerce(kind, value, bounds)
        except Invalid:
            continue
    return coerce(kinds[-1], value, bounds)


def _choice(choices: tuple[Any, ...], value: Any) -> Any:
    if any(value == choice and type(value) is type(choice) for choice in choices):
        return value
    near = difflib.get_close_matches(short(value), [str(choice) for choice in choices], 1, 0.5)
    words = f"one of {', '.join(map(str, choices))}"
    raise Invalid(f"must be {words}" + (f" (did you mean {near[0]}?)" if near else ""))


def _items(kinds: tuple[Any, ...], value: Any, bounds: Range | None) -> tuple[Any, ...]:
    items = list(value) if isinstance(value, (list, tuple, set, frozenset)) else [value]
    if kinds[-1] is not Ellipsis:
        if len(items) != len(kinds):
            raise Invalid(f"must be {len(kinds)} values")
        return tuple(coerce(kind, item, bounds) for kind, item in zip(kinds, items, strict=True))
    found = []
    for number, item in enumerate(items):
        try:
            if item == "":
                raise Invalid("must not be empty")
            found.append(coerce(kinds[0], item, bounds))
        except Invalid as error:
            raise Invalid(f"{error} (item {number + 1})" if len(items) > 1 else str(error)) from error
    return tuple(found)


def _config(kind: Any, value: Any) -> Any:
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise Invalid("must hold keys")
    names = [field.name for field in dataclasses.fields(kind)]
    value = {name: item for name, item in value.items() if not is_removed(kind, name, item)}
    for name in value:
        if name not in names:
            near = difflib.get_close_matches(str(name)[:100], names, 1, 0.5)
            advice = f"did you mean {near[0]}?" if near else f"such as {names[0]}"
            raise Invalid(f"must hold known keys, not {short(name)} ({advice})")
    return kind.typed(value)


def is_removed(kind: Any, name: str, value: Any) -> bool:
    """Whether an option is one of an earlier version, with the value that says what is done now.

    Raises:
        Invalid: It has another value.
    """
    if name not in kind.REMOVED:
        return False
    if value != kind.REMOVED[name]:
        raise Invalid(f"was removed, since it gained nothing: leave {name} out")
    return True


def _scalar(hint: Any, value: Any, bounds: Range) -> Any:
    if hint is bool or isinstance(value, bool):
        if hint is bool and isinstance(value, bool):
            return value
        raise Invalid(_RULES.get(hint, "must be a number"))
    if hint is str:
        if isinstance(value, (str, int, float, os.PathLike)):
            return os.fspath(value) if isinstance(value, os.PathLike) else str(value)
        raise Invalid(_RULES[str])
    number = _number(hint, value)
    if not bounds.holds(number):  # NaN among them
        raise Invalid(f"must be {bounds.words}")
    if not math.isfinite(number) and ("<=", math.inf) not in bounds.bounds:
        raise Invalid("must be a finite number")
    if hint is Steps and number >= 1 and number != int(number):
        raise Invalid("must be a whole number of steps, or a fraction < 1")
    return number


def _number(hint: Any, value: Any) -> int | float:
    """A number of the right type, from text or from any library's own type."""
    if hint is Bytes:
        if not isinstance(value, int) or abs(value) > LARGEST:
            return parse_size(value)
        _check_unit(value)
        return value
    whole = hint is int
    if not isinstance(value, str):
        try:
            value = operator.index(value) if hasattr(value, "__index__") else float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise Invalid(_RULES[int if whole else float]) from error
    if whole:
        if isinstance(value, int) and abs(value) <= LARGEST:
            return value
        return (
            -parse_count(value[1:])
            if isinstance(value, str) and value.startswith("-")
            else parse_count(value)
        )
    try:
        return float(value)
    except ValueError as error:
        if _COUNT.match(_text(value)):  # with a unit
            return float(parse_count(value))
        raise Invalid(_RULES[float]) from error
    except OverflowError as error:
        raise Invalid("must be at most 1e18") from error


_RULES = {
    bool: "must be true or false",
    int: "must be a whole number",
    float: "must be a number",
    Steps: "must be a number",
    Bytes: "must be a size such as 5GB",
    str: "must be text",
}

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 60
_repr.maxlevel, _repr.maxlong = 2, 40


def short(value: Any) -> str:
    """A value for a message: whole where it is short, its beginning where it is not."""
    if isinstance(value, int) and abs(value) > LARGEST:
        return "a number of very many digits" if value.bit_length() > 400 else f"{value}"
    return _repr.repr(value)


def unknown_key(key: str, word: str, valid: Sequence[str], where: str) -> typing.NoReturn:
    """Refuse a key, naming the nearest valid one."""
    near = difflib.get_close_matches(word[:100], valid, 1, 0.5)
    fix = f"did you mean {near[0]}?" if near else _listed(valid)
    raise UsageError("unknown key", where=f"{where}: {key[:100]}", fix=fix)


def _listed(valid: Sequence[str]) -> str:
    words = f"valid keys: {', '.join(valid)}"
    return words if len(words) <= 300 else f"{words[:300].rpartition(',')[0]}, …"
