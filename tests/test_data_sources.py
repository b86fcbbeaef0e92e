"""What a name or a value stands for: every container, folders as they are found, values in memory, bounded memory."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from mha2gqa.data import Document, TextSource, opening, read_documents
from mha2gqa.data.opening import pieces
from mha2gqa.data.sniffing import SourceFile, split_of
from mha2gqa.errors import DataError, UsageError

TEXTS = ["w0 w1, w2", "w3\nw4", 'naïve — é "w5"']
TABLE = pyarrow.table({"id": range(3), "text": TEXTS})


def jsonl(path: Path, texts: list[str] = TEXTS) -> None:
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))


def table_text(delimiter: str) -> str:
    rows = "".join(f'{i}{delimiter}"{t.replace(chr(34), chr(34) * 2)}"\n' for i, t in enumerate(TEXTS))
    return f"id{delimiter}text\n{rows}"


def write_arrow_stream(path: Path) -> None:
    with pyarrow.ipc.new_stream(str(path), TABLE.schema) as sink:
        sink.write_table(TABLE)


WRITERS: dict[str, Callable[[Path], Any]] = {
    "jsonl": jsonl,
    "json": jsonl,
    "csv": lambda path: path.write_text(table_text(",")),
    "tsv": lambda path: path.write_text(table_text("\t")),
    "parquet": lambda path: pyarrow.parquet.write_table(TABLE, path),
    "arrow": write_arrow_stream,
    "feather": lambda path: pyarrow.feather.write_feather(TABLE, str(path)),
}


def zipped(data: bytes, name: str, path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, data)


PACKERS: dict[str, Callable[[bytes, str, Path], Any]] = {
    "gz": lambda data, name, path: path.write_bytes(gzip.compress(data)),
    "xz": lambda data, name, path: path.write_bytes(lzma.compress(data)),
    "bz2": lambda data, name, path: path.write_bytes(bz2.compress(data)),
    "zst": lambda data, name, path: path.write_bytes(zstandard.compress(data)),
    "zip": zipped,
}


# --- files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*WRITERS, "txt"])
def test_every_format_in_every_container(tmp_path: Path, kind: str) -> None:
    bare = tmp_path / f"a.{kind}"
    expected = ["w0\n w1"] if kind == "txt" else TEXTS
    if kind == "txt":
        bare.write_text(expected[0])
    else:
        WRITERS[kind](bare)
    assert list(read_documents(bare)) == expected
    for ending, pack in PACKERS.items():
        for name in (f"a.{kind}.{ending}", f"A.{kind.upper()}.{ending.upper()}"):
            packed = tmp_path / name
            pack(bare.read_bytes(), bare.name, packed)
            assert list(read_documents(packed)) == expected, name


@pytest.mark.parametrize("ending", [e for e in PACKERS if e != "zip"])
def test_a_truncated_file_is_an_error(tmp_path: Path, ending: str) -> None:
    """Also for Zstandard, whose readers end a truncated file in silence."""
    lines = b"".join(b'{"text": "%d"}\n' % (i * 7919**3) for i in range(20_000))
    PACKERS[ending](lines, "", whole := tmp_path / f"a.jsonl.{ending}")
    assert len(list(read_documents(whole))) == 20_000
    whole.write_bytes(whole.read_bytes()[:-20])
    with pytest.raises(DataError, match=rf"a.jsonl.{ending}: cannot be read"):
        list(read_documents(whole))


def test_all_frames_of_zstandard_are_read(tmp_path: Path) -> None:
    frames = [zstandard.compress(b'{"text": "%s"}\n' % t) for t in (b"w0", b"w1")]
    skipped = b"\x50\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"abc"
    (file := tmp_path / "a.jsonl.zst").write_bytes(frames[0] + skipped + frames[1])
    assert list(read_documents(file)) == ["w0", "w1"]


def test_content_counts_more_than_endings(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(gzip.compress(b'{"text": "w0"}\n'))
    assert list(read_documents(tmp_path / "a.jsonl")) == ["w0"]
    pyarrow.parquet.write_table(TABLE, tmp_path / "b.jsonl")
    assert list(read_documents(tmp_path / "b.jsonl")) == TEXTS


def test_archives_of_several_files(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("data/b.jsonl", '{"text": "w1"}')
        archive.writestr("data/a.csv", "text\nw0\n")
        archive.writestr("README.md", "card")
        archive.writestr("__MACOSX/data/b.jsonl", "rubbish")
    found = list(TextSource(tmp_path / "a.zip"))
    assert [d.text for d in found] == ["w0", "w1"]
    assert found[1].source == f"{tmp_path}/a.zip/data/b.jsonl:1"
    with zipfile.ZipFile(tmp_path / "c.zip", "w") as archive:
        archive.writestr("model.bin", "x")
    with pytest.raises(DataError, match=r"c.zip: no \.jsonl.* file in this archive"):
        TextSource(tmp_path / "c.zip")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.txt",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            "Git LFS pointer.*git lfs pull",
        ),
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        ("a.bin", b"\x80\x04\x00\x00\x00", "not UTF-8 at byte 2: a zero byte.*convert"),
        ("a.txt", "w0 w1".encode("utf-16"), "not UTF-8 at byte 3"),
        ("a.jsonl", b'{"text": "w0", "n": ' + b"1" * 5000 + b"}", "a.jsonl:1: this line is not JSON"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl:1: holds a JSON array"),
        ("a.csv", b"id,text\n1,w0\n2\n", "a.csv:3: a row of 1 fields under a header of 2"),
        ("a.csv", b'id,text\n1,"w0\n', "a.csv:2: not CSV"),
        ("a.csv", b"id,body\n1,w0\n", "no column 'text'; the columns are body, id"),
        ("a.csv", b"id,text\n1,\xff\n", "a.csv:2: not UTF-8 at byte 10"),
        ("a.arrow", b"ARROW1 and no more", "a.arrow: cannot be read"),
        ("a.zip", b"PK\x03\x04 and no more", "a.zip: cannot be read"),
    ],
)
def test_what_is_refused_by_name(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(read_documents(tmp_path / name))


def test_parquet_that_is_not_utf8(tmp_path: Path) -> None:
    raw = pyarrow.array([b"w0", b"\xff\xfe"], pyarrow.binary())
    bad = pyarrow.StringArray.from_buffers(2, raw.buffers()[1], raw.buffers()[2])
    pyarrow.parquet.write_table(pyarrow.table({"text": bad}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet: cannot be read"):
        list(read_documents(tmp_path / "a.parquet"))


# --- memory --------------------------------------------------------------------------------------------


def peak(run: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_bomb_is_refused_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "LINE_BYTES", 1 << 21)
    (file := tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(b'{"text": "' + b"a" * (64 << 20), preset=0))

    def read() -> None:
        with pytest.raises(DataError, match=r"a.jsonl.xz:1: a line of more than 2 MiB; split it"):
            list(read_documents(file))

    assert peak(read) < 16 << 20


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_limit_reads_little_more(tmp_path: Path, name: str) -> None:
    data = "é".encode() * (16 << 20)
    (tmp_path / name).write_bytes(gzip.compress(data, 1) if name.endswith("gz") else data)

    def read() -> None:
        assert list(read_documents(tmp_path / name, limit_bytes=1001)) == ["é" * 500]

    assert peak(read) < 1 << 21


def test_a_limit_cuts_a_line_that_alone_is_longer(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", ["w" * 50, "v" * 1000, "u"])
    assert list(read_documents(tmp_path / "a.jsonl", limit_bytes=60)) == ["w" * 50, "v" * 60]
    assert list(read_documents(tmp_path / "a.jsonl", limit_bytes=50)) == ["w" * 50]


@settings(max_examples=200, deadline=None)
@given(text=st.text("ab é\n😀", max_size=60), size=st.integers(4, 20), at_lines=st.booleans())
def test_pieces_are_the_text(
    tmp_path_factory: pytest.TempPathFactory, text: str, size: int, at_lines: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "pieces.txt"
    path.write_bytes(text.encode())
    found = list(pieces(SourceFile(path, "text"), size, at_lines=at_lines))
    assert "".join(found) == text
    assert all(len(piece.encode()) <= size + 4 for piece in found)


def test_long_text_is_read_in_pieces_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mha2gqa.data.formats.PIECE_BYTES", 64)
    text = "".join(f"line {i}\n" for i in range(40))
    (tmp_path / "a.txt").write_text(text)
    source = TextSource(tmp_path / "a.txt")
    found = [d.text for d in source]
    assert "".join(found) == text and len(found) > 4 and all(t.endswith("\n") for t in found)
    assert "read in pieces" in source.warnings[0]


def test_a_bad_byte_is_named_beyond_the_first_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mha2gqa.data.formats.PIECE_BYTES", 64)
    (tmp_path / "a.txt").write_bytes(b"012345678\n" * 30 + b"ab\xff")
    with pytest.raises(DataError, match=r"a.txt:31: not UTF-8 at byte 302"):
        list(read_documents(tmp_path / "a.txt"))


# --- folders -------------------------------------------------------------------------------------------


def test_a_downloaded_data_set_is_read_without_its_card(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    WRITERS["parquet"](tmp_path / "data" / "train-00000-of-00001.parquet")
    for name in ("README.md", "LICENSE.txt", "notes.md", ".gitattributes", "data/.cache.txt", "logo.png"):
        (tmp_path / name).write_text("not data")
    (tmp_path / "dataset_infos.json").write_text('{"default": {}}')
    source = TextSource(tmp_path)
    assert [d.text for d in source] == TEXTS
    (warning,) = source.warnings
    assert "not read: LICENSE.txt, README.md, dataset_infos.json, logo.png and 1 more" in warning


def test_text_beside_markdown_and_markdown_alone(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("w0")
    (tmp_path / "README.md").write_text("card")
    assert list(read_documents(tmp_path)) == ["w0"]
    (tmp_path / "b.txt").write_text("w1")
    source = TextSource(tmp_path)
    assert [d.text for d in source] == ["w1"] and "README.md, a.md" in source.warnings[0]


def test_mixed_kinds_are_read_together_and_said(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl.zst").write_bytes(zstandard.compress((tmp_path / "a.jsonl").read_bytes()))
    WRITERS["csv"](tmp_path / "c.csv")
    source = TextSource(tmp_path)
    assert [d.text for d in source] == TEXTS * 3
    assert "1 .csv, 1 .jsonl, 1 .jsonl.zst" in source.warnings[0]


def test_splits_are_not_mixed(tmp_path: Path) -> None:
    jsonl(tmp_path / "train-0.jsonl", ["w0"])
    jsonl(tmp_path / "train-1.jsonl", ["w1"])
    assert list(read_documents(tmp_path)) == ["w0", "w1"]
    jsonl(tmp_path / "test.jsonl", ["w2"])
    with pytest.raises(
        UsageError, match=r"several splits.*test \(1\), train \(2\); choose one with .*::test"
    ):
        TextSource(tmp_path)
    source = TextSource(f"{tmp_path}::train")
    assert [d.text for d in source] == ["w0", "w1"] and "split train, 2 of 3 files" in source.warnings[0]
    source = TextSource(f"{tmp_path}::all")
    assert [d.text for d in source] == ["w2", "w0", "w1"] and "test, train together" in source.warnings[0]
    assert "test, train together" in TextSource(str(tmp_path / "*.jsonl")).warnings[0]
    with pytest.raises(DataError, match="no files of a split validation; it has test, train"):
        TextSource(f"{tmp_path}::validation")
    with pytest.raises(DataError, match="no such folder"):
        TextSource(f"{tmp_path}/none::train")


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train-00000-of-00002.parquet", "train"),
        ("data/test/part.jsonl", "test"),
        ("wiki.valid.raw", "validation"),
        ("my_dev.jsonl", "validation"),
        ("latest.jsonl", None),
        ("developers.jsonl", None),
        ("trained.txt", None),
    ],
)
def test_splits_by_name(name: str, split: str | None) -> None:
    assert split_of(name) == split


def test_saved_data_sets(tmp_path: Path) -> None:
    import datasets

    table = datasets.Dataset.from_dict({"text": TEXTS, "id": [0, 1, 2]})
    table.save_to_disk(str(tmp_path / "one"))
    assert list(read_documents(tmp_path / "one")) == TEXTS
    both = datasets.DatasetDict(train=table, test=table.select([0]))
    both.save_to_disk(str(tmp_path / "two"))
    assert list(read_documents(f"{tmp_path}/two::test")) == TEXTS[:1]
    assert list(read_documents(f"{tmp_path}/two::all")) == [TEXTS[0], *TEXTS]
    with pytest.raises(UsageError, match=r"several splits.*test, train"):
        TextSource(tmp_path / "two")
    with pytest.raises(UsageError, match="several splits"):
        TextSource(both)


# --- values in memory ----------------------------------------------------------------------------------


def texts_of(data: Any, **options: Any) -> list[str]:
    source = TextSource(data, **options)
    found = [d.text for d in source]
    assert [d.text for d in source] == found  # as often as needed
    return found


def test_values_in_memory(tmp_path: Path) -> None:
    import datasets

    jsonl(file := tmp_path / "a b.jsonl")
    table = datasets.Dataset.from_dict({"text": TEXTS, "body": ["x", "y", "z"]})
    for data in (str(file), file, [str(file)], (file,)):
        assert texts_of(data) == TEXTS
    for data in (
        TEXTS,
        tuple(TEXTS),
        iter(TEXTS),
        (t for t in TEXTS),
        table,
        table["text"],
        table.to_pandas(),
    ):
        assert texts_of(data) == TEXTS
    assert texts_of(table, text_column="body") == ["x", "y", "z"]
    assert texts_of([{"text": "w0"}, {"text": None}, {"text": "w1"}]) == ["w0", "w1"]
    assert texts_of([Document("w0", "here")]) == ["w0"]
    assert texts_of(iter(["w0"])) == ["w0"]  # texts for sure: paths come in a list
    assert texts_of(table.to_iterable_dataset()) == TEXTS


@pytest.mark.parametrize(
    "data",
    [
        [[1, 2, 3], [4]],
        [np.array([1, 2, 3]), np.array([4], dtype=np.uint16)],
        ([1, 2, 3] if i == 0 else [4] for i in range(2)),
        [torch.tensor([1, 2, 3]), torch.tensor([4])],
    ],
)
def test_token_ids_in_memory(data: Any) -> None:
    found = [d.ids for d in TextSource(data)]
    assert [ids.tolist() for ids in found if ids is not None] == [[1, 2, 3], [4]]


def test_rows_of_a_tensor_are_documents() -> None:
    found = [d.ids for d in TextSource(torch.arange(6).view(2, 3))]
    assert [ids.tolist() for ids in found if ids is not None] == [[0, 1, 2], [3, 4, 5]]


def failing() -> Iterator[str]:
    yield "w0"
    raise ZeroDivisionError("mine")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            "Once upon a time\nthere was",
            "cannot be a path; a str is one path; give texts as a list|a str is one",
        ),
        ("x" * 5000, "a str is one path"),
        ("once upon", "neither a local file nor a dataset"),
        (["text"], "text: neither a local file nor a dataset"),
        ([], "no evaluation or training text"),
        ("", "an empty name"),
        ([""], "an empty name"),
        (["none.jsonl"], "none.jsonl: no such file"),
        (["none.jsonl", "once upon a time"], "give paths or texts, not both"),
        (3, "int is not data; give a path"),
        ({"text": ["w0"]}, "a mapping with the keys text"),
        ([3], "a int is not a document"),
        ([b"bytes"], "a bytes is not a document"),
        ([[0.5]], "a list is not a document"),
        ([{"body": "w0"}], "no column 'text'; the columns are body"),
        (failing(), "cannot be drawn .ZeroDivisionError: mine"),
    ],
)
def test_values_that_are_no_data(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(TextSource(data))


@pytest.mark.parametrize("name", ["text", "json", "csv:default:train", "audiofolder"])
def test_a_format_is_no_data_set(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` would read whatever lies below the current folder."""
    for file in ("a.txt", "a.json", "a.csv"):
        (tmp_path / file).write_text('{"text": "found"}')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"neither a local file nor a dataset.*names a format"):
        list(TextSource([name]))


def test_empty_rows_are_counted(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", ["w0", "", "  \n", "w1", ""])
    source = TextSource(tmp_path / "a.jsonl")
    assert [(d.text, d.row) for d in source] == [("w0", 1), ("w1", 4)] and source.empty == 3
