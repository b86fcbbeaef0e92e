"""One self-contained HTML file: no script, no network, light and dark, readable on a phone and on paper."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

from . import grids, plots
from .content import (
    COLUMNS,
    Report,
    best_rows,
    differences,
    headline,
    limits,
    model_rows,
    name_of,
    scoring,
    tiles,
)
from .names import public
from .plots import drawable
from .tables import fixed

_OPTIONAL = ("loss", "tokens", "bits/byte")  # columns that a phone leaves out


def html_page(report: Report) -> str:
    """The report as one HTML document.

    Args:
        report: What to show.

    Returns:
        A complete document without references to any other file.
    """
    report = public(report)
    title = html.escape(report.title)
    body = [
        f"<h1>{title}</h1>",
        f'<p class="soft">made from {html.escape(report.source)}</p>',
        f'<p class="lead">{html.escape(headline(report))}</p>',
        _tiles(report),
        "<h2>Models</h2>",
        _table(COLUMNS, model_rows(report.models)),
        f'<p class="soft">Loss in nats per token; {html.escape(scoring(report))}.</p>',
        "".join(f'<p class="soft">{html.escape(line)}.</p>' for line in differences(report.models)),
        _plots(report),
        "<h2>What these figures do not show</h2>",
        "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in limits(report)) + "</ul>",
        _layers(report),
        _provenance(report),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{_style()}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main>\n</body>\n</html>\n"
    )


def _style() -> str:
    return resources.files("mha2gqa").joinpath("assets", "report.css").read_text(encoding="utf-8")


def _tiles(report: Report) -> str:
    cells = "".join(
        f'<div class="tile"><b>{html.escape(value)}</b><span>{html.escape(what)}</span>'
        f"<small>{html.escape(detail)}</small></div>"
        for value, what, detail in tiles(report)
    )
    return f'<div class="tiles">{cells}</div>' if cells else ""


def _table(columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]]) -> str:
    classes = [
        " ".join(
            name for name, wanted in (("num", align == ">"), ("optional", heading in _OPTIONAL)) if wanted
        )
        for heading, align in columns
    ]

    def line(tag: str, cells: Sequence[str]) -> str:
        marked = (f'<{tag} class="{c}">{html.escape(x)}</{tag}>' for x, c in zip(cells, classes, strict=True))
        return f"<tr>{''.join(marked)}</tr>"

    head = line("th", [heading for heading, _ in columns])
    body = "\n".join(line("td", list(row)) for row in rows)
    return f'<div class="scroll"><table>\n<thead>{head}</thead>\n<tbody>\n{body}\n</tbody></table></div>'


def _plots(report: Report) -> str:
    marks = {
        str(row["role"]): row["loss"]
        for row in report.models[:2]
        if row.get("role") and drawable(row.get("loss"))
    }
    bars = [
        (name_of(row), row["kv_bytes_per_token"], str(row.get("role") or ""))
        for row in report.models
        if row.get("kv_bytes_per_token") and row.get("role") != "uptrained"
    ]
    compared = report.models
    if best := best_rows(report.models):  # of a sweep: one line and one bar for each G
        compared = [row for row in report.models if row is report.original] + best
        bars = [
            (f"G={row['groups']}", row["kv_bytes_per_token"], "converted")
            if "groups" in row
            else (name_of(row), row["kv_bytes_per_token"], "original")
            for row in compared
            if row.get("kv_bytes_per_token")
        ]
    pictures = [
        ("Uptraining", plots.curves_svg(report.curves, marks), "Dashed: loss before uptraining."),
        *(
            (grids.TITLES[name][0], svg, grids.TITLES[name][1])
            for name, svg in grids.sweep_pictures(report.frontier, report.original).items()
        ),
        (
            "Loss by length of context",
            plots.positions_svg({name_of(row): row.get("positions") or () for row in compared}),
            ("Best at each G. " if best else "")
            + "Tokens with more context in front are easier; a gap that widens to the right costs long contexts.",
        ),
        (
            "KV cache",
            plots.kv_bars_svg(bars, report.batch, report.context),
            f"At batch {report.batch} and a context of {report.context:,} tokens.",
        ),
        (
            "Residual of the merge",
            plots.residuals_svg(layer_series(report.layers)),
            "Relative error of keys and values after merging; 0 would be lossless.",
        ),
        (
            "Which heads share",
            plots.grouping_svg(layer_groupings(report.layers)),
            "Cells of one colour in a row become one KV head.",
        ),
    ]
    figures = "".join(
        f"<figure><h3>{title}</h3>{svg}<figcaption>{html.escape(caption)}</figcaption></figure>"
        for title, svg, caption in pictures
        if svg
    )
    return f'<h2>Pictures</h2>\n<div class="plots">{figures}</div>' if figures else ""


def layer_series(layers: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Every relative error in `layers[]` (`residual` in older files), as `(layer, value)` points."""
    series: dict[str, list[tuple[int, float]]] = {}
    for i, layer in enumerate(layers):
        for key, value in layer.items():
            name = key.replace("residual", "relative_error")
            if "relative_error" in name and (name == key or name not in layer) and drawable(value):
                points = series.setdefault(name.replace("_", " "), [])
                points.append((int(layer.get("layer", i)), float(value)))
    return series


def layer_groupings(layers: Sequence[Mapping[str, Any]]) -> list[tuple[str, Sequence[Sequence[int]]]]:
    """The grouping of each attention module, labelled by its layer."""
    found = []
    for i, layer in enumerate(layers):
        if layer.get("grouping"):
            kind = layer.get("kind", "self")
            suffix = "" if kind == "self" else f" {kind}"
            found.append((f"{layer.get('layer', i)}{suffix}", layer["grouping"]))
    return found


def _layers(report: Report) -> str:
    series = layer_series(report.layers)
    groupings = dict(layer_groupings(report.layers))
    if not series and not groupings:
        return ""
    columns = [("layer", "<"), *[(name, ">") for name in series], ("groups of source heads", "<")]
    values = {name: dict(points) for name, points in series.items()}
    rows = []
    for i, layer in enumerate(report.layers):
        number = int(layer.get("layer", i))
        groups = layer.get("grouping") or ()
        text = " ".join("{" + " ".join(map(str, group)) + "}" for group in groups)
        rows.append([str(number), *[fixed(values[name].get(number), 4) for name in series], text])
    return f"<details><summary>Layer by layer</summary>{_table(columns, rows)}</details>"


def _provenance(report: Report) -> str:
    items = "".join(
        f"<dt>{html.escape(key)}</dt><dd>{html.escape(str(value))}</dd>"
        for key, value in report.provenance.items()
    )
    parts = ["<h2>Provenance</h2>", f"<dl>{items}</dl>"] if items else []
    if report.command:
        parts.append(f"<p>Command:</p><pre>{html.escape(report.command)}</pre>")
    if report.recipe:
        parts.append(
            f"<details><summary>Effective recipe</summary><pre>{html.escape(report.recipe)}</pre></details>"
        )
    return "\n".join(parts)
