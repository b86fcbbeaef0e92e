"""Numbers for people: human units, fixed decimals, changes in percent. Pure strings."""

from __future__ import annotations

import math
from typing import Any


def human_bytes(count: float | None) -> str:
    """Bytes in binary units with three significant digits.

    Example:
        >>> human_bytes(524288), human_bytes(None)
        ('512 KiB', '–')
    """
    if count is None:
        return "–"
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{significant(value)} {unit}"


def box_size(count: float) -> str:
    """Bytes in decimal units, as memory and bandwidth are sold.

    Example:
        >>> box_size(80e9), box_size(3.35e12)
        ('80 GB', '3.35 TB')
    """
    return f"{significant(count / 1e12)} TB" if count >= 1e12 else f"{significant(count / 1e9)} GB"


def human_count(count: float | None) -> str:
    """A count with a decimal suffix.

    Example:
        >>> human_count(2_000_000_000_000), human_count(65536)
        ('2T', '65.5k')
    """
    if count is None:
        return "–"
    value = float(count)
    for suffix in ("", "k", "M", "B", "T"):
        if abs(value) < 1000 or suffix == "T":
            break
        value /= 1000
    return f"{significant(value)}{suffix}"


def significant(value: float, digits: int = 3) -> str:
    """`value` with so many significant digits, never in exponent form, without trailing zeros."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def number(value: Any) -> float | None:
    """A figure as a float, also where JSON holds it as `"nan"` or `"inf"`; None for all else.

    Example:
        >>> number("inf"), number(2), number("two"), number(None)
        (inf, 2.0, None, None)
    """
    if isinstance(value, str):
        return float(value) if value in ("nan", "inf", "-inf") else None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def finite(value: Any) -> float | None:
    """A figure that can be drawn or ordered, else None."""
    figure = number(value)
    return figure if figure is not None and math.isfinite(figure) else None


def fixed(value: Any, decimals: int = 3, sign: str = "") -> str:
    """A float with fixed decimals; `–` for None, `inf` and `nan` by name, other text unchanged.

    Args:
        value: A number, None, or text.
        decimals: Behind the point.
        sign: `"+"` writes a plus too.
    """
    if value is None:
        return "–"
    figure = number(value)
    if figure is None:
        return str(value)
    value = figure
    if math.isfinite(value) and abs(value) >= 1e9:  # a broken model's loss: thirty digits tell nothing
        return f"{value:{sign}.2e}"
    return f"{value:{sign},.{decimals}f}" if math.isfinite(value) else str(value)


def perplexity_text(value: Any) -> str:
    """Perplexity with three decimals while small and fewer as it grows."""
    figure = finite(value)
    if figure is None:
        return fixed(value)
    return fixed(figure, 3 if figure < 100 else 1 if figure < 10_000 else 0)


def ratio_text(value: Any, reference: Any) -> str:
    """Change of `value` against `reference` in percent, signed; `nan` and `inf` by name.

    Example:
        >>> ratio_text(2.2, 2.0), ratio_text(27.6, 2.0), ratio_text(math.nan, 2.0), ratio_text(2.0, None)
        ('+10.0 %', '+1,280 %', 'nan', '–')
    """
    ours, theirs = number(value), finite(reference)
    if ours is None or not theirs:
        return "–"
    if not math.isfinite(ours):
        return str(ours)
    change = (ours / theirs - 1) * 100
    if abs(change) >= 1e9:
        return f"{change:+.1e} %"
    return f"{change:+,.{1 if abs(change) < 100 else 0}f} %"
