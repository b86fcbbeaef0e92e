"""`KEY=VALUE` arguments of the command line: `--fit` of convert, `--set` of uptrain."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..errors import UsageError
from .coerce import Invalid, is_removed, short, unknown_key
from .option import Declared, OptionError, declared
from .recipe import keys
from .recipe_reading import hidden
from .reconstruct import ReconstructConfig
from .training_arguments import TrainerOptions, read_training_arg
from .uptrain import UptrainConfig
from .yaml_text import NotYaml, parse_value


def read_fit(texts: Sequence[str]) -> ReconstructConfig | None:
    """The settings of `--fit`; several pairs may stand in one argument, apart by spaces or commas.

    Args:
        texts: What was typed, such as `steps=2000 patience=12`.

    Raises:
        UsageError: Not of that form, an unknown key, or a value that cannot be used; as it was typed.

    Example:
        >>> read_fit(["steps=2000,patience=12"]).patience
        12
    """
    pairs = [pair for text in texts for pair in re.split(r"[\s,]+(?=\w+\s*=)", text.strip()) if pair]
    values: dict[str, Any] = {}
    typed: dict[str, str] = {}
    for pair in pairs:
        key, value, place = _pair(pair, "--fit", "--fit steps=300; --fit help lists the keys")
        try:
            if is_removed(ReconstructConfig, key, value):
                continue
        except Invalid as error:
            raise UsageError(str(error), where=place) from error
        if key not in keys(ReconstructConfig):
            unknown_key(key, key, list(keys(ReconstructConfig)), "--fit")
        item = keys(ReconstructConfig)[key]
        values[item.name], typed[item.name] = _value(item, value, place), place
    try:
        return ReconstructConfig.typed(values) if values else None
    except OptionError as error:
        raise error.at(typed.get(error.name, "--fit")) from error


def fit_help() -> str:
    """The keys of `--fit` with defaults and ranges, a line for each."""
    return "\n".join(_described(item) for item in keys(ReconstructConfig).values())


def _described(item: Declared) -> str:
    from .generate import type_words

    kind = " ".join(part for part in (type_words(item.hint).replace("`", ""), item.range.words) if part)
    return f"{item.key:14}{item.option.help} [{kind}; default: {item.default_words()}]"


def read_sets(texts: Sequence[str]) -> dict[str, Any]:
    """Options of `uptrain` and of TrainingArguments given as `--set KEY=VALUE`.

    Args:
        texts: What was typed.

    Returns:
        Keyword arguments of `uptrain`.

    Raises:
        UsageError: As `read_fit`.
    """
    out: dict[str, Any] = {}
    own = keys(UptrainConfig)
    for text in texts:
        key, value, place = _pair(text, "--set", "for example --set temperature=2")
        if hidden(text) != text:
            raise UsageError(
                "must hold no password or access token", where=place, fix="use `hf auth login` or HF_TOKEN"
            )
        if key in own:
            out[own[key].name] = _value(own[key], value, place)
            continue
        try:
            out[key] = read_training_arg(key, value, list(own))
        except OptionError as error:
            if error.rule.startswith("is neither"):
                unknown_key(key, key, [*own, *declared(TrainerOptions)], place)
            raise error.at(place) from error
    return out


def _pair(text: str, flag: str, example: str) -> tuple[str, Any, str]:
    """Key, value as YAML reads it, and the place for messages."""
    key, equals, value = text.partition("=")
    place = f"{flag} {hidden(text)[:100]}"
    if not equals or not key.strip():
        raise UsageError("is not KEY=VALUE", where=place, fix=example)
    try:
        return key.strip(), parse_value(value), place
    except NotYaml as error:
        raise UsageError(error.what, where=place) from error


def _value(item: Declared, value: Any, place: str) -> Any:
    try:
        return item.read(value)
    except Invalid as error:
        again = "" if place.endswith(f"={value}") else f", not {short(value)}"
        raise UsageError(f"{error}{again}", where=place) from error
