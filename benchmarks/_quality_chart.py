"""The chart of a ledger: gap to the original against FLOPs and against unique tokens, for two cache sizes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from _headline import DASH, GRID, LINE, document
from _quality_cells import Cell
from _quality_frontier import Rows, by_configuration

GROUPS = (4, 2)  # the cache sizes drawn, a row of panels each
AXES = (("flops", "FLOPs, fits included"), ("unique_tokens", "unique tokens"))
TICKS = (-0.03, -0.01, 0.0, 0.01, 0.03, 0.1, 0.3, 1.0)
HEIGHT, LEFT, GAP, TOP, PANEL = 348, 52, 44, 72, 264
SOFT = 0.01  # gaps below are drawn on a linear scale, those above on a logarithmic one


@dataclass(frozen=True)
class Line:
    """One way to fill the cache of GQA-G.

    Args:
        name: In the legend.
        colour: A CSS variable of `_headline.STYLE`.
        points: Per G: FLOPs, unique tokens and gap of each budget.
        dashed: Whether half of the loss of its uptraining came from the text.
    """

    name: str
    colour: str
    points: Mapping[int, Sequence[Mapping[str, float]]]
    dashed: bool = False


Form = tuple[str, str, int, int, str]  # start, fit, how many times G heads, R, cache
FORMS: dict[tuple[str, str], Form] = {
    ("plain heads", "--s3"): ("joint", "fits", 1, 1, ""),
    ("300 steps of fits", "--s6"): ("joint", "fits300", 1, 1, ""),
    ("wide heads, R=2", "--s4"): ("joint", "fits", 1, 2, ""),
    ("R=4", "--s1"): ("joint", "fits", 1, 4, ""),
    ("twice the heads, 8-bit cache", "--s5"): ("joint", "fits", 2, 1, "int8"),
    ("mean pooling", "--s2"): ("mean", "merged", 1, 1, ""),
}


def lines(rows: Rows, num_kv_heads: int) -> list[Line]:
    """Plain and wide heads, GQA-2G with an 8-bit cache, mean pooling; distilled, and on half text; without those not run."""
    drawn = [(Cell.of(found[0]), _point(found)) for found in rows.values() if not found[0].get("at_rate")]
    kept = [
        (cell, point)
        for cell, point in drawn
        if cell.text == "calibration"
        and not (cell.batch or cell.over)
        and (cell.fit == "fits" or cell.objective)
    ]
    found = []
    for objective in ("kd", "mix"):
        for (name, colour), (start, fit, times, wide, cache) in FORMS.items():
            ordered: dict[int, list[dict[str, float]]] = {}
            for g in (g for g in GROUPS if g < num_kv_heads):
                form = start, fit, times * g, wide, cache
                those = [(c, p) for c, p in kept if (c.start, c.fit, c.groups, c.wide, c.cache) == form]
                those = [(c, p) for c, p in those if c.objective in ("", objective)]
                if objective == "mix" and not any(c.objective for c, _ in those):
                    those = []  # no more than the fits: the solid line has them
                ordered[g] = sorted((p for _, p in those), key=lambda point: point["flops"])
            if any(ordered.values()):
                found.append(Line(name, colour, ordered, objective == "mix"))
    return found


def _point(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {name: statistics.mean(row[name] for row in rows) for name in ("flops", "unique_tokens", "gap")}


@dataclass(frozen=True)
class _Panel:
    """One pair of axes: a logarithmic one of costs, and one of gaps that is linear around zero."""

    left: float
    top: float
    costs: tuple[float, float]
    gaps: tuple[float, float]

    def x(self, cost: float) -> float:
        low, high = (math.log(c) for c in self.costs)
        return self.left + 8 + (PANEL - 16) * (math.log(cost) - low) / max(1e-9, high - low)

    def y(self, gap: float) -> float:
        low, high = (math.asinh(g / SOFT) for g in self.gaps)
        return self.top + (HEIGHT - TOP - 72) * (high - math.asinh(gap / SOFT)) / (high - low)

    def frame(self, title: str, name: str, labelled: bool) -> list[str]:
        """Grid, ticks, title and the name of the axis of costs."""
        right, bottom = self.left + PANEL, self.y(self.gaps[0])
        parts = [f'<text x="{self.left}" y="{self.top - 8}" font-weight="bold">{title}</text>']
        for tick in (t for t in TICKS if self.gaps[0] <= t <= self.gaps[1]):
            dash = f" {DASH}" if tick == 0 else ""
            y = f"{self.y(tick):.1f}"
            parts.append(f'<line {GRID}{dash} x1="{self.left}" x2="{right}" y1="{y}" y2="{y}"/>')
            if labelled:
                parts.append(
                    f'<text x="{self.left - 6}" y="{self.y(tick) + 4:.1f}" text-anchor="end">{f"{tick:+.2f}" if tick else 0}</text>'
                )
        cost_range = self.costs[1] / self.costs[0]
        for power in range(int(math.log10(self.costs[0])), int(math.log10(self.costs[1])) + 1):
            for digit in (1, 2, 3, 5) if cost_range < 10 else (1, 2, 5):
                if self.costs[0] <= (cost := digit * 10.0**power) <= self.costs[1]:
                    parts.append(
                        f'<text x="{self.x(cost):.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{_short(cost)}</text>'
                    )
        middle = self.left + PANEL / 2
        return [*parts, f'<text x="{middle:.0f}" y="{bottom + 33:.1f}" text-anchor="middle">{name}</text>']

    def curve(self, line: Line, groups: int, cost: str) -> list[str]:
        """A line through the budgets of one form."""
        points, colour = line.points.get(groups, []), line.colour
        at = [(self.x(p[cost]), self.y(p["gap"])) for p in points]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in at)
        dots = [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" style="fill:var({colour})"/>' for a, b in at]
        dash = f" {DASH}" if line.dashed else ""
        return [f'<polyline {LINE}{dash} style="stroke:var({colour})" points="{path}"/>', *dots]


def _short(cost: float) -> str:
    """`2M`, `5e15`."""
    return f"{cost / 1e6:.3g}M" if cost < 1e9 else f"{cost:.0e}".replace("e+", "e")


def chart(record: Mapping[str, Any]) -> str:
    """An SVG that follows light and dark."""
    rows, heads = by_configuration(record["entries"]), record["num_kv_heads"]
    drawn = lines(rows, heads)
    points = [p for line in drawn for of_g in line.points.values() for p in of_g]
    left = LEFT - 40
    parts, x = [f'<text x="{left}" y="16">gap to the original, nats per token</text>'], float(left)
    y = 35
    for line in (line for line in drawn if not line.dashed):
        if x + 12 + 6.8 * len(line.name) > LEFT + 2 * PANEL + GAP:
            x, y = float(left), y + 16
        parts.append(f'<circle cx="{x + 4:.0f}" cy="{y - 4}" r="3.5" style="fill:var({line.colour})"/>')
        parts.append(f'<text x="{x + 12:.0f}" y="{y}" style="fill:var({line.colour})">{line.name}</text>')
        x += 28 + 6.8 * len(line.name)
    gaps = (1.15 * min(-0.012, *(p["gap"] for p in points)), 1.1 * max(p["gap"] for p in points))
    height = HEIGHT - TOP
    for i, g in enumerate(GROUPS):
        for j, (cost, name) in enumerate(AXES):
            known = [p[cost] for p in points]
            panel = _Panel(
                LEFT + j * (PANEL + GAP), TOP + 12 + i * height, (min(known) / 1.1, max(known) * 1.1), gaps
            )
            parts += panel.frame(f"cache of GQA-{g} ({heads // g}:1)", name, labelled=j == 0)
            for line in drawn:
                parts += panel.curve(line, g, cost) if line.points.get(g) else []
    size = f"0 0 {LEFT + 2 * PANEL + GAP + 12} {TOP + len(GROUPS) * height}"
    title = "Gap to the original against FLOPs and unique tokens: " + ", ".join(
        line.name for line in drawn if not line.dashed
    )
    if any(line.dashed for line in drawn):
        parts[0] = parts[0].replace(
            "per token", "per token; solid: distilled, dashed: half of the loss from the text"
        )
    return document(size, title, parts)
