"""`sweep`: a grid over G, method, grouping and alpha from one recipe; shared statistics, one table."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from ..architectures.arch_conversions import differs_for_mqa
from ..calibration.sampling import copy_sampled
from ..checkpoints.atomic import writing_to
from ..checkpoints.hf_config import load_config_json
from ..config import Recipe
from ..config.convert import Method
from ..config.pair_options import GENERATE
from ..conversion.sampled_text import generated_file
from ..distributed import is_rank_zero
from ..errors import UsageError
from ..progress import current
from ..report import write_pictures, write_report
from ..results import Result
from .builtin import resolve_model
from .check_pairs import check_pairs
from .dry_run import gate_limits, rehearse
from .report_data import Outcome, build_report, title
from .run_recipe import Job, as_recipe, check_recipe, command
from .stages import StageRecords

logger = logging.getLogger(__name__)
CALIBRATED = ("align", "joint")  # methods that share one file of statistics


@dataclass(frozen=True)
class Cell:
    """One point of the grid.

    Args:
        groups, method, grouping: Of the conversion.
        alpha: Of the uptraining; 0 for none.
    """

    groups: int
    method: Method | None
    grouping: str | None
    alpha: float

    @property
    def conversion(self) -> str:
        """Folder name of the conversion, which all alphas share."""
        grouping = "" if self.grouping is None else f"-{Path(self.grouping).stem}"
        return f"g{self.groups}-{self.method or 'default'}{grouping}"

    @property
    def label(self) -> str:
        """How tables call it."""
        grouping = "" if self.grouping is None else f" {Path(self.grouping).stem}"
        alpha = f" alpha {self.alpha:g}" if self.alpha else ""
        return f"G={self.groups} {self.method or 'default'}{grouping}{alpha}"


@dataclass
class SweepResult(Result):
    """What a sweep gave.

    Args:
        output: Folder of everything.
        stages: As in `run`.
        models: The original, then one row for each cell: figures, `label`, `groups`, `method`, `alpha`.
        written: Files of the report.
        warnings: What the user should know.
        dry_run: Nothing was done.
    """

    command: ClassVar[str] = "sweep"
    renamed: ClassVar[dict[str, str]] = {"notices": "warnings"}
    table: ClassVar[str] = "models"
    output: str
    stages: list[dict[str, Any]] = field(default_factory=list)
    models: list[dict[str, Any]] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    dry_run: bool = False


def grid(recipe: Recipe) -> list[Cell]:
    """Every cell of a recipe's grid, conversions in the order given, alphas ascending.

    Raises:
        UsageError: There is no grid, or it asks for uptraining without an `uptrain` section.
    """
    sweep = recipe.sweep
    if sweep is None or not (sweep.groups or recipe.convert.groups):
        raise UsageError("missing", where="recipe: sweep.groups", fix="list the values of G, such as [8, 4]")
    if any(sweep.alphas) and recipe.uptrain is None:
        raise UsageError(
            "no uptrain section", where="recipe: sweep.alphas", fix="add one, or leave alphas out"
        )
    axes = (
        sweep.groups or (recipe.convert.groups,),
        sweep.methods or (recipe.convert.method,),
        sweep.groupings or (recipe.convert.grouping,),
        sorted(sweep.alphas),
    )
    return [Cell(int(g), m, p, a) for g, m, p, a in itertools.product(*axes) if g is not None]


def sweep(
    recipe: Recipe | str | Path | Mapping[str, Any],
    *,
    overrides: Sequence[str] = (),
    dry_run: bool = False,
    force: bool = False,
) -> SweepResult:
    """Do every cell of a recipe's grid; finished cells are skipped.

    Args:
        recipe: A `Recipe` with a `sweep` section, its file, or the same as plain data.
        overrides: `section.key=value`, for a file.
        dry_run: Check everything that can be checked without weights, and stop.
        force: Replace checkpoints that another version of the recipe made.

    Returns:
        One table over all cells, and the files written (the page has the frontier).

    Raises:
        UsageError, UnsupportedModelError: The recipe is invalid, or has no `sweep` section; nothing has been written.
        CheckpointError, DataError, TrainingError: As the stages of a cell raise them.

    Example:
        >>> sweep("recipes/paper-methods.yaml", overrides=["sweep.groups=[8, 4]"]).written  # doctest: +SKIP
    """
    recipe = as_recipe(recipe, overrides)
    check_recipe(recipe)
    cells = grid(recipe)
    if dry_run:
        stages, warnings = rehearse(recipe)
        return SweepResult(recipe.output, stages, warnings=[*_unjudged(recipe), *warnings], dry_run=True)
    return _Sweep(recipe, cells, force).run()


def _unjudged(recipe: Recipe) -> list[str]:
    """Warnings of gates, which have no effect here."""
    return [
        f"report.{name}: a sweep judges none of its models, read its table" for name in gate_limits(recipe)
    ]


class _Sweep:
    """One sweep being done."""

    def __init__(self, recipe: Recipe, cells: list[Cell], force: bool) -> None:
        self.recipe, self.cells, self.force = recipe, cells, force
        self.folder = Path(recipe.output)
        self.stages: list[dict[str, Any]] = []
        self.warnings = _unjudged(recipe)
        self.trained: list[dict[str, Any]] = []
        self.sampled: Path | None = None  # text of a cell before, which the original need not write again

    def run(self) -> SweepResult:
        """All cells, then the report."""
        source = resolve_model(self.recipe.source)
        check_pairs(self.recipe, source, load_config_json(source))
        with writing_to(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "recipe.yaml").write_text(self.recipe.to_yaml(), encoding="utf-8")
        base = self._job(self.recipe, "original")
        first = base.evaluate("evaluate", {"original": source})
        self._collect("original", base.records)
        original = first["models"][0] | self._speed(base, "original", source)
        rows = [original]
        for number, cell in enumerate(self.cells, 1):
            with current().part(cell.label, number, len(self.cells)):
                rows.append(self._cell(cell, first))
        outcome = Outcome(self.recipe, source, trained=self.trained, evaluations=[first | {"models": rows}])
        named = self.recipe.report.title or sweep_title(self.recipe, rows)
        report = replace(build_report(outcome, command(), frontier(rows)), models=rows, title=named)
        formats = [name for name in self.recipe.report.formats if name != "card"]
        written = write_report(report, self.folder, formats)
        written += write_pictures(report, self.folder / "pictures")
        result = SweepResult(
            str(self.folder), self.stages, rows, [str(path) for path in written], self.warnings
        )
        result.write_json(self.folder / "result.json")
        return result

    def _cell(self, cell: Cell, first: Mapping[str, Any]) -> dict[str, Any]:
        """The row of one cell."""
        job = self._job(self._recipe_of(cell), cell.conversion)
        text = generated_file(job.converted)
        if self.sampled is not None and GENERATE in job.recipe.convert.calibration and is_rank_zero():
            copy_sampled(self.sampled, text)
        found = job.convert()
        self.sampled = text if text.exists() else self.sampled
        role, name, place = "converted", "evaluate", job.converted
        if cell.alpha:
            job.trained = f"uptrained-{cell.alpha:g}"
            self.trained.append(job.uptrain())
            role, name, place = "uptrained", f"evaluate-{job.trained}", job.uptrained
        scored = job.evaluate(name, {role: str(place)})
        if scored["data"]["sha256"] != first["data"]["sha256"]:
            self.warnings.append(f"{cell.label} was scored on other tokens: compare bits per byte")
        row = scored["models"][0] | self._speed(job, name.replace("evaluate", "bench"), str(place))
        self._collect(cell.label, job.records)
        method = found["method"]
        label = cell.label.replace("default", method)
        return row | {"label": label, "groups": cell.groups, "method": method, "alpha": cell.alpha}

    def _recipe_of(self, cell: Cell) -> Recipe:
        axes = {"groups": cell.groups, "grouping": cell.grouping, "method": cell.method}
        convert = self.recipe.convert.replaced(**axes)
        if convert.calibration and cell.method in (None, *CALIBRATED):
            convert = convert.replaced(statistics=self._statistics_of(cell, convert.statistics))
        else:
            convert = convert.replaced(calibration=None, statistics=None)
        uptrain = self.recipe.uptrain
        if uptrain is not None:
            uptrain = uptrain.replaced(alpha=cell.alpha, tokens=None)
        return replace(self.recipe, convert=convert, uptrain=uptrain, sweep=None)

    def _statistics_of(self, cell: Cell, named: str | None) -> str:
        """The file of moments that cells share, as far as they run the same class."""
        path = Path(named or self.folder / "statistics.safetensors")
        model_type = str(load_config_json(resolve_model(self.recipe.source)).get("model_type"))
        mixed = len({other.groups == 1 for other in self.cells}) == 2
        apart = mixed and cell.groups == 1 and differs_for_mqa(model_type)
        return str(path.with_stem(f"{path.stem}-mqa") if apart else path)

    def _job(self, recipe: Recipe, name: str) -> Job:
        folder = self.folder / "cells" / name
        return Job(recipe, StageRecords(folder / "stages", self.force), folder, texts=self.folder / "text")

    def _speed(self, job: Job, name: str, place: str) -> dict[str, Any]:
        if self.recipe.sweep is None or not self.recipe.sweep.bench:
            return {}
        return job.bench(name, place)

    def _collect(self, label: str, records: StageRecords) -> None:
        self.stages += [stage | {"name": f"{label}: {stage['name']}"} for stage in records.stages]


def sweep_title(recipe: Recipe, rows: Sequence[Mapping[str, Any]]) -> str:
    """What a sweep's page is called: the model, and what its grid varies.

    Args:
        recipe: Of the sweep.
        rows: The original, then one row for each cell.
    """
    cells = [row for row in rows if "groups" in row]
    groups, methods = (list(dict.fromkeys(row[key] for row in cells)) for key in ("groups", "method"))
    alphas = sorted({row["alpha"] for row in cells})
    parts = [f"G = {', '.join(map(str, groups))}", ", ".join(methods)]
    if len(alphas) > 1:
        parts.append(f"alpha {alphas[0]:g} to {alphas[-1]:g}")
    elif alphas[0]:
        parts.append(f"alpha {alphas[0]:g}")
    return f"{title(recipe, None)}: {'; '.join(parts)}"


def frontier(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Points of a sweep's pictures from its rows."""
    figures = ("kv_bytes_per_token", "loss", "perplexity", "decode_milliseconds_per_step")
    keys = ("label", "method", "alpha", *figures)
    return [
        {key: row.get(key) for key in keys} | {"num_kv_heads": row["groups"]}
        for row in rows
        if "groups" in row
    ]
