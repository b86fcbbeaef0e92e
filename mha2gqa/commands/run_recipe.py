"""`run`: a whole recipe, stage by stage, each done once: convert, evaluate, uptrain, evaluate, report."""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..checkpoints.atomic import writing_to
from ..checkpoints.fingerprints import source_fingerprint, source_fingerprints
from ..checkpoints.hf_config import load_config_json
from ..config import Recipe, load_recipe, recipe_from_dict
from ..conversion.checkpoint import convert
from ..errors import UsageError, quoted
from ..evaluation import evaluate
from ..evaluation.gates import measure_gates, require
from ..report import becomes, fixed, headline, write_report
from ..results import Result
from ..uptraining import uptrain
from .bench import bench, longest_context
from .builtin import resolve_data, resolve_model
from .check_pairs import check_pairs
from .describe import read_config
from .dry_run import check_limits, gate_limits, rehearse
from .report_data import Outcome, build_report
from .stages import StageRecords

if TYPE_CHECKING:
    from transformers import TrainerCallback

logger = logging.getLogger(__name__)


@dataclass
class RunResult(Result):
    """What a recipe gave.

    Args:
        output: Folder of everything.
        stages: `name, status (done, skipped, planned), detail, seconds` of each stage.
        models: Rows as in `evaluate`, each with its `role`.
        headline: One sentence.
        written: Files of the report.
        warnings: What the user should know.
        next: What to do next.
        dry_run: Nothing was done.
    """

    command: ClassVar[str] = "run"
    renamed: ClassVar[dict[str, str]] = {"notices": "warnings"}
    table: ClassVar[str] = "models"
    output: str
    stages: list[dict[str, Any]] = field(default_factory=list)
    models: list[dict[str, Any]] = field(default_factory=list)
    headline: str = ""
    written: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    next: list[str] = field(default_factory=list)
    dry_run: bool = False


def run(
    recipe: Recipe | str | Path | Mapping[str, Any],
    *,
    overrides: Sequence[str] = (),
    dry_run: bool = False,
    force: bool = False,
    callbacks: Sequence[TrainerCallback] = (),
) -> RunResult:
    """Do a whole recipe. Doing it again skips what is finished and continues what was interrupted.

    Args:
        recipe: A `Recipe`, its file, or the same as plain data.
        overrides: `section.key=value`, for a file.
        dry_run: Check everything that can be checked without weights, and stop.
        force: Replace checkpoints that another version of the recipe made.
        callbacks: `transformers.TrainerCallback`s of the uptraining.

    Returns:
        Stages, the table original / converted / uptrained, and the files written.

    Raises:
        UsageError, UnsupportedModelError: The recipe is invalid; nothing has been written.
        GateError: A gate of `report` does not hold (after everything has been written).
        CheckpointError, DataError, TrainingError: As the stages raise them.

    Example:
        >>> run("recipes/tiny.yaml", overrides=["uptrain.alpha=0.02"]).headline  # doctest: +SKIP
    """
    recipe = as_recipe(recipe, overrides)
    check_recipe(recipe)
    if dry_run:
        check_limits(recipe, read_config(resolve_model(recipe.source)))
        stages, warnings = rehearse(recipe)
        return RunResult(recipe.output, stages, warnings=warnings, dry_run=True)
    job = Job(recipe, StageRecords(Path(recipe.output) / "stages", force), callbacks=callbacks)
    return job.run()


def as_recipe(recipe: Recipe | str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Recipe:
    """A recipe from whatever form it was given in."""
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, (str, Path)):
        return load_recipe(recipe, overrides)
    if not isinstance(recipe, Mapping):
        raise UsageError(
            f"must be a Recipe, a recipe file or a mapping of its sections, not {quoted(recipe)}",
            where="recipe",
        )
    return recipe_from_dict(recipe)


