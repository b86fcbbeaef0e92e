"""Encoder-decoders from end to end: span-corruption loss, uptraining, saving, generation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import word_tokenizer
from families import PICOS, inputs, logits, stock_model
from torch.nn import functional as F

from mha2gqa.checkpoints.loading import load_model, load_tokenizer
from mha2gqa.conversion.checkpoint import convert, convert_model
from mha2gqa.data import span_corruption, token_blocks
from mha2gqa.errors import DataError, UsageError
from mha2gqa.evaluation import LoadedModel, evaluate
from mha2gqa.uptraining import UptrainConfig, train_model, uptrain
from mha2gqa.uptraining.batches import BlockOrder, SpanCollator
from mha2gqa.uptraining.budget import learning_rate_factor
from mha2gqa.uptraining.prepare import choose_objective, choose_window

WINDOW = 30


def texts() -> list[str]:
    rng = np.random.default_rng(0)
    return [" ".join(f"w{w}" for w in rng.integers(0, 40, 50)) for _ in range(40)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts()))
    return path


def saved_t5(folder: Path, sentinels: int = 10, name: str = "t5") -> Path:
    """A pico T5 with 80 embeddings and a tokenizer of 60 words and some sentinels."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(word_tokenizer(folder))
    extra = [f"<extra_id_{i}>" for i in range(sentinels)]
    tokenizer.add_special_tokens({"additional_special_tokens": extra, "pad_token": "<pad>"})
    model = stock_model(name)
    model.resize_token_embeddings(80)
    with torch.no_grad():
        model.shared.weight.normal_(std=0.5)
    model.config.decoder_start_token_id = model.config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def expected_loss(folder: Path, window: int) -> float:
    """Mean target loss by the model's own loss, block after block."""
    model, tokenizer = load_model(folder, device="cpu"), load_tokenizer(folder)
    made = span_corruption(tokenizer, model.config.to_dict(), window)
    blocks = token_blocks(tokenizer, texts(), window)[:, :-1]
    encoder, targets = made(blocks.numpy(), range(len(blocks)))
    with torch.no_grad():
        out = model(input_ids=torch.from_numpy(encoder), labels=torch.from_numpy(targets))
    assert (model._shift_right(torch.from_numpy(targets)).numpy() == made.decoder_inputs(targets)).all()
    return float(out.loss)


def test_the_score_is_the_models_own_loss_of_every_target(tmp_path: Path, data: Path) -> None:
    folder = saved_t5(tmp_path / "t5")
    right = expected_loss(folder, WINDOW)
    for batch_size in (1, 3, 16):
        result = evaluate(folder, str(data), window=WINDOW, batch_size=batch_size, device="cpu")
        model = result.models[0]
        assert model.loss == pytest.approx(right, rel=1e-5)
        blocks = (50 + 1) * 40 // WINDOW - (0 if (50 + 1) * 40 % WINDOW else 1)
        assert model.tokens == blocks * (4 + 1 + 1)  # 30 tokens: 4 of noise in 1 span, and the end
    assert result.protocol == "span-corruption"
    chosen, rest, bits = result.warnings
    assert rest == f"not scored: {51 * 40 - 1 - blocks * WINDOW} tokens after the last whole block"
    assert chosen == "encoder-decoder: scored by span-corruption"
    assert bits.startswith("bits/byte is the loss of the corrupted spans over the bytes of the whole text")
    limited = evaluate(folder, str(data), protocol="span-corruption", window=WINDOW, max_tokens=20)
    assert limited.models[0].tokens == 18 and limited.warnings == [bits]


def test_original_and_converted_are_scored_on_the_same_targets(tmp_path: Path, data: Path) -> None:
    source = saved_t5(tmp_path / "t5")
    convert(source, tmp_path / "gqa", 2)
    result = evaluate([source, tmp_path / "gqa"], str(data), window=WINDOW, against=source, device="cpu")
    original, converted = result.models
    assert original.sha256 == converted.sha256 and result.comparison == "tokens"
    assert converted.kv_bytes_per_token == original.kv_bytes_per_token // 4
    assert converted.kl is not None and converted.kl > 0


