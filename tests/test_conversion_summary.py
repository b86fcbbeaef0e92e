"""What a conversion says of itself: cache sizes, warnings from the losses it measured, the card of the folder."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mha2gqa.checkpoints.reader import open_checkpoint
from mha2gqa.conversion.checkpoint import convert, convert_model
from mha2gqa.conversion.plan import plan_conversion
from mha2gqa.conversion.publishing import cache_sizes
from mha2gqa.conversion.warnings import DECODER, PAIRS, T5, data_free_warnings, loss_warnings
from mha2gqa.evaluation import evaluate
from mha2gqa.evaluation.context import context_warnings
from mha2gqa.evaluation.evaluate_result import PositionLoss
from mha2gqa.kv_cache import kv_bytes_per_token
from mha2gqa.report.card_file import card_metadata
from mha2gqa.uptraining import uptrain
from tests.conftest import pico_llama, word_tokenizer
from tests.families import stock_model


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bart", "t5", "whisper"])
def test_cache_sizes_of_a_plan_are_those_of_the_configs(model_type: str, tmp_path: Path) -> None:
    made: Any = pico_llama() if model_type == "llama" else stock_model(model_type)
    made.save_pretrained(tmp_path / "m")
    checkpoint = open_checkpoint(tmp_path / "m")
    plan = plan_conversion(checkpoint.config, checkpoint.shapes, 2, method="mean")
    sizes = cache_sizes(plan)
    assert sizes == {
        "before": kv_bytes_per_token(checkpoint.config),
        "after": kv_bytes_per_token(plan.config),
    }


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ({"original": 2.9, "merged": 3.4, "fitted": 3.1}, []),
        ({"original": 2.9, "merged": 3.4}, []),
        ({"original": 2.9, "merged": 3.4, "fitted": 3.4}, ["fitting did not lower"]),
        ({"original": 2.9, "merged": 3.4, "fitted": math.nan}, ["fitting did not lower"]),
        ({"original": 6.1, "merged": 7.4, "fitted": 7.1}, ["of the kind the model was trained on"]),
    ],
)
def test_losses_that_need_a_word(losses: dict[str, float], said: list[str]) -> None:
    found = loss_warnings(losses, 32000)
    assert len(found) == len(said) and all(part in text for part, text in zip(said, found, strict=True))
    assert not loss_warnings({"original": 6.1}, None)


def curve(*losses: float, tokens: int = 5000) -> list[PositionLoss]:
    return [PositionLoss(2**i // 2 + 1, 2**i, tokens, loss) for i, loss in enumerate(losses)]


def test_a_loss_that_rises_with_the_context_is_named() -> None:
    assert context_warnings("m", curve(6.0, 4.0, 3.5, 3.3, 3.25)) == []
    assert context_warnings("m", curve(6.0, 4.0, 3.5, 3.3, 3.4)) == []  # other text at other places
    (text,) = context_warnings("m", curve(6.0, 4.0, 3.5, 3.3, 4.9))
    assert "3.3000 at 5 to 8 tokens, 4.9000 at 9 to 16" in text and text.endswith("use windows of 8 tokens")
    assert context_warnings("m", [*curve(6.0, 3.3), *curve(9.0, tokens=10)]) == []  # too few to say
    assert context_warnings("m", curve(6.0, math.nan)) == [] == context_warnings("m", [])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "pico"
    pico_llama().save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Pico\n", encoding="utf-8")
    return word_tokenizer(folder)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.jsonl"
    drawn = torch.randint(57, (300, 80), generator=torch.Generator().manual_seed(0)).tolist()
    lines = (json.dumps({"text": " ".join(f"w{i}" for i in row)}) for row in drawn)
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


def test_every_output_has_a_card_and_keeps_the_source_s_own(source: Path, text: Path, tmp_path: Path) -> None:
    calibration: dict[str, Any] = {
        "calibration": str(text),
        "calibration_tokens": 2048,
        "calibration_window": 32,
    }
    result = convert(source, tmp_path / "out", 2, reconstruct=False, **calibration)
    assert result.kv_bytes_per_token == {"before": 512, "after": 128}
    stated = [f"original {result.calibration['losses']['original']:.4f}", "8 KV heads became 2"]
    uptrain(
        tmp_path / "out", tmp_path / "up", str(text), tokens=256, window=32, batch_tokens=128, eval_tokens=64
    )
    trained = json.loads((tmp_path / "up" / "mha2gqa.json").read_text())["uptrain"]["losses"]
    for folder, parts in (
        ("out", stated),
        ("up", [*stated, f"{trained['held_out_end']:.4f}", "uptrained on 256"]),
    ):
        card = (tmp_path / folder / "README.md").read_text(encoding="utf-8")
        assert all(part in card for part in parts), folder
        assert str(tmp_path) not in card and str(source.parent) not in card
        assert card_metadata(tmp_path / folder / "README.md")["license"] == "mit"
        assert (tmp_path / folder / "README.base.md").read_bytes() == (source / "README.md").read_bytes()


def test_text_of_another_kind_is_noticed(source: Path, text: Path, tmp_path: Path) -> None:
    """Random weights know no text: their loss is that of a guess."""
    result = convert(
        source, tmp_path / "out", 2, calibration=str(text), calibration_tokens=2048, calibration_window=32,
        reconstruct=False, refit=True,
    )  # fmt: skip
    assert any("of the kind the model was trained on" in warning for warning in result.warnings)


def test_a_model_trained_on_shorter_sequences_is_noticed(text: Path, tmp_path: Path) -> None:
    """A guess at the first 16 positions; at the others, which are as if never trained, always one token."""
    from transformers import GPT2Config, GPT2LMHeadModel

    ids = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
    model = GPT2LMHeadModel(GPT2Config(n_positions=64, n_embd=32, n_layer=1, n_head=4, **ids))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.zero_() if "ln_f" not in name else None
        direction = torch.linspace(-1, 1, 32)
        model.transformer.wpe.weight[16:] = direction
        model.lm_head.weight[3] = direction
    folder = word_tokenizer(tmp_path / "m")
    model.save_pretrained(folder)
    result = evaluate(folder, str(text), protocol="blocks", window=64)
    assert any(warning.endswith("use windows of 16 tokens") for warning in result.warnings)


@pytest.mark.parametrize(
    ("model_type", "method", "said"),
    [
        (
            "llama",
            "joint",
            "from 3.310 to 4.687 (mean 5.827, joint with data 3.322); give --calibration TEXT",
        ),
        ("llama", "mean", "from 3.310 to 5.827 (joint 4.687, joint with data 3.322)"),
        ("llama", "align", "without calibration data; give --calibration TEXT"),
        ("t5", "joint", "from 3.376 to 3.442 (mean 5.844, joint with data 3.392); give --calibration TEXT"),
        (
            "bart",
            "joint",
            "4M parameters that others trained) from 0.086 to 0.906 (mean 1.044, joint with data 0.086); give --calibration",
        ),
        (
            "bart",
            "mean",
            "from 0.086 to 1.044 (joint 0.906, joint with data 0.086); give --calibration pairs of its task",
        ),
        ("whisper", "joint", "--calibration recordings with their transcripts"),
    ],
)
def test_a_conversion_without_data_says_what_it_is_worth(
    model_type: str, method: str, said: str, tmp_path: Path
) -> None:
    made: Any = pico_llama() if model_type == "llama" else stock_model(model_type)
    made.save_pretrained(tmp_path / "m")
    checkpoint = open_checkpoint(tmp_path / "m")
    plan = plan_conversion(checkpoint.config, checkpoint.shapes, 2, method=method)
    (sentence,) = data_free_warnings(plan)
    assert said in sentence and sentence.endswith(", or uptrain the result before using it")
    same = plan_conversion(checkpoint.config, checkpoint.shapes, plan.num_kv_heads[0], method=method)
    assert not data_free_warnings(same)


@pytest.mark.parametrize(("page", "figures"), [("quality-llama", DECODER), ("quality-t5", T5)])
def test_the_worth_of_a_conversion_without_data_is_what_was_measured(
    page: str, figures: dict[str, float]
) -> None:
    text = Path(__file__).parent.parent.joinpath("docs", "results", f"{page}.md").read_text(encoding="utf-8")
    rows = {"joint": "joint: weights-only", "calibrated": "joint: refit + regression"}
    for name in figures.keys() - {"original"}:
        assert f"\n| {rows.get(name, name)} | {figures[name]:.3f} " in text, name
    assert f"loss of the original {figures['original']:.3f}" in text


@pytest.mark.parametrize(("name", "data", "groups", "figures"), [("annalog", "molecules", 4, PAIRS)])
def test_it_is_what_was_measured_on_models_of_others(
    name: str, data: str, groups: int, figures: dict[str, float]
) -> None:
    path = Path(__file__).parent.parent / "benchmarks" / "results" / f"real_{name}.json"
    rows = json.loads(path.read_text())["rows"]
    named = {"joint": "joint, no data", "calibrated": "joint, calibrated"}
    for method, loss in figures.items():
        found = {  # of every state of the code that measured it
            f"{row['scores'][data]['loss']:.3f}"
            for row in rows
            if row["name"] == named.get(method, method) and (method == "original" or row["groups"] == groups)
        }
        assert found == {f"{loss:.3f}"}


def test_joint_is_the_default_with_and_without_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("mha2gqa"), "propagate", True)  # the command line switches it off
    pico_llama().save_pretrained(tmp_path / "m")
    result = convert(tmp_path / "m", tmp_path / "out", 2)
    assert result.method == "joint" and any("without calibration data" in line for line in result.warnings)
    joint = convert_model(pico_llama(), 2, method="joint").state_dict()
    caplog.clear()
    with caplog.at_level(logging.WARNING, "mha2gqa"):  # which a quiet command raises
        default = convert_model(pico_llama(), 2).state_dict()
    assert "without calibration data" in caplog.text
    assert all(torch.equal(default[name], joint[name]) for name in joint)
