"""The one table and the one chart that the front pages show: `joint` beside mean pooling, the control and fewer heads from scratch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from _markdown import markdown, mean_and_spread
from _quality_frontier import by_configuration

from mha2gqa.report.svg import BACKGROUND, with_fallbacks

SOURCE = "quality_ledger"  # the results file of both


@dataclass(frozen=True)
class Series:
    """One row of the table and one line of the chart.

    Args:
        key: Of the rows of the ledger, without the seed; `{}` stands for the number of KV heads.
        name: What readers call it.
        short: Its label in the chart.
        colour: A CSS variable of `STYLE`.
    """

    key: str
    name: str
    short: str
    colour: str


AS_MANY = "kd-as[joint/G{0}/fits/kd-2.71M/seed0]"  # FLOPs
SERIES = (
    Series(
        f"mean/G{{0}}/merged/{AS_MANY}",
        "mean pooling, distilled on 11M tokens",
        "mean pooling, distilled",
        "--s2",
    ),
    Series(
        f"joint/G{{0}}/fits300/{AS_MANY}",
        "**`joint`, fitted and distilled for as many FLOPs**",
        "joint, as many FLOPs",
        "--s3",
    ),
    Series(
        "joint/G{0}/fits", "`joint`, fitted on 0.5M tokens, no uptraining", "joint, no uptraining", "--s5"
    ),
    Series(
        "joint/G{0}/fits/mix-13.6M",
        "… half distilled, half text, on 13.6M tokens",
        "joint, with text",
        "--s4",
    ),
    Series("scratch/G{0}", "trained from scratch with as few KV heads", "from scratch", "--s1"),
)
CONTROL = "original/G{0}/ce-2.71M"

Losses = dict[str, dict[int, list[float]]]


def losses(record: Mapping[str, Any]) -> tuple[Losses, list[int]]:
    """Losses by the name of a series and G, and the numbers of KV heads that the headline shows, descending."""
    rows, heads = by_configuration(record["entries"]), record["num_kv_heads"]
    sizes = sorted({row["groups"] for found in rows.values() for row in found} - {heads}, reverse=True)
    found: Losses = {}
    for series in SERIES:
        by = {g: [r["loss"] for r in rows[key]] for g in sizes if (key := series.key.format(g)) in rows}
        found |= {series.name: by} if by else {}
    for key in ("original/G{0}", CONTROL):
        if (at := key.format(heads)) in rows:
            found[key] = {heads: [row["loss"] for row in rows[at]]}
    return found, [g for g in sizes if any(g in found.get(s.name, {}) for s in SERIES)]


def table(record: Mapping[str, Any]) -> str:
    """The table with its caption."""
    found, groups = losses(record)
    heads, protocol = record["num_kv_heads"], record["protocol"]
    lines = [
        [s.name, *(mean_and_spread(found[s.name].get(g, [])).split(" ")[0] for g in groups)]
        for s in SERIES
        if s.name in found
    ]
    (original,) = found["original/G{0}"].values()
    control = mean_and_spread(found.get(CONTROL, {}).get(heads, []))
    caption = (
        f"Loss in nats per token, lower is better: `{record['model']}`, {heads} KV heads, **{original[0]:.3f}** as it was"
        + (
            f" and {control} when it is itself continued on 2.7M tokens of this text (the control)"
            if control
            else ""
        )
        + f". All on text that it had not seen; protocol `{protocol['name']}`, {protocol['tokens']:,} held-out tokens; "
        f"{record['runs'][0]['hardware']['gpu']}."
    )
    head = ["", *(f"{heads // g}:1 (G={g})" for g in groups)]
    return f"{markdown(head, lines)}\n\n{caption}"


# --- the chart -------------------------------------------------------------------------------------------

STYLE = """:root { --paper:#fff; --ink:#1b1f24; --faint:#d4d9df; --s1:#57606a; --s2:#d55e00; --s3:#0072b2; --s4:#009e73;
  --s5:#a3527f; --s6:#b58900; }
@media (prefers-color-scheme: dark) { :root { --paper:#14171b; --ink:#e6e9ed; --faint:#3a414a; --s1:#a3acb7;
  --s2:#ff9248; --s3:#56b4e9; --s4:#2fc79b; --s5:#e39cc4; --s6:#e0b84c; } }
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
    drawn = [s for s in SERIES if s.name in found]
    means = {s.name: {g: sum(x) / len(x) for g, x in found[s.name].items()} for s in drawn}
    levels = [("original", found["original/G{0}"][heads][0])]
    levels += [("original + 2.7M tokens", loss) for loss in found.get(CONTROL, {}).get(heads, [])[:1]]
    values = [loss for _, loss in levels] + [x for by in means.values() for x in by.values()]
    axes = _Axes(groups, min(values) - 0.012, max(values) + 0.012)
    parts = axes.drawn(heads)
    labels = []
    for name, loss in levels:
        parts.append(axes.level(loss))
        labels.append((name, axes.y(loss), "--s1"))
    for s in drawn:
        parts += axes.curve(means[s.name], s.colour)
        labels.append((s.short, axes.y(means[s.name][min(means[s.name])]), s.colour))
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
