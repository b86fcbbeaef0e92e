"""Weight files are never trusted: headers, pickles, files that change while they are read, numbers that are none."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import pico_llama
from launching import started
from safetensors.torch import load_file, save_file

from mha2gqa.checkpoints.finite import _PATTERNS, PIECE, all_finite
from mha2gqa.checkpoints.reader import Checkpoint
from mha2gqa.commands.estimate import plan
from mha2gqa.conversion.checkpoint import convert
from mha2gqa.errors import CheckpointError, Mha2gqaError
from mha2gqa.verification.checks import verify

UP = "model.layers.0.mlp.up_proj.weight"
Header = dict[str, Any]


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A source of two shards, `b.safetensors` without any attention tensor: its tensors are only copied."""
    source = tmp_path / "pico"
    pico_llama(num_hidden_layers=1).save_pretrained(source)
    state = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    parts = {f: {n: x for n, x in state.items() if ("mlp" in n) == (f == "b.safetensors")} for f in ("a.safetensors", "b.safetensors")}  # fmt: skip
    for file, part in parts.items():
        save_file(part, source / file, {"format": "pt"})
    weight_map = {n: f for f, part in parts.items() for n in part}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return source


def rewrite(
    path: Path, change: Callable[[Header], None], raw: bytes | None = None, tail: bytes = b""
) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode() if raw is None else raw
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :] + tail)


def entry(**fields: object) -> Callable[[Header], None]:
    return lambda header: header[UP].update(fields)


def shrink(header: Header) -> None:
    header[UP]["data_offsets"][1] -= 512  # F1: half of the tensor would be published as zeros


def overlap(header: Header) -> None:
    down, up = header["model.layers.0.mlp.down_proj.weight"], header[UP]
    up["data_offsets"] = down["data_offsets"]


def gap(header: Header) -> None:
    for name, info in header.items():
        if name != "__metadata__":
            info["data_offsets"] = [x + 4 for x in info["data_offsets"]]


def nothing(header: Header) -> None:
    pass


HEADERS: list[tuple[str, Callable[[Header], None], str]] = [
    ("shrunk", shrink, "needs 6144"),
    ("overlap", overlap, "overlaps|gap"),
    ("gap", gap, "gap"),
    ("negative", entry(data_offsets=[-64, 6080]), "no usable data_offsets"),
    ("float offsets", entry(data_offsets=[0.0, 6144.0]), "no usable data_offsets"),
    ("one offset", entry(data_offsets=[0]), "no usable data_offsets"),
    ("unknown dtype", entry(dtype="f32"), "unknown dtype"),
    ("dtype a list", entry(dtype=[]), "no usable dtype"),
    ("other dtype", entry(dtype="F64"), "needs 12288"),
    ("shape of strings", entry(shape=["48", "32"]), "no usable dtype or shape"),
    ("shape of bools", entry(shape=[True, True]), "no usable dtype or shape"),
    ("negative shape", entry(shape=[-1]), "no usable dtype or shape"),
    ("endless shape", entry(shape=[2**40, 2**40]), "needs"),
    ("entry null", lambda h: h.update({UP: None}), "no usable data_offsets"),
    ("metadata", lambda h: h.update(__metadata__={"a": 1}), "strings to strings"),
]


@pytest.mark.parametrize(
    ("change", "said"), [case[1:] for case in HEADERS], ids=[case[0] for case in HEADERS]
)
def test_a_header_that_contradicts_itself_is_refused(
    sharded: Path, tmp_path: Path, change: Callable[[Header], None], said: str
) -> None:
    rewrite(sharded / "b.safetensors", change)
    for call in (lambda: convert(sharded, tmp_path / "out", 2), lambda: plan(sharded, groups=2)):
        with pytest.raises(CheckpointError, match=said) as caught:
            call()
        assert "b.safetensors" in str(caught.value) and len(str(caught.value)) <= 400
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"[]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b"{" + b'"a":{' * 3000, "nested too deeply|Expecting"),
        (b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}', "there twice"),
        (b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0],"x":NaN}}', "too many at its end|refuses"),
        (b"version", "not|Expecting"),
    ],
)  # fmt: skip
def test_a_header_that_is_no_table_is_refused(sharded: Path, raw: bytes, said: str) -> None:
    rewrite(sharded / "b.safetensors", nothing, raw)
    with pytest.raises(CheckpointError, match=said):
        Checkpoint(sharded)


