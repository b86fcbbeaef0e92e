"""Calibration that cannot be done, or not as asked: one line that names the option or the tensor."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import pico_llama, word_tokenizer
from families import stock_model
from test_calibrated_fits import FEW, write_text

from mha2gqa.commands.bench import bench
from mha2gqa.conversion import through_model
from mha2gqa.conversion.checkpoint import convert
from mha2gqa.conversion.warnings import merging_notes
from mha2gqa.errors import CheckpointError, UnsupportedModelError, UsageError
from mha2gqa.report.terminal import render

MERGED_ONLY = {"refit": False, "reconstruct": False}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    pico_llama().save_pretrained(tmp_path / "source")
    return word_tokenizer(tmp_path / "source")


@pytest.fixture
def text(tmp_path: Path) -> str:
    return str(write_text(tmp_path / "text.jsonl"))


def options(text: str, **changes: Any) -> dict[str, Any]:
    return {"calibration": [text], "calibration_window": 16, "fit": FEW, "device": "cpu"} | changes


def broken(source: Path, module: str, value: float) -> Path:
    """The same model with one bad weight in layer 1."""
    model = pico_llama()
    with torch.no_grad():
        getattr(model.model.layers[1].self_attn, module).weight[3, 3] = value
    model.save_pretrained(source)
    return source


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ({"calibration_tokens": 0}, "calibration_tokens: must be >= 1, not 0"),
        ({"calibration_window": 0}, "calibration_window: must be >= 2, not 0"),
        ({"calibration_window": 1}, "calibration_window: must be >= 2, not 1"),
    ],
)
def test_no_tokens_at_all_are_refused(
    words: dict[str, int], option: str, source: Path, text: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=option):
        convert(source, tmp_path / "out", 2, **options(text, **words))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", [{"batch": 0}, {"context": 0}, {"new_tokens": 0}])
def test_nothing_to_time_is_refused(words: dict[str, int], source: Path) -> None:
    with pytest.raises(UsageError, match=rf"^{next(iter(words))}: must be >= 1"):
        bench(source, **words)


@pytest.mark.parametrize("method", ["joint", "align"])
@pytest.mark.parametrize(("module", "value"), [("q_proj", float("nan")), ("v_proj", float("inf"))])
def test_weights_that_are_not_finite_are_named(
    module: str, value: float, method: str, source: Path, text: str, tmp_path: Path
) -> None:
    name = rf"model\.layers\.1\.self_attn\.{module}\.weight: holds NaN or infinity"
    broken(source, module, value)
    for grouping in ("search", "neighbours"):
        with pytest.raises(CheckpointError, match=name):
            convert(source, tmp_path / "out", 2, method=method, grouping=grouping, device="cpu")
    if value == float("inf"):  # the last layer's values are in no module's input
        with pytest.raises(CheckpointError, match=name):
            convert(source, tmp_path / "out", 2, **options(text, method=method))
    assert not (tmp_path / "out").exists()


def test_where_statistics_cannot_be_written_is_seen_before_the_model_runs(
    source: Path, text: str, tmp_path: Path
) -> None:
    stages: list[str] = []
    (tmp_path / "file").write_text("")
    words = options(text, statistics=tmp_path / "file" / "st", stage=lambda *x: stages.append(x[0]))
    with pytest.raises(UsageError, match=r"^statistics .*st: cannot be written"):
        convert(source, tmp_path / "out", 2, **words)
    assert not stages and not (tmp_path / "out").exists()


def test_what_is_asked_and_cannot_be_had_is_told(source: Path, text: str, tmp_path: Path) -> None:
    def said(name: str, **changes: Any) -> list[str]:
        return convert(source, tmp_path / name, 2, **options(text, **changes)).warnings

    few, many = replace(FEW, batch_size=2), replace(FEW, batch_size=500)
    usual = said("usual", fit=few)
    longer = said("longer", fit=few, calibration_window=1000)
    assert any("1,000: the model was built for 128 tokens, and so long are the blocks" in w for w in longer)
    found = said("more", fit=many, calibration_tokens=10**7)
    assert any("10,000,000: the text has " in w and "all of which are used" in w for w in found)
    assert any(
        re.search(r"there are \d+ blocks of 16 tokens: steps of \d+ are made, not of 500", w) for w in found
    )
    off = said("off", reconstruct=False, fit={"steps": 3, "patience": 2, "distill_steps": 4})
    assert any("steps, patience, distill_steps have no effect without the regression" in w for w in off)
    assert any("steps has no effect" in w for w in said("quick", reconstruct=False, effort="quick", fit=None))
    assert any(
        "ridge has no effect without the refit" in w
        for w in said("no", refit=False, fit={"ridge": 0.1, "steps": 2})
    )
    without = convert(source, tmp_path / "plain", 2, calibration_tokens=5, text_column="body").warnings
    assert any(w.startswith("no text is read: ") and "calibration" in w and "column" in w for w in without)
    for warnings in (usual, off):
        assert not any("all of which" in w or "so long are" in w or "no text" in w for w in warnings)


def test_statistics_of_other_text_are_used_and_said(source: Path, text: str, tmp_path: Path) -> None:
    file, other = tmp_path / "st", str(write_text(tmp_path / "other.jsonl", seed=1))
    first = convert(source, tmp_path / "a", 2, **options(text, statistics=file, **MERGED_ONLY))
    same = convert(source, tmp_path / "b", 2, **options(text, statistics=file, reconstruct=False))
    assert not any("moments" in warning for warning in [*first.warnings, *same.warnings])
    moved = convert(source, tmp_path / "c", 2, **options(other, statistics=file, reconstruct=False))
    assert any("other text than --calibration" in warning for warning in moved.warnings)
    shorter = options(text, statistics=file, reconstruct=False, calibration_window=8)
    cut = convert(source, tmp_path / "cut", 2, **shorter)
    assert any("or on blocks of another length, and are used" in warning for warning in cut.warnings)
    unread = convert(source, tmp_path / "d", 2, **options(other, statistics=file, **MERGED_ONLY))
    assert any("calibration text is not read" in warning for warning in unread.warnings)
    assert [x["residual"] for x in unread.layers] == [x["residual"] for x in first.layers]
    pooled = convert(source, tmp_path / "e", 2, method="mean", statistics=file)
    assert any("uses no statistics" in w for w in pooled.warnings) and "statistics" not in pooled.calibration


def test_people_read_the_losses_before_and_after(source: Path, text: str, tmp_path: Path) -> None:
    result = convert(source, tmp_path / "out", 2, **options(text))
    losses = result.calibration["losses"]
    line = (
        f"Loss on held-out calibration text: original {losses['original']:.4f}, "
        f"merged {losses['merged']:.4f}, fitted {losses['fitted']:.4f}"
    )
    assert line in render(result.to_dict()).splitlines()


def test_what_merging_could_not_use_is_told_once() -> None:
    unknown = "keys: position style unknown, plain mean"
    converters = [SimpleNamespace(report={"notes": notes}) for notes in ([unknown], [], [unknown])]
    assert merging_notes(converters) == [f"{unknown} (2 of 3 modules)"]  # type: ignore[arg-type]


def test_plan_refuses_encoders_in_the_words_of_convert(tmp_path: Path) -> None:
    from transformers import T5Config, T5EncoderModel

    from mha2gqa.commands.estimate import plan

    small = T5Config(vocab_size=64, d_model=32, d_kv=4, d_ff=48, num_layers=2, num_heads=8)
    T5EncoderModel(small).save_pretrained(tmp_path / "t5")
    for call in (lambda: plan(tmp_path / "t5"), lambda: convert(tmp_path / "t5", tmp_path / "out", 2)):
        with pytest.raises(UnsupportedModelError, match="T5EncoderModel is an encoder alone"):
            call()


def test_encoder_decoders_are_not_timed(tmp_path: Path) -> None:
    for name in ("t5", "whisper"):
        stock_model(name).save_pretrained(tmp_path / name)
        with pytest.raises(UnsupportedModelError, match=f"{name} is an encoder-decoder"):
            bench(tmp_path / name)


def test_settings_of_fits_that_are_not_made_are_said(tmp_path: Path) -> None:
    said = "--fit and --effort have no effect"
    pico_llama().save_pretrained(tmp_path / "mha")
    for name, fit in (("with", {"steps": 7}), ("without", None)):
        result = convert(tmp_path / "mha", tmp_path / name, 2, fit=fit)
        assert any(said in warning for warning in result.warnings) == (fit is not None)


def test_distillation_of_a_model_that_does_not_fit_is_refused_before_the_walk(
    source: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit = replace(FEW, distill_steps=2)
    with monkeypatch.context() as patch:
        patch.setattr(through_model, "free_memory", lambda device: 10_000)
        says = (
            r"fit distill_steps: trains all layers together: .* need 0\.0 GB, cpu has 0\.0 GB free; .*uptrain"
        )
        with pytest.raises(UsageError, match=says):
            convert(source, tmp_path / "out", 2, **options(text, fit=fit))
        convert(source, tmp_path / "merged", 2, **options(text))
    assert not (tmp_path / "out").exists()
    convert(source, tmp_path / "out", 2, **options(text, fit=fit))
