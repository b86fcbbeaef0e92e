"""Tensors pickled by torch: `pytorch_model.bin`, read without running what it may hold."""

from __future__ import annotations

import pickletools
import re
import struct
import sys
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, listed, quoted, reason
from .dtypes import stored_name
from .json_files import LFS_POINTER, check_pointer
from .safetensors_file import TensorInfo, can_store
from .source_file import SourceFile

_WRAPPED = ("state_dict", "model_state_dict", "model", "module")  # what training scripts call the weights
_FIX = "save the model as safetensors first"
_STORAGE = re.compile(r"[^/]+/data/\d+")  # the record of a storage
_SIGNATURE = b"PK\x03\x04"  # of a record's own header
_LOCAL = struct.Struct("<26xHH")  # a record's own header: lengths of its name and of its extra field
_PACKED = 0x2061  # flags of a record: encrypted, patched, encrypted strongly, masked
_FOLDER = 0x10  # attribute of a record: torch takes it for a folder and reads nothing, without a word


class BinFile:
    """The tensors of one file.

    Args:
        file: The file.
        name: What the table calls it.

    Attributes:
        tensors: Name -> where it lies; `plain` where its bytes lie in the file as they are.

    Raises:
        CheckpointError: Not written by torch, unsafe to read, or no state dict; what is wrong is named.
    """

    def __init__(self, file: SourceFile, name: str) -> None:
        self.file = file
        begin = file.read(0, min(file.size, len(LFS_POINTER)))
        check_pointer(begin, file.path)
        if not begin:
            raise CheckpointError("an empty file", where=file.path, fix="download it again")
        zipped = begin.startswith(b"PK")  # the older form cannot be read by position: it is loaded whole
        self._state = _state_dict(_load(file.path, "meta" if zipped else "cpu"), file.path)
        offsets = _storage_offsets(file, self._state) if zipped else {}
        if offsets is None:
            self._state = _state_dict(_load(file.path, "cpu"), file.path)
        self._offsets = offsets or {}
        self.tensors = {key: self._info(name, key, x) for key, x in self._state.items()}

    def _info(self, name: str, key: str, x: Tensor) -> TensorInfo:
        try:
            dtype = stored_name(x.dtype)
        except CheckpointError as error:
            raise CheckpointError(f"{quoted(key)}: {error.what}", where=self.file.path, fix=_FIX) from error
        if not can_store(dtype):
            raise CheckpointError(
                f"{quoted(key)} is {dtype}, which the installed safetensors cannot store",
                where=self.file.path,
                fix="install a newer safetensors",
            )
        shape, place = tuple(x.shape), self._offsets.get(key)
        if place is None or not x.is_contiguous():
            return TensorInfo(name, dtype, shape)
        begin = place + int(x.storage_offset()) * x.element_size()
        return TensorInfo(name, dtype, shape, begin, begin + x.numel() * x.element_size())

    def read(self, key: str) -> Tensor:
        """A tensor, whatever its strides."""
        x, info = self._state[key], self.tensors[key]
        if info.plain:
            return self.file.tensor(info.dtype, info.shape, info.begin, info.end)
        if (place := self._offsets.get(key)) is None:
            return x
        count = x.untyped_storage().nbytes() // x.element_size()
        whole = self.file.tensor(info.dtype, (count,), place, place + count * x.element_size())
        return whole.as_strided(x.shape, x.stride(), x.storage_offset())


def _load(path: Path, device: str) -> Any:
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # whatever it meets in a damaged or hostile file
        said = str(error)
        unsafe = "Weights only load failed" in said or "weights_only" in said
        what = (
            "holds pickled Python objects, which could run code"
            if unsafe
            else f"not readable ({reason(error, 100)})"
        )
        raise CheckpointError(what, where=path, fix=_FIX if unsafe else "download it again") from error


