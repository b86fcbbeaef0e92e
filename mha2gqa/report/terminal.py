"""Results of commands for the terminal, through rich; without styles where the output is no terminal."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .content import Table
from .lines import Block, Line
from .text import printable
from .views import STYLES, view

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text


def render(data: Mapping[str, Any]) -> str:
    """A result as plain text, as it is written to a file or a pipe.

    Args:
        data: `to_dict()` of a result; its `command` chooses the form.

    Returns:
        Lines as wide as their content, without a final newline.
    """
    return plain(view(data))


def show(data: Mapping[str, Any]) -> None:
    """Print a result on stdout: with styles on a terminal, else as `render` gives it."""
    from rich.console import Console

    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        print(render(data))
        return
    for block in view(data):
        if isinstance(block, Table):
            _print_table(console, block)
        else:
            _print_line(console, block)


def plain(blocks: Sequence[Block]) -> str:
    """Blocks as plain text."""
    from rich.console import Console

    sink = io.StringIO()
    console = Console(
        file=sink, width=1_000_000, color_system=None, markup=False, highlight=False, emoji=False
    )
    for block in blocks:
        if isinstance(block, Table):
            console.print(_rich_table(block, ascii_rule=True))
        else:
            sink.write(f"{printable(block.text, keep=chr(10))}\n")
    return "\n".join(line.rstrip() for line in sink.getvalue().splitlines()).rstrip()


def _print_table(console: Console, table: Table) -> None:
    """A table is never cut: a terminal that is narrower than its content wraps the lines itself."""
    from rich.measure import Measurement

    made = _rich_table(table, ascii_rule=False)
    least = Measurement.get(console, console.options.update(max_width=1_000_000), made).minimum
    width, console.width = console.width, max(console.width, least)
    console.print(made, crop=False)
    console.width = width


def _print_line(console: Console, line: Line) -> None:
    """Prose is broken between words; a command is not broken, so that it can be copied."""
    console.print(_text(line.text, line.style), soft_wrap=not line.wrap)


def _rich_table(table: Table, ascii_rule: bool) -> RichTable:
    from rich.box import Box
    from rich.table import Table as RichTable

    rule = "-" if ascii_rule else "─"
    box = Box(f"    \n    \n {rule}{rule} \n" + "    \n" * 5)
    made = RichTable(box=box, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    made.border_style = "dim"
    last = len(table.columns) - 1
    for i, (heading, align) in enumerate(table.columns):
        fold = i == last and align == "<"  # reasons and details; figures and names stay whole
        made.add_column(
            _text(heading), justify="right" if align == ">" else "left", no_wrap=not fold, overflow="fold"
        )
    for row in table.rows:
        made.add_row(*(_text(str(cell), STYLES.get(str(cell), "")) for cell in row))
    return made


def _text(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(printable(text, keep="\n"), style=style)