def test_kinds_of_models_and_protocols_that_do_not_go_together(tmp_path: Path, data: Path) -> None:
    t5, gpt2 = saved_t5(tmp_path / "t5"), word_tokenizer(tmp_path / "gpt2")
    stock_model("gpt2").save_pretrained(gpt2)
    with pytest.raises(UsageError, match="window does not fit an encoder-decoder; try protocol span"):
        evaluate([t5, gpt2], str(data))
    with pytest.raises(UsageError, match="does not fit a decoder; try protocol blocks"):
        evaluate(gpt2, str(data), protocol="span-corruption")
    none = saved_t5(tmp_path / "none", sentinels=0)
    with pytest.raises(DataError, match="an encoder-decoder needs the columns source and target"):
        evaluate(none, str(data), window=WINDOW, device="cpu")
    with pytest.raises(UsageError, match="use span-corruption"):
        choose_objective(UptrainConfig("m", "o", (), objective="next-token"), {"model_type": "t5"})
    with pytest.raises(UsageError, match="use next-token"):
        choose_objective(UptrainConfig("m", "o", (), objective="span-corruption"), {"model_type": "llama"})


def test_default_blocks_are_t5s_for_encoder_decoders_only() -> None:
    assert choose_window(None, {"model_type": "t5"}, "m") == 568
    assert choose_window(None, {"model_type": "llama", "max_position_embeddings": 512}, "m") == 512


def collator() -> SpanCollator:
    from mha2gqa.data import SpanCorruption

    return SpanCollator(SpanCorruption(20, tuple(range(900, 910)), 1, 0))


def test_each_pass_over_the_data_takes_other_spans_out() -> None:
    blocks = np.arange(3 * 61).reshape(3, 61) % 800 + 2
    from mha2gqa.data import SpanCorruption

    made = SpanCollator(SpanCorruption(60, tuple(range(900, 910)), 1, 0))
    order = BlockOrder(blocks, 6, 0, made)
    first = {order.row(i): order[i]["labels"].tolist() for i in range(3)}
    second = {order.row(i): order[i]["labels"].tolist() for i in range(3, 6)}
    assert first.keys() == second.keys() == {0, 1, 2}
    assert all(first[row] != second[row] for row in first)
    again = BlockOrder(blocks, 6, 0, made).__getitems__([0, 1, 2, 3])  # whatever the batch
    assert again["labels"][3].tolist() == order[3]["labels"][0].tolist()


def test_a_stream_of_blocks_is_corrupted_by_what_it_holds() -> None:
    rows = [np.arange(21) + 2, np.arange(21) + 50]
    batch = collator()(rows)
    assert set(batch) == {"input_ids", "decoder_input_ids", "labels"}
    assert torch.equal(collator()(rows[1:])["labels"], batch["labels"][1:])


