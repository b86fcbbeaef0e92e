"""Span corruption against T5's own arithmetic and a plain restatement of its rules."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import word_tokenizer

from mha2gqa.data.spans import (
    SpanCorruption,
    block_tokens,
    noise_counts,
    sentinel_ids,
    span_corruption,
)
from mha2gqa.errors import DataError, UsageError

SENTINELS = tuple(range(1000, 1100))


def corruption(tokens: int, seed: int = 0) -> SpanCorruption:
    return SpanCorruption(tokens, SENTINELS, eos=1, start=0, seed=seed)


def google_lengths(inputs_length: int) -> tuple[int, int]:
    """`random_spans_helper` of text-to-text-transfer-transformer, restated: (block, targets)."""

    def lengths(tokens: int) -> tuple[int, int]:
        noise = round(tokens * 0.15)
        spans = round(noise / 3.0)
        return tokens - noise + spans + 1, noise + spans + 1

    tokens = inputs_length
    while lengths(tokens + 1)[0] <= inputs_length:
        tokens += 1
    return tokens, lengths(tokens)[1]


@pytest.mark.parametrize("length", [64, 128, 256, 512, 1024, 2048])
def test_lengths_are_t5s(length: int) -> None:
    tokens, targets = google_lengths(length)
    assert block_tokens(length) == tokens
    made = SpanCorruption(tokens, tuple(range(1000, 1400)), 1, 0)
    assert (made.encoder_length, made.target_length) == (length, targets)


def test_the_published_figures() -> None:
    assert block_tokens(512) == 568 and corruption(568).target_length == 114
    assert noise_counts(284) == (43, 14)  # the reference model's training: 256 encoder ids, 58 targets
    assert (corruption(284).encoder_length, corruption(284).target_length) == (256, 58)


@pytest.mark.parametrize("tokens", [3, 7, 20, 284, 568])
def test_every_token_is_read_or_asked_for_and_nothing_else(tokens: int) -> None:
    blocks = np.arange(2, 2 + 5 * tokens).reshape(5, tokens) % 900 + 2
    made = corruption(tokens)
    encoder, targets = made(blocks, keys=range(5))
    count, spans = made.counts
    assert encoder.shape == (5, made.encoder_length) and targets.shape == (5, made.target_length)
    for block, read, asked in zip(blocks, encoder, targets, strict=True):
        assert read[-1] == asked[-1] == 1
        rebuilt, answers, current = [], {}, None
        for token in asked[:-1]:
            if token >= 1000:
                current = answers.setdefault(int(token), [])
            else:
                current.append(int(token))
        for token in read[:-1]:
            rebuilt += answers[int(token)] if token >= 1000 else [int(token)]
        assert rebuilt == block.tolist()
        assert list(answers) == list(SENTINELS[:spans])  # in order, starting after some text
        assert read[0] < 1000 and asked[0] == SENTINELS[0]
        assert sum(map(len, answers.values())) == count and min(map(len, answers.values())) >= 1


def test_noise_depends_on_seed_and_key_alone() -> None:
    rng = np.random.default_rng(0)
    blocks = rng.integers(2, 900, (6, 100))
    encoder, targets = corruption(100)(blocks, range(6))
    for row in range(6):
        alone = corruption(100)(blocks[row : row + 1], [row])
        assert np.array_equal(alone[0][0], encoder[row]) and np.array_equal(alone[1][0], targets[row])
    assert not np.array_equal(corruption(100)(blocks, range(1, 7))[0], encoder)
    assert not np.array_equal(corruption(100, seed=1)(blocks, range(6))[0], encoder)


def test_every_partition_is_equally_likely() -> None:
    """40 tokens: 6 of them noise, in 2 spans. T5 alternates text and noise and ends with noise."""
    runs = corruption(20).noise_runs(range(100))
    assert ((runs == 1).argmax(1) == 17).all()  # a single span is the last 3 of 20 tokens
    made = SpanCorruption(40, SENTINELS, 1, 0)
    assert made.counts == (6, 2)
    runs = made.noise_runs(range(33_000))
    firsts = np.bincount((runs == 0).sum(1), minlength=40)  # text before the first span: 1 … 33
    assert firsts[1:34].min() > 850 and firsts[1:34].max() < 1150 and firsts[34:].sum() == 0
    lengths = np.bincount((runs == 1).sum(1), minlength=6)[1:6]  # the first span: 1 … 5
    assert lengths.min() > 6300 and lengths.max() < 6900


def test_decoder_reads_the_targets_one_later() -> None:
    _, targets = corruption(50)(np.full((2, 50), 7), [0, 1])
    read = corruption(50).decoder_inputs(targets)
    assert (read[:, 0] == 0).all() and np.array_equal(read[:, 1:], targets[:, :-1])


def sentinel_tokenizer(path: Path, names: list[str]) -> object:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(word_tokenizer(path))
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    return tokenizer


def test_sentinels_are_found_by_name_in_any_order_of_ids(tmp_path: Path) -> None:
    ascending = sentinel_tokenizer(tmp_path / "a", [f"<extra_id_{i}>" for i in range(10)])
    descending = sentinel_tokenizer(tmp_path / "d", [f"<extra_id_{i}>" for i in reversed(range(10))])
    multilingual = sentinel_tokenizer(tmp_path / "m", [f"▁<extra_id_{i}>" for i in range(10)])
    assert sentinel_ids(ascending) == list(range(60, 70)) == sentinel_ids(multilingual)
    assert sentinel_ids(descending) == list(range(69, 59, -1))
    made = span_corruption(descending, {"decoder_start_token_id": 5, "pad_token_id": 6}, 60)
    assert made.sentinels == (69, 68, 67) and (made.eos, made.start) == (0, 5)
    assert span_corruption(descending, {"pad_token_id": 6}, 60).start == 6


def test_missing_sentinels_and_short_blocks_are_errors_that_say_what_to_do(tmp_path: Path) -> None:
    few = sentinel_tokenizer(tmp_path / "few", ["<extra_id_0>", "<extra_id_1>"])
    with pytest.raises(DataError, match=r"14 sentinel tokens .* it has 2; use a window of at most 49"):
        span_corruption(few, {"pad_token_id": 0}, 284)
    none = sentinel_tokenizer(tmp_path / "none", [])
    with pytest.raises(
        DataError, match="it has none; use the tokenizer the T5 came with; other models read pairs"
    ):
        span_corruption(none, {"pad_token_id": 0}, 284)
    with pytest.raises(UsageError, match="cannot be corrupted"):
        span_corruption(few, {"pad_token_id": 0}, 2)
