"""Tensors that older versions saved beside the weights: they are copied, and nobody takes them for weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from families import inputs, logits, stock_model
from safetensors.torch import load_file, save_file
from test_seq2seq import WINDOW, saved_t5
from torch import Tensor

from mha2gqa.architectures.leftovers import without_leftovers
from mha2gqa.conversion import convert, convert_model
from mha2gqa.errors import CheckpointError
from mha2gqa.loading import load_model
from mha2gqa.verification import verify

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
    with pytest.raises(CheckpointError, match=r"unexpected_keys': \['transformer\.h\.0\.attn\.typo\.weight'"):
        convert(source, tmp_path / "out", 2)
    assert not (tmp_path / "out").exists()
    learned = ["model.decoder.embed_positions.weight", "h.0.attn.c_attn.bias"]
    assert without_leftovers(learned) == sorted(learned)


@pytest.mark.parametrize("name", ["t5", "umt5"])
def test_the_first_t5s_relative_bias_of_cross_attention_is_not_part_of_the_model(
    name: str, tmp_path: Path
) -> None:
    """google-t5/t5-small and its kin hold one; transformers ignores it, and so does calibration."""
    rng = np.random.default_rng(0)
    rows = [" ".join(f"w{w}" for w in rng.integers(0, 40, 50)) for _ in range(40)]
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    plain = saved_t5(tmp_path / "plain", name=name)
    stray = torch.randn(32, 8)
    held = with_tensors(saved_t5(tmp_path / "held", name=name), {STRAY: stray})
    words = {
        "calibration": [str(text)], "calibration_tokens": 40 * WINDOW, "calibration_window": WINDOW,
        "grouping": "search", "reconstruct": False, "device": "cpu",
    }  # fmt: skip
    if name == "umt5":  # its class has never known such a tensor
        with pytest.raises(CheckpointError, match="1 unexpected"):
            convert(held, tmp_path / "out", 2, **words)
        return
    convert(plain, tmp_path / "right", 2, **words)
    convert(held, tmp_path / "out", 2, **words)
    right, out = (load_file(tmp_path / f / "model.safetensors") for f in ("right", "out"))
    assert torch.equal(out.pop(STRAY), stray)
    assert out.keys() == right.keys() and all(torch.equal(out[key], x) for key, x in right.items())
    assert verify(tmp_path / "out", against=held, full=True).ok
