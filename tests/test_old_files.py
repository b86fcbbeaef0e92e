"""Files that commit 1386471 wrote (manifest, statistics, the folder of an unfinished run) are still read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import mha2gqa
from mha2gqa.calibration import load_statistics

FIXTURES = Path(__file__).parent / "fixtures" / "1386471"


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the fixtures as the current folder: that run was started with relative names."""
    shutil.copytree(FIXTURES, tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")
    return tmp_path / "old"


def test_old_manifest_is_verified(old: Path) -> None:
    found = mha2gqa.verify("converted", against="pico")
    assert found.ok and [check.name for check in found.checks if not check.ok] == ["as written"]
    assert "records no digests" in next(c.detail for c in found.checks if c.ok is None)


def test_old_statistics_give_the_grouping_they_gave(old: Path) -> None:
    statistics = load_statistics("moments.safetensors")
    assert statistics.about["tokens"] == 1920  # two of the 64 blocks were held out
    mha2gqa.convert("pico", "again", 2, statistics="moments.safetensors", device="cpu")
    manifests = [json.loads(Path(name, "mha2gqa.json").read_text()) for name in ("converted", "again")]
    assert manifests[0]["grouping"] == manifests[1]["grouping"]


def test_old_run_is_resumed(old: Path) -> None:
    result = mha2gqa.uptrain(
        "converted",
        "trained",
        "text.jsonl",
        tokens=8 * 256,
        window=32,
        batch_tokens=256,
        teacher="pico",
        holdout=0.0,
        save_steps=4,
        save_total_limit=5,
        device="cpu",
        logging_steps=1,
    )
    assert result.resumed_from == 4
    before = json.loads((old / "trained.json").read_text())["uptrain"]["losses"]["train"]
    after = result.losses["train"]
    assert [entry["step"] for entry in after] == [entry["step"] for entry in before]
    assert [entry["loss"] for entry in after] == pytest.approx([e["loss"] for e in before], rel=1e-4)
