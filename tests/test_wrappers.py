"""A model that also sees: calibration, scores, uptraining and plans are those of the text model inside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import pico_llama, word_tokenizer
from safetensors.torch import load_file
from training import TINY, write_text

import mha2gqa
from mha2gqa.checkpoints.loading import load_model, loading_class
from mha2gqa.commands.estimate import plan
from mha2gqa.errors import UnsupportedModelError
from mha2gqa.reconstruct import ReconstructConfig

STEPS = {
    "calibration_tokens": 2048,
    "calibration_window": 32,
    "device": "cpu",
    "fit": ReconstructConfig(steps=20, batch_size=4),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A Llama, the same inside LLaVA, and text."""
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    folder = tmp_path_factory.mktemp("wrapped")
    torch.manual_seed(3)
    text = pico_llama()
    tower = CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        image_size=32, patch_size=16, projection_dim=16,
    )  # fmt: skip
    seeing = LlavaForConditionalGeneration(
        LlavaConfig(text_config=text.config, vision_config=tower, image_token_index=1)
    )
    seeing.model.language_model.load_state_dict(text.model.state_dict())
    seeing.lm_head.load_state_dict(text.lm_head.state_dict())
    for name, model in (("llama", text), ("llava", seeing)):
        model.save_pretrained(folder / name)
        word_tokenizer(folder / name)
    return folder / "llama", folder / "llava", write_text(folder / "text.jsonl", documents=200)


def tensors(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The text model's tensors under Llama's names, and the others."""
    stored = load_file(folder / "model.safetensors")
    inside = {n: t for n, t in stored.items() if "vision" not in n and "projector" not in n}
    names = {
        n.replace("language_model.model.", "model.").replace("language_model.lm_head", "lm_head"): n
        for n in inside
    }
    return {short: stored[n] for short, n in names.items()}, {
        n: t for n, t in stored.items() if n not in inside
    }


def test_calibration_finds_the_heads_of_the_text_model(models, tmp_path):
    llama, llava, text = models
    for source in (llama, llava):
        mha2gqa.convert(source, tmp_path / source.name, 2, method="joint", calibration=[text], **STEPS)
    alone, others = tensors(tmp_path / "llama")
    inside, tower = tensors(tmp_path / "llava")
    assert alone.keys() == inside.keys() and not others and tower
    for name, tensor in alone.items():
        torch.testing.assert_close(inside[name], tensor, rtol=1e-5, atol=1e-6)
    before = tensors(llava)[1]
    assert before.keys() == tower.keys() and all(torch.equal(tower[n], t) for n, t in before.items())
    result = mha2gqa.evaluate(
        [llama, llava, tmp_path / "llama", tmp_path / "llava"],
        text,
        protocol="blocks",
        window=32,
        device="cpu",
    )
    losses = [model.loss for model in result.models]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6) and losses[2] == pytest.approx(losses[3], abs=1e-6)
    assert losses[2] != pytest.approx(losses[0], abs=1e-4)


def test_uptraining_moves_the_text_model_as_it_would_alone(models, tmp_path):
    llama, llava, text = models
    for source in (llama, llava):
        mha2gqa.convert(source, tmp_path / source.name, 2, method="mean")
        result = mha2gqa.uptrain(
            tmp_path / source.name,
            tmp_path / f"{source.name}-up",
            text,
            tokens=64 * 6,
            learning_rate=3e-3,
            **TINY,
        )
    assert any("outside the text model keep their values" in warning for warning in result.warnings)
    alone, inside = tensors(tmp_path / "llama-up")[0], tensors(tmp_path / "llava-up")[0]
    for name, tensor in alone.items():
        torch.testing.assert_close(inside[name], tensor, rtol=1e-4, atol=1e-6)
    tower = tensors(tmp_path / "llava-up")[1]
    assert all(torch.equal(tower[n], t) for n, t in tensors(llava)[1].items())


def test_a_bare_config_can_be_planned(models, tmp_path):
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "config.json").write_bytes((models[1] / "config.json").read_bytes())
    known, bare = (plan(source, groups=2).to_dict() for source in (models[1], folder))
    assert (
        known["parameters"] == bare["parameters"]
        and known["kv_bytes_per_token"] == bare["kv_bytes_per_token"]
    )


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "AutoModelForCausalLM"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "AutoModelForSeq2SeqLM"),
        ({"model_type": "whisper", "is_encoder_decoder": True}, "AutoModelForSpeechSeq2Seq"),
        ({"model_type": "llava", "text_config": {}}, "AutoModelForImageTextToText"),
        ({"model_type": "voxtral", "text_config": {}}, "AutoModelForMultimodalLM"),
        # auto classes would build the text model alone, or nothing
        (
            {"model_type": "mllama", "text_config": {}, "architectures": ["MllamaForConditionalGeneration"]},
            "MllamaForConditionalGeneration",
        ),
        (
            {"model_type": "llava", "text_config": {}, "architectures": ["LlavaModel"]},
            "AutoModelForImageTextToText",
        ),
    ],
)
def test_the_class_that_loads(config: dict[str, Any], name: str) -> None:
    assert loading_class(config).__name__ == name


def test_a_module_that_layers_share_is_refused_for_calibration(models, tmp_path):
    from pico_models import model_class, pico_config

    model_class("zamba")(pico_config("zamba")).save_pretrained(tmp_path / "zamba")
    word_tokenizer(tmp_path / "zamba")
    with pytest.raises(
        UnsupportedModelError, match=r'layers\.3.*is the same module as .*layers\.1.*method="mean"'
    ):
        mha2gqa.convert(tmp_path / "zamba", tmp_path / "out", 2, calibration=[models[2]], **STEPS)
    assert not (tmp_path / "out").exists()
    mha2gqa.convert(tmp_path / "zamba", tmp_path / "out", 2, method="mean")


def test_the_model_is_put_back_after_calibration(models):
    """Attention implementations of all parts, also of parts that have no other than eager."""
    from mha2gqa.calibration.hooks import observing

    model = load_model(models[1], device="cpu")
    model.model.vision_tower.config._attn_implementation = "eager"
    before = [m.config._attn_implementation for m in model.modules() if hasattr(m, "config")]
    with observing(model, {}):
        assert model.model.language_model.config._attn_implementation not in before
    assert [m.config._attn_implementation for m in model.modules() if hasattr(m, "config")] == before
    assert json.loads((models[1] / "config.json").read_text())["model_type"] == "llava"
