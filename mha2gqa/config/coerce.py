"""Raw YAML values as the types that recipe fields are annotated with."""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin

from ..errors import UsageError

_COUNT = re.compile(r"^(\d+(?:\.\d+)?(?:[eE]\+?\d+)?)\s*([kKMGBT]?)$")
_SCALE = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}


def parse_count(text: str | float) -> int:
    """A count such as `65536`, `1e9`, `100B` or `1.4T` as an int.

    Raises:
        ValueError: No whole number.

    Example:
        >>> parse_count("1.4T")
        1400000000000
    """
    if isinstance(text, bool):
        raise ValueError(f"{text!r} is not a number")
    match = _COUNT.match(str(text).strip().replace("_", "").replace(",", ""))
    if match is None:
        raise ValueError(f"{text!r} is not a whole number (65536, 1e9 and 100B are)")
    value = float(match[1]) * _SCALE[match[2]] if not match[1].isdigit() else int(match[1]) * _SCALE[match[2]]
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number")
    return int(value)


_SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*(?:([kKMGT])(i?)[bB]?|[bB])?$")


def parse_size(text: str | float) -> int:
    """Bytes such as `5GB` (decimal, as on a box) or `512MiB` (binary) as an int.

    Raises:
        ValueError: No size.

    Example:
        >>> parse_size("5GB"), parse_size("1MiB")
        (5000000000, 1048576)
    """
    match = _SIZE.match(str(text).strip())
    if match is None or isinstance(text, bool):
        raise ValueError(f"{text!r} is not a size (5GB and 512MiB are)")
    power = " kMGT".index((match[2] or " ").replace("K", "k"))
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def coerce(hint: Any, value: Any, place: str) -> Any:
    """`value` as the annotated type `hint` of a recipe field.

    Raises:
        UsageError: It cannot be meant as one.
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return coerce(next(a for a in args if a is not type(None)), value, place)
    if value is None:
        raise UsageError("needs a value", where=place)
    if origin is Literal:
        if value not in args:
            near = difflib.get_close_matches(str(value), [str(a) for a in args], 1, 0.5)
            fix = f"did you mean {near[0]}?" if near else f"one of {', '.join(map(str, args))}"
            raise UsageError(f"{value!r} is not possible", where=place, fix=fix)
        return value
    if origin is tuple:
        items = value if isinstance(value, (list, tuple)) else [value]
        return tuple(coerce(args[0], item, f"{place}[{i}]") for i, item in enumerate(items))
    if dataclasses.is_dataclass(hint) or origin is dict:
        return value
    return _scalar(hint, value, place)


def _scalar(hint: Any, value: Any, place: str) -> Any:
    wrong = UsageError(f"{value!r} is not {_WORDS.get(hint, hint)}", where=place)
    if hint is bool or isinstance(value, bool):
        if hint is bool and isinstance(value, bool):
            return value
        raise wrong
    if hint is str:
        if isinstance(value, (str, int, float)):
            return str(value)
        raise wrong
    if not isinstance(value, (str, int, float)):
        raise wrong
    try:
        return parse_count(value) if hint is int and not isinstance(value, int) else hint(value)
    except ValueError as error:
        raise wrong from error


_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def unknown_key(key: str, word: str, valid: Sequence[str], where: str) -> typing.NoReturn:
    """Refuse a key, naming the nearest valid one."""
    near = difflib.get_close_matches(word, valid, 1, 0.5)
    fix = f"did you mean {near[0]}?" if near else f"valid keys: {', '.join(valid)}"
    raise UsageError("unknown key", where=f"{where}: {key}", fix=fix)


def yaml_name(name: str) -> str:
    """A field as YAML spells it: `as_` is `as`."""
    return name.rstrip("_")
