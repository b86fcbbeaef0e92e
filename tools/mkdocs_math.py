"""Formulas as MathML, made when the site is built: readers need no script and no network."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(?:span|div) class="arithmatex">\\[\[(](.*?)\\[\])]</(?:span|div)>', re.S)


def on_page_content(content: str, **_: Any) -> str:
    """mkdocs hook: replace what the Markdown extension `arithmatex` marked."""

    def mathml(match: re.Match[str]) -> str:
        display = "block" if match[0].startswith("<div") else "inline"
        made = convert(html.unescape(match[1].strip()), display=display)
        return f'<div class="formula">{made}</div>' if display == "block" else made

    return FORMULA.sub(mathml, content)
