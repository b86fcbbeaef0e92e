"""From the results of stages to a report: roles, curves, provenance, the licence of the source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoints.hf_config import load_config_json, longest_context
from ..config import Recipe
from ..evaluation.evaluate_result import exp
from ..report import Report, display_name, how_to_load, hub_name, number, source_license
from ..report.content import wide_heads
from ..results import versions

ROLES = ("original", "converted", "uptrained")


@dataclass
class Outcome:
    """Results of the stages so far.

    Args:
        recipe: What was asked.
        source: The original, resolved.
        convert, uptrain: Their results as plain data.
        trained: Of a sweep, the results of every uptraining.
        evaluations: Results of `evaluate`, each row with its role.
    """

    recipe: Recipe
    source: str
    _: KW_ONLY
    convert: Mapping[str, Any] = field(default_factory=dict)
    uptrain: Mapping[str, Any] = field(default_factory=dict)
    trained: Sequence[Mapping[str, Any]] = ()
    evaluations: list[Mapping[str, Any]] = field(default_factory=list)

    def add(self, evaluation: Mapping[str, Any]) -> None:
        """Another evaluation on the same text."""
        self.evaluations.append(evaluation)

    @property
    def models(self) -> list[dict[str, Any]]:
        """One row for each role, the newest figures of each, original first; made ones with their method."""
        rows = {row["role"]: dict(row) for found in self.evaluations for row in found["models"]}
        for role in ROLES[1:]:
            if role in rows and (method := self.convert.get("method")):
                rows[role].setdefault("method", method)
        known = [rows[role] for role in ROLES if role in rows]
        known += [row for role, row in rows.items() if role not in ROLES]
        return known + part_rows(self.uptrain, known)

    @property
    def warnings(self) -> list[str]:
        """What the user should know, each line once."""
        results = [self.convert, *self.evaluations, self.uptrain]
        found = (result.get("warnings") or result.get("notices") or () for result in results)
        return list(dict.fromkeys(line for part in found for line in part))


def build_report(outcome: Outcome, command: str = "", frontier: Sequence[Mapping[str, Any]] = ()) -> Report:
    """A report of what the stages gave.

    Args:
        outcome: Their results.
        command: What was typed.
        frontier: Points of a sweep.
    """
    recipe, found = outcome.recipe, outcome.evaluations[0]
    heads, rows = outcome.convert.get("num_kv_heads") or {}, outcome.models
    stated = source_license(outcome.source)
    folder = outcome.convert.get("output")
    return Report(
        title=recipe.report.title or title(recipe, outcome.convert.get("groups") or heads.get("after")),
        source=recipe.source,
        models=rows,
        protocol=found["protocol"],
        settings=found["settings"],
        data=found["data"],
        num_kv_heads=(heads["before"], heads["after"]) if heads else None,
        wide=wide_heads(outcome.convert),
        method=str(outcome.convert.get("method") or ""),
        layers=outcome.convert.get("layers") or (),
        calibration=outcome.convert.get("calibration") or {},
        budget=outcome.uptrain.get("budget") or {},
        training=outcome.uptrain.get("losses") or {},
        curves=curves(outcome.uptrain, rows),
        frontier=frontier,
        batch=recipe.report.batch,
        context=decoding_context(recipe, load_config_json(outcome.source)),
        license=recipe.report.license or stated.get("license"),
        license_details={} if recipe.report.license else {k: v for k, v in stated.items() if k != "license"},
        datasets=hub_datasets(recipe),
        provenance=provenance(outcome),
        warnings=outcome.warnings,
        **(how_to_load(Path(folder)) if folder else {}),
        recipe=recipe.to_yaml(),
        command=command,
    )


def decoding_context(recipe: Recipe, config: Mapping[str, Any]) -> int:
    """Tokens of context that cache sizes are quoted for: the recipe's, as far as the model reaches."""
    return min(recipe.report.context, longest_context(config) or recipe.report.context)


def title(recipe: Recipe, groups: int | None) -> str:
    """`name-gqaG` of a source."""
    name = display_name(recipe.source).removeprefix("builtin:").rsplit("/", 1)[-1] or "model"
    return f"{name}-gqa{groups}" if groups else name


