"""One self-contained HTML file: no script, no network, light and dark, readable on a phone and on paper."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import grids, plots
from .content import Report, Row, Table, differences, models_table, name_of, scoring
from .headline import best_rows, headline, limits, tiles
from .layers import STAGE_ERRORS, layer_groupings, layer_series, layers_table
from .names import public
from .numbers import finite
from .svg import OTHER, row_colour, stylesheet
from .templating import html_templates
from .text import shortened


@dataclass(frozen=True)
class Figure:
    """A picture of the page.

    Args:
        title, caption: Above and below it.
        svg: The element.
    """

    title: str
    svg: str
    caption: str


def html_page(report: Report) -> str:
    """The report as one HTML document.

    Args:
        report: What to show.

    Returns:
        A complete document without references to any other file.
    """
    from markupsafe import Markup

    report = public(report)
    found = [Figure(f.title, Markup(f.svg), f.caption) for f in figures(report) if f.svg]
    best = best_rows(report.models)
    return (
        html_templates()
        .get_template("page.html")
        .render(
            report=report,
            style=Markup(stylesheet()),
            headline=headline(report),
            tiles=tiles(report),
            models=models_table(report.models),
            best=[i for i, row in enumerate(report.models) if any(row is b for b in best)],
            scoring=scoring(report),
            differences=differences(report.models),
            figures=found,
            limits=limits(report),
            layers=_layers(report.layers),
        )
    )


def figures(report: Report) -> Iterator[Figure]:
    """Every picture, empty where there is nothing to draw."""
    yield from _training_figures(report)
    for name, svg in grids.sweep_pictures(report.frontier, report.original).items():
        yield Figure(grids.TITLES[name][0], svg, grids.TITLES[name][1])
    best = best_rows(report.models)
    shown = [row for row in report.models if row is report.original] + best if best else report.models
    shown = [row for row in shown if not row.get("part")]
    yield Figure(
        "Loss by length of context",
        plots.positions_svg(
            [(shortened(name_of(row)), row_colour(row), row.get("positions") or ()) for row in shown]
        ),
        ("Best at each G. " if best else "")
        + "Tokens with more context in front are easier; a gap that widens to the right costs long contexts.",
    )
    yield Figure(
        "KV cache",
        plots.kv_bars_svg(_bars(shown), report.batch, report.context),
        f"At batch {report.batch} and a context of {report.context:,} tokens.",
    )
    yield from _layer_figures(report.layers)


def _training_figures(report: Report) -> Iterator[Figure]:
    curves, original = report.curves, report.original
    measured = curves.get("evaluation") or ()
    own = any(row.get("part") for row in report.models)
    yield Figure(
        "Loss over uptraining",
        plots.evaluation_svg(measured, None if original is None or own else finite(original.get("loss"))),
        "On the part of the evaluation text whose rows stand in the table."
        if own
        else "On the evaluation text, scored as in the table; dashed: the original.",
    )
    terms = {name: curves.get(key) or () for name, key in OBJECTIVE.items()}
    yield Figure(
        "Training objective",
        plots.objective_svg(terms, "Objective of training over uptraining tokens"),
        "On the batches of training text: to be compared with itself only.",
    )
    yield Figure(
        "Validation split of the training run",
        plots.objective_svg(
            {"validation": curves.get("held-out") or ()}, "Validation loss over uptraining tokens"
        ),
        "Next-token loss on text that the training run held out: other text than the table's.",
    )


OBJECTIVE = {"objective": "training", "next-token loss": "training CE"}


def _bars(rows: Sequence[Row]) -> list[tuple[str, float, str]]:
    """One bar for each size of cache: uptraining and alpha do not change it."""
    bars: dict[str, tuple[str, float, str]] = {}
    for row in rows:
        size = row.get("kv_bytes_per_token")
        if not size or (row.get("role") == "uptrained" and "groups" not in row):
            continue
        name = f"G = {row['groups']}" if "groups" in row else shortened(name_of(row))
        bars.setdefault(name, (name, size, OTHER if "groups" in row else row_colour(row)))
    return list(bars.values())


def _layer_figures(layers: Sequence[Row]) -> Iterator[Figure]:
    yield Figure(
        "Error of the merge",
        plots.layers_svg(
            "merge", "Relative error of the merge, layer by layer", layer_series(layers), "relative error"
        ),
        "Relative error of keys and values after merging; 0 would be lossless.",
    )
    yield Figure(
        "Error of the attention output",
        plots.layers_svg(
            "output",
            "Relative error of the attention output after each stage",
            layer_series(layers, STAGE_ERRORS),
            "relative error",
        ),
        "On held-out calibration text, after each stage of the conversion.",
    )
    yield Figure(
        "Which heads share",
        plots.grouping_svg(layer_groupings(layers)),
        "Cells of one colour in a row become one KV head.",
    )


def _layers(layers: Sequence[Mapping[str, Any]]) -> Table | None:
    """Figures of every layer and its groups, where anything is known."""
    table = layers_table(layers, groups=True)
    return table if len(table.columns) > 1 else None
