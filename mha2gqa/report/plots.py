"""Pictures as inline SVG through matplotlib, coloured by CSS variables so that they follow light and dark.

Figures are drawn in marker colours that are then replaced by `var(--…)`; text stays text (searchable,
and in the page's own font). Widths are those of a phone held upright, so that nothing shrinks there.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .tables import finite, human_bytes, human_count

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
    "figure.constrained_layout.use": True,
}
WIDTH = 4.9  # inches at 72 points: 353 points, a phone's width
ROLE_COLOURS = {"original": SERIES[0], "converted": SERIES[1], "uptrained": SERIES[2]}


def curves_svg(curves: Mapping[str, Sequence[tuple[float, float]]], marks: Mapping[str, float]) -> str:
    """Training and held-out loss over tokens, with the original's loss as a line to reach.

    Args:
        curves: Name -> `(tokens, loss)` points.
        marks: Name -> loss, drawn as labelled horizontal lines.

    Returns:
        An SVG element, or `""` where there is nothing to draw.
    """
    shown = {name: points for name, points in curves.items() if points}
    if not shown:
        return ""
    with styled_figure(3.0) as (figure, axes):
        styles = {"training": (SERIES[1], "-", None), "held-out": (SERIES[2], "-", "o")}
        for name, points in shown.items():
            colour, line, marker = styles.get(name, (SERIES[3], "-", None))
            x, y = zip(*points, strict=True)
            thin = 1.0 if name == "training" else 1.8
            axes.plot(x, y, line, color=colour, marker=marker, markersize=3.5, linewidth=thin, label=name)
        for name, loss in marks.items():
            axes.axhline(loss, color=ROLE_COLOURS.get(name, FAINT), linestyle="--", linewidth=1.2, label=name)
        axes.xaxis.set_major_formatter(lambda value, _: human_count(value))
        axes.set(xlabel="uptraining tokens", ylabel="loss, nats/token")
        axes.legend(frameon=False, fontsize=9.5, ncols=2)
        return as_svg(figure, "curves", "Training and held-out loss over uptraining tokens")


def frontier_svg(points: Sequence[Mapping[str, Any]], original: Mapping[str, Any] | None) -> str:
    """Perplexity against KV bytes per token, one line for each method and alpha.

    Args:
        points: Rows with `method`, `alpha`, `num_kv_heads`, `kv_bytes_per_token`, `perplexity`.
        original: The same keys for the original, drawn as the reference.

    Returns:
        An SVG element, or `""` where there are fewer than two points.
    """
    if original is not None and not drawable(original.get("perplexity")):
        original = None
    usable = [p for p in points if drawable(p.get("perplexity")) and p.get("kv_bytes_per_token")]
    if len(usable) + (original is not None) < 2:
        return ""
    series: dict[str, list[Mapping[str, Any]]] = {}
    for point in usable:
        alpha = point.get("alpha")
        name = str(point.get("method") or "") + (f", alpha {alpha:g}" if alpha else "")
        series.setdefault(name, []).append(point)
    with styled_figure(3.4) as (figure, axes):
        for i, (name, members) in enumerate(series.items()):
            members = sorted(members, key=lambda p: p["kv_bytes_per_token"])
            x, y = [p["kv_bytes_per_token"] for p in members], [p["perplexity"] for p in members]
            marker = "os^Dv<>p"[i % 8]
            axes.plot(x, y, marker=marker, markersize=5, color=SERIES[1 + i % 7], label=name)
        if original is not None:
            axes.axhline(original["perplexity"], color=SERIES[0], linestyle="--", linewidth=1.2)
            axes.plot(
                [original["kv_bytes_per_token"]],
                [original["perplexity"]],
                "*",
                markersize=11,
                color=SERIES[0],
                label="original",
            )
        sizes = sorted({p["kv_bytes_per_token"] for p in [*usable, *([original] if original else [])]})
        values = [p["perplexity"] for p in usable]
        if max(values) > 8 * min(values):
            axes.set_yscale("log")
            low, high = axes.get_ylim()
            powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
            ticks = [m * 10.0**n for n in powers for m in (1, 2, 5) if low <= m * 10.0**n <= high]
            axes.set_yticks(ticks, [f"{tick:,.15g}" for tick in ticks])  # 10² alone is no scale
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [human_bytes(size) for size in sizes])
        axes.minorticks_off()
        axes.set(xlabel="KV cache per token", ylabel="perplexity")
        axes.legend(frameon=False, fontsize=9.5)
        return as_svg(figure, "frontier", "Perplexity against KV-cache bytes per token")


def positions_svg(series: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Loss by length of context, one line for each model.

    Args:
        series: Name -> `positions` of a model: `low`, `high`, `tokens`, `loss`.

    Returns:
        An SVG element, or `""` where there are fewer than two lengths.
    """
    shown = {
        name: [
            (math.sqrt(max(p["low"], 1) * max(p["high"], 1)), p["loss"])
            for p in points
            if drawable(p["loss"])
        ]
        for name, points in series.items()
    }
    shown = {name: points for name, points in shown.items() if len(points) > 1}
    if not shown:
        return ""
    with styled_figure(3.0) as (figure, axes):
        for i, (name, points) in enumerate(shown.items()):
            x, y = zip(*points, strict=True)
            colour = ROLE_COLOURS.get(name, SERIES[i % 8])
            axes.plot(x, y, marker="os^Dv<>p"[i % 8], markersize=4, color=colour, label=name)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set(xlabel="tokens of context", ylabel="loss, nats/token")
        axes.legend(frameon=False, fontsize=9.5)
        return as_svg(figure, "positions", "Loss by length of context")


