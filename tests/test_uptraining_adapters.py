"""LoRA: pooled K/V in full, q and o low-rank, merged exactly, resumed exactly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import pico_llama, word_tokenizer
from safetensors.torch import load_file
from training import TINY, family, write_text

from mha2gqa.errors import UsageError
from mha2gqa.uptraining import uptrain
from mha2gqa.uptraining.adapters import plan_adapter
from mha2gqa.uptraining.budget import UptrainConfig
from mha2gqa.uptraining.guard import SpikeGuard

LORA = {**TINY, "tokens": 640, "train": "lora", "learning_rate": 2e-3, "lora_r": 4, "save_steps": 4}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    return family(tmp_path_factory.mktemp("family"))


@pytest.fixture(scope="module")
def trained(models, tmp_path_factory: pytest.TempPathFactory):
    out = tmp_path_factory.mktemp("lora") / "up"
    return uptrain(models[1], out, models[2], **LORA), out


def test_keys_and_values_move_in_full_and_queries_by_low_rank(models, trained):
    result, out = trained
    before, after = load_file(models[1] / "model.safetensors"), load_file(out / "model.safetensors")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if "self_attn" in name}  # L01
    for name in moved:
        rank = int(torch.linalg.matrix_rank(after[name] - before[name], rtol=1e-3))
        full = min(before[name].shape)
        assert rank == (full if "k_proj" in name or "v_proj" in name else 4), name
    losses = [entry["loss"] for entry in result.losses["train"]]
    assert sum(losses[-3:]) < sum(losses[:3])


def test_adapter_is_kept_and_gives_the_merged_model(models, trained):
    from peft import PeftModel

    from mha2gqa.checkpoints.loading import load_model

    result, out = trained
    config = json.loads((out / "adapter" / "adapter_config.json").read_text())
    assert config["r"] == 4 and config["base_model_name_or_path"] == str(models[1])
    wrapped = PeftModel.from_pretrained(load_model(models[1], device="cpu"), out / "adapter").eval()
    merged = load_model(out, device="cpu")
    ids = torch.randint(0, 64, (2, 12))
    with torch.no_grad():
        torch.testing.assert_close(wrapped(ids).logits, merged(ids).logits, rtol=1e-4, atol=1e-5)
    assert result.merge["exact"] < 1e-5 and result.merge["stored"] < 1e-5  # a float32 checkpoint


def test_killed_and_resumed_is_the_same(models, trained, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    accept = SpikeGuard.accept

    def killing(self, at, *args):
        if at == 7:
            raise Killed
        return accept(self, at, *args)

    with monkeypatch.context() as patch:
        patch.setattr(SpikeGuard, "accept", killing)
        with pytest.raises(Killed):
            uptrain(models[1], tmp_path / "up", models[2], **LORA)
    result = uptrain(models[1], tmp_path / "up", models[2], **LORA)
    assert result.resumed_from == 4
    assert [e["loss"] for e in result.losses["train"]] == [e["loss"] for e in trained[0].losses["train"]]
    a, b = load_file(tmp_path / "up" / "model.safetensors"), load_file(trained[1] / "model.safetensors")
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_bf16_checkpoint_is_merged_in_float32_and_rounded_once(tmp_path):
    """L05: tied embeddings, bf16."""
    model = pico_llama(num_key_value_heads=2, tie_word_embeddings=True)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "gqa")
    word_tokenizer(tmp_path / "gqa")
    text = write_text(tmp_path / "text.jsonl")
    result = uptrain(tmp_path / "gqa", tmp_path / "up", text, teacher="none", **LORA)
    assert result.merge["exact"] < 1e-5 < result.merge["stored"] < 0.3
    stored = load_file(tmp_path / "up" / "model.safetensors")
    assert {x.dtype for x in stored.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in stored


def test_what_trained_in_bf16_is_merged_in_float32(models, tmp_path):
    """As on every GPU: accelerate's autocast must be gone when adapter and merged model are compared."""
    result = uptrain(models[1], tmp_path / "up", models[2], **LORA, bf16=True)
    assert result.merge["exact"] < 1e-5


def test_fused_projections_are_trained_whole():
    """L04: Phi-3 has no k_proj or v_proj."""
    from transformers import Phi3Config, Phi3ForCausalLM

    config = Phi3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        pad_token_id=None,
        eos_token_id=0,
        bos_token_id=None,
    )
    plan = plan_adapter(Phi3ForCausalLM(config), config.to_dict())
    assert plan.full == tuple(f"model.layers.{i}.self_attn.qkv_proj" for i in range(2))
    assert plan.low_rank == tuple(f"model.layers.{i}.self_attn.o_proj" for i in range(2))


