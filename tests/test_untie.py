"""An output head stored apart: the same function, and what has no such form is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from families import stock_model
from pico_models import model_class, pico_config
from reexpressed_picos import save_source
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mha2gqa.checkpoints.reader import open_checkpoint
from mha2gqa.conversion.checkpoint import convert
from mha2gqa.errors import UnsupportedModelError
from mha2gqa.verification.checks import verify

IDS = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(1))


def logits(path: Path) -> torch.Tensor:
    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        return model.eval()(IDS).logits


def test_a_native_result_stores_its_head_and_computes_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model_class("olmo2")(pico_config("olmo2", tie_word_embeddings=True)).save_pretrained(tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "tied", 2)
    result = convert(tmp_path / "in", tmp_path / "out", 2, untie=True, max_shard_size=40_000)
    assert [check for check in result.verification if not check.ok] == []
    out = open_checkpoint(tmp_path / "out")
    assert out.config["tie_word_embeddings"] is False and len(out.files) > 1
    assert torch.equal(out.read("lm_head.weight"), out.read("model.embed_tokens.weight"))
    assert "lm_head.weight" not in open_checkpoint(tmp_path / "tied").tensors
    assert torch.equal(logits(tmp_path / "out"), logits(tmp_path / "tied"))
    assert all(check.ok for check in verify(tmp_path / "out", against=tmp_path / "in", full=True).checks)


def test_a_rewritten_model_can_be_untied_too(tmp_path: Path) -> None:
    source = save_source("gpt2", tmp_path / "in")
    result = convert(tmp_path / "in", tmp_path / "out", 1, untie=True)
    assert result.reexpression["target_type"] == "gpt_bigcode"
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], source.transformer.wte.weight)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False


def test_an_untied_model_stays_and_says_so(tmp_path: Path) -> None:
    model_class("llama")(pico_config("llama", tie_word_embeddings=False)).save_pretrained(tmp_path / "in")
    result = convert(tmp_path / "in", tmp_path / "out", 2, untie=True)
    assert any("--untie changes nothing" in warning for warning in result.warnings)


def test_classes_that_only_transformers_runs_are_refused(tmp_path: Path) -> None:
    stock_model("t5").save_pretrained(tmp_path / "t5")
    with pytest.raises(UnsupportedModelError, match=r"^untie=True"):
        convert(tmp_path / "t5", tmp_path / "out", 2, untie=True)
    assert not (tmp_path / "out").exists()
