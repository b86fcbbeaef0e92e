"""Results in notebooks: the blocks of the terminal as HTML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .content import Table
from .templating import html_templates
from .views import view


def html(data: Mapping[str, Any]) -> str:
    """A result as an HTML fragment for the output cell of a notebook.

    Args:
        data: `to_dict()` of a result.
    """
    blocks = [(isinstance(block, Table), block) for block in view(data)]
    return html_templates().get_template("notebook.html").render(blocks=blocks)