def test_lora_words_are_checked():
    with pytest.raises(UsageError, match="lora_r"):
        UptrainConfig("m", "o", ("d",), lora_r=0)


# --- QLoRA ------------------------------------------------------------------------------------------------


def test_qlora_says_what_to_install(models, tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(
        UsageError, match="train qlora: needs the package bitsandbytes; pip install bitsandbytes"
    ):
        uptrain(models[1], tmp_path / "up", models[2], **QLORA)
    assert not list(tmp_path.iterdir())


WIDE = {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.1}  # rows of whole 4-bit blocks
QLORA = {**LORA, "train": "qlora"}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    pytest.importorskip("bitsandbytes")
    return family(tmp_path_factory.mktemp("wide"), **WIDE)


@pytest.fixture(scope="module")
def quantised(wide, tmp_path_factory: pytest.TempPathFactory):
    out = tmp_path_factory.mktemp("qlora") / "up"
    return uptrain(wide[1], out, wide[2], **QLORA), out


def test_qlora_is_merged_onto_the_full_precision_weights(wide, quantised, tmp_path):
    from peft import PeftModel

    from mha2gqa.checkpoints.loading import load_model

    result, out = quantised
    plain = uptrain(wide[1], tmp_path / "lora", wide[2], **LORA)
    before, after = load_file(wide[1] / "model.safetensors"), load_file(out / "model.safetensors")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if "self_attn" in name}
    for name in moved:
        rank = int(torch.linalg.matrix_rank(after[name] - before[name], rtol=1e-3))
        assert rank == (min(before[name].shape) if "k_proj" in name or "v_proj" in name else 4), name
    wrapped = PeftModel.from_pretrained(load_model(wide[1], device="cpu"), out / "adapter").eval()
    ids = torch.randint(0, 64, (2, 12))
    with torch.no_grad():
        torch.testing.assert_close(
            wrapped(ids).logits, load_model(out, device="cpu")(ids).logits, rtol=1e-4, atol=1e-5
        )
    assert result.merge["exact"] < 1e-5 < result.merge["quantised"] < 2
    losses = [entry["loss"] for entry in result.losses["train"]]
    assert sum(losses[-3:]) < sum(losses[:3]) and losses[0] != plain.losses["train"][0]["loss"]
    assert result.budget["model_flops"] == pytest.approx(plain.budget["model_flops"], rel=1e-3)


def test_qlora_keeps_what_is_pooled_and_the_head():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    from mha2gqa.uptraining.qlora import add_quantised_adapter

    model, config = pico_llama(num_key_value_heads=2, **WIDE), UptrainConfig("m", "o", ("d",), train="qlora")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    wrapped = add_quantised_adapter(model, model.config.to_dict(), config, torch.device("cpu"), torch.float32)
    for name, module in wrapped.named_modules():
        narrow = isinstance(module, bitsandbytes.nn.Linear4bit)
        if name.endswith(("gate_proj", "up_proj", "down_proj", "base_layer")):
            assert narrow, name
            own = name.removeprefix("base_model.model.").removesuffix(".base_layer") + ".weight"
            back = bitsandbytes.functional.dequantize_4bit(module.weight, module.weight.quant_state)
            scale = before[own].abs().max()
            assert (
                0 < (back.float() - before[own]).abs().max() < 0.16 * scale
            )  # half of NF4's widest step, 0.304
        elif isinstance(module, torch.nn.Linear) and "lora" not in name:
            assert not narrow and module.weight.dtype == torch.float32
    moving = {name for name, p in wrapped.named_parameters() if p.requires_grad}
    assert all("lora_" in name or "modules_to_save" in name for name in moving)


def test_qlora_needs_rows_of_whole_blocks(models, tmp_path):
    pytest.importorskip("bitsandbytes")
    with pytest.raises(UsageError, match="no linear layer has rows of whole blocks of 64"):
        uptrain(models[1], tmp_path / "up", models[2], **QLORA)


def test_qlora_resumes(wide, quantised, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    accept = SpikeGuard.accept

    def killing(self, at, *args):
        if at == 7:
            raise Killed
        return accept(self, at, *args)

    with monkeypatch.context() as patch:
        patch.setattr(SpikeGuard, "accept", killing)
        with pytest.raises(Killed):
            uptrain(wide[1], tmp_path / "up", wide[2], **QLORA)
    assert uptrain(wide[1], tmp_path / "up", wide[2], **QLORA).resumed_from == 4
    a, b = load_file(tmp_path / "up" / "model.safetensors"), load_file(quantised[1] / "model.safetensors")
    assert all(torch.equal(a[name], b[name]) for name in a)
