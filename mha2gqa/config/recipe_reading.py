"""Reading a recipe: files, overrides, and errors that name file, line, key and the nearest valid key."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .coerce import Invalid, is_removed, short, unknown_key
from .option import Config, OptionError, declared, plain
from .recipe import SECTIONS, Recipe, Section, keys
from .training_arguments import INSTEAD, WITHOUT_EFFECT, TrainerOptions, read_each
from .yaml_text import NotYaml, parse, parse_value, read_text

SECRET_KEY = re.compile(r"(^|_)(token|api_key|password|secret)$", re.I)
SECRET = re.compile(r"\bhf_[A-Za-z0-9]{16,}|\bsk-[A-Za-z0-9_-]{20,}|://[^/\s:@]+:[^/\s@]+@")


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file and apply `section.key=value` overrides.

    Args:
        path: YAML file.
        overrides: `--set` arguments, later ones win.

    Returns:
        The recipe; sections that need a value check it when they run.

    Raises:
        UsageError: Unreadable file, bad YAML, unknown key, value of the wrong kind or out of range, keys that
            contradict each other, a password or token in the clear.

    Example:
        >>> load_recipe("recipes/tiny.yaml", ["uptrain.alpha=0.02"]).uptrain.alpha  # doctest: +SKIP
        0.02
    """
    path = Path(path)
    try:
        data, lines = parse(read_text(path))
    except NotYaml as error:
        raise UsageError(error.what, where=path if error.line is None else f"{path}:{error.line}") from error
    if not isinstance(data, dict):
        raise UsageError(
            "holds no keys", where=path, fix=f"start with `source:` ({', '.join(SECTIONS)} follow)"
        )
    places = {key: f"{path}:{line}" for key, line in lines.items()}
    for override in overrides:
        _override(data, places, override)
    return recipe_from_dict(data, str(path), places)


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
        UsageError: As `load_recipe`.
    """
    reader = _Reader(where, places or {})
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key in SECTIONS:
            if value is not None:
                values[key] = reader.section(SECTIONS[key], f"{key}", value)
        elif key in keys(Recipe):
            values[key] = reader.value(keys(Recipe)[key], str(key), value)
        else:
            unknown_key(str(key), str(key), [*keys(Recipe), *SECTIONS], reader.place(str(key)))
    return Recipe(**values)


def _override(data: dict[str, Any], places: dict[str, str], override: str) -> None:
    key, equals, text = override.partition("=")
    place = f"--set {hidden(override)[:120]}"
    parts = key.split(".")
    if not equals or not all(parts) or len(parts) > 3:
        raise UsageError("is not section.key=value", where=place, fix="for example --set uptrain.alpha=0.02")
    try:
        value = parse_value(text)
    except NotYaml as error:
        raise UsageError(error.what.replace("is not YAML", "the value is not YAML"), where=place) from error
    holder = data
    if len(parts) > 1 and parts[0] not in SECTIONS:
        unknown_key(parts[0], parts[0], list(SECTIONS), place)
    for part in parts[:-1]:
        inner = holder.get(part)
        if inner is not None and not isinstance(inner, (dict, Section)):
            raise UsageError("holds no keys", where=f"{place}: {part}")
        holder[part] = holder = dict(inner or {})
    holder[parts[-1]] = value
    for replaced in [name for name in places if name.startswith(f"{key}.")]:
        del places[replaced]  # of a section that is given whole
    places[key] = place


def hidden(text: str) -> str:
    """A text for a message, without what may be a secret in it."""
    key, equals, value = text.partition("=")
    if equals and (SECRET_KEY.search(key.strip()) or SECRET.search(value)):
        return f"{key}=…"
    return SECRET.sub("…", text)


class _Reader:
    """One reading: turns raw values into typed ones, with the place of each in errors."""

    def __init__(self, where: str, places: Mapping[str, str]) -> None:
        self.where, self.places = where, places

    def place(self, key: str) -> str:
        """Where a dotted key, or the section that holds it, stands: file and line, or what was typed."""
        parts = key.split(".")
        known = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
        return next((self.places[name] for name in known if name in self.places), self.where)

    def value(self, item: Any, key: str, value: Any) -> Any:
        """One typed value.

        Raises:
            UsageError: Of the wrong kind, out of range, or a secret.
        """
        self.refuse_secret(key, value)
        try:
            return item.read(value)
        except Invalid as error:
            raise UsageError(f"{error}, not {short(value)}", where=f"{self.place(key)}: {key}") from error

    def refuse_secret(self, key: str, value: Any) -> None:
        """Refuse passwords and access tokens: recipes are copied, logged and uploaded.

        Raises:
            UsageError: The value is not repeated.
        """
        texts = value if isinstance(value, (list, tuple)) else [value]
        named = SECRET_KEY.search(key.rpartition(".")[2]) and isinstance(value, str) and value
        if named or any(isinstance(text, str) and SECRET.search(text) for text in texts):
            raise UsageError(
                "a recipe must hold no password or access token",
                where=f"{self.place(key)}: {key}",
                fix="use `hf auth login` or HF_TOKEN",
            )

    def section(self, kind: type[Config], name: str, value: Any) -> Any:
        """A section: what was set of it, or for those without a command of their own the whole `Config`.

        Raises:
            UsageError: Unknown keys, values that cannot be used, or that contradict each other.
        """
        if isinstance(value, Config):
            return value
        if not isinstance(value, Mapping):
            raise UsageError("must hold keys", where=f"{self.place(name)}: {name}")
        known, found = keys(kind), dict[str, Any]()
        further: dict[str, Any] = {}
        takes_further = any(field.name == "training_args" for field in dataclasses.fields(kind))
        for key, raw in value.items():
            key, dotted = str(key), f"{name}.{key}"
            if self.is_removed(kind, key, raw, dotted):
                continue
            if key in known:
                item = known[key]
                inner = plain(item.hint)
                if isinstance(inner, type) and issubclass(inner, Config) and raw is not None:
                    found[item.name] = self.section(inner, dotted, raw)
                else:
                    found[item.name] = self.value(item, dotted, raw)
            elif takes_further:
                further |= self.training_args(key, raw, dotted, list(known))
            else:
                unknown_key(dotted, key, list(known), self.place(dotted))
        if further:
            found["training_args"] = further
        found = {key: item for key, item in found.items() if item is not None}
        self.check_together(kind, name, found)
        return (
            Section(kind, found)
            if name.split(".")[0] in ("convert", "evaluate", "uptrain")
            else kind(**found)
        )

    def is_removed(self, kind: type[Config], key: str, raw: Any, dotted: str) -> bool:
        """Whether a key of an earlier version says what is done now.

        Raises:
            UsageError: It says something else.
        """
        try:
            return is_removed(kind, key, raw)
        except Invalid as error:
            raise UsageError(str(error), where=f"{self.place(dotted)}: {dotted}") from error

    def training_args(self, key: str, raw: Any, dotted: str, known: Sequence[str]) -> dict[str, Any]:
        """An option of TrainingArguments, or several under the key `training_args`."""
        self.refuse_secret(dotted, raw)
        own, values = set(declared(SECTIONS["uptrain"])), {key: raw}
        if key == "training_args":
            if not isinstance(raw, Mapping):
                raise UsageError("must hold keys", where=f"{self.place(dotted)}: {dotted}")
            values = {str(name): value for name, value in raw.items()}
            for name, value in values.items():
                self.refuse_secret(f"{dotted}.{name}", value)
        elif key not in (*declared(TrainerOptions), *INSTEAD, *WITHOUT_EFFECT):
            near = difflib.get_close_matches(key[:100], [*known, *declared(TrainerOptions)], 1, 0.6)
            if near:
                unknown_key(dotted, key, near, self.place(dotted))
        try:
            return read_each(values, own)
        except OptionError as error:
            raise error.at(f"{self.place(dotted)}: {dotted}") from error

    def check_together(self, kind: type[Config], name: str, found: Mapping[str, Any]) -> None:
        """Keys that exclude or need each other, reported at the key's own line."""
        arguments = {
            item.name: () if str(item.hint).startswith("tuple") else ""
            for item in declared(kind).values()
            if item.required
        }
        try:
            kind(**(arguments | {key: _opened(value) for key, value in found.items()}))
        except OptionError as error:
            dotted = f"{name}.{error.name.rstrip('_')}"
            raise error.at(f"{self.place(dotted)}: {dotted}") from error


def _opened(value: Any) -> Any:
    return dict(value) if isinstance(value, Section) else value
