"""Reading a recipe: YAML with line numbers, overrides, unknown keys answered with the nearest valid one."""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from ..errors import UsageError
from .coerce import coerce, unknown_key, yaml_name
from .sections import SECTIONS, Recipe, UptrainRecipe


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file and apply `section.key=value` overrides.

    Args:
        path: YAML file.
        overrides: `--set` arguments, later ones win.

    Returns:
        The recipe; sections that need a value check it when they run.

    Raises:
        UsageError: Unreadable file, bad YAML, unknown key, value of the wrong kind.

    Example:
        >>> load_recipe("recipes/tiny.yaml", ["uptrain.alpha=0.02"]).uptrain.alpha  # doctest: +SKIP
        0.02
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot be read ({error.strerror})", where=path, fix="give a recipe file, as in recipes/"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"is not UTF-8 (byte {error.start})", where=path) from error
    data, lines = _parse(text, path)
    where = {key: f"{path}:{line}" for key, line in lines.items()}
    for override in overrides:
        _override(data, where, override)
    return recipe_from_dict(data, str(path), where)


def recipe_from_dict(
    data: Mapping[str, Any], where: str = "recipe", places: Mapping[str, str] | None = None
) -> Recipe:
    """A recipe from plain data, checked key by key.

    Args:
        data: As in the YAML file.
        where: Name of the recipe in error messages.
        places: Dotted key -> better place (file:line) for error messages.

    Returns:
        The recipe.

    Raises:
        UsageError: Unknown key or value of the wrong kind.
    """
    places = places or {}
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key in SECTIONS:
            values[key] = None if value is None else _section(SECTIONS[key], key, value, where, places)
        else:
            values[key] = value
    for name in ("convert", "evaluate", "report"):
        if values.get(name) is None:
            values.pop(name, None)
    return _build(Recipe, "", values, where, places)


def recipe_from_overrides(overrides: Sequence[str]) -> Recipe:
    """A recipe of `section.key=value` overrides alone.

    Raises:
        UsageError: As `load_recipe`.
    """
    data: dict[str, Any] = {}
    where: dict[str, str] = {}
    for override in overrides:
        _override(data, where, override)
    return recipe_from_dict(data, "--set", where)


def check_training_words(words: Iterable[str], where: str = "uptrain") -> None:
    """Check words of the `uptrain` section against `transformers.TrainingArguments` (imports torch).

    Raises:
        UsageError: A word that is neither ours nor one of TrainingArguments.
    """
    words = list(words)
    if not words:
        return
    from transformers import TrainingArguments

    known = {f.name for f in dataclasses.fields(TrainingArguments) if f.init}
    ours = {yaml_name(f.name) for f in dataclasses.fields(UptrainRecipe)} - {"training_args"}
    for word in words:
        if word not in known:
            unknown_key(f"uptrain.{word}", word, sorted(known | ours), where)


# --- reading -------------------------------------------------------------------------------------------


@cache
def _loader() -> Any:
    """SafeLoader that reads 1e-5 as a number, as YAML 1.2 does (YAML 1.1 wants 1.0e-5)."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    number = re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    return Loader


def _parse(text: str, path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """YAML text as data and the line of every dotted key."""
    import yaml  # not at the top: `mha2gqa --help` reads this module

    try:
        node = yaml.compose(text, _loader())
        lines: dict[str, int] = {}
        if node is not None:
            _collect_lines(node, "", lines, path)
        data = yaml.load(text, _loader())
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        raise UsageError(f"is not YAML ({getattr(error, 'problem', error)})", where=place) from error
    if not isinstance(data, dict):
        raise UsageError(
            "holds no keys", where=path, fix=f"start with `source:` ({', '.join(SECTIONS)} follow)"
        )
    return data, lines


def _collect_lines(node: Any, prefix: str, lines: dict[str, int], path: Path) -> None:
    if node.id != "mapping":
        return
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        line = key.start_mark.line + 1
        if name in lines:  # YAML would silently keep the last one
            raise UsageError(f"key given twice (first at line {lines[name]})", where=f"{path}:{line}: {name}")
        lines[name] = line
        _collect_lines(value, f"{name}.", lines, path)


def _override(data: dict[str, Any], where: dict[str, str], override: str) -> None:
    key, equals, text = override.partition("=")
    place = f"--set {override}"
    parts = key.split(".")
    if not equals or not all(parts) or len(parts) > 3:
        raise UsageError("is not section.key=value", where=place, fix="for example --set uptrain.alpha=0.02")
    import yaml

    try:
        value = yaml.load(text, _loader())
    except yaml.YAMLError as error:
        raise UsageError("the value is not YAML", where=place) from error
    holder = data
    if len(parts) > 1 and parts[0] not in SECTIONS:
        unknown_key(parts[0], parts[0], list(SECTIONS), place)
    for part in parts[:-1]:
        inner = holder.get(part)
        if inner is not None and not isinstance(inner, dict):
            raise UsageError("holds no keys", where=f"{place}: {part}")
        holder[part] = holder = dict(inner or {})
    holder[parts[-1]] = value
    where[key] = place


def _section(kind: Any, name: str, value: Any, where: str, places: Mapping[str, str]) -> Any:
    if dataclasses.is_dataclass(value):
        return value
    if not isinstance(value, Mapping):
        raise UsageError("must hold keys", where=f"{places.get(name, where)}: {name}")
    return _build(kind, f"{name}.", dict(value), where, places)


T = TypeVar("T")


def _build(kind: type[T], prefix: str, values: Mapping[str, Any], where: str, places: Mapping[str, str]) -> T:
    """An instance of a recipe dataclass from raw values."""
    hints = typing.get_type_hints(kind)
    names = {yaml_name(f.name): f.name for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    extra = names.pop("training_args", None)
    built: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for key, value in values.items():
        if key in names:
            hint, place = hints[names[key]], f"{places.get(prefix + key, where)}: {prefix}{key}"
            inner = next((a for a in typing.get_args(hint) if dataclasses.is_dataclass(a)), None)
            if prefix and inner is not None and value is not None:
                built[names[key]] = _section(inner, prefix + key, value, where, places)
            else:
                built[names[key]] = coerce(hint, value, place)
        elif extra and key == "training_args" and isinstance(value, Mapping):
            rest |= value
        elif extra and isinstance(key, str):
            near = difflib.get_close_matches(key, names, 1, 0.8)
            if near:  # `alhpa` is a slip of ours, not a word of TrainingArguments
                unknown_key(prefix + key, key, list(names), places.get(prefix + key, where))
            rest[key] = value
        else:
            unknown_key(f"{prefix}{key}", str(key), list(names), places.get(f"{prefix}{key}", where))
    if extra:
        built[extra] = rest
    return kind(**built)
