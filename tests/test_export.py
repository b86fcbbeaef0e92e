"""`export`: a thin call of an engine's converter, with its traps handled, its output checked, nothing half-written."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import word_tokenizer
from families import stock_model
from pico_models import model_class, pico_config

from mha2gqa.commands import export as export_module
from mha2gqa.commands.engine_converters import staged
from mha2gqa.commands.engine_tokenizers import compare, sample_lines
from mha2gqa.commands.export import export
from mha2gqa.conversion.checkpoint import convert
from mha2gqa.errors import CheckpointError, UnsupportedModelError, UsageError

WRITES = """
import argparse, json, pathlib
p = argparse.ArgumentParser(); p.add_argument("model"); p.add_argument("--outfile"); p.add_argument("--outtype")
a = p.parse_args()
config = json.loads((pathlib.Path(a.model) / "config.json").read_text())
pathlib.Path(a.outfile).write_text(json.dumps({"type": a.outtype, "config": config}))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "llama"
    torch.manual_seed(0)
    model_class("llama")(pico_config("llama")).save_pretrained(folder)
    return word_tokenizer(folder)


def llama_cpp(folder: Path, script: str = WRITES) -> Path:
    """Sources of llama.cpp whose converter is `script`."""
    (folder / "conversion").mkdir(parents=True)
    (folder / "conversion" / "base.py").write_text("")
    (folder / "convert_hf_to_gguf.py").write_text(script)
    return folder


@pytest.fixture
def no_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the engines is installed."""
    real = importlib.util.find_spec
    engines = ("xllamacpp", "llama_cpp", "ctranslate2", "onnxruntime_genai")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in engines else real(name))
    monkeypatch.delenv("LLAMA_CPP", raising=False)


@pytest.mark.usefixtures("no_engines")
def test_the_converter_gets_the_checkpoint_with_the_keys_it_expects(model: Path, tmp_path: Path) -> None:
    sources = llama_cpp(tmp_path / "llama.cpp")
    result = export(model, tmp_path / "out", "gguf", precision="f32", llama_cpp=sources)
    assert result.files == ["llama.gguf"]
    assert result.verification[0].ok is None and "pip install xllamacpp" in result.verification[0].detail
    written = json.loads((tmp_path / "out" / "llama.gguf").read_text())
    assert written["type"] == "f32"
    assert written["config"]["rope_theta"] == written["config"]["rope_parameters"]["rope_theta"]
    with pytest.raises(UsageError, match="not empty"):
        export(model, tmp_path / "out", "gguf", llama_cpp=sources)
    again = export(model, tmp_path / "out", "gguf", llama_cpp=sources, pre_tokenizer="gpt-2", force=True)
    assert json.loads((tmp_path / "out" / again.files[0]).read_text())["type"] == "f16"


def test_gpt2_gets_the_key_that_converters_read(model: Path) -> None:
    with staged(model, {"model_type": "gpt2", "n_positions": 77}) as folder:
        assert json.loads((folder / "config.json").read_text())["n_ctx"] == 77
        assert (folder / "model.safetensors").resolve() == (model / "model.safetensors").resolve()
    assert not folder.exists()


@pytest.mark.usefixtures("no_engines")
@pytest.mark.parametrize(
    ("to", "words", "message"),
    [
        ("gguf", {}, "--llama-cpp or LLAMA_CPP"),
        ("gguf", {"llama_cpp": "."}, "no convert_hf_to_gguf.py"),
        ("ct2", {}, "pip install ctranslate2"),
        ("onnx", {}, "pip install onnxruntime-genai onnx"),
        ("tflite", {}, "choose one of gguf, ct2, onnx"),
    ],
)
def test_a_missing_converter_says_what_to_install(
    to: Any, words: dict[str, Any], message: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        export(model, tmp_path / "out", to, **words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("script", "error", "message"),
    [
        ("raise SystemExit('the disk is on fire')", CheckpointError, "the disk is on fire"),
        ("def get_vocab_base_pre(): raise NotImplementedError('unknown')\nget_vocab_base_pre()",
         UnsupportedModelError, "--pre-tokenizer, such as gpt-2"),
        ("raise SystemExit('ERROR: The model is not currently supported.')", UnsupportedModelError, "lacks this"),
    ],
)  # fmt: skip
def test_a_converter_that_fails_is_one_line_and_leaves_nothing(
    script: str, error: type[Exception], message: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        export(model, tmp_path / "out", "gguf", llama_cpp=llama_cpp(tmp_path / "llama.cpp", script))
    assert [path.name for path in tmp_path.iterdir()] == ["llama.cpp"]


def test_a_tokenizer_that_reads_otherwise_fails(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("w0 w1\n\nw2\n")
    assert sample_lines(text) == ["w0 w1", "w2"] and len(sample_lines()) == 100

    def reading(ids: dict[str, list[int]]) -> Any:
        return lambda file, source, lines: compare(source, lines, ids.__getitem__)

    sources = llama_cpp(tmp_path / "llama.cpp")
    monkeypatch.setattr(export_module, "check_gguf", reading({"w0 w1": [3, 4], "w2": [5]}))
    assert export(model, tmp_path / "good", "gguf", llama_cpp=sources, text=text).verification[0].ok
    monkeypatch.setattr(export_module, "check_gguf", reading({"w0 w1": [3, 4], "w2": [6]}))
    with pytest.raises(CheckpointError, match="'w2' as other tokens"):
        export(model, tmp_path / "bad", "gguf", llama_cpp=sources, text=text)
    assert not (tmp_path / "bad").exists()


def test_what_an_engine_cannot_run_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    stock_model("gpt2").save_pretrained(tmp_path / "gpt2")
    convert(tmp_path / "gpt2", tmp_path / "gqa", 2)
    with pytest.raises(UnsupportedModelError, match="gqa_gpt2 is a class of its own"):
        export(tmp_path / "gqa", tmp_path / "out", "ct2")
    check = export_module.check_architecture
    phi = {"model_type": "phi", "num_attention_heads": 8, "num_key_value_heads": 2}
    with pytest.raises(UnsupportedModelError, match="as many KV heads as query heads"):
        check(phi, "gguf")
    with pytest.raises(UnsupportedModelError, match="old remote code"):
        check(phi, "ct2")
    check(phi, "onnx")
    with pytest.raises(UnsupportedModelError, match="--untie"):
        check({"model_type": "olmo2", "tie_word_embeddings": True}, "gguf")
    check({"model_type": "olmo2", "tie_word_embeddings": False}, "gguf")