def check_recipe(recipe: Recipe) -> None:
    """Check what every run needs.

    Raises:
        UsageError: A key is missing.
    """
    needed: dict[str, Any] = {
        "source": recipe.source,
        "output": recipe.output,
        "evaluate.data": recipe.evaluate.data,
    }
    if recipe.sweep is None:
        needed["convert.groups"] = recipe.convert.groups
    if recipe.uptrain is not None:
        needed["uptrain.data"] = recipe.uptrain.data
    for key, value in needed.items():
        if value in ("", None, ()):
            raise UsageError("missing", where=f"recipe: {key}", fix=f"add it, or --set {key}=…")


@dataclass
class Job:
    """One recipe being done.

    Args:
        recipe: The recipe.
        ledger: What is finished.
        folder: Where checkpoints go; the recipe's output by default.
        texts: Where built-in texts are written; inside `folder` by default.
        trained: Name of the uptrained checkpoint.
        callbacks: Of its training.
    """

    recipe: Recipe
    records: StageRecords
    folder: Path = field(default_factory=Path)
    texts: Path = field(default_factory=Path)
    trained: str = "uptrained"
    callbacks: Sequence[TrainerCallback] = ()

    def __post_init__(self) -> None:
        if self.folder == Path():
            self.folder = Path(self.recipe.output)
        if self.texts == Path():
            self.texts = self.folder / "text"
        self.source = resolve_model(self.recipe.source)
        self.original = source_fingerprint(self.source)

    @property
    def converted(self) -> Path:
        """Folder of the converted checkpoint."""
        return self.folder / "converted"

    @property
    def uptrained(self) -> Path:
        """Folder of the uptrained checkpoint."""
        return self.folder / self.trained

    def run(self) -> RunResult:
        """All stages, then the report and the gate."""
        config = load_config_json(self.source)
        check_limits(self.recipe, config)
        check_pairs(self.recipe, self.source, config)
        self.records.expected = 2 if self.recipe.uptrain is None else 4
        with writing_to(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "recipe.yaml").write_text(self.recipe.to_yaml(), encoding="utf-8")
        outcome = Outcome(self.recipe, self.source, convert=self.convert())
        outcome.add(self.evaluate("evaluate", {"original": self.source, "converted": str(self.converted)}))
        if self.recipe.uptrain is not None:
            outcome.uptrain = self.uptrain()
            models = {"original": self.source, "uptrained": str(self.uptrained)}
            outcome.add(self.evaluate("evaluate-uptrained", models))
        report = build_report(outcome, command())
        final = self.converted if self.recipe.uptrain is None else self.uptrained
        with writing_to(self.folder):
            written = write_report(report, self.folder, self.recipe.report.formats, card=final)
        result = RunResult(
            str(self.folder),
            self.records.stages,
            outcome.models,
            headline(report),
            [str(path) for path in written],
            outcome.warnings,
        )
        result.write_json(self.folder / "result.json")
        check_gates(self.recipe, outcome.models)
        return result

    def convert(self) -> dict[str, Any]:
        """The converted checkpoint."""
        options = self.recipe.convert.options()
        options["calibration"] = resolve_data(self.recipe.convert.calibration, self.texts)
        inputs = {
            "source": self.original,
            "convert": self._named(options),
            "text": source_fingerprints(options["calibration"]),
        }
        groups = options.pop("groups")
        if not options["calibration"]:
            del options["calibration"]
        if self.recipe.trust_remote_code:
            options["trust_remote_code"] = True

        def work(replace: bool) -> dict[str, Any]:
            return convert(self.source, self.converted, groups, force=replace, **options).to_dict()

        return self.records.stage("convert", inputs, work, _convert_detail, self.converted)

    def evaluate(self, name: str, models: Mapping[str, str]) -> dict[str, Any]:
        """Figures of some models, by role."""
        options = self.recipe.evaluate.options()
        data = resolve_data(options.pop("data"), self.texts)
        if options.pop("agreement", False):
            options["against"] = next(iter(models.values()))
        options["trust_remote_code"] = self.recipe.trust_remote_code
        inputs = {
            "evaluate": options,
            "text": source_fingerprints(data),
            "models": {r: source_fingerprint(p) for r, p in models.items()},
        }

        def work(replace: bool) -> dict[str, Any]:
            found = evaluate(list(models.values()), data, **options).to_dict()
            for row, role in zip(found["models"], models, strict=True):
                row["role"] = role
            return found

        return self.records.stage(name, inputs, work, _evaluate_detail)

    def uptrain(self) -> dict[str, Any]:
        """The uptrained checkpoint; an interrupted run continues where it was."""
        assert self.recipe.uptrain is not None
        options = self.recipe.uptrain.options()
        further = options.pop("training_args", {})
        data = resolve_data(options.pop("data"), self.texts)
        inputs = {
            "uptrain": self._named(options | further),
            "converted": source_fingerprint(str(self.converted)),
        }
        inputs["text"] = source_fingerprints(data)
        if "eval_data" in options:
            options["eval_data"] = tuple(resolve_data(options["eval_data"], self.texts))
        options |= {"force": self.records.force, "trust_remote_code": self.recipe.trust_remote_code}

        def work(replace: bool) -> dict[str, Any]:
            return uptrain(
                self.converted, self.uptrained, data, callbacks=self.callbacks, **options, **further
            ).to_dict()

        return self.records.stage(
            self.trained.replace("uptrained", "uptrain"),
            inputs,
            work,
            _uptrain_detail,
            self.uptrained,
            everywhere=True,
        )

    def bench(self, name: str, model: str) -> dict[str, Any]:
        """Measured decode speed of a checkpoint, at the report's batch and context as far as the model reaches."""
        batch, context = self.recipe.report.batch, self.recipe.report.context
        context = min(context, longest_context(load_config_json(model)) or context)
        inputs = {"batch": batch, "context": context, "model": source_fingerprint(model)}

        def work(replace: bool) -> dict[str, Any]:
            found = bench(model, batch=batch, context=context).models[0]
            keys = ("tokens_per_second", "milliseconds_per_step")
            return {"decode_context": found["context"]} | {f"decode_{key}": found[key] for key in keys}

        return self.records.stage(
            name, inputs, work, lambda r: f"{r['decode_milliseconds_per_step']:.3g} ms a step"
        )

    @staticmethod
    def _named(options: Mapping[str, Any]) -> dict[str, Any]:
        """Options without the names of texts: those count by content."""
        return {key: value for key, value in options.items() if key not in ("calibration", "device")}


