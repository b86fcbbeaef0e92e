"""The one table and the one chart that the front pages show: `joint` beside the paper's recipe and the control."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from _loss_tables import first_of_each, label
from _markdown import markdown, mean_and_spread, measured_on, state

from mha2gqa.report.svg import BACKGROUND, with_fallbacks

SOURCE = "quality_ref-llama-30m"  # the results file of both


@dataclass(frozen=True)
class Series:
    """One row of the table and, where it has a colour, one line of the chart.

    Args:
        row: What `label` calls it.
        name: What readers call it.
        short: Its label in the chart; empty leaves it out there.
        colour: A CSS variable of `STYLE`.
    """

    row: str
    name: str
    short: str = ""
    colour: str = ""


SERIES = (
    Series("mean", "mean pooling, as in the paper"),
    Series(
        "mean → next token, alpha 0.05",
        "… trained on 5 % of the original's tokens (the paper's recipe)",
        "the paper's recipe, 5 %",
        "--s2",
    ),
    Series("joint: refit + regression", "**`joint`, fitted on 0.5M tokens**", "joint, no uptraining", "--s3"),
    Series("joint → distillation, alpha 0.01", "… distilled on 1 %", "joint + 1 %", "--s4"),
    Series("joint → distillation, alpha 0.05", "… distilled on 5 %", "joint + 5 %", "--s5"),
)
CONTROL = "original → next token, alpha 0.05"

Losses = dict[str, dict[int, list[float]]]


def losses(record: Mapping[str, Any]) -> tuple[Losses, list[int]]:
    """Losses by row and G, and the numbers of KV heads that the headline shows, descending."""
    found: Losses = {}
    for row in first_of_each(record["rows"]):
        found.setdefault(label(row), {}).setdefault(row["groups"], []).append(row["loss"])
    shown = {g for series in SERIES for g in found.get(series.row, {})}
    return found, sorted(shown - {record["num_kv_heads"]}, reverse=True)


def table(record: Mapping[str, Any]) -> str:
    """The table with its caption."""
    found, groups = losses(record)
    heads, protocol = record["num_kv_heads"], record["protocol"]
    rows = [s for s in SERIES if s.row in found]
    lines = [
        [s.name, *(mean_and_spread(found[s.row].get(g, [])).split(" ")[0] for g in groups)] for s in rows
    ]
    used = [
        record["runs"][row["run"]]
        for row in first_of_each(record["rows"])
        if label(row) in {s.row for s in rows} | {CONTROL}
    ]
    several = len({state(run) for run in used}) > 1
    control = mean_and_spread(found.get(CONTROL, {}).get(heads, []))
    caption = (
        f"Loss in nats per token, lower is better: `{record['model']}`, {heads} KV heads, "
        f"**{found['original'][heads][0]:.3f}** as it was"
        + (f" and {control} when it is itself continued on the 5 % (the control)" if control else "")
        + f". Protocol `{protocol['name']}`, {protocol['tokens']:,} held-out tokens; {measured_on(used[0])}"
        + (
            "; rows come from several states of that version, which the results page keeps apart."
            if several
            else "."
        )
    )
    head = ["", *(f"{heads // g}:1 (G={g})" for g in groups)]
    return f"{markdown(head, lines)}\n\n{caption}"


# --- the chart -------------------------------------------------------------------------------------------

STYLE = """:root { --paper:#fff; --ink:#1b1f24; --faint:#d4d9df; --s1:#57606a; --s2:#d55e00; --s3:#0072b2; --s4:#009e73;
  --s5:#a3527f; }
@media (prefers-color-scheme: dark) { :root { --paper:#14171b; --ink:#e6e9ed; --faint:#3a414a; --s1:#a3acb7;
  --s2:#ff9248; --s3:#56b4e9; --s4:#2fc79b; --s5:#e39cc4; } }
svg { font: 12px sans-serif; }"""
GRID = 'style="stroke:var(--faint)"'
LINE = 'fill="none" stroke-width="2"'
DASH = 'stroke-dasharray="5 4"'
WIDTH, HEIGHT = 480, 330
LEFT, RIGHT, TOP, BOTTOM = 46, 318, 34, 284


@dataclass(frozen=True)
class _Axes:
    """Where a number of KV heads and a loss lie in the picture."""

    groups: Sequence[int]
    low: float
    high: float

    def x(self, g: int) -> float:
        return LEFT + 24 + (RIGHT - LEFT - 40) * self.groups.index(g) / max(1, len(self.groups) - 1)

    def y(self, loss: float) -> float:
        return TOP + (BOTTOM - TOP) * (self.high - loss) / (self.high - self.low)

    def drawn(self, heads: int) -> list[str]:
        """Grid, ticks and names of the axes."""
        step = 0.05 if self.high - self.low < 0.5 else 0.1
        ticks = [i * step for i in range(int(-(-self.low // step)), int(self.high // step) + 1)]
        parts = [f'<text x="{LEFT - 34}" y="18">held-out loss, nats per token</text>']
        for tick in ticks:
            height = self.y(tick)
            parts.append(f'<line {GRID} x1="{LEFT}" x2="{RIGHT}" y1="{height:.1f}" y2="{height:.1f}"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{height + 4:.1f}" text-anchor="end">{tick:.2f}</text>')
        parts += [
            f'<text x="{self.x(g):.1f}" y="{BOTTOM + 18}" text-anchor="middle">{g}</text>'
            for g in self.groups
        ]
        middle = (LEFT + RIGHT) / 2
        name = f"KV heads, of {heads}"
        return [*parts, f'<text x="{middle:.0f}" y="{BOTTOM + 36}" text-anchor="middle">{name}</text>']

    def level(self, loss: float) -> str:
        """A dashed line at one loss."""
        height = f"{self.y(loss):.1f}"
        return (
            f'<line {LINE} {DASH} style="stroke:var(--s1)" x1="{LEFT}" x2="{RIGHT}" '
            f'y1="{height}" y2="{height}"/>'
        )

    def curve(self, losses: Mapping[int, float], colour: str) -> list[str]:
        """A line with points over the numbers of KV heads."""
        points = [(self.x(g), self.y(losses[g])) for g in self.groups if g in losses]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        dots = [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" style="fill:var({colour})"/>' for a, b in points]
        return [f'<polyline {LINE} style="stroke:var({colour})" points="{path}"/>', *dots]


def chart(record: Mapping[str, Any]) -> str:
    """An SVG that follows light and dark: loss over the number of KV heads."""
    found, groups = losses(record)
    heads = record["num_kv_heads"]
    drawn = [s for s in SERIES if s.short and s.row in found]
    means = {s.row: {g: sum(x) / len(x) for g, x in found[s.row].items()} for s in drawn}
    levels = [("original", found["original"][heads][0])]
    levels += [("original + 5 %", loss) for loss in found.get(CONTROL, {}).get(heads, [])[:1]]
    values = [loss for _, loss in levels] + [x for by in means.values() for x in by.values()]
    axes = _Axes(groups, min(values) - 0.012, max(values) + 0.012)
    parts = axes.drawn(heads)
    labels = []
    for name, loss in levels:
        parts.append(axes.level(loss))
        labels.append((name, axes.y(loss), "--s1"))
    for s in drawn:
        parts += axes.curve(means[s.row], s.colour)
        labels.append((s.short, axes.y(means[s.row][min(means[s.row])]), s.colour))
    for name, height, colour in _apart(labels):
        parts.append(f'<text x="{RIGHT + 6}" y="{height + 4:.1f}" style="fill:var({colour})">{name}</text>')
    title = f"Loss over the number of KV heads: {', '.join(s.short for s in drawn)}"
    return document(f"0 0 {WIDTH} {HEIGHT}", title, parts)


def document(size: str, title: str, parts: Sequence[str]) -> str:
    """The text of an `.svg` file that follows light and dark, and is light where a viewer knows no CSS variables.

    Args:
        size: The `viewBox`.
        title: For screen readers.
        parts: Elements, coloured by the variables of `STYLE`.
    """
    return with_fallbacks(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" role="img" aria-label="{title}" '
        f'style="fill:var(--ink)"><style>{STYLE}</style>{BACKGROUND}\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _apart(labels: Sequence[tuple[str, float, str]], least: float = 14) -> list[tuple[str, float, str]]:
    """Labels moved up where they would overlap the one below."""
    placed: list[tuple[str, float, str]] = []
    for name, height, colour in sorted(labels, key=lambda item: -item[1]):
        if placed:
            height = min(height, placed[-1][1] - least)
        placed.append((name, height, colour))
    return placed
