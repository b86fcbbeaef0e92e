"""Probes of what loss hides: what they ask, who answers, when they count."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import _probes
import quality_probes
from _quality_cells import Cell
from _quality_schedule import Scratch

from mha2gqa.assets import tiny_model_path
from mha2gqa.checkpoints.loading import load_tokenizer

VOCABULARY = 2048


@pytest.fixture(scope="module")
def source() -> _probes.Source:
    text = np.random.default_rng(0).integers(5, VOCABULARY, 20_000)
    return _probes.Source.of(load_tokenizer(tiny_model_path()), text)


class Finder(nn.Module):
    """Predicts what followed the last earlier place where the last `width` tokens stood, as a perfect head would."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.unused = width, nn.Parameter(torch.zeros(1))

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Any:
        logits = torch.zeros(*input_ids.shape, VOCABULARY)
        for row, ids in enumerate(input_ids.tolist()):
            seen: dict[tuple[int, ...], int] = {}
            for i in range(self.width - 1, len(ids)):
                before = tuple(ids[i + 1 - self.width : i + 1])
                if before in seen:
                    logits[row, i, ids[seen[before] + 1]] = 1.0
                seen[before] = i
        return type("Output", (), {"logits": logits})


@pytest.mark.parametrize("name", _probes.PROBES)
@pytest.mark.parametrize("length", [128, 200])
def test_a_head_that_finds_the_earlier_place_answers_everything(
    source: _probes.Source, name: str, length: int
) -> None:
    asked = _probes.PROBES[name](source, length, 6, 0)
    assert asked.ids.shape[0] == 6 and length - 4 <= asked.ids.shape[1] <= length
    assert asked.choices.shape[-1] == _probes.CHOICES
    assert all(len(set(row)) == _probes.CHOICES for row in asked.choices.flatten(0, 1).tolist())
    width = 1 if name == "key-value recall" else 4
    shares = _probes.answered(Finder(width), asked, batch_tokens=300)
    assert shares.shape == (6,) and float(shares.mean()) == 1.0
    again = _probes.PROBES[name](source, length, 6, 0)
    assert torch.equal(again.ids, asked.ids) and torch.equal(again.choices, asked.choices)


class Blind(nn.Module):
    """Guesses by a fixed preference among tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.liked = nn.Parameter(torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1)))

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Any:
        return type("Output", (), {"logits": self.liked.expand(*input_ids.shape, -1)})


@pytest.mark.parametrize("name", _probes.PROBES)
def test_a_model_that_reads_nothing_answers_by_chance_and_does_not_count(
    source: _probes.Source, name: str
) -> None:
    shares = _probes.answered(Blind(), _probes.PROBES[name](source, 128, 300, 0))
    assert abs(float(shares.mean()) - 1 / _probes.CHOICES) < 0.06
    assert not _probes.counts(shares)


def test_a_probe_counts_from_three_standard_errors_above_chance() -> None:
    chance, texts = 1 / _probes.CHOICES, 400
    least = chance + 3 * (chance * (1 - chance) / texts) ** 0.5
    for share, counted in ((least + 1e-6, True), (least - 1e-6, False)):
        assert _probes.counts(np.full(texts, share)) is counted
    noisy = np.concatenate([np.ones(60), np.zeros(340)])  # 15 % right, of single questions
    assert _probes.standard_error(noisy) == pytest.approx((0.15 * 0.85 / 399) ** 0.5)
    assert _probes.counts(noisy)


def test_results_answer_the_same_questions_as_the_original(tmp_path: Path) -> None:
    valid, out = tmp_path / "v.jsonl", tmp_path / "p.json"
    valid.write_text("".join(json.dumps({"text": f"some words of text {i}"}) + "\n" for i in range(300)))
    tiny = str(tiny_model_path())
    words = ["--model", tiny, "--valid", str(valid), "--results", f"same={tiny}", "--out", str(out)]
    words += ["--lengths", "64", "96", "--count", "4", "--device", "cpu", "--all"]
    quality_probes.main(quality_probes.parse_args(words))
    record = json.loads(out.read_text())
    assert [(row["probe"], row["length"]) for row in record["rows"]] == [
        (name, length) for name in _probes.PROBES for length in (64, 96)
    ]
    assert all(row["results"]["same"]["lost"] == 0.0 for row in record["rows"])
    assert all(row["results"].keys() == {"same"} for row in record["rows"])
    assert record["provenance"]["versions"]["torch"] and record["choices"] == 16
    more = ["--results", f"other={tiny}", "--resume", str(out), "--out", str(tmp_path / "q.json")]
    quality_probes.main(quality_probes.parse_args([*words, *more]))
    both = json.loads((tmp_path / "q.json").read_text())
    assert all(row["results"]["same"] == row["results"]["other"] for row in both["rows"])
    with pytest.raises(SystemExit, match="other questions"):
        quality_probes.main(quality_probes.parse_args([*words, *more, "--seed", "1"]))


def test_rows_of_a_ledger_are_found_in_its_work_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [Cell("joint", 4, "fits"), Cell("joint", 4, "fits", objective="kd", tokens=2_713_000)]
    rows += [replace(rows[1], groups=2)]
    rates, scratch = {"fit": 3e-3, "kd": 5e-4}, Scratch(tmp_path)
    ledger = tmp_path / "ledger.jsonl"
    ledger.write_text("".join(json.dumps(row.to_dict() | {"rates": rates}) + "\n" for row in rows))
    for row in rows[:2]:
        scratch.result(row, rates).mkdir(parents=True)
    words = [
        "--model",
        str(tiny_model_path()),
        "--valid",
        "v",
        "--ledger",
        str(ledger),
        "--work",
        str(tmp_path),
    ]
    words += ["--lengths", "64", "--rows", *(row.key for row in rows)]
    found = quality_probes.checkpoints(quality_probes.parse_args(words))
    assert list(found) == ["GQA-4, fits", "GQA-4, distilled 2.71M tokens"]
    assert found["GQA-4, fits"] == str(tmp_path / "converted" / "joint-G4-fits-calibration-0-fit0.003")
    assert f"{rows[2].key}: no checkpoint" in capsys.readouterr().err


def test_a_probe_longer_than_the_models_positions_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        quality_probes.parse_args(
            ["--model", str(tiny_model_path()), "--valid", "v.jsonl", "--lengths", "64", "2048"]
        )
    assert "2048: longer than the model's 1024 positions" in capsys.readouterr().err