def _state_dict(found: Any, path: Path) -> dict[str, Tensor]:
    """The tensors by name.

    Raises:
        CheckpointError: `found` is not a state dict; what it is instead is named.
    """

    def refuse(what: str, fix: str = _FIX) -> CheckpointError:
        return CheckpointError(what, where=path, fix=fix)

    if not isinstance(found, Mapping):
        raise refuse(f"holds a {type(found).__name__}, not a state dict")
    if odd := [key for key in found if not isinstance(key, str)]:
        raise refuse(f"a key of its state dict is not a string ({quoted(odd[0])})")
    if inner := [key for key in _WRAPPED if isinstance(found.get(key), Mapping)]:
        raise refuse(
            f"a training checkpoint, not a state dict: keys {listed(sorted(found))}",
            f"save what is under {inner[0]!r} as safetensors",
        )
    state = {}
    for key, x in found.items():
        if x is None or key.endswith("_extra_state"):  # of Transformer Engine: no weights
            continue
        if not isinstance(x, Tensor) or x.layout is not torch.strided or x.is_quantized:
            kind = (
                type(x).__name__ if not isinstance(x, Tensor) else f"{x.layout} tensor".replace("torch.", "")
            )
            raise refuse(f"its entry {quoted(key)} is a {kind}, not a plain tensor")
        state[key] = x.detach()
    return state


def _storage_offsets(file: SourceFile, state: Mapping[str, Tensor]) -> dict[str, int] | None:
    """Where the storage of each tensor begins in the zip file; None where it must be loaded to be read.

    That is so with a torch that does not tell, and for numbers in the other byte order.

    Raises:
        CheckpointError: A storage would end beyond its record.
    """
    offsets: dict[str, int] = {}
    records, order = _records(file)
    if order not in (b"", sys.byteorder.encode()):
        return None
    for key, x in state.items():
        storage = x.untyped_storage()
        place = getattr(storage, "_checkpoint_offset", None)
        if not isinstance(place, int):
            return None
        if storage.nbytes() and records.get(place, -1) < storage.nbytes():
            raise CheckpointError(
                f"its record of {quoted(key)} is too short", where=file.path, fix="download it again"
            )
        offsets[key] = place
    return offsets


def _records(file: SourceFile) -> tuple[dict[int, int], bytes]:
    """Begin of the data -> bytes, of every record that is stored as it is; and the byte order of the file."""
    try:
        with zipfile.ZipFile(file.path) as archive:
            infos = [info for info in archive.infolist() if info.compress_type == zipfile.ZIP_STORED]
            orders = [info for info in infos if info.filename.endswith("/byteorder") and info.file_size < 16]
            order = archive.read(orders[0]) if orders else b""
    except Exception as error:  # zipfile's own, struct's, NotImplementedError, … for a damaged archive
        raise CheckpointError(
            f"not readable ({reason(error, 100)})", where=file.path, fix="download it again"
        ) from error
    found: dict[int, int] = {}
    keys, pickled = {}, b""
    names = [info.orig_filename for info in infos]
    for info in infos:
        packed, folder = info.flag_bits & _PACKED, info.external_attr & _FOLDER
        if packed or folder:
            raise CheckpointError(
                f"not readable ({quoted(info.orig_filename)} is {'encrypted' if packed else 'marked as a folder'})",
                where=file.path,
                fix="download it again",
            )
        head = bytearray(_LOCAL.size)
        file.read_into(memoryview(head), info.header_offset)
        length, extra = _LOCAL.unpack(head)
        begin = info.header_offset + _LOCAL.size
        name = file.read(begin, length).decode("utf-8", "replace")
        if not head.startswith(_SIGNATURE) or name != info.orig_filename or names.count(name) > 1:
            raise CheckpointError(
                f"its records contradict its directory ({quoted(name)})",
                where=file.path,
                fix="download it again",
            )
        begin += length + extra
        if _STORAGE.fullmatch(name):
            found[begin], keys[name.rsplit("/", 1)[1]] = info.file_size, name
        elif name.endswith("/data.pkl"):
            pickled = file.read(begin, info.file_size)
    for key in keys.keys() - _strings(pickled):
        raise CheckpointError(
            f"its pickle does not name its record {quoted(keys[key])}",
            where=file.path,
            fix="download it again",
        )
    return found, order


def _strings(pickled: bytes) -> set[str]:
    """The texts that a pickle holds, keys of storages among them; those before the place where it is broken."""
    found = set()
    with suppress(Exception):
        for _, word, _ in pickletools.genops(pickled):
            if isinstance(word, str):
                found.add(word)
    return found
