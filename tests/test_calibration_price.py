"""What `plan` says calibration costs, against what was measured."""

from __future__ import annotations

import itertools
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from families import llama_shape

from mha2gqa.commands.calibration_price import calibration_price
from mha2gqa.commands.describe import describe
from mha2gqa.commands.estimate import plan
from mha2gqa.config import ReconstructConfig
from mha2gqa.config.key_values import read_fit
from mha2gqa.conversion.plan import plan_conversion
from mha2gqa.conversion.result_tensors import result_shapes
from mha2gqa.report.terminal import render

MEASURED = Path(__file__).parents[1] / "benchmarks" / "results" / "calibrate_speed.json"
SHAPES = {"7b": (4096, 11008, 32, 32), "72b": (8192, 29568, 64, 80)}
ROWS = json.loads(MEASURED.read_text(encoding="utf-8"))["rows"]


@pytest.mark.parametrize("row", ROWS, ids=[row["name"] for row in ROWS])
def test_the_price_is_what_was_measured_within_half(row: dict[str, Any], tmp_path: Path) -> None:
    model = describe(llama_shape(tmp_path, *SHAPES[row["shape"]][:3], row["layers"]))
    decided = plan_conversion(model.config, model.shapes, row["groups"])
    steps = next((int(o.removeprefix("steps=")) for o in row["options"] if o.startswith("steps=")), None)
    price = calibration_price(
        model.shapes,
        result_shapes(decided, dict(model.shapes)),
        decided,
        gpu_memory=80e9,
        gpus=row["processes"],
        tokens=row["calibration_tokens"],
        fit=None if steps is None else ReconstructConfig(steps=steps),
    )
    stage = price["closed_form" if "--no-reconstruct" in row["options"] else "regression"]
    if (pinned := row.get("host_pinned_gib")) and row["steps"][0]:  # the closed form keeps no layer's outputs
        assert price["host_bytes"] == pinned * row["processes"] * 2**30
    for said, found in (
        (stage["seconds"], row["wall_seconds"]),
        (stage["device_bytes_cached"] / 2**30, row["gpu_gib"]),
    ):
        assert found / 1.5 <= said <= found * 1.5


def test_plan_tells_the_price_and_what_does_not_fit(tmp_path: Path) -> None:
    large = llama_shape(tmp_path, *SHAPES["72b"][:3], 80)
    roomy, tight = plan(large, groups=8), plan(large, groups=8, gpu_memory=12e9)
    assert roomy.calibration["regression"]["fits"] and not any("batch_tokens" in w for w in roomy.warnings)
    assert not tight.calibration["regression"]["fits"]
    assert any("--fit batch_tokens" in w and "12 GB" in w for w in tight.warnings)
    two = plan(large, groups=8, gpus=2).calibration
    assert two["regression"]["seconds"] < roomy.calibration["regression"]["seconds"] / 1.6
    half = plan(large, groups=8, calibration_tokens=262_144).calibration
    assert half["host_bytes"] * 2 == roomy.calibration["host_bytes"]
    assert half["regression"]["seconds"] < roomy.calibration["regression"]["seconds"]


def test_batches_in_blocks_and_distillation_have_their_price(tmp_path: Path) -> None:
    large = llama_shape(tmp_path, *SHAPES["7b"][:3], 32)

    def asked(**fit: Any) -> Any:
        return plan(large, groups=8, fit=fit)

    def price(**fit: Any) -> Any:
        return asked(**fit).calibration["regression"]

    assert price(batch_size=16) == price(batch_tokens=16 * 2048) != price()
    assert price(batch_size=512) == price(batch_tokens=524_288 // 8)  # the text fills a step several times
    long, few = asked(distill_steps=300), asked(distill_steps=150)
    whole = long.calibration["distillation"]
    assert whole["seconds"] == pytest.approx(2 * few.calibration["distillation"]["seconds"], abs=0.1)
    before, after = long.parameters["before"], long.parameters["after"]
    trained = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096)  # q and o, k and v
    assert whole["device_bytes"] == 2 * (before + after) + 16 * trained and whole["fits"]
    assert asked().calibration["distillation"] == {} and asked().calibration["disk_bytes"] > 0
    assert long.calibration["disk_bytes"] == 0 and "begins afresh" in render(long.to_dict())
    assert "to go on after" in render(asked().to_dict()) and "to go on after" not in render(long.to_dict())
    small = plan(large, groups=8, fit={"distill_steps": 300}, gpu_memory=40e9)
    says = (
        f"both models and the optimiser need {whole['device_bytes'] / 1e9:.1f} GB, a device has 40.0 GB free"
    )
    assert any(says in warning for warning in small.warnings)
    unread = plan(large, groups=8, fit={"rest_rate": 0.1}).warnings
    assert "--fit rest_rate has no effect without train=layer" in unread
    assert any("--effort have no effect" in w for w in plan(large, groups=32, effort="quick").warnings)


def test_plan_prices_what_the_fits_are_asked_and_repeats_it(tmp_path: Path) -> None:
    """Whole layers cost about 1.3 times the steps of attention alone; the command to copy is what was priced."""
    folder = tmp_path / "my model"
    folder.mkdir()
    model = llama_shape(folder, *SHAPES["7b"][:3], 32)
    words = (None, "quick", "thorough")
    usual, quick, thorough = (plan(model, groups=8, effort=word).calibration["regression"] for word in words)
    assert quick["seconds"] < 0.5 * usual["seconds"] and thorough["device_bytes"] > usual["device_bytes"]
    assert 1.2 * usual["seconds"] < thorough["seconds"] < 1.5 * usual["seconds"]
    found = plan(model, groups=8, effort="thorough", calibration_tokens=10**6, fit={"batch_tokens": 8192})
    assert found.recommended == (
        f"mha2gqa convert '{model}' 'my model-gqa8' --groups 8 --calibration TEXT.jsonl --calibration-tokens 1000000 "
        "--effort thorough --fit batch_tokens=8192"
    )
    fit = {"betas": (0.8, 0.9), "relative": True, "rest_rate": 0.1, "train": "layer"}
    words = shlex.split(plan(model, groups=8, fit=fit, drop_extra=("a b", "c*")).recommended)
    given = [word for flag, word in itertools.pairwise(words) if flag == "--fit"]
    assert read_fit(given) == ReconstructConfig(**fit)
    assert [word for flag, word in itertools.pairwise(words) if flag == "--drop-extra"] == ["a b", "c*"]


def test_nothing_to_convert_has_no_price(tmp_path: Path) -> None:
    assert plan(llama_shape(tmp_path, *SHAPES["7b"][:3], 2), groups=32).calibration == {}
