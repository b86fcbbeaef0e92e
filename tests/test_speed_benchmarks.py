"""What the benchmarks of speed compute from what they measure."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import convert_speed
import decode_speed
import tables
import uptrain_large


def size(gigabytes: float, cp: float, convert: float) -> dict[str, Any]:
    return {
        "checkpoint": {"bytes": gigabytes * 1e9},
        "median_seconds": {"cp": cp, "convert": convert},
        "load_average": [0.5, 0.5, 0.5],
        "convert_over_cp": convert / cp,
        "peak_anonymous_mib": {"cp": 0.2, "convert": 460.0},
        "rounds": {"cp": [{}]},
    }


def test_the_slope_of_conversion_is_that_of_a_straight_line() -> None:
    rows = [size(1, 1.0, 6.2), size(4, 3.4, 8.9), size(13.5, 11.0, 17.45)]
    found = convert_speed.lines(rows)
    assert found["cp"] == {"start_seconds": pytest.approx(0.2), "seconds_per_gb": pytest.approx(0.8)}
    assert found["convert"] == {"start_seconds": pytest.approx(5.3), "seconds_per_gb": pytest.approx(0.9)}
    assert found["convert_over_cp"]["per_gb"] == pytest.approx(1.125)
    text = tables.convert_speed({"sizes": rows, "lines": found, "hardware": {}, "versions": {}})
    assert "| 13.5 GB | 11.0 | 17.4 |" in text or "| 13.5 GB | 11.0 | 17.5 |" in text
    assert "takes 5.3 s and 0.90 s for each further 10^9 bytes" in text and "1.12 times as long" in text


def decode_arguments(**changes: Any) -> argparse.Namespace:
    words = {
        "kv_heads": [32, 8, 4],
        "wide": True,
        "points": ["2x64"],
        "budgets": [0.01],
        "budget_context": 64,
    }
    words |= {
        "hidden": 4096,
        "intermediate": 11008,
        "heads": 32,
        "layers": 32,
        "vocab": 32000,
        "dtype": "bfloat16",
    }
    return argparse.Namespace(**(words | changes))


def test_wide_forms_have_the_cache_of_plain_ones() -> None:
    args = decode_arguments()
    assert decode_speed.forms(args) == [(32, 1), (8, 1), (4, 1), (8, 2), (4, 2)]
    configs = {form: decode_speed.config_of(args, form) for form in decode_speed.forms(args)}
    cache = {form: c["num_key_value_heads"] * c["head_dim"] for form, c in configs.items()}
    assert cache == {(32, 1): 4096, (8, 1): 1024, (4, 1): 512, (8, 2): 1024, (4, 2): 512}
    assert (
        configs[(8, 2)]["head_dim"] == 256 and configs[(8, 2)]["rope_parameters"]["rope_type"] == "longrope"
    )
    assert decode_speed.forms(decode_arguments(wide=False)) == [(32, 1), (8, 1), (4, 1)]


def test_the_summary_holds_speed_against_bytes_and_wide_against_plain(tmp_path: Path) -> None:
    args = decode_arguments(kv_heads=[32, 8], budgets=[])
    rows = decode_speed.Rows(tmp_path / "rows.json", {})
    for (groups, wide), speed, step_bytes in (((32, 1), 100, 40), ((8, 1), 250, 10), ((8, 2), 200, 16)):
        row = {"kind": "point", "asked_batch": 2, "context": 64, "batch": 2, "groups": groups, "wide": wide}
        row |= {"kv_heads": groups // wide, "head_dim": 128 * wide, "tokens_per_second": speed}
        rows.data["rows"].append(row | {"step_bytes": step_bytes, "share_of_bandwidth": 0.7})
    plain, wide = decode_speed.summary(args, rows)
    assert (plain["speed_up"], plain["predicted"], plain["of_predicted"]) == (2.5, 4.0, 0.625)
    assert "step_over_plain" not in plain
    assert wide["predicted"] == 2.5 and wide["step_over_plain"] == pytest.approx(1.25)
    assert wide["tokens_over_plain"] == pytest.approx(0.8)
    assert rows.done(groups=8, wide=2) and not rows.done(groups=4)


def test_speeds_are_read_from_what_uptraining_logs(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "step 2/8  loss 0.0345  lr 5.00e-04  800 tokens/s  0:15 left\n"
        "step 4/8  loss 0.0250  lr 3.57e-04  12,672 tokens/s  0:07 left\n1.28k tokens/s\n"
    )
    assert uptrain_large.speeds(log) == [800.0, 12672.0, 1280.0]
    assert uptrain_large.steps(log) == (4, 8)


def test_an_uptraining_is_ended_after_its_last_step(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("uptrain: starting\nstep 2/4  loss 0.0345\n")
    sleeps = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(sleeps, text=True, start_new_session=True) as process:
        uptrain_large.wait(process, log, 0.1, False)  # its time is up
        log.write_text("step 4/4  loss 0.0250\n")
        uptrain_large.wait(process, log, 60, False)
        assert process.poll() is None
        uptrain_large.stop(process)
    assert process.returncode and uptrain_large.steps(tmp_path / "log") == (4, 4)
