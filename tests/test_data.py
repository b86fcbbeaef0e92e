"""Reading, tokenising, cutting, splitting: exact counts, flat memory, errors that name the place."""

from __future__ import annotations

import gzip
import json
import lzma
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import word_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mha2gqa.data import (
    Place,
    Prefetcher,
    bos_id,
    cut,
    encode_documents,
    held_out,
    read_documents,
    read_records,
    token_blocks,
)
from mha2gqa.errors import DataError, UsageError

TEXTS = ["w0 w1 w2", "", "w3\n", "naïve — é w4"]
JSONL = "".join(json.dumps({"text": t, "id": 1}) + "\n" for t in TEXTS)
FULL = [t for t in TEXTS if t]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(word_tokenizer(tmp_path_factory.mktemp("t")))


@pytest.fixture(scope="module")
def bos_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(word_tokenizer(tmp_path_factory.mktemp("t"), bos=True))


# --- reading -------------------------------------------------------------------------------------------


def test_every_format_gives_the_same_texts(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "a.jsonl").write_text(JSONL)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(JSONL.encode()))
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(JSONL.encode()))
    pyarrow.parquet.write_table(
        pyarrow.table({"text": [*TEXTS, None], "id": range(5)}), tmp_path / "a.parquet"
    )
    for file in ("a.jsonl", "a.jsonl.gz", "a.jsonl.xz", "a.parquet"):
        assert list(read_documents(tmp_path / file)) == FULL, file
    assert list(read_documents(tmp_path)) == FULL * 4
    assert list(read_documents(str(tmp_path / "*.jsonl*"))) == FULL * 3
    assert list(read_documents([tmp_path / "a.jsonl", tmp_path / "a.parquet"])) == FULL * 2


def test_a_text_file_is_one_document_to_the_byte(tmp_path: Path) -> None:
    text = "one\r\ntwo\n\n  naïve \x0b x\u2028y"
    for name, data in (("a.txt", text.encode()), ("a.txt.xz", lzma.compress(text.encode()))):
        (tmp_path / name).write_bytes(data)
        assert list(read_documents(tmp_path / name)) == [text]
    (tmp_path / "bom.txt").write_bytes(b"\xef\xbb\xbfw0")
    assert list(read_documents(tmp_path / "bom.txt")) == ["w0"]


def test_rows_are_those_of_the_wikitext_dataset(tmp_path: Path) -> None:
    (tmp_path / "wiki.test.raw").write_text(" \n = A = \n \n b c \n")
    assert [d.text for d in read_records(tmp_path / "wiki.test.raw", rows=True)] == [
        "",
        " = A = \n",
        "",
        " b c \n",
    ]


def test_sources_name_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(JSONL)
    assert [d.source for d in read_records(file)] == [f"{file}:1", f"{file}:3", f"{file}:4"]


def test_chats_are_kept_as_messages(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"messages": chat}) + "\n")
    (document,) = read_records(file, text_column="messages")
    assert list(document.messages or ()) == chat
    with pytest.raises(DataError, match="chat messages"):
        list(read_documents(file, text_column="messages"))


def test_limit_bytes_stops_at_a_document(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(JSONL)
    assert list(read_documents(tmp_path / "a.jsonl", limit_bytes=9)) == FULL[:2]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b'{"text": "w0"}\n{"text": \n', r"a\.jsonl:2: this line is not JSON"),
        ("a.jsonl", b'{"text": "w0"}\n["w0"]\n', r"a\.jsonl:2: this line is a JSON list"),
        ("a.jsonl", b'{"body": "w0", "id": 1}\n', r"a\.jsonl:1: no column 'text'; the columns are body, id"),
        ("a.jsonl", b'{"text": 5}\n', r"a\.jsonl:1: column 'text' holds a int"),
        ("a.jsonl", b'{"text": "w0"}\n{"text": "\xff"}\n', r"a\.jsonl:2: not UTF-8 at byte 25"),
        ("a.txt", b"w0 \xe9 w1", r"a\.txt:1: not UTF-8 at byte 3"),
        ("a.txt", b"", "no text"),
        ("a.jsonl", b'{"text": "  "}\n', "no text"),
        ("a.jsonl.gz", gzip.compress(JSONL.encode(), mtime=0)[:-9], "cannot be read"),
        ("a.jsonl.xz", lzma.compress(JSONL.encode())[:-9], "cannot be read"),
        ("a.jsonl.gz", b"not gzip", "cannot be read"),
        ("a.parquet", b"not parquet", "cannot be read"),
    ],
)
def test_corrupt_input_names_the_place(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said) as caught:
        list(read_documents(tmp_path / name))
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_parquet_names_its_columns(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"b": ["x"], "a": [1]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="no column 'text'; the columns are a, b"):
        list(read_documents(tmp_path / "a.parquet"))


