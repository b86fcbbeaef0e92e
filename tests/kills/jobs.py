"""Commands that are killed: what they start from, what they make, and what is right after them."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

FIT = ["--fit", "steps=2", "--fit", "batch_size=2"]
CALIBRATE = ["--calibration-tokens", "1536", "--calibration-window", "32", "--device", "cpu", *FIT]
TRAIN = ["--tokens", "512", "--window", "16", "--batch-tokens", "64", "--holdout", "0.1", "--device", "cpu"]


@dataclass(frozen=True)
class Job:
    """A command line in a folder of its own.

    Args:
        name: Of the job.
        argv: Its arguments; `{}` is the folder.
        product: The folder whose appearance is the point, below it.
        prepare: Fills the folder before the command.
        more: Whether the command has work left once that is there: a report, say.
    """

    name: str
    argv: tuple[str, ...]
    product: str = "out"
    prepare: Callable[[Path], None] | None = None
    more: bool = False


def make_inputs(folder: Path) -> None:
    """A pico model with a tokenizer, its conversion, and text."""
    from conftest import pico_llama, word_tokenizer
    from training import write_text

    from mha2gqa import convert

    pico_llama().save_pretrained(folder / "model")
    word_tokenizer(folder / "model")
    write_text(folder / "text.jsonl", documents=80)
    convert(folder / "model", folder / "gqa", 2)
    convert(folder / "model", folder / "older", 4)


def jobs(inputs: Path) -> list[Job]:
    """Every command that is tried."""
    model, text = str(inputs / "model"), str(inputs / "text.jsonl")
    convert = ("convert", model, "{}/out", "--groups", "2")
    calibrated = (*convert, "--calibration", text, *CALIBRATE)

    def older(folder: Path) -> None:
        shutil.copytree(inputs / "older", folder / "out")

    def halfway(folder: Path) -> None:
        if (inputs / "halfway").exists():
            shutil.copytree(inputs / "halfway", folder, dirs_exist_ok=True)

    def recipe(folder: Path) -> None:
        train = {"data": text, "tokens": 256, "window": 16, "batch_tokens": 64, "holdout": 0.1}
        data = {
            "source": model,
            "output": str(folder / "out"),
            "convert": {"groups": 2},
            "evaluate": {"data": text, "window": 32, "max_tokens": 500, "device": "cpu"},
            "uptrain": train | {"device": "cpu"},
        }
        (folder / "recipe.yaml").write_text(json.dumps(data))

    return [
        Job("convert", convert),
        Job("convert --force", (*convert, "--force"), prepare=older),
        Job("convert --calibration", calibrated),
        Job("convert resumed", calibrated, prepare=halfway),
        Job("convert generate", (*convert, "--calibration", "generate", *CALIBRATE)),
        Job(
            "uptrain",
            ("uptrain", str(inputs / "gqa"), "{}/out", "--data", text, *TRAIN, "--set", "save_steps=3"),
        ),
        Job("run", ("run", "{}/recipe.yaml"), "out/uptrained", recipe, more=True),
    ]


def digest(folder: Path) -> str | None:
    """What a checkpoint computes: its weights and config; None where there is no such folder.

    Raises:
        FileNotFoundError: It is there, but not whole.
    """
    if not folder.exists():
        return None
    found = hashlib.sha256()
    for name in ("config.json", "model.safetensors", "mha2gqa.json"):
        data = (folder / name).read_bytes()
        if name != "mha2gqa.json":  # which holds times
            found.update(data)
    return found.hexdigest()[:16]


def names(folder: Path) -> list[str]:
    """What lies in the folder of a job."""
    return sorted(path.name for path in folder.iterdir())