def kv_bars_svg(rows: Sequence[tuple[str, float, str]], batch: int, context: int) -> str:
    """KV-cache size of each model at one batch and context, as bars.

    Args:
        rows: (name, bytes per token, role).
        batch, context: What the sizes are for.

    Returns:
        An SVG element, or `""` where nothing is known.
    """
    if not rows:
        return ""
    with styled_figure(0.75 + 0.42 * len(rows)) as (figure, axes):
        sizes = [per_token * batch * context for _, per_token, _ in rows]
        colours = [ROLE_COLOURS.get(role, SERIES[3]) for _, _, role in rows]
        axes.barh(range(len(rows)), sizes, color=colours, height=0.62)
        for i, size in enumerate(sizes):
            axes.annotate(human_bytes(size), (size, i), (5, 0), textcoords="offset points", va="center")
        axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
        axes.invert_yaxis()
        axes.set_xlim(0, max(sizes) * 1.22)
        axes.set_xticks([])
        axes.grid(False)
        axes.spines["bottom"].set_visible(False)
        axes.tick_params(length=0)
        return as_svg(figure, "kv", f"KV cache at batch {batch}, context {context}")


def residuals_svg(series: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """Relative residuals of the merge, layer by layer.

    Args:
        series: Name -> `(layer, residual)` points.

    Returns:
        An SVG element, or `""` where nothing is known.
    """
    shown = {name: points for name, points in series.items() if points}
    if not shown:
        return ""
    with styled_figure(2.7) as (figure, axes):
        for i, (name, points) in enumerate(shown.items()):
            x, y = zip(*points, strict=True)
            axes.plot(x, y, marker="os^D"[i % 4], markersize=4, color=SERIES[1 + i % 7], label=name)
        axes.locator_params(axis="x", integer=True)
        axes.set_ylim(bottom=0)
        axes.set(xlabel="layer", ylabel="relative residual")
        axes.legend(frameon=False, fontsize=9.5)
        return as_svg(figure, "residuals", "Relative residual of the merge for each layer")


def grouping_svg(groupings: Sequence[tuple[str, Sequence[Sequence[int]]]]) -> str:
    """Which source KV heads share: a row for each attention module, a column for each head.

    Args:
        groupings: (layer label, groups of source head indices).

    Returns:
        An SVG element, or `""` where nothing is known.
    """
    if not groupings:
        return ""
    heads = sum(len(group) for group in groupings[0][1])
    height = 0.75 + min(0.19 * len(groupings), 8.0)
    with styled_figure(height) as (figure, axes):
        cells: dict[int, list[tuple[int, int]]] = {}
        for y, (_, groups) in enumerate(groupings):
            for number, group in enumerate(groups):
                cells.setdefault(number, []).extend((head, y) for head in group)
        for number, places in cells.items():
            axes.add_patch(_squares(places, SERIES[number % 8]))
            if heads <= 16 and len(groupings) <= 16:
                for x, y in places:
                    axes.text(x + 0.5, y + 0.52, str(number), ha="center", va="center", color=PAPER, size=7)
        axes.set(xlim=(0, heads), ylim=(len(groupings), 0), xlabel="source KV head", ylabel="layer")
        step = max(1, heads // 16)
        axes.set_xticks([h + 0.5 for h in range(0, heads, step)], [str(h) for h in range(0, heads, step)])
        every = max(1, len(groupings) // 16)
        axes.set_yticks(
            [y + 0.5 for y in range(0, len(groupings), every)],
            [label for label, _ in groupings[::every]],
        )
        axes.grid(False)
        axes.tick_params(length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
        return as_svg(figure, "grouping", "Which source KV heads share a head in each layer")


def _squares(places: Sequence[tuple[int, int]], colour: str) -> Any:
    """Unit squares at `(x, y)` as one path: a path for each square would make megabytes."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    left, top, right, bottom = 0.04, 0.06, 0.96, 0.94
    corners = [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]
    vertices = [(x + dx, y + dy) for x, y in places for dx, dy in corners]
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(places)
    return PathPatch(Path(vertices, codes), facecolor=colour, edgecolor="none", clip_on=False)


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
    with matplotlib.rc_context({"svg.hashsalt": name}):  # ids differ between pictures of a page
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


def drawable(value: Any) -> bool:
    """Whether it is a number that can be drawn."""
    return finite(value) is not None
