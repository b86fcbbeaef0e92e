"""What `plan` says uptraining costs, against what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import pico_llama
from families import llama_shape

from mha2gqa.commands.describe import describe
from mha2gqa.commands.estimate import plan
from mha2gqa.commands.training_price import (
    Sizes,
    Way,
    device_bytes,
    host_bytes,
    sizes_of,
    tokens_per_second,
)
from mha2gqa.conversion.plan import plan_conversion
from mha2gqa.report.training import price_table

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
SHAPES = {"1b": (2048, 5632, 16, 22), "7b": (4096, 11008, 32, 32)}  # as the benchmarks make them
SMALL = [
    row
    for row in json.loads((RESULTS / "uptrain_throughput.json").read_text())["rows"]
    if row["contender"] == "ours" and row["parallel"] != "ddp"
]
LARGE_FILE = RESULTS / "uptrain_large.json"
LARGE = json.loads(LARGE_FILE.read_text())["rows"] if LARGE_FILE.exists() else []


def sizes(folder: Path, shape: str, groups: int, window: int) -> Sizes:
    model = describe(llama_shape(folder, *SHAPES[shape]))
    return sizes_of(model, plan_conversion(model.config, model.shapes, groups), window)


@pytest.mark.parametrize("row", SMALL, ids=lambda row: f"{row['objective']}-{row['gpus']}")
def test_training_of_a_billion_costs_what_was_measured_within_half(
    row: dict[str, Any], tmp_path: Path
) -> None:
    found, teacher = sizes(tmp_path, row["shape"], row["groups"], row["window"]), row["objective"] == "kd"
    assert found.total == row["parameters"]
    way = Way(teacher="bfloat16" if teacher else None)
    need = device_bytes(found, "all", row["gpus"], row["micro_batch"] * row["window"], way)
    speed = tokens_per_second(found, "all", row["gpus"], way)
    for said, measured in ((need / 2**30, row["memory_gib"]), (speed, row["tokens_per_second"])):
        assert measured / 1.5 <= said <= measured * 1.5


@pytest.mark.parametrize("row", LARGE, ids=lambda row: row["name"])
def test_training_of_7b_with_its_teacher_costs_what_was_measured_within_half(
    row: dict[str, Any], tmp_path: Path
) -> None:
    found = sizes(tmp_path, row["shape"], row["groups"], row["window"])
    options = dict(x.partition("=")[::2] for x in row["options"] if "=" in x)
    words = row["options"]
    way = Way(
        options.get("optim", "adamw_torch_fused"),
        "int8" if "int8" in words else "bfloat16",
        "cpu_offload" in options.get("fsdp_config", ""),
    )
    micro = int(options["per_device_train_batch_size"]) * row["window"]
    gpus = row["processes"]
    need = device_bytes(found, row["train"], gpus, micro, way, compiled="--torch-compile" in words)
    speed = tokens_per_second(found, row["train"], gpus, way, micro, row["batch_tokens"])
    pairs = [(need / 2**30, row["gpu_gib"]), (speed, row["tokens_per_second"])]
    host = row.get("host_anonymous_gib")
    if way.offload:  # the state of the student is pinned, which the kernel counts as shared
        host = host + row["host_shared_gib"] if "host_shared_gib" in row else None
    if host is not None:
        pairs.append((host_bytes(found, row["train"], gpus, way) / 2**30, host))
    for said, measured in pairs:
        assert measured / 1.5 <= said <= measured * 1.5


def short_llama(folder: Path) -> Path:
    """A model of fewer positions than `uptrain` takes by default."""
    pico_llama().save_pretrained(folder / "short")
    return folder / "short"


def test_less_is_trained_or_kept_the_less_it_costs(tmp_path: Path) -> None:
    found = plan(llama_shape(tmp_path, *SHAPES["7b"]), groups=8, uptrain_tokens=10**8).memory
    by_name = {
        (name, price["optim"], price["gpus"]): price
        for name, row in found["sets"].items()
        for price in row["prices"]
        if price["teacher_dtype"] == "bfloat16" and not price["offload"]
    }
    one = {name: by_name[(name, "adamw_torch_fused", 1)] for name in found["sets"]}
    assert one["all"]["blocks"] == 0 and one["all"]["hours"] is None
    assert found["window"] == 2048 and plan(short_llama(tmp_path), groups=2).memory["window"] == 128
    assert one["attention"]["blocks"] and one["lora"]["blocks"] >= one["attention"]["blocks"]
    assert one["lora"]["hours"] <= one["attention"]["hours"]
    two = by_name[("attention", "adamw_torch_fused", 2)]
    assert 1.5 < two["tokens_per_second"] / one["attention"]["tokens_per_second"] <= 2
    assert ("lora", "adamw_torch_fused", 2) not in by_name
    eight = by_name[("all", "adamw_torch_8bit", 2)]
    assert eight["blocks"] >= by_name[("all", "adamw_torch_fused", 2)]["blocks"]
    lora = one["lora"]
    assert lora["hours"] == pytest.approx(10**8 / lora["tokens_per_second"] / 3600, rel=0.01)
    rows = price_table(found).rows
    assert not any(row[0] == "all" and row[2] == "1" and row[1] != "offload" for row in rows)
    assert any(row[:3] == ["lora", "", "1"] for row in rows)
    assert any(row[:3] == ["lora", "teacher int8", "1"] for row in rows)
    assert [row[2] for row in rows if row[:2] == ["all", "offload"]] == ["1", "2"]  # 7B whole, on one card
    assert not any(row[0] in ("lora", "qlora") and row[1] == "offload" for row in rows)


def test_student_and_teacher_are_shared_out(tmp_path: Path) -> None:
    found = sizes(tmp_path, "7b", 8, 2048)
    one, two = (device_bytes(found, "all", n, 0) for n in (1, 2))
    # float32 weight, gradient and moments and the bf16 teacher by half, and no copies of whole weights.
    assert one - two == pytest.approx(found.total * (16 / 2 + 2) + found.teacher * 2 / 2)
    without = device_bytes(found, "all", 2, 0, Way(teacher=None))
    assert two - without == found.teacher


def test_a_teacher_in_8_bits_takes_half_of_its_linear_layers(tmp_path: Path) -> None:
    found = sizes(tmp_path, "7b", 8, 2048)
    layers = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)  # embedding and head stay
    assert found.rounded == layers
    wide, narrow = (device_bytes(found, "lora", 1, 0, Way(teacher=t)) for t in ("bfloat16", "int8"))
    assert wide - narrow == layers


def test_offload_trades_the_device_for_the_host_and_time(tmp_path: Path) -> None:
    found, away = sizes(tmp_path, "7b", 8, 2048), Way(offload=True)
    layer = found.trained["attention"] // 32 + 3 * 4096 * 11008 + 2 * 4096
    assert found.unit == layer
    here = device_bytes(found, "all", 2, 0) - device_bytes(found, "all", 2, 0, away)
    assert here == pytest.approx(16 * found.total / 2 - 12 * layer)
    assert host_bytes(found, "all", 2, away) == 16 * found.total
    slow, fast = (tokens_per_second(found, "all", 2, away, 2048 * n) for n in (1, 8))
    assert slow < fast < tokens_per_second(found, "all", 2)


def test_layers_that_are_not_compiled_keep_more(tmp_path: Path) -> None:
    found = sizes(tmp_path, "7b", 8, 2048)
    compiled, plain = (device_bytes(found, "lora", 1, 4096, compiled=c) for c in (True, False))
    assert plain - compiled == pytest.approx(4096 * 32 * (30 * 4096 + 7 * 11008))
