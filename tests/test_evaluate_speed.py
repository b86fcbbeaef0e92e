"""The evaluation benchmark compares two loops that score the same tokens."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import evaluate_speed

from mha2gqa.assets import heldout_path, tiny_model_path


def test_both_loops_give_one_loss() -> None:
    args = argparse.Namespace(
        model=str(tiny_model_path()),
        data=str(heldout_path()),
        shape=None,
        device="cpu",
        dtype="float32",
        window=32,
        batch_size=4,
        repeats=1,
        lengthen=2,
        limit_bytes=2000,
    )
    found = evaluate_speed.measure(args)
    assert found["losses"]["evaluate"] == pytest.approx(found["losses"]["bare"], rel=1e-5)
    assert found["threads"]["tokenising"] >= 1
    assert found["memory"][1]["tokens"] == 2 * found["tokens"]
