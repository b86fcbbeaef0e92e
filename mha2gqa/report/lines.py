"""Lines and tables of a result, and the lines that several commands end with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .content import Table
from .numbers import human_bytes

Data = Mapping[str, Any]


@dataclass(frozen=True)
class Line:
    """A line, or several.

    Args:
        text: What it says.
        style: How rich shows it on a terminal.
        wrap: Whether a terminal may break it between words; a command is not broken, so that it can be copied.
    """

    text: str = ""
    style: str = ""
    wrap: bool = True


Block = Line | Table
BLANK = Line()


def change(pair: Data, form: Callable[[Any], str] = human_bytes) -> str:
    """A figure before and after."""
    return f"{form(pair['before'])} -> {form(pair['after'])}"


def warning_lines(data: Data) -> Iterable[Block]:
    """What the user should know, each once."""
    found = dict.fromkeys([*(data.get("warnings") or ()), *(data.get("notices") or ())])
    return [BLANK, *(Line(f"warning: {text}", "yellow") for text in found)] if found else []


def next_lines(command: str) -> Iterable[Block]:
    """The command to type next, unbroken."""
    return BLANK, Line(f"Next: {command}", "cyan", wrap=False)
