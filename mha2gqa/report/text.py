"""Text from outside, made safe to show: on a terminal, in a page, in Markdown."""

from __future__ import annotations

import unicodedata

# Marks that turn the direction of what follows, so that a line reads otherwise than it is.
BIDIRECTIONAL = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def printable(text: str, keep: str = "") -> str:
    """`text` with control characters written out, so that no terminal obeys them.

    Args:
        text: Anything, also with lone surrogates.
        keep: Control characters that stay, such as line ends.

    Returns:
        The same text where it has no controls, no marks of direction and no halves of characters.

    Example:
        >>> printable("a\\x1b[31mb")
        'a\\\\x1b[31mb'
    """
    if text.isprintable():
        return text
    return "".join(_shown(c) if c not in keep and _unsafe(c) else c for c in text)


def shortened(text: str, most: int = 34) -> str:
    """`text` with its middle left out where it is too long for a picture."""
    return text if len(text) <= most else f"{text[: most // 2 - 1]}…{text[-(most // 2) :]}"


def _unsafe(character: str) -> bool:
    return character in BIDIRECTIONAL or unicodedata.category(character) in ("Cc", "Cs")


def _shown(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
