"""What is read from raw configs, JSON files and dtype names, and how messages and files are written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mha2gqa.checkpoints.atomic import FileLock, replacing, write_json
from mha2gqa.checkpoints.dtypes import named_dtype, stored_name, stored_nbytes, torch_dtype
from mha2gqa.checkpoints.hf_config import dtype_bytes, is_encoder_decoder, longest_context, stored_dtype
from mha2gqa.checkpoints.json_files import read_json
from mha2gqa.checkpoints.loading import loading_class
from mha2gqa.errors import CheckpointError, Mha2gqaError


def test_a_t5_whose_config_leaves_out_its_kind_is_an_encoder_decoder() -> None:
    """The class knows it: loading took such a config for a decoder's."""
    assert is_encoder_decoder({"model_type": "t5"})
    assert is_encoder_decoder({"model_type": "gqa_t5"})
    assert not is_encoder_decoder({"model_type": "t5", "is_encoder_decoder": False})
    assert not is_encoder_decoder({"model_type": "llama"}) and not is_encoder_decoder({"model_type": "mine"})
    assert loading_class({"model_type": "t5"}).__name__ == "AutoModelForSeq2SeqLM"


def test_the_longest_context_is_the_text_models_own_with_the_defaults_of_its_class() -> None:
    assert longest_context({"model_type": "llama"}) == 2048  # calibration saw no limit here
    assert longest_context({"model_type": "gpt2", "n_positions": 77}) == 77
    assert longest_context({"model_type": "mpt", "max_seq_len": 99}) == 99
    assert longest_context({"model_type": "mine", "n_ctx": 5, "max_position_embeddings": True}) == 5
    nested = {"model_type": "llava", "max_position_embeddings": 9, "text_config": {"model_type": "llama"}}
    assert longest_context(nested) == 2048  # calibration took the wrapper's 9
    assert longest_context({"model_type": "whisper", "max_target_positions": 44}) == 44


def test_one_table_of_dtypes() -> None:
    assert (
        stored_dtype({"torch_dtype": "half"}) is torch.float16
    )  # was float32 when loading, 2 bytes in the cache
    assert stored_dtype({"text_config": {"dtype": "torch.bfloat16"}}) is torch.bfloat16
    assert stored_dtype({"dtype": "int8"}) is torch.float32 and dtype_bytes({"dtype": "int8"}) == 4
    assert dtype_bytes({"dtype": "double"}) == 8 and dtype_bytes({"dtype": ["float16"]}) == 4
    for stored in ("F64", "F32", "BF16", "I64", "U16", "U32", "U64", "C64", "BOOL", "F8_E4M3", "F8_E8M0"):
        assert stored_name(torch_dtype(stored)) == stored
        assert stored_nbytes(stored, (3, 5)) == 15 * torch_dtype(stored).itemsize
    assert stored_nbytes("F4", (4, 2)) == 4
    for broken in (
        lambda: stored_nbytes("F4", (3,)),
        lambda: stored_nbytes("f32", (3,)),
        lambda: torch_dtype("X"),
    ):
        with pytest.raises(CheckpointError):
            broken()
    assert named_dtype("F32") is None and named_dtype(3) is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"[" * 150 + b"]" * 150 + b"}", "nested too deeply"),
        (b'{"a":' * 200 + b"1" + b"}" * 200, "nested too deeply"),
        (b'{"a": ' + b"1" * 5000 + b"}", "digits"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"a": "\xff"}', "not UTF-8 at byte 7"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n", "git lfs pull"),
        (b"", "not valid JSON"),
        (b"[]", "not a JSON object"),
    ],
)
def test_json_of_any_shape_ends_as_one_short_error(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=said) as caught:
        read_json(file)
    assert str(file) in str(caught.value) and len(str(caught.value)) <= 400


def test_as_many_levels_as_any_reader_follows_are_read(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(b'{"a":' * 100 + b"1" + b"}" * 100)
    assert read_json(file)["a"]


def test_no_file_that_is_none_holds_a_reader_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "gone.json").symlink_to("../blobs/none")
    for name, said in (
        ("pipe.json", "not a regular file"),
        ("gone.json", "a link to .*blobs/none"),
        ("x.json", "missing"),
    ):
        with pytest.raises(CheckpointError, match=said):
            read_json(tmp_path / name)


def test_messages_are_short_and_fit_for_a_terminal() -> None:
    error = Mha2gqaError("x" * 5000 + "\x1b[31m\ud800", where="p/" * 4000 + "end.json", fix="do\nthis")
    assert len(str(error)) <= 400 and str(error).endswith("; do this") and "end.json: " in str(error)
    assert str(error).isascii() or "…" in str(error)
    assert "\x1b" not in str(error) and str(error).encode()
    assert len(error.message(10**6)) > 12_000 and "\\x1b[31m\\ud800" in error.message(10**6)
    assert str(Mha2gqaError("a  b", where="c")) == "c: a b"


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    write_json(file, {"a": 1})
    with pytest.raises(RuntimeError), replacing(file) as partial:
        partial.write_text("half")
        raise RuntimeError
    assert json.loads(file.read_text()) == {"a": 1} and list(tmp_path.iterdir()) == [file]
    with pytest.raises(CheckpointError, match=r"none/a\.json: cannot be written"):
        write_json(tmp_path / "none" / "a.json", {})


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = f"from mha2gqa.checkpoints.atomic import FileLock; from pathlib import Path; lock = FileLock(Path({str(path)!r})); print(lock.acquire(), flush=True); input()"
    holder = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None and holder.stdout.readline() == "True\n"
    with FileLock(path) as mine:
        assert not mine.acquire() and mine.owner == str(holder.pid)
        holder.kill()
        holder.communicate()
        assert mine.acquire() and mine.owner == str(os.getpid())
    with FileLock(path) as again:
        assert again.acquire()
