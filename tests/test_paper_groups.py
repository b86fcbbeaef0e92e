"""Losses of a sweep and times of `bench` meet at the same number of KV heads."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from paper_groups import joined, picture

SWEPT = [
    {"role": "original", "loss": 3.0, "kv_bytes_per_token": 16},
    {"role": "uptrained", "groups": 1, "loss": 5.0, "kv_bytes_per_token": 2},
    {"role": "uptrained", "groups": 4, "loss": 4.0, "kv_bytes_per_token": 8, "decode_milliseconds_per_step": 42.0},
]  # fmt: skip
TIMED = [
    {"kv_bytes": bytes_, "milliseconds_per_step": ms, "tokens_per_second": 1e3 / ms}
    for bytes_, ms in ((800, 9.0), (1600, 20.0), (200, 5.0))
]


def test_each_row_gets_the_time_of_its_own_cache() -> None:
    rows = joined(SWEPT, TIMED)
    assert [row["decode_milliseconds_per_step"] for row in rows] == [20.0, 5.0, 9.0]
    assert [row.get("sweep_milliseconds_per_step") for row in rows] == [None, None, 42.0]
    svg = picture(rows)
    assert svg.startswith("<svg") and "Decoding time over the number of KV heads" in svg
    with pytest.raises(ValueError, match="zip"):
        joined(SWEPT, TIMED[:2])
