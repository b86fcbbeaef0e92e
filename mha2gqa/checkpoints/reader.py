"""Checkpoints on disk, read lazily: tensors by name, the raw config, everything else beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import CheckpointError, UsageError, hub_refusals, listed, quoted, reason
from .bin_file import BinFile
from .folder import BIN_INDEX, BIN_SINGLE, INDEX, SINGLE, check_model_folder, find_weights
from .hf_config import read_config_json
from .hub import check_hub_name, local_path
from .manifest import MANIFEST
from .safetensors_file import TensorInfo, check_distinct, read_header
from .source_file import SourceFile

__all__ = [
    "BIN_INDEX",
    "BIN_SINGLE",
    "INDEX",
    "MANIFEST",
    "SINGLE",
    "Checkpoint",
    "TensorInfo",
    "edit_config",
    "open_checkpoint",
]


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
        check_model_folder(path)
        self.config = read_config_json(path / "config.json")
        weights = find_weights(path)
        self.files, self.is_bin = list(weights.files), weights.is_bin
        self.metadata: dict[str, str] = {"format": "pt"}
        self._sources = {name: SourceFile(path / name) for name in self.files}
        self._texts = [SourceFile(path / "config.json"), *(SourceFile(p) for p in (weights.index,) if p)]
        for text in self._texts:
            text.read(0, text.size)
        self._bins: dict[str, BinFile] = {}
        tables: dict[str, dict[str, TensorInfo]] = {}
        for name, file in self._sources.items():
            if self.is_bin:
                self._bins[name] = BinFile(file, name)
                tables[name] = self._bins[name].tensors
            else:
                tables[name], metadata = read_header(file, name)
                if name == self.files[0] and metadata:
                    self.metadata = metadata
        check_distinct(tables, path)
        self.tensors = {name: info for table in tables.values() for name, info in table.items()}
        if weights.index is not None:
            self._check_index(weights.index, weights.weight_map)
        if not self.tensors:
            raise CheckpointError("its weight files hold no tensor", where=path, fix="download it again")

    def _check_index(self, index: Path, weight_map: Mapping[str, str]) -> None:
        """Every tensor is where the index says, and the index knows them all."""
        lost = sorted(n for n, f in weight_map.items() if n not in self.tensors or self.tensors[n].file != f)
        if lost:
            raise CheckpointError(
                f"{len(lost)} tensors are not where the index says, first {lost[0]} in {weight_map[lost[0]]}",
                where=index,
                fix="download the checkpoint again",
            )
        if extra := sorted(set(self.tensors) - set(weight_map)):
            raise CheckpointError(
                f"{len(extra)} tensors are missing from the index: {listed(extra, 2)}",
                where=index,
                fix="restore the original index",
            )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return {name: info.shape for name, info in self.tensors.items()}

    @property
    def dtypes(self) -> dict[str, str]:
        """safetensors dtype of every tensor."""
        return {name: info.dtype for name, info in self.tensors.items()}

    def drop(self, patterns: Sequence[str]) -> list[str]:
        """Treat tensors as if they were not there.

        Args:
            patterns: Names, or globs of names.

        Returns:
            Their names.

        Raises:
            UsageError: A pattern names none.
        """
        gone: set[str] = set()
        for pattern in patterns:
            found = [name for name in self.tensors if name == pattern or fnmatchcase(name, pattern)]
            if not found:
                raise UsageError(
                    "names no tensor of the source",
                    where=f"--drop-extra {quoted(pattern)}",
                    fix="check the pattern",
                )
            gone.update(found)
        self.tensors = {name: info for name, info in self.tensors.items() if name not in gone}
        return sorted(gone)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    def read(self, name: str) -> Tensor:
        """The tensor called `name`, a copy of its own."""
        info = self.tensors[name]
        if info.file in self._bins:
            return self._bins[info.file].read(name)
        return self._sources[info.file].tensor(info.dtype, info.shape, info.begin, info.end)

    def source_file(self, file: str) -> SourceFile:
        """One of `files`, open."""
        return self._sources[file]

    def check_unchanged(self) -> None:
        """Refuse a source that was written to since it was opened.

        Raises:
            CheckpointError: A file has another size, time, inode or header; it is named.
        """
        for file in (*self._texts, *self._sources.values()):
            file.check_unchanged()


def open_checkpoint(source: str | Path, revision: str | None = None) -> Checkpoint:
    """A folder, or a hub id downloaded into the local cache.

    Args:
        source: Folder or `ORG/NAME`; an existing folder wins.
        revision: Branch, tag or commit on the hub.

    Raises:
        CheckpointError: It cannot be found, downloaded or read.
    """
    path = local_path(source)
    if path.is_dir():
        return Checkpoint(path)
    if path.exists():
        raise CheckpointError(
            "is not a folder", where=source, fix="give a checkpoint folder or a Hub id ORG/NAME"
        )
    check_hub_name(source)
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

    Raises:
        CheckpointError: What should hold such a key is no object.

    Example:
        >>> edit_config({"text_config": {"a": 1}}, {("text_config", "b"): 2})
        {'text_config': {'a': 1, 'b': 2}}
    """
    edited = json.loads(json.dumps(config))
    for (*parents, key), value in changes.items():
        node = edited
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise CheckpointError(
                    f"{parent} is {quoted(node)}", where="config.json", fix="it must be an object"
                )
        node[key] = value
    return edited