def curves(
    uptrain: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> dict[str, list[tuple[float, float]]]:
    """Losses over uptraining tokens, each of one quantity on one text.

    Args:
        uptrain: Result of the uptraining.
        rows: Of the table.

    Returns:
        `evaluation`: on the evaluation text as `rows`, at least before and after; `training` and `training CE`:
        terms of the objective on training batches; `held-out`: on the validation split of the run, where the
        evaluation text was not scored meanwhile.
    """
    losses, budget = uptrain.get("losses") or {}, uptrain.get("budget") or {}
    per_step = budget.get("batch_tokens") or 1

    def points(entries: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
        values = ((e["step"], number(e.get(key))) for e in entries if "step" in e)
        return [(step * per_step, value) for step, value in values if value is not None]

    measured = points(losses.get("evaluation") or (), "loss")
    return {
        "evaluation": measured
        if measured and is_part(uptrain, rows)
        else _between_rows(measured, budget, rows),
        "training": points(losses.get("train") or (), "loss"),
        "training CE": points(losses.get("train") or (), "ce_loss"),
        "held-out": [] if len(measured) > 1 else points(losses.get("held_out") or (), "eval_loss"),
    }


def _between_rows(
    measured: list[tuple[float, float]], budget: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> list[tuple[float, float]]:
    """The curve whose ends are the rows of the table: what is published is what is shown."""
    losses = {row.get("role"): number(row.get("loss")) for row in rows}
    before, after = losses.get("converted"), losses.get("uptrained")
    if before is None or after is None or not budget.get("tokens"):
        return []
    last = float(budget["tokens"])
    return [(0.0, before), *((x, y) for x, y in measured if 0 < x < last), (last, after)]


def is_part(uptrain: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the run scored only a part of the evaluation text."""
    entries = (uptrain.get("losses") or {}).get("evaluation") or []
    return bool(entries) and not any(row.get("tokens") == entries[-1].get("tokens") for row in rows)


def part_rows(uptrain: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows for the part of the evaluation text that the run scored, at its start and at its end."""
    if not is_part(uptrain, rows):
        return []
    entries = uptrain["losses"]["evaluation"]
    parts = []
    for role, entry in (("converted", entries[0]), ("uptrained", entries[-1])):
        label = f"{role}, {entry['tokens']:,} tokens of it"
        figures = {"loss": entry["loss"], "perplexity": exp(float(entry["loss"])), "tokens": entry["tokens"]}
        parts.append({"role": f"{role} (part)", "label": label, "part": True} | figures)
    return parts


def provenance(outcome: Outcome) -> dict[str, str]:
    """Where everything came from, label -> text."""
    recipe, found = outcome.recipe, outcome.evaluations[0]
    rows: dict[str, Any] = {
        "source": display_name(recipe.source),
        "revision": recipe.convert.revision,
        "method": outcome.convert.get("method"),
        "calibration text": _names(recipe.convert.calibration),
        "evaluation text": f"{_names(recipe.evaluate.data)} (sha256 of its tokens {found['data'].get('sha256')})",
        "evaluated in": f"{found['settings'].get('dtype')} on {found['settings'].get('device')}",
    }
    if recipe.uptrain is not None:
        rows["uptraining text"] = _names(recipe.uptrain.data)
        trained = [outcome.uptrain] if outcome.uptrain else [*outcome.trained]
        teachers = dict.fromkeys(found.get("teacher") for found in trained)
        names = (display_name(str(name)) if name else "none (next-token loss)" for name in teachers)
        rows["teacher"] = ", ".join(names)
        rows["trained"] = ", ".join(dict.fromkeys(str(found.get("train")) for found in trained))
        budget = outcome.uptrain.get("budget") or {}
        rows["unique tokens"] = budget.get("unique_tokens")
        rows["original tokens"] = budget.get("original_tokens")
    rows["versions"] = ", ".join(f"{name} {version}" for name, version in versions().items())
    return {
        label: f"{value:,}" if isinstance(value, int) else str(value)
        for label, value in rows.items()
        if value
    }


def _names(texts: Sequence[str]) -> str:
    return ", ".join(map(display_name, texts))


def hub_datasets(recipe: Recipe) -> list[str]:
    """Hub names among the texts that shaped the weights."""
    names = [*recipe.convert.calibration, *(recipe.uptrain.data if recipe.uptrain else ())]
    bare = (name.split(":", 1)[0] for name in names if not Path(name).exists())
    return list(dict.fromkeys(name for name in bare if hub_name(name)))
