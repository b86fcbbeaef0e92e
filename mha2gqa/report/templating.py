"""Templates in which escaping is a property of the environment: one for HTML pages, one for Markdown.

Whatever a template prints is escaped unless it was made by code of this package and is marked so: `Markup` in
a page (the pictures), `Markdown` in a Markdown file (tables, fenced blocks).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from .text import printable

if TYPE_CHECKING:
    from jinja2 import Environment

# Where a character means something to a Markdown reader; elsewhere it stays as it is, for those who read the source.
INLINE = re.compile(r"[\\`*\[\]|~$]|(?<![^\W_])_|_(?![^\W_])")
BLOCK = re.compile(r"^(?:[-+](?=\s|$)|-{2,}$|=+$|#{1,6}(?=\s|$)|\d+(?P<dot>[.)])(?=\s|$))")
ENTITY = re.compile(r"&(?=#?\w+;)")


class Markdown(str):
    """Text that is Markdown already; all other text is escaped when a template prints it."""


def escape_markdown(value: Any) -> Markdown:
    r"""Text as Markdown that shows exactly this text, on one line.

    Args:
        value: Anything; `Markdown` stays as it is.

    Example:
        >>> print(escape_markdown("a|b <i> _x_ max_ppl_ratio"), escape_markdown("# x"))
        a\|b &lt;i> \_x\_ max_ppl_ratio \# x
    """
    if isinstance(value, Markdown):
        return value
    text = printable(" ".join(str(value).split()))
    text = INLINE.sub(lambda match: f"\\{match[0]}", text)
    text = ENTITY.sub("&amp;", text).replace("<", "&lt;")
    if text.startswith(">"):
        text = f"&gt;{text[1:]}"
    return Markdown(BLOCK.sub(_escape_block, text))


def _escape_block(match: re.Match[str]) -> str:
    """A mark that would begin a heading, a list, a quotation or a rule."""
    found = match[0]
    return f"{found[:-1]}\\{found[-1]}" if match["dot"] else f"\\{found}"


def fenced(text: str, language: str = "") -> Markdown:
    """Text as a code block; its fence is longer than any in the text.

    Args:
        text: Lines.
        language: For the reader's colours.
    """
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return Markdown(f"{fence}{language}\n{printable(text, keep=chr(10)).strip()}\n{fence}")


def markdown_table(columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[Any]]) -> Markdown:
    """A table; every cell is escaped.

    Args:
        columns: Heading and alignment (`<` or `>`) of each column.
        rows: Cells.
    """
    rule = [Markdown("---:" if align == ">" else "---") for _, align in columns]
    table: list[Sequence[Any]] = [[heading for heading, _ in columns], rule, *rows]
    return Markdown("\n".join(f"| {' | '.join(escape_markdown(cell) for cell in row)} |" for row in table))


def _shown(value: Any) -> Any:
    """What a page prints: escaping is the environment's business, control characters are none of a page's."""
    return value if hasattr(value, "__html__") or not isinstance(value, str) else printable(value, keep="\n")


@cache
def html_templates() -> Environment:
    """The environment of pages."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("mha2gqa.report"),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@cache
def markdown_templates() -> Environment:
    """The environment of Markdown files and model cards."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("mha2gqa.report"),
        finalize=escape_markdown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"fenced": fenced}
    return environment
