"""`demo`: the whole job on the embedded tiny model, mean and joint side by side, offline."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from ..config import Recipe, recipe_from_dict
from ..report import headline, write_report
from ..results import Result
from .builtin import resolve_model
from .report_data import Outcome, build_report
from .run_recipe import Job, command
from .stages import StageRecords

ORIGINAL_TOKENS = 81_920_000  # of the embedded model, as its train.json says
ALPHA = 0.003


@dataclass
class DemoResult(Result):
    """What the demo showed.

    Args:
        output: Folder of everything.
        stages: As in `run`.
        models: Rows: the original, the two conversions, the uptrained one.
        headline: One sentence.
        written: Files of the report.
        next: What to type for a model of one's own.
    """

    command: ClassVar[str] = "demo"
    table: ClassVar[str] = "models"
    output: str
    stages: list[dict[str, Any]] = field(default_factory=list)
    models: list[dict[str, Any]] = field(default_factory=list)
    headline: str = ""
    written: list[str] = field(default_factory=list)
    next: list[str] = field(default_factory=list)


def demo(out: str | Path = "mha2gqa-demo", *, groups: int = 4, force: bool = False) -> DemoResult:
    """Convert the embedded tiny model by the paper's method and by ours, evaluate, uptrain, evaluate.

    Args:
        out: Folder for checkpoints and report. A finished demo in it is only shown again.
        groups: KV heads of the result (the model has 8).
        force: Do everything again.

    Returns:
        The table, and what to type next.

    Raises:
        UsageError: Impossible `groups`.
        DataError: This Python carries no standard-library sources.
    """
    out = Path(out)
    source = resolve_model("builtin:tiny")
    mean, joint = (_job(out, groups, method, force) for method in ("mean", "joint"))
    mean.convert()
    converted = joint.convert()
    models = {"original": source, "mean": str(mean.converted), "converted": str(joint.converted)}
    first = joint.evaluate("evaluate", models)
    uptrained = joint.uptrain()
    second = joint.evaluate("evaluate-uptrained", {"original": source, "uptrained": str(joint.uptrained)})
    outcome = Outcome(joint.recipe, source, convert=converted, uptrain=uptrained, evaluations=[first, second])
    labels = {
        "original": "original (8 KV heads)",
        "mean": f"GQA-{groups}, mean (the paper's)",
        "converted": f"GQA-{groups}, joint (calibrated)",
        "uptrained": f"… uptrained, alpha {ALPHA:g}",
    }
    found = {row["role"]: row for row in outcome.models}
    rows = [found[role] | {"label": label} for role, label in labels.items()]
    report = replace(build_report(outcome, command()), models=rows, title="mha2gqa demo")
    written = write_report(report, out, ("json", "markdown", "html"))
    stages = [*mean.records.stages, *joint.records.stages]
    return DemoResult(str(out), stages, rows, headline(report), [str(path) for path in written], next_steps())


def _job(out: Path, groups: int, method: str, force: bool) -> Job:
    folder = out / f"g{groups}-{method}"
    return Job(
        demo_recipe(folder, groups, method),
        StageRecords(folder / "stages", force),
        folder,
        texts=out / "text",
    )


def demo_recipe(folder: Path, groups: int, method: str) -> Recipe:
    """The recipe behind the demo: text that every Python carries, and the embedded held-out text."""
    calibration: dict[str, Any] = {}
    if method == "joint":  # small amounts: seconds on two cores
        calibration = {
            "calibration": "builtin:stdlib",
            "calibration_tokens": 65536,
            "calibration_window": 256,
        }
        calibration["fit"] = {"steps": 120, "batch_size": 8, "check_every": 40}
    return recipe_from_dict(
        {
            "source": "builtin:tiny",
            "output": str(folder),
            "convert": {"groups": groups, "method": method} | calibration,
            "evaluate": {"data": "builtin:heldout", "protocol": "blocks", "window": 512},
            "uptrain": {
                "data": "builtin:stdlib",
                "eval_data": "builtin:heldout",
                "eval_tokens": 8192,
                "eval_steps": 10,
                "alpha": ALPHA,
                "original_tokens": ORIGINAL_TOKENS,
                "window": 512,
                "batch_tokens": 8192,
                "learning_rate": 1e-3,
            },
            "report": {"batch": 8, "context": 1024},
        }
    )


def next_steps() -> list[str]:
    """What to type for a model of one's own."""
    return [
        "For a model of your own (a folder or a hub id) and text of the kind it was trained on:\n"
        "  mha2gqa plan MODEL                                   what it would give and need\n"
        "  mha2gqa convert MODEL OUT --groups 8 --calibration TEXT.jsonl\n"
        "  mha2gqa evaluate MODEL OUT --data HELDOUT.jsonl\n"
        "  mha2gqa uptrain OUT OUT-uptrained --data TEXT.jsonl --tokens 100M\n"
        "or all of it from one file: mha2gqa run recipes/llama-2-7b-gqa8.yaml --dry-run"
    ]
