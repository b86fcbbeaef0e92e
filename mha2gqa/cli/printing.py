"""Results on stdout and in files, from rank 0 only. Imports no torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..distributed import is_rank_zero
from ..errors import Mha2gqaError, UsageError, quoted
from .state import state

if TYPE_CHECKING:
    from ..results import Result


def emit(result: Result | dict[str, Any], text: str | None = None) -> None:
    """Print a result: one JSON object with `--json`, else its rendering for people.

    Args:
        result: The result, or its JSON data.
        text: The rendering, where it is a few plain lines.
    """
    data = result if isinstance(result, dict) else result.to_dict()
    if not is_rank_zero():
        return
    state()["emitted"] = 1
    if state().get("json"):
        click.echo(json.dumps(data, ensure_ascii=False))
    elif text is not None:
        click.echo(text)
    else:
        from ..report.terminal import show

        show(data)


def check_output(path: str | None) -> None:
    """Before the work whose result goes into a file: can it be written there?

    Raises:
        UsageError: There is no such folder, or it may not be written.
    """
    if path is None or not is_rank_zero():
        return
    file = Path(path)
    problem = None
    whole = path.encode("utf-8", "surrogatepass")
    if max(map(len, whole.split(b"/"))) > 255 or len(whole) > 4095:
        problem = "is too long a name", "choose a shorter one"
    elif file.is_dir():
        problem = "is a folder", "name a file in it"
    elif not file.parent.is_dir():
        problem = f"there is no folder {file.parent}", "make it first"
    elif not os.access(file if file.exists() else file.parent, os.W_OK):
        problem = "may not be written", "choose another place"
    if problem:
        raise UsageError(
            problem[0],
            where=f"--output {quoted(path)}" if len(path) > 80 else f"--output {path}",
            fix=problem[1],
        )


def write_json(data: dict[str, Any], path: str) -> None:
    """Write a result to a file, in the first process only.

    Raises:
        Mha2gqaError: It cannot be written.
    """
    if not is_rank_zero():
        return
    text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise Mha2gqaError(f"cannot be written ({error.strerror})", where=path) from error
