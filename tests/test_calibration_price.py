"""What `plan` says calibration costs, against what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mha2gqa.commands.calibration_price import calibration_price
from mha2gqa.commands.describe import describe
from mha2gqa.commands.estimate import plan
from mha2gqa.config import ReconstructConfig
from mha2gqa.conversion.plan import plan_conversion
from mha2gqa.conversion.result_tensors import result_shapes

MEASURED = Path(__file__).parents[1] / "benchmarks" / "results" / "calibrate_speed.json"
SHAPES = {"7b": (4096, 11008, 32, 32), "72b": (8192, 29568, 64, 80)}
ROWS = json.loads(MEASURED.read_text(encoding="utf-8"))["rows"]


def config_of(folder: Path, shape: str, layers: int) -> Path:
    """The config of a Llama as the benchmark makes it, without weights."""
    hidden, feed, heads, _ = SHAPES[shape]
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": hidden,
        "intermediate_size": feed, "num_attention_heads": heads, "num_key_value_heads": heads,
        "num_hidden_layers": layers, "vocab_size": 32000, "dtype": "bfloat16", "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("row", ROWS, ids=[row["name"] for row in ROWS])
def test_the_price_is_what_was_measured_within_half(row: dict[str, Any], tmp_path: Path) -> None:
    model = describe(config_of(tmp_path, row["shape"], row["layers"]))
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
    for said, found in (
        (stage["seconds"], row["wall_seconds"]),
        (stage["device_bytes_cached"] / 2**30, row["gpu_gib"]),
    ):
        assert found / 1.5 <= said <= found * 1.5


def test_plan_tells_the_price_and_what_does_not_fit(tmp_path: Path) -> None:
    large = config_of(tmp_path, "72b", 80)
    roomy, tight = plan(large, groups=8), plan(large, groups=8, gpu_memory=12e9)
    assert roomy.calibration["regression"]["fits"] and not any("batch_tokens" in w for w in roomy.warnings)
    assert not tight.calibration["regression"]["fits"]
    assert any("--fit batch_tokens" in w and "12 GB" in w for w in tight.warnings)
    two = plan(large, groups=8, gpus=2).calibration
    assert two["regression"]["seconds"] < roomy.calibration["regression"]["seconds"] / 1.6
    half = plan(large, groups=8, calibration_tokens=262_144).calibration
    assert half["host_bytes"] * 2 == roomy.calibration["host_bytes"]
    assert half["regression"]["seconds"] < roomy.calibration["regression"]["seconds"]


def test_nothing_to_convert_has_no_price(tmp_path: Path) -> None:
    assert plan(config_of(tmp_path, "7b", 2), groups=32).calibration == {}
