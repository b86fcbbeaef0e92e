"""Names of models, texts and files for readers elsewhere: pages and cards never show a path of this machine."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING, Any

import yaml

from ..assets import heldout_path, tiny_model_path

if TYPE_CHECKING:
    from .content import Report

_ROOT = Path(__file__).parents[2]
HUB_NAME = re.compile(r"[A-Za-z0-9][\w-]*/[A-Za-z0-9_][\w.-]*")
# In running text; not the slashes of a URL, of a fraction or of a relative path.
ABSOLUTE = re.compile(
    r"""(?<![\w/:.~-])/(?:[^\s/'",;:()\[\]{}<>`]+/)+[^\s/'",;:()\[\]{}<>`]*|\b[A-Za-z]:\\[^\s'",;]+"""
)


def hub_name(text: str) -> bool:
    """Whether `text` is `owner/name` of the Hub: it reads so, and no file or folder here has that path."""
    return HUB_NAME.fullmatch(text) is not None and not Path(text).exists()


def display_name(name: str) -> str:
    """What a model or a text is called where its path means nothing.

    Args:
        name: A path, a glob, a hub name with or without config and split, or a built-in name.

    Returns:
        The last part of a path; built-in and hub names as they are.

    Example:
        >>> display_name("models/v1/llama-7b/"), display_name("allenai/c4:en"), display_name("builtin:tiny")
        ('llama-7b', 'allenai/c4:en', 'builtin:tiny')
    """
    if name.startswith("builtin:") or hub_name(name.split(":", 1)[0]):
        return name
    path = PureWindowsPath(name)  # understands both kinds of slashes
    for carried, built_in in ((tiny_model_path(), "builtin:tiny"), (heldout_path(), "builtin:heldout")):
        if path.parts[-len(inside := carried.relative_to(_ROOT).parts) :] == inside:  # of any installation
            return built_in
    return path.name or name


def is_machine_path(text: str) -> bool:
    """Whether a whole value is a path that only this machine knows."""
    return text.startswith("/") or PureWindowsPath(text).is_absolute()


def without_paths(text: str) -> str:
    """Running text with every absolute path replaced by its name."""
    return ABSOLUTE.sub(lambda match: display_name(match[0]), text)


def public(report: Report) -> Report:
    """The report as a page, a Markdown file or a card may show it: names instead of machine paths."""
    data = dict(report.data)
    if paths := data.get("paths"):
        data["paths"] = [display_name(str(p)) for p in ([paths] if isinstance(paths, str) else paths)]
    return replace(
        report,
        title=without_paths(report.title),
        source=display_name(report.source),
        models=[_named_row(row) for row in report.models],
        data=data,
        provenance={key: without_paths(str(value)) for key, value in report.provenance.items()},
        recipe=_named_recipe(report.recipe),
        command=_named_command(report.command),
    )


def _named_row(row: Mapping[str, Any]) -> dict[str, Any]:
    named = {key: without_paths(str(row[key])) for key in ("label", "role") if row.get(key)}
    return {**row, **named} | ({"path": display_name(str(row["path"]))} if row.get("path") else {})


def _named_recipe(text: str) -> str:
    """A recipe whose absolute paths are names; others may hold blanks, so that values are looked at whole."""
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError:
        return without_paths(text)
    named = _map_strings(data, lambda value: display_name(value) if is_machine_path(value) else value)
    if named == data:
        return text
    return yaml.safe_dump(named, sort_keys=False, allow_unicode=True)


def _named_command(text: str) -> str:
    """A command line whose absolute paths are names, also behind `KEY=`."""
    try:
        words = shlex.split(text)
    except ValueError:
        return without_paths(text)
    parts = [word.rpartition("=") for word in words]
    if not any(is_machine_path(value) for _, _, value in parts):
        return text
    named = (k + sign + (display_name(v) if is_machine_path(v) else v) for k, sign, v in parts)
    return shlex.join(named)


def _map_strings(data: Any, change: Callable[[str], str]) -> Any:
    """Nested JSON data with every text changed, keys left alone."""
    if isinstance(data, str):
        return change(data)
    if isinstance(data, Mapping):
        return {key: _map_strings(value, change) for key, value in data.items()}
    return [_map_strings(value, change) for value in data] if isinstance(data, list) else data