def check_gates(recipe: Recipe, models: Sequence[Mapping[str, Any]]) -> None:
    """The gates of `report` on the last model.

    Raises:
        GateError: One does not hold.
    """
    if limits := gate_limits(recipe):
        require(measure_gates([models[0], models[-1]], **limits))


def command() -> str:
    """What was typed, as far as this process knows."""
    name = Path(sys.argv[0]).name
    return shlex.join(["mha2gqa", *sys.argv[1:]]) if name in ("mha2gqa", "__main__.py") else ""


def _convert_detail(result: Mapping[str, Any]) -> str:
    heads, types = result["num_kv_heads"], result.get("reexpression")
    kinds = f"{becomes(types['source_type'], types['target_type'])}, " if types else ""
    wide = f" {result['wide']} times as wide" if result.get("wide", 1) > 1 else ""
    return f"{kinds}{heads['before']} KV heads -> {heads['after']}{wide}, method {result['method']}"


def _evaluate_detail(result: Mapping[str, Any]) -> str:
    figures = (f"{row['role']} {_loss(row)}" for row in result["models"])
    return f"loss ({result['protocol']}): {', '.join(figures)}"


def _loss(row: Mapping[str, Any]) -> str:
    return f"{fixed(row['bits_per_byte'], 4)} bits/byte" if row["loss"] is None else fixed(row["loss"], 4)


def _uptrain_detail(result: Mapping[str, Any]) -> str:
    budget = result["budget"]
    alpha = f"alpha {budget['alpha']:.4g}" if budget.get("alpha") else "alpha unknown"
    return f"{budget['tokens']:,} tokens in {budget['steps']:,} steps ({alpha})"