def test_bytes_beyond_the_last_tensor_and_duplicates_between_shards_are_refused(sharded: Path) -> None:
    rewrite(sharded / "b.safetensors", nothing, tail=b"\x77" * 64)
    with pytest.raises(CheckpointError, match="64 bytes too many"):
        Checkpoint(sharded)
    (sharded / "b.safetensors").write_bytes((sharded / "a.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"in a\.safetensors and in b\.safetensors"):
        Checkpoint(sharded)


@pytest.mark.parametrize(
    "dtype", ["complex64", "uint16", "uint32", "uint64", "float8_e8m0fnu", "int64", "bool"]
)
def test_a_buffer_of_any_dtype_is_copied_as_it_is(pico: Path, tmp_path: Path, dtype: str) -> None:
    state = load_file(pico / "model.safetensors")
    buffer = torch.arange(1, 25, dtype=torch.uint8).view(getattr(torch, dtype))
    save_file(state | {"h.0.attn.masked_bias": buffer}, pico / "model.safetensors", {"format": "pt"})
    convert(pico, tmp_path / "out", 2)
    found = load_file(tmp_path / "out" / "model.safetensors")["h.0.attn.masked_bias"]
    assert found.dtype == buffer.dtype and torch.equal(found.view(torch.uint8), buffer.view(torch.uint8))
    assert verify(tmp_path / "out", full=True).ok


CHANGES = [
    "src.write_bytes(good[:head] + bytes(len(good) - head))",
    "new = src.with_name('new'); new.write_bytes(good[:head] + bytes(len(good) - head)); new.replace(src)",
    "src.write_bytes(good[:2000])",
    "os.truncate(src, 0)",
    "src.unlink()",
]
CONVERT_EACH = """
import os, pathlib, shutil, sys, mha2gqa
from mha2gqa.errors import Mha2gqaError
pico, *changes = sys.argv[1:]
waiting = []
def hook(name, args):
    if name == "os.mkdir" and "partial" in str(args[0]) and waiting:
        src = source / "model.safetensors"
        exec(waiting.pop())
sys.addaudithook(hook)
good = pathlib.Path(pico, "model.safetensors").read_bytes(); head = 8 + int.from_bytes(good[:8], "little")
for i, change in enumerate(changes):
    source = pathlib.Path(f"source-{i}")
    shutil.copytree(pico, source)
    waiting.append(change)
    try:
        mha2gqa.convert(source, f"out-{i}", 2)
    except Mha2gqaError as error:
        print(error)
    else:
        print("published")
"""


def test_a_source_that_changes_while_it_is_read_publishes_nothing(pico: Path, tmp_path: Path) -> None:
    """In a process of its own, which a mapped file that was cut short would end by a signal.

    Each change happens when the partial folder is made.
    """
    done = started(["-c", CONVERT_EACH, str(pico), *CHANGES], tmp_path, where=tmp_path)
    assert done.code == 0, done
    said = done.stdout.splitlines()
    assert len(said) == len(CHANGES)
    for line in said:
        assert "model.safetensors: " in line
        assert any(word in line for word in ("changed while it was read", "truncated", "is gone"))
    assert not list(tmp_path.glob("out*"))


def test_numbers_that_are_none_are_found_while_copying(sharded: Path, tmp_path: Path) -> None:
    state = load_file(sharded / "b.safetensors")
    state[UP][3, 5] = float("nan")
    save_file(state, sharded / "b.safetensors", {"format": "pt"})
    found = [w for w in convert(sharded, tmp_path / "out", 2).warnings if "NaN" in w]
    assert len(found) == 1 and UP in found[0]
    state[UP][3, 5] = 3e38  # large, and a number
    save_file(state, sharded / "b.safetensors", {"format": "pt"})
    assert not [w for w in convert(sharded, tmp_path / "ok", 2).warnings if "NaN" in w]


@pytest.mark.parametrize("dtype", sorted(_PATTERNS))
def test_every_pattern_of_bits_is_judged_as_torch_judges_it(dtype: str) -> None:
    from mha2gqa.checkpoints.dtypes import torch_dtype

    kind, width = torch_dtype(dtype), torch_dtype(dtype).itemsize
    rng = np.random.default_rng(0)
    raw = np.arange(2 ** (8 * width), dtype=f"u{width}").view(np.uint8) if width < 4 else rng.integers(0, 256, 65_536, np.uint8)  # fmt: skip
    rows = raw.reshape(-1, width)
    ends = np.concatenate([rows, np.eye(8, dtype=np.uint8)[:, :width] * 255])
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, 1.0])
    if width > 1:
        ends = np.concatenate([ends, special.to(kind).view(torch.uint8).numpy().reshape(-1, width)])
    numbers = torch.from_numpy(ends.copy()).view(kind)
    wide = numbers if numbers.dtype.is_complex or width > 2 else numbers.float()
    right = torch.isfinite(wide).reshape(len(ends)).numpy()
    got = np.array([all_finite(np.ascontiguousarray(row), dtype) for row in ends])
    assert (right == got).all() and not right.all() and right.any()
    late = np.zeros(2 * PIECE + width, np.uint8)
    late[-width:] = ends[np.flatnonzero(~right)[0]]
    assert not all_finite(late, dtype) and all_finite(late[:-width], dtype)