@pytest.mark.parametrize(
    "name", ["none.jsonl", "./none", "/none/at/all", "*.none", "no-such-org/no-such-data"]
)
def test_what_is_not_there(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"no such file|no file matches|neither a local file"):
        list(read_documents(name))
    with pytest.raises(DataError, match="file in this folder"):
        list(read_documents(tmp_path))


def test_reading_streams(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "w0"}\n' * 3 + "broken\n")
    texts = read_documents(file)
    assert [next(texts) for _ in range(3)] == ["w0"] * 3  # the broken line has not been read yet


# --- tokens --------------------------------------------------------------------------------------------


def test_documents_end_with_eos(tokenizer: PreTrainedTokenizerBase) -> None:
    assert [ids.tolist() for ids in encode_documents(tokenizer, ["w0 w1", "w2"])] == [[3, 4, 0], [5, 0]]
    assert bos_id(tokenizer) is None


def test_bos_where_the_post_processor_puts_one(bos_tokenizer: PreTrainedTokenizerBase) -> None:
    assert bos_id(bos_tokenizer) == 2
    assert [ids.tolist() for ids in encode_documents(bos_tokenizer, ["w0 w1"])] == [[2, 3, 4, 0]]


def test_no_eos_is_an_error(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    bare = AutoTokenizer.from_pretrained(word_tokenizer(tmp_path))
    bare.eos_token = None
    with pytest.raises(DataError, match="end-of-text"):
        list(encode_documents(bare, ["w0"]))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    window=st.integers(1, 17),
    limit=st.none() | st.integers(1, 80),
)
def test_blocks_are_the_joined_stream(
    tokenizer: PreTrainedTokenizerBase, lengths: list[int], window: int, limit: int | None
) -> None:
    texts = [" ".join(f"w{(7 * i + j) % 57}" for j in range(n)) for i, n in enumerate(lengths)]
    stream = np.concatenate(list(encode_documents(tokenizer, texts)))
    count = (len(stream) - 1) // window
    if limit is not None:
        count = min(count, limit // window)
    if count == 0:
        with pytest.raises(DataError):
            token_blocks(tokenizer, texts, window, max_tokens=limit)
        return
    blocks = token_blocks(tokenizer, texts, window, max_tokens=limit)
    assert blocks.dtype == torch.int64 and blocks.shape == (count, window + 1)
    for i, block in enumerate(blocks):
        assert block.tolist() == stream[i * window : i * window + window + 1].tolist()


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    window=st.integers(1, 11),
    overlap=st.integers(0, 2),
    skip=st.integers(0, 5),
)
def test_blocks_know_their_place(lengths: list[int], window: int, overlap: int, skip: int) -> None:
    """Every id of the stream carries its own place, so a block's ids say where it begins and ends."""
    lengths[0] += skip + 1
    documents = [np.arange(n, dtype=np.int32) + 100 * i for i, n in enumerate(lengths)]
    stream = np.concatenate(documents)[skip:]
    starts = range(0, len(stream) - window - overlap + 1, window)
    found = []
    try:
        found += cut(documents, window, overlap=overlap, skip=skip)
    except DataError as error:
        assert not starts and f"has {len(stream)} tokens, one block needs {window + overlap}" in str(error)
    assert [b.ids.tolist() for b in found] == [stream[i : i + window + overlap].tolist() for i in starts]
    for block in found:
        assert block.first == Place(*divmod(int(block.ids[0]), 100))
        assert block.last == Place(*divmod(int(block.ids[-1]), 100))


def test_too_short_says_what_is_there_and_needed(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(DataError, match="the text has 3 tokens, one block needs 9"):
        token_blocks(tokenizer, ["w0 w1"], 8)
    with pytest.raises(DataError, match="less than one block"):
        token_blocks(tokenizer, ["w0 w1"], 8, max_tokens=7)
    with pytest.raises(UsageError, match="--window"):
        token_blocks(tokenizer, ["w0 w1"], 0)


# --- streams -------------------------------------------------------------------------------------------


def test_sides_are_a_function_of_the_words_alone() -> None:
    texts = [f"document {i}" for i in range(5000)]
    sides = [held_out(text, 0.1) for text in texts]
    assert 420 < sum(sides) < 580
    assert [held_out(f"  document\n {i} ", 0.1) for i in range(5000)] == sides
    assert [held_out(text, 0.1, seed=1) for text in texts] != sides
    assert not any(held_out(text, 0.0) for text in texts) and all(held_out(text, 1.0) for text in texts)


def test_prefetch_keeps_order_and_errors_and_ends_its_thread() -> None:
    assert list(Prefetcher(range(100))) == list(range(100))

    def failing() -> Iterator[int]:
        yield 1
        raise DataError("broken", where="a:2")

    items = Prefetcher(failing())
    assert next(items) == 1
    with pytest.raises(DataError, match="a:2: broken"):
        next(items)
    before = threading.active_count()
    endless = Prefetcher(iter(int, 1), depth=2)
    next(endless)
    endless.close()
    assert threading.active_count() == before
