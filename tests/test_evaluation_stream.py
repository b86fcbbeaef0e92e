"""The way of the text to the model: threads that tokenise ahead, batches that leave early, sums on the way."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import pico_llama, word_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mha2gqa.data import Document, Prefetcher, encoding
from mha2gqa.data.encoding import Encoded, encode, word_starts
from mha2gqa.errors import CheckpointError, DataError
from mha2gqa.evaluation import LoadedModel, Window, evaluate
from mha2gqa.evaluation.batching import make_batches
from mha2gqa.evaluation.metrics import Positions


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(word_tokenizer(tmp_path_factory.mktemp("t")))


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four threads that get one document each, however many cores there are."""
    monkeypatch.setattr(encoding, "encode_threads", lambda tokenizer: 4)
    monkeypatch.setattr(encoding, "ENCODE_DOCUMENTS", 1)


class Slowly:
    """A tokenizer that takes the longer for a text the earlier it comes; some texts it cannot take."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self.calls = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, texts: Any, **options: Any) -> Any:
        self.calls += 1
        time.sleep(0.02 / self.calls)
        if "w13" in texts[0]:
            raise RuntimeError("tokenizer broken")
        return self.tokenizer(texts, **options)


def documents(count: int) -> list[Document]:
    return [Document(f"w{i} w{i + 1}", f"d:{i}") for i in range(count)]


@pytest.mark.usefixtures("threads")
def test_documents_stay_in_order(tokenizer: PreTrainedTokenizerBase) -> None:
    found = list(encode(Slowly(tokenizer), documents(12)))
    assert [d.source for d in found] == [f"d:{i}" for i in range(12)]
    assert [d.ids.tolist() for d in found] == [[i + 3, i + 4] for i in range(12)]


def test_a_tokenizer_that_changes_itself_gets_one_thread(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding.os, "sched_getaffinity", lambda pid: range(16), raising=False)
    assert encoding.encode_threads(tokenizer) == 8
    monkeypatch.setattr(type(tokenizer), "_switch_to_input_mode", lambda self: None, raising=False)
    assert encoding.encode_threads(tokenizer) == 1


@pytest.mark.usefixtures("threads")
def test_an_error_comes_in_its_turn(tokenizer: PreTrainedTokenizerBase) -> None:
    def broken() -> Iterator[Document]:
        yield from documents(6)
        raise DataError("no text", where="d:6")

    found = encode(tokenizer, broken())
    assert [next(found).source for _ in range(6)] == [f"d:{i}" for i in range(6)]
    with pytest.raises(DataError, match="d:6: no text"):
        next(found)
    with pytest.raises(RuntimeError, match="tokenizer broken"):
        list(encode(Slowly(tokenizer), documents(20)))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("protocol", ["window", "blocks", "rolling", "wikitext2"])
def test_errors_of_the_text_reach_the_caller_and_no_thread_stays(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, protocol: str
) -> None:
    path = tmp_path / "text.jsonl"
    lines = [json.dumps({"text": "w1 w2 w3 w4 w5 w6 w7"}) for _ in range(40)]
    path.write_text("\n".join([*lines[:30], '{"text": ', *lines[30:]]))
    before = set(threading.enumerate())
    options: dict[str, Any] = {"protocol": protocol, "window": 8, "batch_size": 2}
    with pytest.raises(DataError, match=r"text\.jsonl:31: this line is not JSON"):
        evaluate(LoadedModel("m", pico_llama(), tokenizer), str(path), **options)
    assert set(threading.enumerate()) == before
    with pytest.raises(CheckpointError, match="the model has 4 embeddings"):
        text = [Document("w1 w2 w3 w4", "d")] * 1000
        evaluate(LoadedModel("m", pico_llama(vocab_size=4), tokenizer), text, **options)
    assert set(threading.enumerate()) == before


@pytest.mark.usefixtures("threads")
def test_text_beyond_the_limit_is_not_judged(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """What `max_tokens` leaves out cannot fail, however far ahead it was read."""
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "w1 w2 w3 w4 w5 w6 w7"}\n' * 3 + "broken\n")
    before = set(threading.enumerate())
    model = LoadedModel("m", pico_llama(), tokenizer)
    result = evaluate(model, str(path), protocol="window", window=8, max_tokens=12)
    assert result.models[0].tokens == 12
    assert set(threading.enumerate()) == before


def test_an_abandoned_prefetch_ends_its_thread_and_its_source() -> None:
    closed = threading.Event()

    def numbers() -> Iterator[int]:
        try:
            yield from iter(int, 1)
        finally:
            closed.set()

    before = set(threading.enumerate())
    with pytest.raises(ZeroDivisionError), Prefetcher(numbers(), depth=2) as ahead:
        assert next(ahead) == 0
        raise ZeroDivisionError
    assert closed.is_set() and set(threading.enumerate()) == before
    assert list(ahead) == []
    dropped = Prefetcher(numbers(), depth=2)
    (thread,) = set(threading.enumerate()) - before
    del dropped
    thread.join(5)
    assert not thread.is_alive()


def test_a_prefetch_begins_at_once() -> None:
    begun = threading.Event()

    def tell() -> Iterator[int]:
        begun.set()
        yield 1

    with Prefetcher(tell()):
        assert begun.wait(5)


def window_of(length: int, unit: int = 0) -> Window:
    return Window(np.arange(length + 1, dtype=np.int32), 0, unit, "")


def test_a_batch_of_equal_windows_leaves_at_once() -> None:
    """The model begins while the rest of the text is still being tokenised."""
    drawn = 0

    def windows(length: int) -> Iterator[Window]:
        nonlocal drawn
        while True:
            drawn += 1
            yield window_of(length)

    for length, rows in ((8, 4), (7, 4), (3, 10), (12, 2), (40, 1)):
        drawn = 0
        batch = next(make_batches(windows(length), 4, 8))
        assert (drawn, len(batch.windows)) == (rows, rows)


@given(st.lists(st.integers(1, 12), max_size=300), st.integers(1, 3))
def test_every_window_is_in_one_batch_and_no_batch_too_large(lengths: list[int], batch_size: int) -> None:
    made = list(make_batches([window_of(n, i) for i, n in enumerate(lengths)], batch_size, 8))
    assert sorted(w.unit for b in made for w in b.windows) == list(range(len(lengths)))
    assert all(b.inputs.numel() <= batch_size * 8 or len(b.windows) == 1 for b in made)
    assert all(b.highest == max(len(w.ids) - 1 for w in b.windows) for b in made)
    for batch in made:
        assert batch.context.tolist() == [i + 1 for w in batch.windows for i in range(w.scored)]
        flat = batch.inputs.flatten()
        assert torch.equal(flat[batch.positions] + 1, batch.targets)


@given(
    st.text("aé\u3000 \n\U0001f600", max_size=12) | st.text(max_size=60),
    st.integers(0, 60),
    st.integers(0, 60),
)
def test_a_text_is_measured_by_its_bytes_and_words(text: str, one: int, other: int) -> None:
    ids = np.zeros(len(text), dtype=np.int32)  # a token per character
    encoded = Encoded(ids, text, "", word_starts(text), lambda i: i + 1)
    for end in sorted((one, other)):
        part = text[:end].encode("utf-8", "surrogatepass")
        assert encoded.bytes_words(end) == (len(part), len(text[:end].split()))
    assert encoded.fields == len(re.split(r"\s+", text))


def test_white_space_is_what_split_takes_for_it() -> None:
    assert encoding.SPACES.sum() == sum(chr(i).isspace() for i in range(0x110000))


def test_positions_are_means_by_length_of_context() -> None:
    positions = Positions()
    rng = np.random.default_rng(0)
    context, values = rng.integers(1, 70, 900), rng.random(900)
    for part in (slice(0, 100), slice(100, 900)):
        positions.add(values[part], context[part])
    curve = positions.curve()
    assert [(p.low, p.high) for p in curve] == [
        (1, 1),
        (2, 2),
        (3, 4),
        (5, 8),
        (9, 16),
        (17, 32),
        (33, 64),
        (65, 128),
    ]
    for point in curve:
        inside = (context >= point.low) & (context <= point.high)
        assert point.tokens == inside.sum() and point.loss == pytest.approx(values[inside].mean(), rel=1e-12)
    assert positions.total == pytest.approx(values.sum(), rel=1e-12)