def test_training_minimises_the_loss_of_the_targets(tmp_path: Path) -> None:
    """One step without decay or warm-up moves the weights as plain AdamW on the model's own loss does."""
    folder = saved_t5(tmp_path / "t5")
    tokenizer = load_tokenizer(folder)
    blocks = token_blocks(tokenizer, texts(), WINDOW)
    model, twin = load_model(folder, device="cpu"), load_model(folder, device="cpu")
    collate = SpanCollator(span_corruption(tokenizer, model.config.to_dict(), WINDOW))
    options: dict[str, Any] = {"learning_rate": 1e-2, "warmup_steps": 0, "lr_scheduler_type": "constant"}
    result = train_model(
        model,
        blocks.numpy(),
        collate=collate,
        tokens=8 * WINDOW,
        batch_tokens=8 * WINDOW,
        per_device_train_batch_size=4,
        weight_decay=0.0,
        logging_steps=1,
        device="cpu",
        **options,
    )
    batch = BlockOrder(blocks.numpy(), 8, 0, collate).__getitems__(list(range(8)))
    loss = twin(**batch).loss
    assert result.losses["train"][0]["loss"] == pytest.approx(loss.item(), rel=1e-4)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
    torch.optim.AdamW(twin.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0).step()
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("teacher", [None, "none"])
def test_a_converted_t5_is_uptrained_and_saved_as_it_came(
    tmp_path: Path, data: Path, teacher: str | None
) -> None:
    source = saved_t5(tmp_path / "t5", name="t5-untied")
    convert(source, tmp_path / "gqa", 2)
    result = uptrain(
        tmp_path / "gqa",
        tmp_path / "up",
        str(data),
        tokens=16 * WINDOW * 6,
        batch_tokens=16 * WINDOW,
        window=WINDOW,
        learning_rate=3e-3,
        teacher=teacher,
        holdout=0.2,
        device="cpu",
        logging_steps=1,
        optim="adafactor",
        lr_scheduler_type="inverse_sqrt",
        warmup_steps=2,
    )
    assert result.teacher == (None if teacher else str(source.resolve()))
    assert result.losses["held_out_end"] < result.losses["held_out_start"]
    out = tmp_path / "up"
    assert (out / "modeling_gqa_t5.py").read_bytes() == (tmp_path / "gqa" / "modeling_gqa_t5.py").read_bytes()
    assert (out / "config.json").read_bytes() == (tmp_path / "gqa" / "config.json").read_bytes()
    load_model(out, device="cpu")  # complete


def test_only_decoder_attention_moves_if_only_attention_is_trained(tmp_path: Path, data: Path) -> None:
    from safetensors.torch import load_file

    convert(saved_t5(tmp_path / "t5"), tmp_path / "gqa", 2)
    options = {"tokens": 960, "batch_tokens": 480, "window": WINDOW, "device": "cpu", "holdout": 0.0}
    uptrain(tmp_path / "gqa", tmp_path / "up", str(data), train="attention", teacher="none", **options)
    before, after = (load_file(tmp_path / f / "model.safetensors") for f in ("gqa", "up"))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and all("decoder" in name and "Attention" in name for name in moved)
    assert any("EncDecAttention.k" in name for name in moved)


def test_t5s_schedule_is_flat_and_then_falls_with_the_root_of_the_step() -> None:
    factors = [learning_rate_factor(step, 10_000, 100, "inverse_sqrt") for step in (0, 50, 100, 400, 10_000)]
    assert factors == pytest.approx([1, 1, 1, 0.5, 0.1])
    assert learning_rate_factor(0, 10, 0, "inverse_sqrt") == 1


def test_models_in_memory_are_scored_too(tmp_path: Path, data: Path) -> None:
    folder = saved_t5(tmp_path / "t5")
    model, tokenizer = load_model(folder, device="cpu"), load_tokenizer(folder)
    narrow = convert_model(model, 8)
    result = evaluate(
        [LoadedModel("mha", model, tokenizer), LoadedModel("gqa-8", narrow, tokenizer)],
        str(data),
        window=WINDOW,
        device="cpu",
    )
    assert result.models[0].loss == pytest.approx(result.models[1].loss, rel=1e-6)
    assert PICOS["t5"][1]["num_heads"] == 8
    batch = inputs("t5")
    assert F.mse_loss(logits(narrow, batch), logits(model, batch)) < 1e-10


def test_dropout_is_off_while_uptraining_unless_asked_for() -> None:
    from torch import nn

    from mha2gqa.uptraining.model_prep import set_dropout

    for name in ("t5", "bart", "gpt2", "opt", "bloom", "mpt"):
        model = stock_model(name)
        set_dropout(model, 0.5)
        torch.manual_seed(0)
        noisy = [model.train()(**inputs(name)).logits for _ in range(2)]
        assert not torch.equal(*noisy), name
        assert set_dropout(model, 0.0) == 0.5
        torch.testing.assert_close(model.train()(**inputs(name)).logits, model.eval()(**inputs(name)).logits)
        assert all(m.p == 0 for m in model.modules() if isinstance(m, nn.Dropout))
    with pytest.raises(UsageError, match="must be >= 0 and < 1"):
        UptrainConfig("m", "o", (), dropout=1.0)
