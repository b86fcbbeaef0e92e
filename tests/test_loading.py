"""Loading: nothing incomplete is accepted, and every refusal says what and where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import pico_llama, word_tokenizer
from safetensors.torch import load_file, save_file

from mha2gqa.checkpoints import loading
from mha2gqa.checkpoints.hf_config import load_config_json, stored_dtype
from mha2gqa.checkpoints.loading import load_model, load_tokenizer, resolve_device, resolve_dtype
from mha2gqa.errors import CheckpointError, UsageError


def edit_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_tensors(folder: Path, drop: tuple[str, ...] = (), **add: torch.Tensor) -> None:
    file = folder / "model.safetensors"
    tensors = {n: x for n, x in load_file(file).items() if n not in drop}
    save_file(
        {**tensors, **{n.replace("__", "."): x for n, x in add.items()}}, file, metadata={"format": "pt"}
    )


def test_same_logits_in_eval_mode(pico: Path) -> None:
    model = load_model(pico, device="cpu")
    ids = torch.arange(20)[None]
    assert not model.training and model.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(model(ids).logits, pico_llama()(ids).logits)


def test_missing_and_unexpected_are_listed_sorted(pico: Path) -> None:
    gone = ("model.layers.1.self_attn.v_proj.weight", "model.layers.0.self_attn.k_proj.weight")
    edit_tensors(pico, drop=gone, zz=torch.zeros(1), aa=torch.zeros(1))
    with pytest.raises(CheckpointError) as caught:
        load_model(pico, device="cpu")
    message = str(caught.value)
    assert f"2 missing: {gone[1]}, {gone[0]}" in message and "2 unexpected: aa, zz" in message
    assert str(pico) in message and "\n" not in message


def test_another_shape_is_refused(pico: Path) -> None:
    edit_config(pico, num_key_value_heads=4)
    with pytest.raises(CheckpointError, match=r"k_proj\.weight \(32, 32\), the config needs \(16, 32\)"):
        load_model(pico, device="cpu")


def test_tied_embeddings_may_be_absent(tmp_path: Path) -> None:
    pico_llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    load_model(tmp_path, device="cpu")


def test_seq2seq_from_the_config(tmp_path: Path) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    assert isinstance(load_model(tmp_path, device="cpu"), T5ForConditionalGeneration)


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "no config.json"), ("{", "not valid JSON"), ("[]", "not a JSON object")],
)
def test_config_faults(tmp_path: Path, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=said):
        load_config_json(tmp_path)


def test_unknown_place_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither a local folder nor a Hub model"):
        load_model("no-such/model-anywhere", device="cpu")


def test_truncated_weights(pico: Path) -> None:
    file = pico / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_model(pico, device="cpu")


def test_own_code_needs_consent(pico: Path) -> None:
    edit_config(pico, model_type="my_llama", auto_map={"AutoConfig": "configuration_my.MyConfig"})
    with pytest.raises(UsageError, match="--trust-remote-code"):
        load_model(pico, device="cpu")


def test_memory_is_named(pico: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "free_memory", lambda device: 50_000)
    with pytest.raises(CheckpointError, match=r"need 0\.0 GB in float32, cpu has 0\.0 GB free"):
        load_model(pico, device="cpu")
    assert load_model(pico, device="cpu", dtype="bf16").dtype == torch.bfloat16  # half the bytes fit


def test_dtype_and_device_words() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert resolve_dtype("auto", cpu, torch.bfloat16) == torch.float32
    assert resolve_dtype("auto", cuda, torch.bfloat16) == torch.bfloat16
    assert resolve_dtype("fp16", cpu) == torch.float16
    assert stored_dtype({"text_config": {"torch_dtype": "bfloat16"}}) == torch.bfloat16
    assert stored_dtype({"dtype": "float16"}) == torch.float16
    with pytest.raises(UsageError, match="float99"):
        resolve_dtype("float99")
    with pytest.raises(UsageError, match="nowhere"):
        resolve_device("nowhere")


def test_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(word_tokenizer(tmp_path / "t"))("w0 w1")["input_ids"] == [3, 4]
    with pytest.raises(CheckpointError, match="tokenizer cannot be loaded"):
        load_tokenizer(tmp_path)
