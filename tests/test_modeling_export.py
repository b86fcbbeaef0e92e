"""Converted checkpoints of exported families: complete on disk, loadable anywhere, nothing lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import word_tokenizer
from families import PICOS, H, assert_same, export_of, inputs, logits, stock_model

from mha2gqa import modeling
from mha2gqa.checkpoints.loading import load_model
from mha2gqa.conversion.checkpoint import convert, convert_model
from mha2gqa.errors import UnsupportedModelError, UsageError
from mha2gqa.kv_cache import kv_layers
from mha2gqa.verification.checks import verify

FRESH = """
import json, sys, torch, transformers
from safetensors.torch import load_file, save_file
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
assert "mha2gqa" not in sys.modules
for folder, auto, batch, result, again in json.loads(sys.argv[1]):
    cls = getattr(transformers, auto)
    model, info = cls.from_pretrained(folder, trust_remote_code=True, output_loading_info=True, dtype="float32")
    assert not any(info.values()), info
    model.save_pretrained(again)
    model = cls.from_pretrained(again, trust_remote_code=True).eval()
    with torch.no_grad():
        save_file({"logits": model(**load_file(batch), use_cache=False).logits}, result)
    transformers.AutoConfig.from_pretrained(again, trust_remote_code=True)
"""


def saved(name: str, folder: Path, **changes: Any) -> Path:
    """The folder of a saved pico stock model."""
    model = stock_model(name)
    for key, value in changes.items():
        setattr(model.config, key, value)
    model.save_pretrained(folder)
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


# Of the same code and nearly the same config as one that is loaded by default.
ALIKE = ("t5", "mt5", "mbart", "pegasus", "m2m_100", "opt", "mpt")


@pytest.mark.parametrize("alike", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_family_reloads_in_a_fresh_process_and_again_after_saving(alike: bool, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    jobs, expected = [], {}
    for name in (name for name in PICOS if (name in ALIKE) == alike):
        convert(saved(name, tmp_path / name), tmp_path / f"{name}-gqa", 2)
        batch, result, again = (tmp_path / f"{name}-{what}" for what in ("batch", "result", "again"))
        save_file(inputs(name), batch)
        folder = tmp_path / f"{name}-gqa"
        jobs.append([str(x) for x in (folder, export_of(name).auto, batch, result, again)])
        expected[name] = logits(convert_model(stock_model(name), 2), inputs(name))
    environment = {**os.environ, "PYTHONPATH": "", "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    code = [sys.executable, "-c", FRESH, json.dumps(jobs)]
    done = subprocess.run(code, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for name, right in expected.items():
        ours = load_file(tmp_path / f"{name}-result")["logits"]
        assert_same(ours, right)


def test_config_gains_only_what_the_exported_class_needs(tmp_path: Path) -> None:
    source = saved("t5-untied", tmp_path / "t5")
    raw = config_of(source) | {"unknown_key": [1, {"a": 2}], "tie_word_embeddings": False}
    (source / "config.json").write_text(json.dumps(raw))
    result = convert(source, tmp_path / "out", 4)
    edited = config_of(tmp_path / "out")
    assert list(edited)[: len(raw)] == list(raw)
    changed = {key: edited[key] for key in edited if edited[key] != raw.get(key)}
    assert changed == {
        "model_type": "gqa_t5",
        "architectures": ["GqaT5ForConditionalGeneration"],
        "auto_map": {
            "AutoConfig": "modeling_gqa_t5.GqaT5Config",
            "AutoModelForSeq2SeqLM": "modeling_gqa_t5.GqaT5ForConditionalGeneration",
        },
        "num_key_value_heads": 4,
        "num_cross_key_value_heads": 4,
        "tokenizer_class": "T5Tokenizer",  # no tokenizer_config.json names one
        "torch_dtype": "float32",  # as older readers spell it
    }
    code = tmp_path / "out" / "modeling_gqa_t5.py"
    assert code.read_bytes() == modeling.modeling_file(modeling.EXPORTS["t5"]).read_bytes()
    assert {layer["kind"] for layer in result.layers} == {"self", "cross"}
    assert any("modeling_gqa_t5.py" in warning for warning in result.warnings)
    assert [check for check in result.verification if not check.ok] == []


@pytest.mark.parametrize("name", ["t5", "whisper"])
@pytest.mark.parametrize("attention", [("self",), ("cross",)])
def test_one_kind_alone_is_shared_and_the_manifest_says_which(
    name: str, attention: tuple[str, ...], tmp_path: Path
) -> None:
    convert(saved(name, tmp_path / "in"), tmp_path / "out", 2, attention=attention)
    manifest = json.loads((tmp_path / "out" / "mha2gqa.json").read_text())
    assert manifest["attention"] == list(attention)
    groups = {"self": 2, "cross": 2} | dict.fromkeys({"self", "cross"} - set(attention), H)
    config = config_of(tmp_path / "out")
    assert config["num_key_value_heads"] == groups["self"]
    assert config["num_cross_key_value_heads"] == groups["cross"]
    assert config.get("encoder_attention_heads", 4) == 4  # Whisper's alias is not touched
    assert [layer.heads for layer in kv_layers(config)] == [groups["self"], groups["cross"]] * 2
    model = load_model(tmp_path / "out", device="cpu")  # this package's own code: no consent needed
    expected = convert_model(stock_model(name), 2, attention=attention)
    assert_same(logits(model, inputs(name)), logits(expected, inputs(name)))


def test_attention_that_the_decoder_lacks_is_refused(tmp_path: Path) -> None:
    source = saved("gpt2", tmp_path / "in")
    with pytest.raises(UsageError, match="only self attention"):
        convert(source, tmp_path / "out", 2, attention=("cross",))
    with pytest.raises(UsageError, match="must be one of self, cross, not"):
        convert(source, tmp_path / "out", 2, attention=("both",))


@pytest.mark.parametrize("name", ["t5", "umt5", "bart", "whisper", "gpt2", "opt", "bloom", "mpt"])
def test_an_exported_checkpoint_can_be_shared_further(name: str, tmp_path: Path) -> None:
    source = saved(name, tmp_path / "in")
    convert(source, tmp_path / "four", 4, method="mean")
    result = convert(tmp_path / "four", tmp_path / "two", 2, method="mean")
    assert result.num_kv_heads == {"before": 4, "after": 2}
    assert [check for check in result.verification if not check.ok] == []
    convert(source, tmp_path / "once", 2, method="mean")  # the mean of means of equal groups is the mean
    twice, once = (load_model(tmp_path / folder, device="cpu") for folder in ("two", "once"))
    assert_same(logits(twice, inputs(name)), logits(once, inputs(name)))
    assert [
        c for c in verify(tmp_path / "two", against=tmp_path / "four", full=True).checks if not c.ok
    ] == []


@pytest.mark.parametrize("name", ["t5-untied", "whisper", "bloom"])
def test_the_same_number_of_heads_is_a_copy_of_the_stock_checkpoint(name: str, tmp_path: Path) -> None:
    source = saved(name, tmp_path / "in")
    result = convert(source, tmp_path / "out", H)
    assert config_of(tmp_path / "out") == config_of(source)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        source / "model.safetensors"
    ).read_bytes()
    assert not list((tmp_path / "out").glob("*.py"))
    assert any("none are shared" in warning for warning in result.warnings)


def test_base_models_without_prefix_load_into_the_language_model(tmp_path: Path) -> None:
    """facebook/bart-base and others are saved as `BartModel`."""
    for name in ("bart", "gpt2", "t5"):
        whole = stock_model(name)
        base = whole.model if name == "bart" else whole.transformer if name == "gpt2" else whole
        base.config.architectures = [export_of(name).stock[1]]
        base.save_pretrained(tmp_path / name)
        raw = config_of(tmp_path / name) | {"architectures": [export_of(name).stock[1]]}
        (tmp_path / name / "config.json").write_text(json.dumps(raw))
        convert(tmp_path / name, tmp_path / f"{name}-out", 2)
        ours = load_model(tmp_path / f"{name}-out", device="cpu")
        expected = convert_model(stock_model(name), 2)
        assert_same(logits(ours, inputs(name)), logits(expected, inputs(name)))


def test_an_untied_output_stays_what_it_was(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = saved("t5-untied", tmp_path / "in")
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = torch.randn_like(tensors["shared.weight"])
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    raw = config_of(source) | {"tie_word_embeddings": False}
    (source / "config.json").write_text(json.dumps(raw))
    convert(source, tmp_path / "out", 2)
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(after["lm_head.weight"], tensors["lm_head.weight"])
    ours, stock = (load_model(path, device="cpu") for path in (tmp_path / "out", source))
    assert torch.equal(ours.lm_head.weight, stock.lm_head.weight)
    assert not torch.equal(ours.lm_head.weight, ours.shared.weight)
    assert ours.config.scale_decoder_outputs is False is stock.config.scale_decoder_outputs
    ours.save_pretrained(tmp_path / "again")
    again = load_model(tmp_path / "again", device="cpu")
    assert_same(logits(again, inputs("t5")), logits(ours, inputs("t5")))


@pytest.mark.parametrize(
    ("name", "unscaled"), [("t5", False), ("t5-untied", True), ("mt5", True), ("umt5", False)]
)
def test_older_classes_read_that_a_stored_head_reads_unscaled_outputs(
    name: str, unscaled: bool, tmp_path: Path
) -> None:
    """transformers 5 says it by `scale_decoder_outputs` beside a tie; 4 by no tie. Both read it here."""
    from safetensors.torch import load_file, save_file

    source = saved(name, tmp_path / "in")
    assert config_of(source)["tie_word_embeddings"] is True
    convert(source, tmp_path / "tied", 2)
    assert config_of(tmp_path / "tied")["tie_word_embeddings"] is True  # no head to load
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = torch.randn_like(tensors["shared.weight"])
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    convert(source, tmp_path / "out", 2)
    assert config_of(tmp_path / "out")["tie_word_embeddings"] is not unscaled
    ours, stock = (load_model(path, device="cpu") for path in (tmp_path / "out", source))
    assert torch.equal(ours.lm_head.weight, stock.lm_head.weight)
    if name != "mt5":
        assert ours.config.scale_decoder_outputs is not unscaled


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("t5", {"architectures": ["T5EncoderModel"]}, "encoder alone"),
        ("t5", {"architectures": ["T5ForTokenClassification"]}, "another head"),
        ("bart", {"architectures": ["BartForSequenceClassification"]}, "another head"),
        ("t5", {"is_encoder_decoder": False}, "one half"),
        ("gpt2", {"reorder_and_upcast_attn": True}, "not available"),
    ],
)
def test_checkpoints_that_would_lose_something_are_refused(
    model_type: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    source = saved(model_type, tmp_path / "in")
    (source / "config.json").write_text(json.dumps(config_of(source) | changes))
    with pytest.raises(UnsupportedModelError, match=message):
        convert(source, tmp_path / "out", 2)
    assert not (tmp_path / "out").exists()


def test_a_folder_without_torch_weights_is_refused_by_name(tmp_path: Path) -> None:
    from mha2gqa.errors import CheckpointError

    source = saved("t5", tmp_path / "in")
    (source / "model.safetensors").rename(source / "flax_model.msgpack")
    with pytest.raises(CheckpointError, match=r"flax_model\.msgpack"):
        convert(source, tmp_path / "out", 2)


def test_the_tokenizer_is_found_without_the_stock_model_type(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    source = word_tokenizer(saved("gpt2", tmp_path / "in"))
    settings = json.loads((source / "tokenizer_config.json").read_text())
    settings.pop("tokenizer_class", None)
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    raw = config_of(source) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    (source / "config.json").write_text(json.dumps(raw))
    convert(source, tmp_path / "out", 2)
    assert config_of(tmp_path / "out")["tokenizer_class"] == "PreTrainedTokenizerFast"
    for consent in (True, False):
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=consent)
        assert tokenizer("w0 w1")["input_ids"] == [3, 4]


def test_models_in_memory_carry_their_code_when_saved(tmp_path: Path) -> None:
    model = convert_model(stock_model("umt5"), 2)
    assert type(model).__name__ == "GqaUMT5ForConditionalGeneration"
    model.save_pretrained(tmp_path / "out")
    assert (tmp_path / "out" / "modeling_gqa_t5.py").exists()
    assert config_of(tmp_path / "out")["auto_map"]["AutoConfig"] == "modeling_gqa_t5.GqaUMT5Config"
    again = load_model(tmp_path / "out", device="cpu")
    assert_same(logits(again, inputs("umt5")), logits(model, inputs("umt5")))
