"""Tables and bars of models that others trained, and what their packages lack."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import _real
import tables


def score(loss: float, **more: Any) -> dict[str, Any]:
    return {"loss": loss, "tokens": 100, "kl": 0.1, "top1_agreement": 0.9} | more


def record(*rows: tuple[str, int, int, dict[str, Any]]) -> dict[str, Any]:
    lines = [
        {"name": name, "groups": groups, "run": run, "scores": {"synthetic": found}}
        for name, groups, run, found in rows
    ]
    runs = [{"versions": {"mha2gqa": "0.1.0"}, "code": code} for code in ("aaaaaaaaaaaa", "bbbbbbbbbbbb")]
    about = {"command": "benchmarks/real/suite.py", "model": "m", "heads": 6, "origin": {"from": "PyPI m 1"}}
    return about | {"rows": lines, "runs": runs}


APART = {"difference": 2.0, "low": -1.0, "high": 5.0}


def test_rows_of_two_states_share_no_table() -> None:
    up = score(1.02, wer=12.0, wer_difference=APART)
    mean = score(2.0, wer=90.0, wer_difference=APART | {"difference": 80.0})
    text = _real.real(record(("original", 6, 0, score(1.0)), ("mean", 3, 1, mean), ("up", 3, 1, up)))
    first, second = text.split("#### mha2gqa 0.1.0, code ")[1:]
    assert first.startswith("bbbbbbb") and "| mean | 3 | 2.000 |" in first and "| original |" not in first
    assert "the original's word errors beside these: 10.0 %, its loss: 1.000." in first
    assert second.startswith("aaaaaaa") and "| original | 6 | 1.000 |" in second


@pytest.mark.parametrize(
    ("measure", "limit", "said"),
    [
        ("loss above the original's", {"at_most": 0.05}, ("≤ 0.05", "+0.020", "met")),
        ("word errors above the original's, points", {"at_most": 1}, ("≤ 1", "+2.0", "**missed**")),
        ("word errors above the original's, points, upper 95 % bound", {"at_most": 5}, ("≤ 5", "+5.0", "met")),
        ("same next token, %", {"at_least": 99}, ("≥ 99", "90.00", "**missed**")),
        ("KL to the original", {"at_most": 1e-6}, ("≤ 1e-06", "1e-01", "**missed**")),
        (_real.LAYERS, {}, ("all", "not run", "not run")),
    ],
)  # fmt: skip
def test_a_bar_is_computed_from_its_row(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    measure: str,
    limit: dict[str, float],
    said: tuple[str, ...],
) -> None:
    monkeypatch.setattr(_real, "RESULTS", tmp_path)
    up = score(1.02, wer=12.0, wer_difference=APART)
    made = record(("original", 6, 0, score(1.0)), ("up", 3, 1, up))
    (tmp_path / "real_m.json").write_text(json.dumps(made))
    bar = {"file": "real_m", "row": "up", "groups": 3, "data": "synthetic", "measure": measure} | limit
    assert _real.verdict(bar) == said
    assert _real.verdict(bar | {"row": "another"})[1:] == ("not run", "not run")
    assert _real.verdict(bar | {"file": "none"})[2] == "not run"


@pytest.mark.parametrize(
    ("again", "limit", "said"),
    [
        (0.5, 1, ("≤ 1", "+5.0; loops written again: +0.5", "met another way")),
        (2.5, 1, ("≤ 1", "+5.0; loops written again: +2.5", "**missed**")),
        (0.5, 5, ("≤ 5", "+5.0; loops written again: +0.5", "met")),
    ],
)  # fmt: skip
def test_a_bar_that_only_texts_written_again_meet_is_not_called_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: float, limit: float, said: tuple[str, ...]
) -> None:
    monkeypatch.setattr(_real, "RESULTS", tmp_path)
    made = record(("up", 3, 1, score(1.02, wer=12.0, wer_difference=APART)))
    made["rows"][0]["scores"]["retried"] = score(1.02, wer=9.0, wer_difference=APART | {"high": again})
    (tmp_path / "real_m.json").write_text(json.dumps(made))
    bar = {
        "name": "b",
        "file": "real_m",
        "row": "up",
        "groups": 3,
        "data": "synthetic",
        "another_way": "retried",
    }
    bar |= {"measure": "word errors above the original's, points, upper 95 % bound", "at_most": limit}
    assert _real.verdict(bar) == said
    told = _real.real_bars({"bars": [bar]})
    assert ("1 met another way only" in told) is (said[2] == "met another way")


def test_every_bar_of_the_page_names_a_measure() -> None:
    found = json.loads((_real.RESULTS / "real_bars.json").read_text())["bars"]
    assert all(bar["measure"] in {*_real.MEASURES, _real.LAYERS} for bar in found)
    (text,) = tables.tables(_real.RESULTS / "real_bars.json")
    assert text.count("\n| ") == len(found) + 2


def test_a_recipe_is_told_beside_the_original(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_real, "RESULTS", tmp_path)
    sound = {"wer_difference": APART, "wer_without_loops_difference": APART}
    up = score(1.02, wer=12.0, **sound)
    made = record(("original", 6, 0, score(1.0, wer=10.0)), ("up", 3, 0, up))
    (tmp_path / "real_m.json").write_text(json.dumps(made))
    text = _real.recipe({"file": "real_m", "rows": [{"row": "up", "groups": 3, "says": "uptrained"}]})
    assert "| original | 6 | 10.0 |  |  |" in text
    assert "| uptrained | 3 | 12.0 | -1.0 to +5.0 | +0.020 |" in text


def test_decoding_says_whose_time_was_taken() -> None:
    row = {
        "name": "original",
        "batch": 16,
        "device": "cpu",
        "tokens": 8,
        "dtype": "float32",
        "cache_bytes": 2**20,
    }
    rows = [row | {"tokens_per_second": 2.0}, row | {"name": "m-g3", "tokens_per_second": 3.0}]
    made = {"model": "m", "rows": rows, "runs": [{}]}
    assert "processor" not in _real.decoding(made)
    rows[0]["clock"] = "processor"
    text = _real.decoding(made)
    assert (
        "one thread's processor time" in text
        and "| g3 | 16 | 3 | 1.50x | 1 |\n" in f"{text}\n"
        and "peak" not in text
    )


@pytest.fixture(scope="module")
def whisper() -> ModuleType:
    folder = Path(_real.__file__).parent / "real"
    sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location("real_whisper", folder / "whisper.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("form", ["text", "pairs"])
def test_a_lost_merge_comes_back(whisper: ModuleType, form: str) -> None:
    vocabulary = {"Ġ": 0, "t": 1, "o": 2, "Ġt": 3, "to": 4, "Ġto": 5}
    whole = [["Ġ", "t"], ["t", "o"], ["Ġt", "o"]]
    kept = [" ".join(merge) for merge in whole[1:]] if form == "text" else whole[1:]
    lost = json.dumps({"model": {"vocab": vocabulary, "merges": kept}})
    assert json.loads(whisper.with_lost_merges(lost))["model"]["merges"] == whole
