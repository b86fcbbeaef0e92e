"""Tensors that older versions saved beside the weights: they are copied, and nobody takes them for weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import word_tokenizer
from families import PICOS, inputs, logits, stock_model
from safetensors.torch import load_file, save_file
from test_seq2seq import WINDOW, saved_t5
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from mha2gqa.checkpoints.ignored_keys import without_ignored
from mha2gqa.checkpoints.loading import load_model
from mha2gqa.checkpoints.reader import open_checkpoint
from mha2gqa.conversion.checkpoint import convert, convert_model
from mha2gqa.errors import CheckpointError, DataError
from mha2gqa.uptraining import uptrain
from mha2gqa.uptraining.publish import named_as_stored
from mha2gqa.verification.checks import verify

STRAY = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
MASKS = {
    f"transformer.h.{layer}.attn.{name}": x
    for layer in range(2)
    for name, x in (("bias", torch.ones(1, 1, 64, 64).tril()), ("masked_bias", torch.tensor(-1e9)))
}
SINUSOIDS = {f"model.{half}.embed_positions.weights": torch.ones(66, 32) for half in ("encoder", "decoder")}


def with_tensors(folder: Path, more: dict[str, Tensor]) -> Path:
    """The checkpoint with tensors added to its file."""
    file = folder / "model.safetensors"
    save_file({**load_file(file), **more}, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(("name", "more"), [("gpt2", MASKS), ("m2m_100", SINUSOIDS)])
@pytest.mark.parametrize("groups", [2, 8])
def test_masks_and_tables_are_copied_and_change_nothing(
    name: str, more: dict[str, Tensor], groups: int, tmp_path: Path
) -> None:
    stock_model(name).save_pretrained(tmp_path / "in")
    source = with_tensors(tmp_path / "in", more)
    result = convert(source, tmp_path / "out", groups)
    assert [check for check in result.verification if not check.ok] == []
    assert verify(tmp_path / "out", against=source, full=True).ok
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(after[key], x) for key, x in more.items())
    model, expected = load_model(tmp_path / "out", device="cpu"), stock_model(name)
    if groups == 2:
        expected = convert_model(expected, 2)
    torch.testing.assert_close(
        logits(model, inputs(name)), logits(expected, inputs(name)), rtol=1e-4, atol=1e-4
    )


def test_a_tensor_that_is_no_buffer_is_still_too_many(tmp_path: Path) -> None:
    stock_model("gpt2").save_pretrained(tmp_path / "in")
    source = with_tensors(tmp_path / "in", {"transformer.h.0.attn.typo.weight": torch.ones(2)} | MASKS)
    with pytest.raises(CheckpointError, match=r"1 unexpected: transformer\.h\.0\.attn\.typo\.weight;"):
        load_model(source, device="cpu")
    with pytest.raises(
        CheckpointError, match=r"unknown to the class: transformer\.h\.0\.attn\.typo\.weight;"
    ):
        convert(source, tmp_path / "out", 2)
    assert not (tmp_path / "out").exists()
    learned = ["model.decoder.embed_positions.weight", "h.0.attn.c_attn.bias"]
    assert without_ignored(learned) == sorted(learned)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    rows = [" ".join(f"w{w}" for w in rng.integers(0, 40, 50)) for _ in range(40)]
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return path


def test_the_first_t5s_relative_bias_of_cross_attention_is_not_part_of_the_model(
    tmp_path: Path, text: Path
) -> None:
    """google-t5/t5-small and its kin hold one; transformers ignores it, and so does calibration."""
    plain, stray = saved_t5(tmp_path / "plain"), torch.randn(32, 8)
    held = with_tensors(saved_t5(tmp_path / "held"), {STRAY: stray})
    words = {
        "calibration": [str(text)], "calibration_tokens": 40 * WINDOW, "calibration_window": WINDOW,
        "grouping": "search", "reconstruct": False, "device": "cpu",
    }  # fmt: skip
    convert(plain, tmp_path / "right", 2, **words)
    convert(held, tmp_path / "out", 2, **words)
    right, out = (load_file(tmp_path / f / "model.safetensors") for f in ("right", "out"))
    assert torch.equal(out.pop(STRAY), stray)
    assert out.keys() == right.keys() and all(torch.equal(out[key], x) for key, x in right.items())
    assert verify(tmp_path / "out", against=held, full=True).ok


def without_prefix(folder: Path, prefix: str) -> Path:
    """The checkpoint as a base model saves it."""
    file = folder / "model.safetensors"
    tensors = {name.removeprefix(prefix): x for name, x in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("name", ["t5", "gpt2"])
@pytest.mark.parametrize("train", ["all", "lora"])
def test_uptraining_keeps_them_and_trains_the_rest(name: str, train: str, tmp_path: Path, text: Path) -> None:
    """Such a run used to end in an error once everything was trained."""
    if name == "t5":
        source = with_tensors(saved_t5(tmp_path / "in"), {STRAY: torch.randn(32, 8)})
    else:  # as openai-community/gpt2 is stored
        stock_model("gpt2").save_pretrained(tmp_path / "in")
        source = without_prefix(with_tensors(word_tokenizer(tmp_path / "in"), MASKS), "transformer.")
    convert(source, tmp_path / "gqa", 2)
    result = uptrain(
        tmp_path / "gqa", tmp_path / "up", str(text), tokens=4 * WINDOW * 4, batch_tokens=4 * WINDOW,
        window=WINDOW, holdout=0.0, teacher="none", train=train, learning_rate=1e-3, device="cpu",
    )  # fmt: skip
    assert result.output == str(tmp_path / "up")
    before, after = (load_file(tmp_path / f / "model.safetensors") for f in ("gqa", "up"))
    leftover = {n for n in before if n == STRAY or n.endswith((".attn.bias", "masked_bias"))}
    assert len(leftover) == (1 if name == "t5" else 4)
    assert before.keys() == after.keys()
    moved = {n for n in before if not torch.equal(before[n], after[n])}
    shared = ("SelfAttention.k.weight", "c_attn.weight")
    assert not moved & leftover and {n for n in before if "encoder" not in n and n.endswith(shared)} <= moved
    load_model(tmp_path / "up", device="cpu")


def test_a_tensor_that_was_not_gathered_is_no_leftover(tmp_path: Path) -> None:
    """GPT-2's class minds no name with `attn.bias` in it, such as that of c_attn's bias."""
    model = stock_model("gpt2")
    model.save_pretrained(tmp_path / "in")
    source = open_checkpoint(with_tensors(tmp_path / "in", MASKS))
    state = model.state_dict()
    assert set(named_as_stored(model, state, source)) == set(source.tensors) - set(MASKS)
    del state["transformer.h.1.attn.c_attn.bias"]
    with pytest.raises(CheckpointError, match=r"1 trained tensors .*h\.1\.attn\.c_attn\.bias is missing"):
        named_as_stored(model, state, source)


@pytest.mark.parametrize("name", ["t5", "gpt2"])
def test_the_tokenizer_of_another_model_is_named(name: str, tmp_path: Path, text: Path) -> None:
    if name == "t5":
        source, embeddings = saved_t5(tmp_path / "in", sentinels=30), 80
        window = 440  # of 22 spans: their sentinels go up to id 82
    else:
        config = {**PICOS["gpt2"][1], "vocab_size": 50}
        AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **config)).save_pretrained(
            tmp_path / "in"
        )
        source, embeddings, window = word_tokenizer(tmp_path / "in"), 50, WINDOW
        text.write_text(json.dumps({"text": "w49 " * 3000}) + "\n")
    said = rf"the tokenizer gives id \d+, the model has {embeddings} embeddings"
    with pytest.raises(DataError, match=said):
        convert(source, tmp_path / "out", 2, calibration=[str(text)], calibration_window=window, device="cpu")
    with pytest.raises(DataError, match=said):
        uptrain(
            source,
            tmp_path / "out",
            str(text),
            tokens=2 * window,
            batch_tokens=window,
            window=window,
            device="cpu",
        )
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob("out*"))
