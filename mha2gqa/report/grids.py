"""Pictures of a sweep: quality against cache, merging methods, the uptraining fraction alpha, decoding time.

Beside the frontier they are the three ablations of the GQA paper (arXiv:2305.13245, figures 4, 5 and 6), for any
grid: each picture appears where the grid varies what it is about. A method has one colour in all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .numbers import finite, fixed, human_bytes, significant
from .svg import (
    DASHES,
    MARKERS,
    ORIGINAL,
    SMALL,
    as_svg,
    legend_below,
    mark_original,
    method_colour,
    number_at,
    spread,
    styled_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Point = Mapping[str, Any]
MOST_BARS = 48  # beyond that a picture shows the best alpha of each method only
TIME = "decode_milliseconds_per_step"
TITLES = {  # picture -> title, caption
    "frontier": (
        "Quality against cache",
        "Lower left is better; the star is the original. Numbers: the best and the worst loss at each size.",
    ),
    "methods": ("Merging methods", "Bars begin at the original's loss: shorter is better."),
    "alphas": (
        "How much uptraining",
        "Alpha is the share of the pretraining tokens; dashed: the original. Numbers: the loss at the largest alpha.",
    ),
    "times": (
        "Decoding time",
        "Dashed: the original. With each time the best loss at this G.",
    ),
}


def _usable(points: Sequence[Point], key: str = "loss") -> list[Point]:
    return [p for p in points if finite(p.get("loss")) is not None and finite(p.get(key)) is not None]


def _alpha(point: Point) -> float:
    return float(point.get("alpha") or 0.0)


def _series_name(point: Point) -> str:
    alpha = _alpha(point)
    return f"{point.get('method') or ''}{f', alpha {alpha:g}' if alpha else ''}"


def _known(original: Point | None, key: str = "loss") -> float | None:
    return None if original is None else finite(original.get(key))


def frontier_svg(points: Sequence[Point], original: Point | None) -> str:
    """Loss against KV bytes per token, one line for each method and alpha.

    Args:
        points: Rows with `method`, `alpha`, `num_kv_heads`, `kv_bytes_per_token`, `loss`.
        original: The same keys for the original, drawn as the reference.

    Returns:
        An SVG element, or `""` where there are fewer than two points.
    """
    usable = _usable(points, "kv_bytes_per_token")
    known = _usable([original] if original is not None else [], "kv_bytes_per_token")
    if not usable or len(usable) + len(known) < 2:
        return ""
    with styled_figure(3.6) as (figure, axes):
        _frontier_lines(axes, usable)
        for row in known:
            x, y = row["kv_bytes_per_token"], row["loss"]
            mark_original(axes, y)
            axes.plot([x], [y], "*", markersize=11, color=ORIGINAL, label="original")
            number_at(axes, fixed(y, 4), x, y)
        for size in {p["kv_bytes_per_token"] for p in usable}:
            here = sorted(p["loss"] for p in usable if p["kv_bytes_per_token"] == size)
            number_at(axes, fixed(here[0], 4), size, here[0], above=False)
            if len(here) > 1 and here[-1] - here[0] > 0.05:
                number_at(axes, fixed(here[-1], 4), size, here[-1])
        sizes = sorted({p["kv_bytes_per_token"] for p in [*usable, *known]})
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [human_bytes(size) for size in sizes])
        axes.minorticks_off()
        axes.margins(x=0.1, y=0.13)
        axes.set(xlabel="KV cache per token", ylabel="loss, nats/token")
        legend_below(figure, axes)
        return as_svg(figure, "frontier", "Loss against KV-cache bytes per token")


def _frontier_lines(axes: Axes, points: Sequence[Point]) -> None:
    alphas = sorted({_alpha(p) for p in points})
    series: dict[str, list[Point]] = {}
    for point in points:
        series.setdefault(_series_name(point), []).append(point)
    for name, members in series.items():
        members = sorted(members, key=lambda p: p["kv_bytes_per_token"])
        x, y = [p["kv_bytes_per_token"] for p in members], [p["loss"] for p in members]
        i, colour = alphas.index(_alpha(members[0])), method_colour(members[0].get("method"))
        axes.plot(x, y, DASHES[i % 4], marker=MARKERS[i % 8], markersize=5, color=colour, label=name)


def methods_svg(points: Sequence[Point], original: Point | None) -> str:
    """Loss by merging method at every G of the grid, a bar for each alpha.

    Args:
        points: Rows with `method`, `alpha`, `num_kv_heads`, `loss`.
        original: The row of the original; bars begin at its loss.

    Returns:
        An SVG element, or `""` where the grid has one method.
    """
    usable = _usable(points)
    if len({p["method"] for p in usable}) < 2:
        return ""
    shown = usable if len(usable) <= MOST_BARS else _best_alphas(usable)
    groups = sorted({p["num_kv_heads"] for p in shown}, reverse=True)
    height = 0.75 + 0.19 * len(shown) + 0.24 * len(groups)
    with styled_figure(height) as (figure, axes):
        base, places, names, y = _known(original) or 0.0, [], [], 0.0
        for g in groups:
            axes.annotate(
                f"G = {g}", (0, y), xycoords=("axes fraction", "data"), xytext=(9, 0), textcoords="offset points",
                va="center", fontweight="bold", fontsize=9.5,
            )  # fmt: skip
            y += 1.1
            for p in (p for p in shown if p["num_kv_heads"] == g):
                axes.barh(y, p["loss"] - base, left=base, height=0.8, color=method_colour(p["method"]))
                axes.annotate(
                    fixed(p["loss"], 4), (max(p["loss"], base), y), xytext=(4, 0), textcoords="offset points",
                    va="center", fontsize=SMALL,
                )  # fmt: skip
                places.append(y)
                names.append(_series_name(p))
                y += 1
            y += 0.3
        axes.set_yticks(places, names)
        axes.set_ylim(y - 0.5, -0.8)
        _loss_scale(axes, [p["loss"] for p in shown], _known(original))
        return as_svg(figure, "methods", "Loss by merging method at each number of KV heads")


def _loss_scale(axes: Axes, losses: Sequence[float], original: float | None) -> None:
    """A horizontal axis of losses with room for the numbers at the ends of bars."""
    low = min(losses) if original is None else min(*losses, original)
    high = max(losses) if original is None else max(*losses, original)
    if original is not None:
        mark_original(axes, original, axis="x")
        axes.annotate(
            f"original {fixed(original, 4)}", (original, 1), xycoords=("data", "axes fraction"), xytext=(3, 1),
            textcoords="offset points", fontsize=SMALL,
        )  # fmt: skip
        axes.set_xlim(min(low, original) - 0.02 * (high - low), high + 0.2 * (high - low))
    else:
        axes.set_xlim(0, high * 1.2)
    axes.grid(False)
    axes.tick_params(axis="y", length=0, labelsize=9.5)
    axes.spines["left"].set_visible(False)
    axes.set(xlabel="loss, nats/token")


def _best_alphas(points: Sequence[Point]) -> list[Point]:
    """Of each method at each G the point of least loss, in the order of the grid."""
    best: dict[tuple[int, str], Point] = {}
    for point in points:
        key = point["num_kv_heads"], str(point["method"])
        best[key] = min(best.get(key, point), point, key=lambda p: p["loss"])
    return list(best.values())


def alphas_svg(points: Sequence[Point], original: Point | None) -> str:
    """Loss over alpha, one line for each method and G.

    Args:
        points: Rows with `method`, `alpha`, `num_kv_heads`, `loss`.
        original: The row of the original.

    Returns:
        An SVG element, or `""` where the grid has fewer than three alphas.
    """
    usable = _usable(points)
    alphas = sorted({_alpha(p) for p in usable})
    if len(alphas) < 3:
        return ""
    groups = sorted({p["num_kv_heads"] for p in usable}, reverse=True)
    lines: dict[tuple[str, int], list[Point]] = {}
    for point in usable:
        lines.setdefault((str(point["method"]), point["num_kv_heads"]), []).append(point)
    with styled_figure(max(3.2, 0.9 + 0.19 * len(lines))) as (figure, axes):
        ends = []
        for (method, g), members in lines.items():
            members = sorted(members, key=_alpha)
            x, y = [_alpha(p) for p in members], [p["loss"] for p in members]
            i = groups.index(g)
            axes.plot(x, y, DASHES[i % 4], marker=MARKERS[i % 8], markersize=4.5, color=method_colour(method))
            ends.append((f"{method}, G = {g}: {fixed(y[-1], 4)}", x[-1], y[-1]))
        if (known := _known(original)) is not None:
            mark_original(axes, known)
            ends.append((f"original: {fixed(known, 4)}", alphas[-1], known))
        axes.margins(y=0.08)
        _name_ends(axes, ends, alphas[-1], figure.get_figheight())
        axes.set_xticks(alphas, _apart([f"{alpha:g}" for alpha in alphas], alphas))
        axes.set(xlabel="alpha", ylabel="loss, nats/token")
        return as_svg(figure, "alphas", "Loss over the uptraining fraction alpha")


def _name_ends(axes: Axes, ends: Sequence[tuple[str, float, float]], right: float, height: float) -> None:
    """Names and numbers at the right ends of lines, moved apart where lines end close to each other."""
    low, high = axes.get_ylim()
    points = height * 72 * 0.75  # about the height of the axes
    places = spread([y for _, _, y in ends], (high - low) * 12.5 / points)
    axes.set_ylim(min(low, *places), max(high, *places))
    for (text, _, _), place in zip(ends, places, strict=True):
        axes.annotate(
            text, (right, place), xytext=(8, 0), textcoords="offset points", va="center", fontsize=SMALL,
            annotation_clip=False,
        )  # fmt: skip


def _apart(labels: Sequence[str], places: Sequence[float], share: float = 0.16) -> list[str]:
    """Labels of ticks, those left empty that would run into the one before; the last always stands."""
    least = share * (places[-1] - places[0])
    shown, previous = [""] * len(labels), float("-inf")
    shown[-1] = labels[-1]
    for i in range(len(labels) - 1):
        if places[i] - previous >= least and places[-1] - places[i] >= least:
            shown[i], previous = labels[i], places[i]
    return shown


def times_svg(points: Sequence[Point], original: Point | None) -> str:
    """Decoding time over the number of KV heads, time and loss beside each point.

    Args:
        points: Rows with `num_kv_heads`, `loss`, `decode_milliseconds_per_step`; of each G the lowest loss.
        original: The row of the original.

    Returns:
        An SVG element, or `""` where fewer than two G were timed.
    """
    best: dict[int, Point] = {}
    for point in _usable(points, TIME):
        known = best.get(point["num_kv_heads"])
        best[point["num_kv_heads"]] = point if known is None or point["loss"] < known["loss"] else known
    if len(best) < 2:
        return ""
    with styled_figure(3.2) as (figure, axes):
        x = sorted(best)
        y = [best[g][TIME] for g in x]
        axes.plot(x, y, marker="o", markersize=5, color=method_colour(None))
        for g, time in zip(x, y, strict=True):
            number_at(axes, f"{significant(time)} ms\nloss {fixed(best[g]['loss'], 4)}", g, time)
        if (reference := _known(original, TIME)) is not None:
            mark_original(axes, reference)
            axes.annotate(
                f"original {significant(reference)} ms", (1, reference), xycoords=("axes fraction", "data"),
                xytext=(0, 3), textcoords="offset points", ha="right", fontsize=SMALL,
            )  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_xticks(x, [str(g) for g in x])
        axes.minorticks_off()
        axes.margins(x=0.14)
        axes.set_ylim(0, max([*y, *([reference] if reference else [])]) * 1.3)
        axes.set(xlabel="KV heads G", ylabel="ms per decoding step")
        return as_svg(figure, "times", "Decoding time over the number of KV heads")


def sweep_pictures(points: Sequence[Point], original: Point | None) -> dict[str, str]:
    """Every picture that a sweep's grid allows, by name."""
    drawn = {
        "frontier": frontier_svg(points, original),
        "methods": methods_svg(points, original),
        "alphas": alphas_svg(points, original),
        "times": times_svg(points, original),
    }
    return {name: svg for name, svg in drawn.items() if svg}
