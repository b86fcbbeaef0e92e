"""Whisper tells the times of words from some heads of its cross-attention, named by number: they stay those."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from families import assert_same, inputs, stock_model
from torch import Tensor, nn

from mha2gqa.checkpoints.loading import load_model
from mha2gqa.conversion.checkpoint import convert, convert_model

PAIRS = [[0, 1], [0, 6], [1, 3], [1, 7]]
ORDERS = {0: ((0, 7, 6, 2), (1, 3, 4, 5)), 1: ((5, 3, 0, 1), (2, 4, 6, 7))}


def whisper() -> nn.Module:
    """A model whose heads differ in queries only: any may share their keys and values without loss."""
    model = stock_model("whisper")
    model.generation_config.alignment_heads = PAIRS
    with torch.no_grad():
        for layer in model.model.decoder.layers:
            for name in ("k_proj", "v_proj"):
                weight = getattr(layer.encoder_attn, name).weight
                weight.copy_(weight[:4].repeat(8, 1))
                if (bias := getattr(layer.encoder_attn, name).bias) is not None:
                    bias.copy_(bias[:4].repeat(8))
    return model


def alignment(model: nn.Module, pairs: list[list[int]]) -> Tensor:
    """Attention of those heads to the sound, `[pairs, B, T, S]`."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(**inputs("whisper"), output_attentions=True).cross_attentions
    return torch.stack([weights[layer][:, head] for layer, head in pairs])


def groupings() -> dict[str, tuple[tuple[int, ...], ...]]:
    crossing = {f"model.decoder.layers.{layer}.encoder_attn": order for layer, order in ORDERS.items()}
    alone = tuple((head,) for head in range(8))
    return crossing | {f"model.decoder.layers.{layer}.self_attn": alone for layer in ORDERS}


@pytest.mark.parametrize("groups", [2, 4])
def test_alignment_heads_are_the_same_heads_in_a_result(groups: int, tmp_path: Path) -> None:
    model = whisper()
    model.save_pretrained(tmp_path / "in")
    before = json.loads((tmp_path / "in" / "generation_config.json").read_text())
    right = alignment(model, PAIRS)
    given = groupings() if groups == 2 else None  # else neighbours share, and no head moves
    convert(tmp_path / "in", tmp_path / "out", groups, method="mean", groupings=given, attention=("cross",))
    after = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    pairs = after.pop("alignment_heads")
    assert after == {key: x for key, x in before.items() if key != "alignment_heads"}
    assert pairs == ([[0, 4], [0, 2], [1, 1], [1, 7]] if groups == 2 else PAIRS)
    if groups == 4:
        files = [(tmp_path / f / "generation_config.json").read_bytes() for f in ("in", "out")]
        assert files[0] == files[1]
    result = load_model(tmp_path / "out", device="cpu")
    assert_same(alignment(result, pairs), right)


def test_alignment_heads_move_in_memory_too(tmp_path: Path) -> None:
    model = whisper()
    right = alignment(model, PAIRS)
    beyond = [[5, 0], [0, 99]]  # of another size of model: nobody reads them
    model.generation_config.alignment_heads = [*PAIRS, *beyond]
    result = convert_model(model, 2, attention=("cross",), groupings=groupings())
    pairs = result.generation_config.alignment_heads[: len(PAIRS)]
    assert result.generation_config.alignment_heads[len(PAIRS) :] == beyond
    assert pairs == [[0, 4], [0, 2], [1, 1], [1, 7]]
    assert_same(alignment(result, pairs), right)
    assert model.generation_config.alignment_heads == [*PAIRS, *beyond]
