"""Text in every container, whole and damaged; json, csv, pyarrow and the compressors say what is right."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import zipfile
from random import Random
from typing import Any

from .mutations import changed_bytes
from .trial import Room, Trial

VALUES: tuple[Any, ...] = (
    "hello", "é🙂", "", "  ", "a\u2028b\x85c\rd", "x" * 3000, "line\nline", None, 3, 1.5, True, [], {}, "\ud800", ["a"],
    [{"role": "user", "content": "x"}], [{"role": 1}], "\ufeff", "\x00",
)  # fmt: skip
LINES = (
    b"", b"   ", b"{", b"[]", b"null", b"3", b'{"text": 1}', b'{"text": "a"', b'{"text": "a"} x', b"\xff",
    b'{"text": "a", "text": "b"}', b'{"text": "\\ud800"}', b'{"text": "\x00"}', b'{"text": "a", "n": ' + b"1" * 5000 + b"}",
    b'{"text": ' + b"[" * 5000, b'{"text": NaN}', b"{'text': 'a'}", b'{"text": "a"}\r', b'{"": ""}', b'{"text": "\t"}',
    b'{"text": "' + b"x" * 100000 + b'"}',
)  # fmt: skip
PACKED = {"": lambda data: data, ".gz": lambda data: gzip.compress(data, 1), ".bz2": bz2.compress,
          ".xz": lambda data: lzma.compress(data, preset=0)}  # fmt: skip


def by_json(data: bytes) -> list[str] | None:
    """The texts of JSON lines; None where they are none."""
    found = []
    for number, raw in enumerate(data.split(b"\n")):
        try:
            line = raw.decode("utf-8-sig" if number == 0 else "utf-8")
            record = json.loads(line) if line.strip() else {"text": None}
        except (ValueError, RecursionError):
            return None
        text = record.get("text", 0) if isinstance(record, dict) else 0
        if text is not None and not isinstance(text, str):
            return None
        try:
            (text or "").encode()
        except UnicodeEncodeError:
            return None
        found += [text] if text and text.strip() else []
    return found or None


def text(rng: Random, room: Room) -> Trial:
    """JSON lines, in one of the compressions."""
    lines = []
    for _ in range(rng.choice((0, 1, 2, 5))):
        value = rng.choice(VALUES[:7]) if rng.random() < 0.8 else rng.choice(VALUES)
        lines.append(
            json.dumps({"text": value}, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
        )
    said = []
    for _ in range(rng.choice((0, 1, 1, 2))):
        lines.insert(rng.randrange(len(lines) + 1), line := rng.choice(LINES))
        said.append(repr(line[:20]))
    data = rng.choice((b"\n", b"\n", b"\r\n")).join(lines) + rng.choice((b"", b"\n", b"\n\n"))
    if rng.random() < 0.2:
        data, how = changed_bytes(rng, data)
        said.append(how)
    right, known = by_json(data), True
    ending = rng.choice(("", "", "", *PACKED, ".zip"))
    if ending == ".zip":
        held = io.BytesIO()
        with zipfile.ZipFile(held, "w") as archive:
            archive.writestr("t.jsonl", data)
        data = held.getvalue()
    else:
        data = PACKED[ending](data)
    if ending and rng.random() < 0.5:
        data, how = changed_bytes(rng, data)
        said.append(f"{how} of {ending}")
        known = False  # what is packed is no longer known, but checksums see most of it
    return _reading(room, f"t.jsonl{ending}", data, right, known, "; ".join(said))


def table(rng: Random, room: Room) -> Trial:
    """CSV, TSV and Parquet."""
    rows: list[Any] = [
        rng.choice(("hello", "é", "a,b", 'q"q', "l\nl", "", "x")) for _ in range(rng.choice((1, 2, 5)))
    ]
    kind = rng.choice((".csv", ".tsv", ".parquet"))
    if kind == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        column = rng.choice(
            (
                pa.array(rows),
                pa.array(rows).dictionary_encode(),
                pa.array(range(len(rows))),
                pa.array([[r] for r in rows]),
            )
        )
        held = io.BytesIO()
        pq.write_table(pa.table({rng.choice(("text", "text", "other")): column}), held)
        data = held.getvalue()
        readable = (
            b"other" not in data
            and pa.types.is_string(getattr(column.type, "value_type", column.type))
            and not pa.types.is_list(column.type)
        )
        right = [row for row in rows if row.strip()] if readable else None
    else:
        written = io.StringIO(newline="")
        writer = csv.writer(written, delimiter="\t" if kind == ".tsv" else ",")
        writer.writerows([["n", "text"], *([i, row] for i, row in enumerate(rows))])
        data, right = written.getvalue().encode(), [row for row in rows if row.strip()]
    said, known = "", True
    if rng.random() < 0.6:
        data, said = changed_bytes(rng, data)
        known = False
    return _reading(room, f"t{kind}", data, right or None, known, said)


def _reading(room: Room, name: str, data: bytes, right: list[str] | None, known: bool, said: str) -> Trial:
    """Read a file of text; where it is `known` what it holds, that must come of it."""
    from mha2gqa.data import read_documents
    from mha2gqa.errors import DataError

    folder = room.fresh("text")
    folder.mkdir()
    (folder / name).write_bytes(data)

    def run() -> str:
        try:
            found = list(read_documents(str(folder / name)))
        except DataError as error:
            if known and right is not None:
                return f"refused, and json reads it: {error.what[:40]}"
            raise
        if known and right is None:
            return "read, and json refuses it"
        return "other texts" if known and found != right else ""

    return Trial(f"text {name.partition('.')[2]}", said, run, {name: data})
