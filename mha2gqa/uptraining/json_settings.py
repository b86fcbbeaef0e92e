"""Settings that TrainingArguments take as a mapping, as JSON, or as a file of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoints.json_files import parse_json, read_json
from ..errors import CheckpointError, UsageError, quoted


def read_settings(given: Any, name: str, fix: str) -> Mapping[str, Any]:
    """The settings themselves.

    Args:
        given: A mapping, JSON, or the path of a JSON file.
        name: What they are called, for messages.
        fix: What to give instead.

    Raises:
        UsageError: Not JSON, or not settings.
        CheckpointError: A file that cannot be read.
    """
    found = _parsed(given, name, fix) if isinstance(given, str) else given
    if not isinstance(found, Mapping):
        raise UsageError(f"must hold settings, not {quoted(found)}", where=name, fix=fix)
    return found


def _parsed(text: str, name: str, fix: str) -> Any:
    if not text.lstrip().startswith(("{", "[")):
        if not Path(text).exists():
            raise CheckpointError("no such file", where=text, fix=fix)
        return read_json(Path(text), fix=fix)
    try:
        return parse_json(text)
    except ValueError as error:
        raise UsageError(f"is not JSON ({error})", where=f"{name} {quoted(text)}", fix=fix) from error
