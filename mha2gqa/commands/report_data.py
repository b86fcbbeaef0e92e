"""From the results of stages to a report: roles, curves, provenance, the licence of the source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ..checkpoints.hf_config import load_config_json
from ..checkpoints.loading import loading_class
from ..config import Recipe
from ..report import Report, display_name, hub_name
from ..results import versions

ROLES = ("original", "converted", "uptrained")


@dataclass
class Outcome:
    """Results of the stages so far.

    Args:
        recipe: What was asked.
        source: The original, resolved.
        convert, uptrain: Their results as plain data.
        evaluations: Results of `evaluate`, each row with its role.
    """

    recipe: Recipe
    source: str
    convert: Mapping[str, Any] = field(default_factory=dict)
    uptrain: Mapping[str, Any] = field(default_factory=dict)
    evaluations: list[Mapping[str, Any]] = field(default_factory=list)

    def add(self, evaluation: Mapping[str, Any]) -> None:
        """Another evaluation on the same text."""
        self.evaluations.append(evaluation)

    @property
    def models(self) -> list[dict[str, Any]]:
        """One row for each role, the newest figures of each, original first."""
        rows = {row["role"]: dict(row) for found in self.evaluations for row in found["models"]}
        known = [rows[role] for role in ROLES if role in rows]
        return known + [row for role, row in rows.items() if role not in ROLES]

    @property
    def notices(self) -> list[str]:
        """What the stages told the user, each line once."""
        parts = [self.convert.get("warnings"), *(found.get("notices") for found in self.evaluations)]
        parts += [self.uptrain.get("notices")]
        return list(dict.fromkeys(line for part in parts for line in part or ()))


def build_report(outcome: Outcome, command: str = "", frontier: Sequence[Mapping[str, Any]] = ()) -> Report:
    """A report of what the stages gave.

    Args:
        outcome: Their results.
        command: What was typed.
        frontier: Points of a sweep.
    """
    recipe, found = outcome.recipe, outcome.evaluations[0]
    heads = outcome.convert.get("num_kv_heads") or {}
    return Report(
        title=recipe.report.title or title(recipe, heads.get("after")),
        source=recipe.source,
        models=outcome.models,
        protocol=found["protocol"],
        settings=found["settings"],
        data=found["data"],
        num_kv_heads=(heads["before"], heads["after"]) if heads else None,
        method=str(outcome.convert.get("method") or ""),
        layers=outcome.convert.get("layers") or (),
        budget=outcome.uptrain.get("budget") or {},
        curves=curves(outcome.uptrain),
        frontier=frontier,
        batch=recipe.report.batch,
        context=recipe.report.context,
        license=recipe.report.license or source_license(outcome.source),
        datasets=hub_datasets(recipe),
        provenance=provenance(outcome),
        **how_to_load(outcome.convert),
        recipe=recipe.to_yaml(),
        command=command,
    )


def how_to_load(convert: Mapping[str, Any]) -> dict[str, Any]:
    """The words of `Report` that say what loading the result of `convert` takes."""
    folder = convert.get("output")
    if not folder:
        return {}
    config = load_config_json(str(folder))
    return {"auto_class": loading_class(config).__name__, "own_code": "auto_map" in config}


def title(recipe: Recipe, groups: int | None) -> str:
    """`name-gqaG` of a source."""
    name = display_name(recipe.source).removeprefix("builtin:").rsplit("/", 1)[-1] or "model"
    return f"{name}-gqa{groups}" if groups else name


def curves(uptrain: Mapping[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Training and held-out loss over tokens, from the log of `uptrain`."""
    losses, budget = uptrain.get("losses") or {}, uptrain.get("budget") or {}
    per_step = budget.get("batch_tokens") or 1

    def points(entries: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
        return [
            (e["step"] * per_step, e[key]) for e in entries if isinstance(e.get(key), float) and "step" in e
        ]

    return {
        "training": points(losses.get("train") or (), "loss"),
        "held-out": points(losses.get("held_out") or (), "eval_loss"),
    }


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
        teacher = outcome.uptrain.get("teacher")
        rows["teacher"] = display_name(str(teacher)) if teacher else "none (next-token loss)"
        rows["trained"] = outcome.uptrain.get("train")
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


def source_license(source: str) -> str | None:
    """The licence that the source's own model card states, or None."""
    readme = Path(source) / "README.md"
    if not readme.is_file():
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(source, "README.md") if hub_name(source) else None
        if not isinstance(found, str):
            return None
        readme = Path(found)
    text = readme.read_text(encoding="utf-8", errors="replace")
    if not text.startswith("---"):
        return None
    try:
        front = yaml.safe_load(text.split("---", 2)[1])
    except yaml.YAMLError:
        return None
    value = front.get("license") if isinstance(front, dict) else None
    return value if isinstance(value, str) else None
