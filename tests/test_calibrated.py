"""Calibrated conversion from folder to folder, on a pico model with a word tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import pico_llama, word_tokenizer
from pico_models import model_class as pico_class
from pico_models import pico_config
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mha2gqa import convert_model
from mha2gqa import plan as plan_conversion
from mha2gqa.checkpoints.loading import load_model, load_tokenizer
from mha2gqa.conversion.checkpoint import convert
from mha2gqa.data import read_documents, token_blocks
from mha2gqa.errors import DataError, UnsupportedModelError, UsageError
from mha2gqa.reconstruct import ReconstructConfig
from mha2gqa.verification.checks import verify

QUICK = {"calibration_window": 16, "fit": ReconstructConfig(steps=20, batch_size=4, unit="attention")}


@pytest.fixture
def text(tmp_path: Path) -> str:
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(0, 57, (40, 60), generator=generator)
    path = tmp_path / "text.jsonl"
    path.write_text(
        "".join(json.dumps({"text": " ".join(f"w{i}" for i in row)}) + "\n" for row in rows.tolist())
    )
    return str(path)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    pico_llama(attention_bias=True).save_pretrained(tmp_path / "mha")
    return word_tokenizer(tmp_path / "mha")


def test_stages_follow_the_options_and_lower_the_loss(source: Path, text: str, tmp_path: Path) -> None:
    merged = convert(
        source, tmp_path / "merged", 2, calibration=[text], refit=False, reconstruct=False, **QUICK
    )
    full = convert(source, tmp_path / "full", 2, calibration=[text], **QUICK)
    assert merged.method == full.method == "joint"
    assert "fitted" not in merged.calibration["losses"]
    losses = full.calibration["losses"]
    assert losses["merged"] == pytest.approx(merged.calibration["losses"]["merged"], abs=1e-6)
    for row in full.layers:
        assert row["error_fitted"] < row["error_merged"]
        assert 0 < row["residual"] < 1
    assert verify(tmp_path / "full", against=source).ok
    manifest = json.loads((tmp_path / "full" / "mha2gqa.json").read_text())
    assert manifest["calibration"]["unique_tokens"] == full.calibration["unique_tokens"]
    assert manifest["grouping"] == {row["path"]: row["grouping"] for row in full.layers}


def test_equal_groups_change_nothing(source: Path, text: str, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", 8, calibration=[text], refit=False, reconstruct=False, **QUICK)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        source / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(
    ("model_type", "gate"),
    [
        ("qwen3", ""),  # norms of q and k, shared by all heads, are trained too
        ("dory", "g_proj.weight"),  # `gate_proj` in its class
        ("cosmos3_omni", ""),  # other names in its class, of those norms as well
        ("idefics3", ""),  # asks where its first weight is, which is in a vision tower that is never read
    ],
)
def test_the_checkpoint_is_the_model_that_was_fitted(
    text: str, tmp_path: Path, model_type: str, gate: str
) -> None:
    """Whatever training moved in memory is stored, and what belongs to a query head stays with it.

    All architectures: `test_a_fitted_checkpoint_is_the_fitted_model` of `make archs`.
    """
    torch.manual_seed(0)
    pico_class(model_type)(pico_config(model_type)).save_pretrained(tmp_path / "mha")
    word_tokenizer(tmp_path / "mha")
    convert(tmp_path / "mha", tmp_path / "gqa", 2, calibration=[text], device="cpu", **QUICK)
    source = load_model(tmp_path / "mha", device="cpu")
    blocks = token_blocks(load_tokenizer(tmp_path / "mha"), read_documents([text]), 16)
    live, stored = (
        convert_model(source, 2, calibration=blocks, fit=QUICK["fit"]),
        load_model(tmp_path / "gqa"),
    )
    ids = blocks[:4, :-1]
    with torch.no_grad():
        before, fitted, read = (model.cpu()(ids).logits for model in (source, live, stored))
    torch.testing.assert_close(read, fitted, rtol=1e-4, atol=1e-5)
    assert (before - fitted).abs().max() > 1e-3
    if not gate:
        return
    grouping = json.loads((tmp_path / "gqa" / "mha2gqa.json").read_text())["grouping"]
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("mha", "gqa")]
    for path, groups in grouping.items():
        order = [head for group in groups for head in group]
        gates = [file[f"{path}.{gate}"].unflatten(0, (len(order), -1)) for file in files]  # [H, …]
        assert torch.equal(gates[1], gates[0][order])


def test_same_seed_gives_the_same_bytes(source: Path, text: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        convert(source, tmp_path / name, 2, calibration=[text], **QUICK)
    a, b = ((tmp_path / name / "model.safetensors").read_bytes() for name in "ab")
    assert a == b


def test_saved_statistics_give_the_same_result_without_the_text(
    source: Path, text: str, tmp_path: Path
) -> None:
    file = str(tmp_path / "statistics.safetensors")
    off = {"refit": False, "reconstruct": False}
    convert(source, tmp_path / "a", 2, calibration=[text], statistics=file, **off, **QUICK)
    result = convert(source, tmp_path / "b", 2, statistics=file)
    assert result.method == "joint"
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert all(torch.allclose(a[n], b[n], atol=1e-5) for n in a)
    pico_llama(intermediate_size=64).save_pretrained(tmp_path / "other")
    state = load_file(tmp_path / "other" / "model.safetensors")
    assert state
    with pytest.raises(UsageError, match="another model"):
        torch.manual_seed(7)
        other = pico_llama(attention_bias=True)
        for x in other.parameters():
            torch.nn.init.normal_(x)
        other.save_pretrained(tmp_path / "other")
        convert(tmp_path / "other", tmp_path / "c", 2, statistics=file)


def test_layers_that_cannot_be_run_alone_are_refused_before_the_text_is_read(tmp_path: Path) -> None:
    pico_class("gemma3n_text")(pico_config("gemma3n_text")).save_pretrained(tmp_path / "mha")
    said = "cannot be calibrated: its layers pass on four hidden states"
    with pytest.raises(UnsupportedModelError, match=said):
        convert(tmp_path / "mha", tmp_path / "gqa", 2, calibration=[str(tmp_path / "absent.jsonl")])
    with pytest.raises(UnsupportedModelError, match=said):
        convert_model(load_model(tmp_path / "mha"), 2, calibration=torch.zeros(8, 17, dtype=torch.long))
    planned = plan_conversion(tmp_path / "mha", groups=2)
    assert any(said in note for note in planned.warnings) and not planned.calibration


@pytest.mark.parametrize("model_type", ["cosmos3_omni", "molmo2"])
def test_saved_statistics_know_the_model_in_the_layout_of_its_files(
    model_type: str, text: str, tmp_path: Path
) -> None:
    """Names, or fused projections, that its class has otherwise."""
    torch.manual_seed(0)
    pico_class(model_type)(pico_config(model_type)).save_pretrained(tmp_path / "mha")
    word_tokenizer(tmp_path / "mha")
    options = {"statistics": str(tmp_path / "statistics.safetensors"), "method": "joint", "device": "cpu"}
    read = {"calibration": [text], "calibration_window": 16, "refit": False, "reconstruct": False}
    convert(tmp_path / "mha", tmp_path / "a", 2, **options, **read)
    convert(tmp_path / "mha", tmp_path / "b", 2, **options)
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert all(torch.allclose(a[n], b[n], atol=1e-5) for n in a)


def test_joint_without_text_uses_the_weights(source: Path, tmp_path: Path) -> None:
    result = convert(source, tmp_path / "joint", 2, method="joint")
    assert all(row["residual"] > 0 for row in result.layers)
    assert result.calibration == {}


def test_a_grouping_can_be_reused_from_a_manifest(source: Path, text: str, tmp_path: Path) -> None:
    off = {"refit": False, "reconstruct": False}
    first = convert(source, tmp_path / "a", 2, calibration=[text], **off, **QUICK)
    again = convert(source, tmp_path / "b", 2, method="mean", grouping=str(tmp_path / "a" / "mha2gqa.json"))
    assert [row["grouping"] for row in again.layers] == [row["grouping"] for row in first.layers]


def test_bfloat16_sources_stay_bfloat16(text: str, tmp_path: Path) -> None:
    pico_llama().bfloat16().save_pretrained(tmp_path / "mha")
    word_tokenizer(tmp_path / "mha")
    convert(tmp_path / "mha", tmp_path / "out", 2, calibration=[text], **QUICK)
    assert {x.dtype for x in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.num_key_value_heads == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reconstruct": True}, "give calibration"),
        ({"refit": True}, "give calibration"),
        ({"grouping": "search", "method": "mean"}, "use joint or align"),
        ({"grouping": "nowhere.json"}, "cannot be read"),
        ({"statistics": "nowhere/none"}, "not a statistics file"),
        ({"method": "best"}, "method: must be one of mean"),
    ],
)
def test_contradictions_are_refused(source: Path, tmp_path: Path, options: dict, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        convert(source, tmp_path / "out", 2, **options)
    assert not list(tmp_path.glob("out*"))


def test_short_text_is_refused(source: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("w1 w2 w3")
    with pytest.raises(DataError):
        convert(source, tmp_path / "out", 2, calibration=[str(short)], **QUICK)
    assert not list(tmp_path.glob("out*"))
