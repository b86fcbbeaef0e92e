"""Figures of matplotlib as inline SVG, coloured by CSS variables so that they follow light and dark.

Figures are drawn in marker colours that are then replaced by `var(--…)`; text stays text (searchable,
and in the page's own font). Widths are those of a phone held upright, so that nothing shrinks there.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Marker colour -> CSS variable. The markers are near-black values that no default style produces.
INK, FAINT, PAPER = "#010203", "#010204", "#010205"
SERIES = tuple(f"#0102{16 + i:02x}" for i in range(8))
_VARIABLES = {INK: "--ink", FAINT: "--faint", PAPER: "--paper"} | {
    colour: f"--s{i + 1}" for i, colour in enumerate(SERIES)
}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a name may hold dollar signs
    "font.family": "sans-serif",
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "figure.constrained_layout.use": True,
}
WIDTH = 4.9  # inches at 72 points: 353 points, a phone's width
SMALL = 9.0  # points of a number at a mark
MARKERS = "osD^v<>p"
DASHES = ("-", "--", "-.", ":")

ORIGINAL, OTHER, UPTRAINED = SERIES[0], SERIES[6], SERIES[7]
METHODS = {"mean": SERIES[1], "joint": SERIES[2], "align": SERIES[3], "first": SERIES[4], "random": SERIES[5]}


def method_colour(method: Any) -> str:
    """The colour of a merging method, the same in every picture."""
    return METHODS.get(str(method), OTHER)


def row_colour(row: Mapping[str, Any]) -> str:
    """The colour of a model: the original's, that of uptraining in a single run, else its method's."""
    if row.get("role") == "original":
        return ORIGINAL
    if row.get("role") == "uptrained" and "groups" not in row:
        return UPTRAINED
    return method_colour(row.get("method"))


class styled_figure:
    """A styled figure of `height` inches that leaves no global state behind."""

    def __init__(self, height: float) -> None:
        self.height = height

    def __enter__(self) -> tuple[Figure, Axes]:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure

        self.context = matplotlib.rc_context(_STYLE)
        self.context.__enter__()
        figure = Figure(figsize=(WIDTH, self.height))
        FigureCanvasSVG(figure)
        figure.patch.set_alpha(0)
        axes = figure.subplots()
        axes.patch.set_alpha(0)
        return figure, axes

    def __exit__(self, *exc: object) -> None:
        self.context.__exit__(None, None, None)


def as_svg(figure: Figure, name: str, title: str) -> str:
    """The figure as one `<svg>` element with CSS variables for colours and a title for screen readers."""
    import matplotlib

    buffer = io.StringIO()
    # A salt of its own for each picture: the ids of two must differ on a page.
    with matplotlib.rc_context({"svg.hashsalt": name}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the reader's font may well have it
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Type", "Format")))
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|\n(?= *<)", "", text, flags=re.S)
    text = re.sub(r' (?:width|height)="[\d.]+pt"', "", text)  # the page decides the size
    text = re.sub(r"font-family: [^;\"]*;? ?|font: ", "", text)
    used = set(re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', text))
    keep = {name for pair in used for name in pair if name}
    text = re.sub(r' id="([^"]+)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in keep else "", text)
    text = re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    text = re.sub(r"\n+", " ", text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1).strip()


def standalone(svg: str) -> str:
    """An SVG element of a page as a file of its own, light and dark.

    Args:
        svg: What `as_svg` returned.

    Returns:
        The text of an `.svg` file with the page's colours.
    """
    css = stylesheet()
    palette = css[css.index(":root") : css.index("* {")]
    style = f"<style>{palette}svg {{ font-family: sans-serif; }}</style>{BACKGROUND}"
    place = svg.index(">") + 1
    return with_fallbacks(f"{svg[:place]}{style}{svg[place:]}\n")


# A rectangle, because few viewers besides browsers know the CSS property `background` of an SVG.
BACKGROUND = '<rect width="100%" height="100%" style="fill: var(--paper)"/>'


def with_fallbacks(svg: str) -> str:
    """The picture with every colour once more as an attribute: viewers without CSS variables show the light ones.

    Args:
        svg: The text of an `.svg` file whose colours are CSS variables in `style` attributes, and whose `:root`
            declares them.

    Returns:
        The text; where CSS variables are known it looks as before, because a `style` outranks an attribute.

    Example:
        >>> with_fallbacks('<style>:root { --s1:#57606a; }</style><path style="fill: var(--s1)"/>')
        '<style>:root { --s1:#57606a; }</style><path fill="#57606a" style="fill: var(--s1)"/>'
    """
    light = dict(re.findall(r"(--\w+):(#\w+)", svg[svg.index(":root") :].partition("}")[0]))

    def both(style: re.Match[str]) -> str:
        coloured = re.findall(r"(fill|stroke): ?var\((--\w+)\)", style[0])
        return " ".join([*(f'{name}="{light[variable]}"' for name, variable in coloured), style[0]])

    return re.sub(r'style="[^"]*"', both, svg)


def stylesheet() -> str:
    """The style sheet of pages, which holds the colours of pictures."""
    return resources.files("mha2gqa.assets").joinpath("report.css").read_text(encoding="utf-8")


# --- parts of pictures ---------------------------------------------------------------------------------


def mark_original(axes: Axes, value: float, axis: str = "y") -> None:
    """The original's figure as a dashed line across the picture."""
    line = axes.axhline if axis == "y" else axes.axvline
    line(value, color=ORIGINAL, linestyle="--", linewidth=1.2, zorder=1)


def legend_below(figure: Figure, axes: Axes) -> None:
    """The legend under the picture, where it hides nothing, in as many columns as its names allow."""
    longest = max(len(str(name)) for name in axes.get_legend_handles_labels()[1])
    columns = max(1, min(4, int(WIDTH * 72 // (42 + 5.4 * longest))))
    figure.legend(ncols=columns, loc="outside lower center", handlelength=2.2, columnspacing=1.2)


def number_at(axes: Axes, text: str, x: float, y: float, above: bool = True) -> None:
    """A number at a mark."""
    axes.annotate(
        text,
        (x, y),
        xytext=(0, 7 if above else -7),
        textcoords="offset points",
        ha="center",
        va="bottom" if above else "top",
        fontsize=SMALL,
    )


def spread(values: Sequence[float], gap: float) -> list[float]:
    """Places for labels as near to `values` as a distance of `gap` between any two allows, in the same order.

    Example:
        >>> spread([1.0, 1.1, 3.0], 0.5)
        [0.8, 1.3, 3.0]
    """
    order = sorted(range(len(values)), key=lambda i: values[i])
    blocks: list[tuple[float, list[int]]] = []  # centre, members: neighbours that push each other
    for i in order:
        centre, members = values[i], [i]
        while blocks and centre - blocks[-1][0] < gap * (len(members) + len(blocks[-1][1])) / 2:
            before, others = blocks.pop()
            total = len(members) + len(others)
            centre = (centre * len(members) + before * len(others)) / total
            members = others + members
        blocks.append((centre, members))
    places = list(values)
    for centre, members in blocks:
        for rank, i in enumerate(members):
            places[i] = round(centre + (rank - (len(members) - 1) / 2) * gap, 12)
    return places
