"""Checkpoints on disk, read lazily: tensors by name, the raw config, everything else beside them."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, hub_refusals, reason
from .dtypes import stored_name, stored_nbytes
from .json_files import read_json

MANIFEST = "mha2gqa.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
BIN_SINGLE, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_WEIGHT_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".tflite",
)
_WEIGHT_FOLDERS = ("original", "onnx", "openvino", "coreml")


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: its file, dtype name, shape, and byte range (none where no file holds it as it is)."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int = 0
    end: int = 0

    @property
    def nbytes(self) -> int:
        return stored_nbytes(self.dtype, self.shape)

    @property
    def plain(self) -> bool:
        """Whether its bytes lie in the file as they are: not inside a .bin, not made from other tensors."""
        return self.end > self.begin


def read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Tensor table and metadata of one safetensors file, checked against the file's size.

    Raises:
        CheckpointError: The file is truncated or no safetensors file.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size:
                raise ValueError("the header is longer than the file")
            header = json.loads(file.read(length))
    except (ValueError, struct.error) as error:
        raise CheckpointError(
            f"no safetensors file ({error})", where=path, fix="download it again"
        ) from error
    metadata = header.pop("__metadata__", {})
    start = 8 + length
    table = {
        name: TensorInfo(
            path.name,
            entry["dtype"],
            tuple(entry["shape"]),
            start + entry["data_offsets"][0],
            start + entry["data_offsets"][1],
        )
        for name, entry in header.items()
    }
    end = max((info.end for info in table.values()), default=start)
    if end > size:
        raise CheckpointError(f"truncated: {size} of {end} bytes", where=path, fix="download it again")
    return table, metadata


class Checkpoint:
    """A checkpoint folder, read lazily.

    Args:
        path: The folder, with `config.json` and weights in safetensors (or .bin) files.
        revision: Commit it was resolved from, if it came from a hub.

    Attributes:
        config: The raw `config.json`.
        tensors: Name -> `TensorInfo`, in file order.
        metadata: safetensors metadata of the first file.

    Example:
        >>> checkpoint = Checkpoint(Path("llama"))  # doctest: +SKIP
        >>> checkpoint.read("model.norm.weight").shape  # doctest: +SKIP
    """

    def __init__(self, path: Path, revision: str | None = None) -> None:
        self.path, self.revision = path, revision
        if not path.is_dir():
            raise CheckpointError(
                "no such folder", where=path, fix="give a checkpoint folder or a hub id ORG/NAME"
            )
        if not (path / "config.json").exists() and (path / "adapter_config.json").exists():
            raise CheckpointError(
                "an adapter, not a model", where=path, fix="merge it into its base model first"
            )
        self.config = read_json(path / "config.json")
        self.files, self.is_bin = self._find_files()
        self.tensors: dict[str, TensorInfo] = {}
        self.metadata: dict[str, str] = {"format": "pt"}
        self._bins: dict[str, dict[str, Tensor]] = {}
        self._handles: dict[str, Any] = {}
        for name in self.files:
            table = self._bin_table(name) if self.is_bin else read_header(path / name)[0]
            self.tensors |= table
        if self.files and not self.is_bin:
            self.metadata = read_header(path / self.files[0])[1] or self.metadata
        self._check_index()

    def _find_files(self) -> tuple[list[str], bool]:
        has = {name for name in (SINGLE, INDEX, BIN_SINGLE, BIN_INDEX) if (self.path / name).exists()}
        if {SINGLE, INDEX} <= has:
            raise CheckpointError(
                f"both {SINGLE} and {INDEX} are there; loaders take the first",
                where=self.path,
                fix="remove the stale one",
            )
        if SINGLE in has:
            return [SINGLE], False
        if BIN_SINGLE in has and INDEX not in has:
            return [BIN_SINGLE], True
        if not has:
            kind = next((n for n in ("tf_model.h5", "flax_model.msgpack") if (self.path / n).exists()), None)
            what = f"only {kind}, no PyTorch weights" if kind else f"no {SINGLE} and no {INDEX}"
            raise CheckpointError(what, where=self.path, fix="save the model as safetensors first")
        index = INDEX if INDEX in has else BIN_INDEX
        weight_map = read_json(self.path / index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError("no weight_map", where=self.path / index, fix="restore the original index")
        files = sorted(set(weight_map.values()))
        if missing := [name for name in files if not (self.path / name).exists()]:
            raise CheckpointError(
                f"the index names files that are missing: {', '.join(missing)}",
                where=self.path,
                fix="download them again",
            )
        return files, index == BIN_INDEX

    def _check_index(self) -> None:
        """Every tensor of the index is where the index says."""
        path = self.path / (BIN_INDEX if self.is_bin else INDEX)
        if not path.exists() or (len(self.files) == 1 and self.files[0] in (SINGLE, BIN_SINGLE)):
            return
        weight_map = read_json(path)["weight_map"]
        lost = sorted(n for n, f in weight_map.items() if n not in self.tensors or self.tensors[n].file != f)
        if lost:
            raise CheckpointError(
                f"{len(lost)} tensors are not where the index says, first {lost[0]} in {weight_map[lost[0]]}",
                where=path,
                fix="download the checkpoint again",
            )
        if extra := sorted(set(self.tensors) - set(weight_map)):
            raise CheckpointError(
                f"{len(extra)} tensors are missing from the index, first {extra[0]}",
                where=path,
                fix="restore the original index",
            )

    def _bin_table(self, name: str) -> dict[str, TensorInfo]:
        try:
            state = torch.load(self.path / name, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            raise CheckpointError(
                f"cannot be read safely ({type(error).__name__})",
                where=self.path / name,
                fix="save the model as safetensors first",
            ) from error
        self._bins[name] = state
        return {key: TensorInfo(name, stored_name(x.dtype), tuple(x.shape)) for key, x in state.items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return {name: info.shape for name, info in self.tensors.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    def read(self, name: str) -> Tensor:
        """The tensor called `name`, mapped from disk where possible: do not write into it."""
        if self.is_bin:
            return self._bins[self.tensors[name].file][name]
        from safetensors import safe_open

        file = self.tensors[name].file
        if file not in self._handles:
            self._handles[file] = safe_open(str(self.path / file), framework="pt")
        return self._handles[file].get_tensor(name)

    def side_files(self) -> list[Path]:
        """Everything that is neither a weight nor ours, relative to the folder, sorted."""
        found = []
        for path in sorted(self.path.rglob("*")):
            relative = path.relative_to(self.path)
            folders = relative.parts[:-1]
            if not path.is_file() or any(part.startswith(".") or part in _WEIGHT_FOLDERS for part in folders):
                continue
            if path.name.endswith(_WEIGHT_SUFFIXES) or path.name.endswith(".index.json"):
                continue
            if relative.parts[0] not in ("config.json", MANIFEST) and not path.name.startswith("."):
                found.append(relative)
        return found


def open_checkpoint(source: str | Path, revision: str | None = None) -> Checkpoint:
    """A folder, or a hub id downloaded into the local cache.

    Args:
        source: Folder or `ORG/NAME`; an existing folder wins.
        revision: Branch, tag or commit on the hub.

    Raises:
        CheckpointError: It cannot be found, downloaded or read.
    """
    path = Path(source)
    if path.is_dir():
        return Checkpoint(path)
    if path.exists() or str(source).count("/") != 1 or str(source).startswith((".", "/", "~")):
        raise CheckpointError(
            "no such folder", where=source, fix="give a checkpoint folder or a hub id ORG/NAME"
        )
    from huggingface_hub import snapshot_download

    try:
        local = snapshot_download(
            str(source), revision=revision, ignore_patterns=["*.gguf", "*.h5", "*.msgpack", "original/*"]
        )
    except hub_refusals() as error:
        raise CheckpointError(
            f"cannot be downloaded ({reason(error)})",
            where=source,
            fix="check the name, HF_TOKEN for gated models, HF_HUB_OFFLINE",
        ) from error
    return Checkpoint(Path(local), revision=Path(local).name)


def edit_config(config: Mapping[str, Any], changes: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """A copy of a raw config with some keys set; order and all other keys stay.

    Args:
        config: The raw config.
        changes: Path of keys from the root -> new value.

    Example:
        >>> edit_config({"text_config": {"a": 1}}, {("text_config", "b"): 2})
        {'text_config': {'a': 1, 'b': 2}}
    """
    edited = json.loads(json.dumps(config))
    for (*parents, key), value in changes.items():
        node = edited
        for parent in parents:
            node = node.setdefault(parent, {})
        node[key] = value
    return edited
