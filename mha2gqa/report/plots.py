"""Pictures of one run: loss over uptraining, loss by context, cache sizes, errors and grouping by layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .numbers import finite, fixed, human_bytes, human_count
from .svg import (
    DASHES,
    MARKERS,
    OTHER,
    PAPER,
    SERIES,
    UPTRAINED,
    as_svg,
    legend_below,
    mark_original,
    number_at,
    styled_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = Sequence[tuple[float, float]]


def _drawn(points: Points) -> list[tuple[float, float]]:
    """The points of a curve; none where there are not at least two that can be drawn."""
    usable = [(x, y) for x, y in points if finite(x) is not None and finite(y) is not None]
    return usable if len(usable) > 1 else []


def evaluation_svg(points: Points, original: float | None) -> str:
    """Loss on the evaluation text from before uptraining to its end.

    Args:
        points: `(uptraining tokens, loss)`, all on one text by one protocol.
        original: The original's loss on the same text by the same protocol, None where unknown.

    Returns:
        An SVG element, or `""` where there are fewer than two points.
    """
    if not (curve := _drawn(points)):
        return ""
    with styled_figure(3.0) as (figure, axes):
        draw_evaluation(axes, curve, original)
        return as_svg(figure, "evaluation", "Loss on the evaluation text over uptraining tokens")


def draw_evaluation(axes: Axes, curve: Points, original: float | None) -> None:
    """The curve, its ends and the original with their numbers as the table writes them."""
    x, y = zip(*curve, strict=True)
    axes.plot(x, y, "-o", color=UPTRAINED, markersize=4.5)
    values = [*y] if original is None else [*y, original]
    room = 0.16 * ((max(values) - min(values)) or 0.1)
    axes.set_ylim(min(values) - room, max(values) + room)
    number_at(axes, fixed(y[0], 4), x[0], y[0])
    number_at(axes, fixed(y[-1], 4), x[-1], y[-1])
    if original is not None:
        mark_original(axes, original)
        axes.annotate(
            f"original {fixed(original, 4)}",
            (0, original),
            xycoords=("axes fraction", "data"),
            xytext=(4, 4),
            textcoords="offset points",
            fontsize=9.0,
        )
    axes.margins(x=0.1)
    _token_axis(axes)


def objective_svg(curves: Mapping[str, Points], title: str) -> str:
    """Terms of the training objective over tokens, or any curves that are compared with no model's row.

    Args:
        curves: Name -> `(tokens, loss)`.
        title: For screen readers.

    Returns:
        An SVG element, or `""` where no curve has two points.
    """
    shown = {name: curve for name, points in curves.items() if (curve := _drawn(points))}
    if not shown:
        return ""
    with styled_figure(2.7) as (figure, axes):
        for i, (name, curve) in enumerate(shown.items()):
            x, y = zip(*curve, strict=True)
            marker = "o" if len(curve) < 20 else None
            style: dict[str, Any] = {
                "linestyle": DASHES[i % 4],
                "marker": marker,
                "markersize": 3.5,
                "linewidth": 1.4,
            }
            axes.plot(x, y, color=SERIES[(7, 0, 6)[i % 3]], label=name, **style)
        _token_axis(axes)
        if len(shown) > 1:
            legend_below(figure, axes)
        return as_svg(figure, title.split()[0].lower(), title)


def _token_axis(axes: Axes) -> None:
    axes.xaxis.set_major_formatter(lambda value, _: human_count(value))
    axes.locator_params(axis="x", nbins=6)
    axes.set(xlabel="uptraining tokens", ylabel="loss, nats/token")


def positions_svg(series: Sequence[tuple[str, str, Sequence[Mapping[str, Any]]]]) -> str:
    """Loss by length of context, one line for each model.

    Args:
        series: Name, colour, and `positions` of a model: `low`, `high`, `tokens`, `loss`.

    Returns:
        An SVG element, or `""` where there are fewer than two lengths.
    """
    lines = []
    for name, colour, positions in series:
        points = [(math.sqrt(max(p["low"], 1) * max(p["high"], 1)), p["loss"]) for p in positions]
        if curve := _drawn(points):
            lines.append((name, colour, curve))
    if not lines:
        return ""
    with styled_figure(3.2) as (figure, axes):
        seen: dict[str, int] = {}
        for i, (name, colour, curve) in enumerate(lines):
            seen[colour] = seen.get(colour, -1) + 1
            x, y = zip(*curve, strict=True)
            marker, dash = MARKERS[i % 8], DASHES[seen[colour] % 4]
            axes.plot(x, y, dash, marker=marker, markersize=4, color=colour, label=name)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set(xlabel="tokens of context", ylabel="loss, nats/token")
        legend_below(figure, axes)
        return as_svg(figure, "positions", "Loss by length of context")


def kv_bars_svg(rows: Sequence[tuple[str, float, str]], batch: int, context: int) -> str:
    """KV-cache size of each model at one batch and context, as bars.

    Args:
        rows: (name, bytes per token, colour).
        batch, context: What the sizes are for.

    Returns:
        An SVG element, or `""` where nothing is known.
    """
    if not rows:
        return ""
    with styled_figure(0.75 + 0.42 * len(rows)) as (figure, axes):
        sizes = [per_token * batch * context for _, per_token, _ in rows]
        axes.barh(range(len(rows)), sizes, color=[colour for _, _, colour in rows], height=0.62)
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


def layers_svg(name: str, title: str, series: Mapping[str, Points], ylabel: str) -> str:
    """A figure of every attention module, layer by layer.

    Args:
        name: Of the picture.
        title: For screen readers.
        series: Name -> `(layer, value)` points.
        ylabel: What the values are.

    Returns:
        An SVG element, or `""` where no series has two layers.
    """
    shown = {label: curve for label, points in series.items() if (curve := _drawn(points))}
    if not shown:
        return ""
    with styled_figure(2.8) as (figure, axes):
        for i, (label, curve) in enumerate(shown.items()):
            x, y = zip(*curve, strict=True)
            dash = DASHES[(len(shown) - 1 - i) % 4]  # the last stage is drawn through
            axes.plot(x, y, dash, marker=MARKERS[i % 8], markersize=4, color=OTHER, label=label)
        axes.locator_params(axis="x", integer=True)
        axes.set_ylim(bottom=0)
        axes.set(xlabel="layer", ylabel=ylabel)
        legend_below(figure, axes)
        return as_svg(figure, name, title)


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
