"""The benchmarks of uptraining across GPUs and across parameter sets, pico-sized."""

from __future__ import annotations

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from training import family

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import pages
import tables
import uptrain_adapters
import uptrain_scaling


def test_each_mode_has_its_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(uptrain_scaling.subprocess, "Popen", lambda command, **_: command)
    args = argparse.Namespace(
        steps=4, batch_tokens=64, window=16, model="m", learning_rate=1e-3, device="cpu", train=["t"]
    )

    def settings(mode: str) -> dict[str, str]:
        words: Any = uptrain_scaling.launch(args, tmp_path / "start", tmp_path / "out", mode, 2)
        assert ("--nproc_per_node=2" in words) == bool(mode)
        return dict(words[i + 1].split("=", 1) for i, word in enumerate(words) if word == "--set")

    assert settings("") == {"logging_steps": "1", "save_steps": "2"}
    assert settings("ddp").keys() - settings("").keys() == {"ddp_backend"}
    assert settings("fsdp")["fsdp"] == "true"
    config = Path(settings("zero3")["deepspeed"])
    assert config.is_absolute()
    zero = json.loads(config.read_text())
    # Our optimiser, so that nothing is compiled; sums in float32, as with FSDP2.
    assert "optimizer" not in zero and "offload_optimizer" not in zero["zero_optimization"]
    assert zero["communication_data_type"] == zero["data_types"]["grad_accum_dtype"] == "fp32"


def test_the_last_sharding_mode_is_killed() -> None:
    assert [uptrain_scaling.killed_mode(m) for m in (["ddp", "fsdp"], ["zero3", "ddp"], ["ddp"])] == [
        "fsdp",
        "zero3",
        "ddp",
    ]


def test_zero_rows_are_rendered() -> None:
    runs = {
        "one": {"gpus": 1, "error": "x"},
        "zero3": {"gpus": 2, "loss": 3.40004},
        "resumed": {"gpus": [2, 2], "mode": "zero3", "largest_difference": 0.00123, "loss": 3.4},
    }
    about = {"model": "m", "groups": 4, "steps": 60, "batch_tokens": 65536, "provenance": {"hardware": {}}}
    text = tables.uptrain_scaling(about | {"runs": runs})
    assert "| one process | 1 | failed |" in text and "| DeepSpeed ZeRO-3 | 2 |  | 3.40004 |" in text
    assert "| DeepSpeed ZeRO-3, killed, resumed | 2, then 2 | 1.2e-03 | 3.40000 |" in text


@pytest.mark.slow
def test_a_set_that_fails_keeps_its_words_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, start, text = family(tmp_path)
    monkeypatch.setenv("PYTHONPATH", ":".join([str(Path(__file__).parents[1]), *filter(None, sys.path)]))
    words = f"--model {original} --start {start} --train {text} --valid {text} --device cpu --window 16"
    words += (
        f" --batch-tokens 64 --steps 2 --max-eval-blocks 4 --work {tmp_path}/work --out {tmp_path}/a.json"
    )
    words += " --sets qlora lora --rates lora=2e-3"
    uptrain_adapters.measure_all(uptrain_adapters.parse_args(words.split()))
    record = json.loads((tmp_path / "a.json").read_text())
    assert [row["train"] for row in record["rows"]] == ["qlora", "lora"]
    quantised, lora = record["rows"]
    if find_spec("bitsandbytes") is None:
        assert "needs the package bitsandbytes; pip install bitsandbytes" in quantised["error"]
    assert (lora["learning_rate"], quantised["learning_rate"]) == (2e-3, pytest.approx(5e-4))
    # 2 layers of 32: pooled K and V of 2 heads of 4, and LoRA of rank 16 on q and o
    assert lora["trained_parameters"] == 2 * (2 * 32 * 8 + 2 * 2 * 16 * 32)
    assert lora["merge"]["exact"] < 1e-5 and lora["loss"] != record["losses"]["start"]
    assert record["protocol"]["tokens"] == 4 * 16 and record["provenance"]["versions"]["torch"]
    (tmp_path / "a.json").write_text(json.dumps(record | {"rows": [{**quantised, "error": "x"}, lora]}))
    table = pages.body(tmp_path / "a.json")
    assert f"| `lora` | 2.0e-03 | {lora['loss']:.4f} |" in table
