"""Results -> terminal table, JSON, Markdown, model card, one self-contained HTML page. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ..errors import UsageError
from ..results import jsonable
from .card import markdown, model_card
from .card_file import how_to_load, source_license, write_card
from .content import COLUMNS, Report, becomes, model_rows, models_table
from .grids import sweep_pictures
from .headline import headline, limits, tiles
from .names import display_name, hub_name
from .numbers import fixed, human_bytes, human_count, number, significant
from .page import html_page
from .svg import standalone
from .templating import markdown_table

__all__ = [
    "COLUMNS",
    "FORMATS",
    "Report",
    "becomes",
    "display_name",
    "fixed",
    "headline",
    "how_to_load",
    "html_page",
    "hub_name",
    "human_bytes",
    "human_count",
    "limits",
    "markdown",
    "markdown_table",
    "model_card",
    "model_rows",
    "models_table",
    "number",
    "significant",
    "source_license",
    "standalone",
    "tiles",
    "write_card",
    "write_pictures",
    "write_report",
]

FORMATS = {
    "json": ("report.json", lambda report: json.dumps(jsonable(report), indent=2, ensure_ascii=False) + "\n"),
    "markdown": ("report.md", markdown),
    "html": ("report.html", html_page),
}


def write_report(
    report: Report,
    out: str | Path,
    formats: Sequence[str] = ("json", "markdown", "html"),
    card: Path | None = None,
) -> list[Path]:
    """Write the report into a folder.

    Args:
        report: What to write.
        out: Folder for `report.json`, `report.md`, `report.html`.
        formats: Which of `json`, `markdown`, `html`, `card`.
        card: Checkpoint folder that receives `README.md` where `card` is among the formats; a README that
            came with the source is kept as `README.base.md`.

    Returns:
        The files written.

    Raises:
        UsageError: Unknown format.
    """
    unknown = [name for name in formats if name not in (*FORMATS, "card")]
    if unknown:
        valid = ", ".join([*FORMATS, "card"])
        raise UsageError(
            f"{unknown[0]!r} is not a format", where="report.formats", fix=f"choose from {valid}"
        )
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name in formats:
        if name in FORMATS:
            file, render = FORMATS[name]
            (out / file).write_text(render(report), encoding="utf-8")
            written.append(out / file)
    if "card" in formats and card is not None:
        written.append(write_card(card, report))
    return written


def write_pictures(report: Report, out: Path) -> list[Path]:
    """Write a sweep's pictures as files, for a README or a paper.

    Args:
        report: With the points of a sweep in `frontier`.
        out: Folder for `frontier.svg`, `methods.svg`, `alphas.svg`, `times.svg`: those that the grid allows.

    Returns:
        The files written.
    """
    written = []
    for name, svg in sweep_pictures(report.frontier, report.original).items():
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.svg").write_text(standalone(svg), encoding="utf-8")
        written.append(out / f"{name}.svg")
    return written
