"""Tables of results that no file holds yet: ledgers, decoding, calibrated conversion."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import _headline
import tables


def _entry(key: str, loss: float, **fields: Any) -> dict[str, Any]:
    row = {"key": key, "loss": loss, "part": "valid", "seed": 0, "model": "m", "window": 32, "blocks": 10}
    row |= {"gpu": "GPU", "code": "abcdef123456", "wall_seconds": 3.0, "unique_tokens": 0, "kl": 0.1}
    row["loss_by_position"] = {"0-16": loss, "16-32": loss / 2}
    return row | fields


def _ledger(tmp_path: Path) -> Path:
    joint = {
        "start": "joint",
        "groups": 4,
        "fit": "fits",
        "unique_tokens": 9,
        "token_visits": 8,
        "flops": 1e9,
    }
    rows = [
        _entry("original/G16/seed0", 3.0, start="original", groups=16),
        _entry("joint/G4/fits/seed0", 9.9, **joint),
        _entry("joint/G4/fits/seed0", 3.1, **joint),  # measured again: the last counts
        _entry("joint/G4/fits/seed1", 3.3, **joint | {"seed": 1}),
        _entry("joint/G4/fits/rate", 1.0, **joint | {"part": "tuning", "tunes": "fit", "rate": 3e-3}),
        _entry("broken", 0.0, error="x"),
        _entry("joint/G4/fits/kd-2.71M/seed0", 3.05, **joint, objective="kd", tokens=2_713_000),
        _entry(
            "mean/G4/as",
            3.4,
            start="mean",
            groups=4,
            fit="merged",
            objective="kd",
            equal_to="joint/G4/fits/seed0",
        ),
        _entry("gen", 3.2, **joint | {"text": "generate"}),
        _entry("scratch/G4", 3.02, start="scratch", groups=4),
        _entry("control", 2.98, start="original", groups=16, objective="ce", tokens=2_713_000),
    ]
    path = tmp_path / "ledger.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_ledger_is_rendered_like_a_quality_file(tmp_path: Path) -> None:
    bytes_, losses, cost, positions, rates = tables.tables(_ledger(tmp_path))
    assert "| joint, GQA-4, fits | fits | 0.003: **1.0000** |" in rates
    assert "| GQA-4, fits | +0.2000 | +0.1000 |" in positions
    assert "| GQA-4 (4:1) | GQA-4 | +0.2000 ± 0.1000 (2 seeds) | +0.0500 |" in bytes_
    assert "`m` (16 KV heads), loss of the original 3.000" in losses
    assert "window 32, 320 tokens" in losses and "Measured on: GPU" in losses
    assert "| joint: refit + regression | 3.200 ± 0.141 |" in losses
    assert "| joint: refit + regression + on generated text | 3.200 |" in losses
    assert "| joint: refit + regression → distillation, 2.71M tokens | 3.050 |" in losses
    assert "| mean → distillation, as many FLOPs as *joint: refit + regression* | 3.400 |" in losses
    assert "| trained from scratch with G heads | 3.020 |" in losses
    assert "continued on the same tokens: 2.71M tokens: 2.980." in losses
    assert "1.000" not in losses and "9.900" not in losses
    assert "| joint: refit + regression | 4 | +0.100 | 9 | 8 | 1.0e+09 | 3 |" in cost


def test_a_ledger_can_be_the_headline(tmp_path: Path) -> None:
    record = tables.read_record(_ledger(tmp_path))
    text = _headline.table(record)
    assert "| 4:1 (G=4) |" in text and "| `joint`, fitted on 0.5M tokens, no uptraining | 3.200 |" in text
    assert "**3.000** as it was. All on text" in text
    assert "KV heads, of 16" in _headline.chart(record)


def test_decoding_is_rendered_beside_what_bytes_predict(tmp_path: Path) -> None:
    point = {"kind": "point", "asked_batch": 4, "context": 2048}
    timed = {**point, "batch": 4, "milliseconds_per_step": 2.5, "tokens_per_second": 1600.0, "head_dim": 64}
    timed |= {"share_of_bandwidth": 0.71, "wide": 1}
    wide = {"groups": 2, "wide": 2, "kv_heads": 1, "head_dim": 128}
    record = {
        "setup": {
            "layers": 2, "hidden": 64, "heads": 8, "dtype": "bfloat16", "device": "GPU", "copy_bandwidth": 2e12,
            "versions": {"torch": "2.11.0"}, "command": "python benchmarks/decode_speed.py",
        },
        "rows": [
            timed | {"kv_heads": 8, "groups": 8},
            timed | {"kv_heads": 2, "groups": 2, "tokens_per_second": 4000.0, "variant_seconds": {"a": 3e-3, "b": 2.5e-3}},
            timed | wide,
            {"kind": "budget", "memory_bytes": 24e9, "context": 4096, "kv_heads": 8, "groups": 8, "wide": 1,
             "head_dim": 64, "reason": "does not fit"},
        ],
        "summary": [
            {**point, "groups": 2, "wide": 1, "speed_up": 2.5, "predicted": 2.6},
            {**point, **wide, "speed_up": 2.4, "predicted": 2.5, "step_over_plain": 1.04},
        ],
    }  # fmt: skip
    path = tmp_path / "decode_speed.json"
    path.write_text(json.dumps(record))
    (text,) = tables.tables(path)
    assert "| KV heads | a | b |" in text and "| 4 | 2,048 | 2 x 64 | 3.00 | **2.50** |" in text
    assert "| 4 | 2,048 | 8 x 64 | 4 | 2.50 | 1,600 | 71% |  |  |  |" in text
    assert "| 4 | 2,048 | 2 x 64 | 4 | 2.50 | 4,000 | 71% | 2.50 | 2.60 |  |" in text
    assert "| 4 | 2,048 | 1 x 128 | 4 | 2.50 | 1,600 | 71% | 2.40 | 2.50 | 1.04 |" in text
    assert (
        "| 24 GB | 4,096 | 8 x 64 |  | does not fit |  |  |  |  |  |" in text and "moves 2,000 GB/s" in text
    )


def test_calibrated_conversion_says_what_is_extrapolated(tmp_path: Path) -> None:
    row = {
        "name": "default", "shape": "7b", "layers": 4, "groups": 8, "gpu": "GPU", "commands": 2, "processes": 1, "calibration_tokens": 524_288,
        "seconds_per_layer": 12.34, "whole_model_minutes": 9.6, "extrapolated": True, "gpu_gib": 20.0,
        "host_anonymous_gib": 7.5, "host_pinned_gib": 12.0, "options": [], "stage_seconds": {"statistics": 8.0, "grouping": 4.0, "fit": 40.0},
    }  # fmt: skip
    two = row | {"name": "two", "processes": 2, "commands": 1, "seconds_per_layer": 6.17}
    two |= {"stage_seconds": {"statistics": 5.0, "grouping": 2.5, "fit": 20.0}}
    record = {
        "command_line": "python benchmarks/calibrate_speed.py",
        "versions": {"mha2gqa": "1", "torch": "2"},
        "rows": [row, two],
    }
    path = tmp_path / "calibrate_speed.json"
    path.write_text(json.dumps(record))
    (text,) = tables.tables(path)
    named = "default: 4 layers of 7b to G=8, in 2 commands | 1 x GPU"
    assert f"| {named} | 524,288 | 12.3 | 10 (extrapolated) | 20.0 | 7.5 | 12.0 |" in text
    assert (
        "`two` beside `default`: a layer 2.00 times as fast on 2 GPUs" in text
        and "second moments and fits 1.92 times, the search of groupings 1.60 times" in text
    )
