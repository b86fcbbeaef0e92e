"""Pictures of a sweep: merging methods, the uptraining fraction alpha, the number of groups against time.

They are the three ablations of the GQA paper (arXiv:2305.13245, figures 4, 5 and 6), for any grid: each picture
appears where the grid varies what it is about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from .plots import SERIES, as_svg, drawable, frontier_svg, styled_figure

Point = Mapping[str, Any]
MARKERS = "os^Dv<>p"
TITLES = {  # picture -> title, caption
    "frontier": ("Quality against cache", "Lower left is better; the star is the original."),
    "methods": ("Merging methods", "Dashed: the original. Lower is better."),
    "alphas": ("How much uptraining", "Alpha is the share of the pretraining tokens; dashed: the original."),
    "times": (
        "Groups against time",
        "Dashed: the original's time. The losses are those of the best point at each G.",
    ),
}


def _usable(points: Sequence[Point], key: str = "loss") -> list[Point]:
    return [p for p in points if drawable(p.get("loss")) and drawable(p.get(key))]


def _alpha(point: Point) -> float:
    return float(point.get("alpha") or 0.0)


def _reference(axes: Any, original: Point | None, key: str = "loss") -> None:
    """The original as a dashed line."""
    if original is not None and drawable(original.get(key)):
        axes.axhline(original[key], color=SERIES[0], linestyle="--", linewidth=1.2, label="original")


def methods_svg(points: Sequence[Point], original: Point | None) -> str:
    """Loss by merging method, a bar for each alpha, at the smallest G of the grid.

    Args:
        points: Rows with `method`, `alpha`, `num_kv_heads`, `loss`.
        original: The row of the original.

    Returns:
        An SVG element, or `""` where the grid has one method.
    """
    groups = min((p["num_kv_heads"] for p in _usable(points)), default=0)
    found = {(p["method"], _alpha(p)): p["loss"] for p in _usable(points) if p["num_kv_heads"] == groups}
    methods = list(dict.fromkeys(method for method, _ in found))
    alphas = sorted({alpha for _, alpha in found})
    if len(methods) < 2:
        return ""
    with styled_figure(2.9) as (figure, axes):
        width = 0.8 / len(alphas)
        for i, alpha in enumerate(alphas):
            places = [j for j, method in enumerate(methods) if (method, alpha) in found]
            values = [found[methods[j], alpha] for j in places]
            left = [j + (i - (len(alphas) - 1) / 2) * width for j in places]
            name = f"alpha {alpha:g}" if alpha else "not uptrained"
            bars = axes.bar(left, values, width * 0.92, color=SERIES[1 + i % 7], label=name)
            axes.bar_label(bars, labels=[f"{value:.2f}" for value in values], fontsize=8.5, padding=1)
        _reference(axes, original)
        axes.set_xticks(range(len(methods)), methods)
        axes.set(ylabel="loss, nats/token", title=f"G = {groups}")
        axes.set_ylim(top=axes.get_ylim()[1] * 1.18)  # room for the legend
        axes.legend(frameon=False, fontsize=9.5, ncols=3, loc="upper center")
        return as_svg(figure, "methods", "Loss by merging method")


def alphas_svg(points: Sequence[Point], original: Point | None) -> str:
    """Loss over alpha, one line for each method and G.

    Args:
        points: Rows with `method`, `alpha`, `num_kv_heads`, `loss`.
        original: The row of the original.

    Returns:
        An SVG element, or `""` where the grid has fewer than three alphas.
    """
    usable = _usable(points)
    if len({_alpha(p) for p in usable}) < 3:
        return ""
    lines: dict[str, list[tuple[float, float]]] = {}
    for point in usable:
        lines.setdefault(f"{point['method']}, G = {point['num_kv_heads']}", []).append(
            (_alpha(point), point["loss"])
        )
    with styled_figure(3.0) as (figure, axes):
        for i, (name, members) in enumerate(lines.items()):
            x, y = zip(*sorted(members), strict=True)
            axes.plot(x, y, marker=MARKERS[i % 8], markersize=4.5, color=SERIES[1 + i % 7], label=name)
        _reference(axes, original)
        axes.set(xlabel="alpha", ylabel="loss, nats/token")
        if len(lines) > 4:
            figure.legend(frameon=False, fontsize=9.5, ncols=3, loc="outside lower center")
        else:
            axes.legend(frameon=False, fontsize=9.5)
        return as_svg(figure, "alphas", "Loss over the uptraining fraction alpha")


def times_svg(points: Sequence[Point], original: Point | None) -> str:
    """Decoding time over the number of KV heads, the loss beside each point.

    Args:
        points: Rows with `num_kv_heads`, `loss`, `decode_milliseconds_per_step`; of each G the lowest loss.
        original: The row of the original.

    Returns:
        An SVG element, or `""` where fewer than two G were timed.
    """
    key = "decode_milliseconds_per_step"
    best: dict[int, Point] = {}
    for point in _usable(points, key):
        known = best.get(point["num_kv_heads"])
        best[point["num_kv_heads"]] = point if known is None or point["loss"] < known["loss"] else known
    if len(best) < 2:
        return ""
    with styled_figure(3.0) as (figure, axes):
        x = sorted(best)
        y = [best[g][key] for g in x]
        axes.plot(x, y, marker="o", markersize=5, color=SERIES[1], label="converted")
        for g, time in zip(x, y, strict=True):
            axes.annotate(
                f"{best[g]['loss']:.3f}",
                (g, time),
                xytext=(0, 7),
                textcoords="offset points",
                ha="center",
                fontsize=9,
            )
        _reference(axes, original, key)
        axes.set_xscale("log", base=2)
        axes.set_xticks(x, [str(g) for g in x])
        axes.minorticks_off()
        axes.set_ylim(0, axes.get_ylim()[1] * 1.1)
        axes.set(xlabel="KV heads G (at each point: loss, nats/token)", ylabel="ms per decoding step")
        axes.legend(frameon=False, fontsize=9.5, loc="lower right")
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


def standalone(svg: str) -> str:
    """An SVG element of a page as a file of its own, light and dark.

    Args:
        svg: What a function of this module or of `plots` returned.

    Returns:
        The text of an `.svg` file with the page's colours.
    """
    css = resources.files("mha2gqa.assets").joinpath("report.css").read_text(encoding="utf-8")
    palette = css[css.index(":root") : css.index("* {")]
    style = "svg { background: var(--paper); font-family: sans-serif; }"
    place = svg.index(">") + 1
    return f"{svg[:place]}<style>{palette}{style}</style>{svg[place:]}\n"