# --- .bin ------------------------------------------------------------------------------------------------


def as_bin(source: Path, value: Any, **options: Any) -> Path:
    (source / "model.safetensors").unlink(missing_ok=True)
    torch.save(value, source / "pytorch_model.bin", **options)
    return source


def test_views_and_the_old_format_are_read_as_torch_reads_them(pico: Path, tmp_path: Path) -> None:
    state = load_file(pico / "model.safetensors")
    convert(pico, tmp_path / "right", 2)
    views = {n: x.t().contiguous().t() if x.dim() == 2 else torch.stack([x, x])[1] for n, x in state.items()}
    for name, value, options in (
        ("views", views, {}),
        ("old", state, {"_use_new_zipfile_serialization": False}),
        ("parameters", {n: torch.nn.Parameter(x) for n, x in state.items()}, {}),
        ("extra", {**state, "model.layers.0._extra_state": None}, {}),
    ):
        convert(as_bin(pico, value, **options), tmp_path / name, 2)
        right, found = (load_file(tmp_path / n / "model.safetensors") for n in ("right", name))
        assert right.keys() == found.keys() and all(torch.equal(right[n], found[n]) for n in right)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"model_state_dict": {"a": torch.ones(2)}, "epoch": 3}, "a training checkpoint, .*epoch, model_state_dict"),
        ({"state_dict": {}, "step": 1}, "a training checkpoint"),
        ([1, 2], "holds a list"),
        (torch.ones(2), "holds a Tensor"),
        ({3: torch.ones(2)}, "is not a string"),
        ({"a": 3}, "'a' is a int"),
        ({"a": torch.ones(2).to_sparse()}, "sparse"),
        ({"a": torch.ones(2, dtype=torch.complex128)}, "complex128"),
    ],
)  # fmt: skip
def test_a_bin_that_is_no_state_dict_says_what_it_is(
    pico: Path, tmp_path: Path, value: Any, said: str
) -> None:
    as_bin(pico, value)
    for call in (lambda: convert(pico, tmp_path / "out", 2), lambda: plan(pico, groups=2)):
        with pytest.raises(CheckpointError, match=said) as caught:
            call()
        assert "pytorch_model.bin: " in str(caught.value)


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("run-by-a-pickle",)


def test_a_bin_runs_nothing_and_damage_is_named(
    pico: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    state = load_file(pico / "model.safetensors")
    as_bin(pico, {**state, "x": Payload()})
    with pytest.raises(CheckpointError, match="pickled Python objects"):
        convert(pico, "out", 2)
    file = pico / "pytorch_model.bin"
    as_bin(pico, state)
    whole = file.read_bytes()
    for data, said in (
        (b"", "an empty file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
        (whole[: len(whole) // 2], "not readable.*download it again"),
        (b"<!DOCTYPE html>", "download it again|safetensors first"),
    ):
        file.write_bytes(data)
        with pytest.raises(Mha2gqaError, match=said):
            convert(pico, "out", 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["pico"]
