"""Write the weight files of a checkpoint: unchanged tensors as bytes, new ones when their turn comes."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from .atomic import sync_file, write_text
from .dtypes import stored_dtype_bits, stored_name, stored_nbytes
from .finite import all_finite, stored_finite
from .ignored_keys import without_ignored
from .reader import INDEX, SINGLE, Checkpoint, TensorInfo
from .source_file import SourceFile

_ALIGNMENT = 8  # of the header, as safetensors asks


@dataclass(frozen=True)
class NewTensor:
    """A tensor that replaces or joins those of the source; made only when its turn to be written comes."""

    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], Tensor]


@dataclass
class Shard:
    """One output file: tensor name -> unchanged (`TensorInfo`) or new (`NewTensor`)."""

    name: str
    entries: dict[str, TensorInfo | NewTensor] = field(default_factory=dict)


def entry_nbytes(entry: TensorInfo | NewTensor) -> int:
    """Bytes an entry takes on disk."""
    return stored_nbytes(entry.dtype, entry.shape)


def plan_shards(
    checkpoint: Checkpoint,
    new: Mapping[str, NewTensor],
    dropped: Sequence[str] = (),
    max_shard_size: int | None = None,
) -> list[Shard]:
    """Lay the output's tensors out in files: as in the source, or anew where a limit is given.

    Args:
        checkpoint: The source.
        new: Tensors that replace those of the same name, or join the file of their neighbours.
        dropped: Names that the output lacks.
        max_shard_size: Bytes a file may hold (one tensor may exceed it).
    """
    entries: dict[str, TensorInfo | NewTensor] = {}
    home: dict[str, str] = {}
    last = ""
    for name, info in checkpoint.tensors.items():
        if name not in dropped:
            entries[name], home[name] = new.get(name, info), info.file
        last = info.file
    for name in [name for name in new if name not in entries]:
        stem = name.rsplit(".", 2)[0]
        entries[name] = new[name]
        home[name] = next(
            (home[other] for other in entries if other in home and other.startswith(stem + ".")), last
        )
    regroup = max_shard_size is not None or checkpoint.is_bin
    if not regroup:
        shards = [
            Shard(file, {n: e for n, e in entries.items() if home[n] == file}) for file in checkpoint.files
        ]
        shards = [shard for shard in shards if shard.entries]
        if len(shards) == 1 or any("/" in shard.name for shard in shards):  # OUT has no sub-folders
            _number(shards)
        return shards
    shards, size = [Shard("")], 0
    for name in sorted(entries, key=lambda n: checkpoint.files.index(home[n])):
        nbytes = entry_nbytes(entries[name])
        if shards[-1].entries and size + nbytes > (max_shard_size or 5 * 10**9):
            shards.append(Shard(""))
            size = 0
        shards[-1].entries[name] = entries[name]
        size += nbytes
    _number(shards)
    return shards


def _number(shards: Sequence[Shard]) -> None:
    """Name the files as transformers does."""
    for i, shard in enumerate(shards):
        shard.name = SINGLE if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"


@dataclass
class Written:
    """What was written.

    Args:
        odd: Names of unchanged tensors that hold NaN or infinity, as the source has them.
        digests: Name of each tensor whose bytes were made, not copied -> SHA-256 of them.
    """

    odd: list[str] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Run:
    """Unchanged tensors that lie together in a file of the source: `[begin, end)`, to be copied to `offset`."""

    source: str
    begin: int
    end: int
    offset: int
    tensors: tuple[tuple[str, TensorInfo], ...]


@dataclass(frozen=True)
class _Layout:
    """Where everything goes in one output file, known before a byte of it is written.

    Args:
        head: Length of the header, and header.
        copied: Runs of unchanged tensors.
        made: Offset of each tensor that is made, by name, in file order.
        size: Bytes in all.
    """

    head: bytes
    copied: tuple[_Run, ...]
    made: Mapping[str, int]
    size: int


def write_shards(
    checkpoint: Checkpoint, shards: Sequence[Shard], out: Path, progress: Callable[[int], None] | None = None
) -> Written:
    """Write every shard and the index into the folder `out`, synced to disk.

    A thread copies what is unchanged while this one makes what is new, and another lets the disk take in
    what is complete: none of the three waits for the others' work.

    Args:
        checkpoint: Source of the unchanged tensors.
        shards: From `plan_shards`.
        out: An existing folder.
        progress: Called with the bytes just written, by one thread at a time.

    Returns:
        What there is to know of the tensors written.

    Raises:
        CheckpointError: A new tensor is not finite, or the source was written to meanwhile.
    """
    turn = Lock()
    written = Written()

    def wrote(count: int) -> None:
        if progress:
            with turn:
                progress(count)

    copying, syncing = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
    try:
        layouts, copies, synced = [], [], []
        for shard in shards:
            layouts.append(layout := _lay_out(checkpoint, shard))
            path = out / shard.name
            with path.open("wb") as file:
                file.write(layout.head)
                file.truncate(layout.size)
            copies.append(
                [copying.submit(_copy, checkpoint, run, path, wrote, written.odd) for run in layout.copied]
            )
        for shard, layout, copied in zip(shards, layouts, copies, strict=True):
            _make(checkpoint, shard, layout, out / shard.name, wrote, written)
            synced.append(syncing.submit(_complete, out / shard.name, copied))
        for done in synced:
            done.result()
    finally:
        copying.shutdown(cancel_futures=True)
        syncing.shutdown(cancel_futures=True)
    if len(shards) > 1 or shards[0].name != SINGLE:
        write_text(out / INDEX, json.dumps(_index(shards), indent=2) + "\n")
    checkpoint.check_unchanged()
    written.odd = without_ignored(written.odd)
    return written


def _index(shards: Sequence[Shard]) -> dict[str, Any]:
    entries = [entry for shard in shards for entry in shard.entries.values()]
    return {
        "metadata": {
            "total_parameters": sum(torch.Size(e.shape).numel() for e in entries),
            "total_size": sum(entry_nbytes(e) for e in entries),
        },
        "weight_map": dict(sorted((name, shard.name) for shard in shards for name in shard.entries)),
    }


def _lay_out(checkpoint: Checkpoint, shard: Shard) -> _Layout:
    # Widest dtypes first, as safetensors does, so that every tensor stays aligned; stable otherwise.
    ordered = sorted(shard.entries.items(), key=lambda item: -stored_dtype_bits(item[1].dtype))
    header: dict[str, Any] = {"__metadata__": checkpoint.metadata}
    end = 0
    for name, entry in ordered:
        begin, end = end, end + entry_nbytes(entry)
        header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    head = struct.pack("<Q", len(text)) + text
    copied: list[_Run] = []
    made: dict[str, int] = {}
    for name, entry in ordered:
        offset = len(head) + header[name]["data_offsets"][0]
        if isinstance(entry, NewTensor) or not entry.plain:
            made[name] = offset
            continue
        run = _Run(entry.file, entry.begin, entry.end, offset, ((name, entry),))
        if copied and _adjoin(copied[-1], run):
            before = copied.pop()
            run = replace(before, end=run.end, tensors=before.tensors + run.tensors)
        copied.append(run)
    return _Layout(head, tuple(copied), made, len(head) + end)


def _adjoin(first: _Run, second: _Run) -> bool:
    """Whether the second follows the first both in the source and in the output."""
    there = first.source == second.source and first.end == second.begin
    return there and first.offset + first.end - first.begin == second.offset


def _copy(
    checkpoint: Checkpoint, run: _Run, path: Path, wrote: Callable[[int], None], odd: list[str]
) -> None:
    """Copy a run, looking for NaN and infinity in what has just gone by."""
    source = checkpoint.source_file(run.source)
    waiting = deque(run.tensors)
    with path.open("r+b", buffering=0) as target:
        begin, offset = run.begin, run.offset
        while begin < run.end:
            count = _copy_some(source, begin, min(run.end - begin, 1 << 26), target, offset)
            begin, offset = begin + count, offset + count
            while waiting and waiting[0][1].end <= begin:  # the system still has its bytes at hand
                name, info = waiting.popleft()
                if not stored_finite(source, info):
                    odd.append(name)
            wrote(count)


def _copy_some(source: SourceFile, begin: int, count: int, target: Any, offset: int) -> int:
    """Copy up to `count` bytes, inside the kernel where it can; returns how many."""
    with suppress(AttributeError, OSError):  # not Linux, or not between these file systems
        if copied := os.copy_file_range(source.fileno(), target.fileno(), count, begin, offset):
            return copied
    data = bytearray(min(count, 1 << 24))
    source.read_into(memoryview(data), begin)
    return os.pwrite(target.fileno(), data, offset)


def _make(
    checkpoint: Checkpoint,
    shard: Shard,
    layout: _Layout,
    path: Path,
    wrote: Callable[[int], None],
    written: Written,
) -> None:
    with path.open("r+b") as file:
        for name, offset in layout.made.items():
            file.seek(offset)
            data, finite = _bytes_of(checkpoint, name, shard.entries[name])
            if not finite:
                written.odd.append(name)
            written.digests[name] = hashlib.sha256(data).hexdigest()
            file.write(data)
            wrote(len(data))


def _complete(path: Path, copied: Sequence[Future[None]]) -> None:
    """Wait until the bytes of a file are copied, and on the disk."""
    for part in copied:
        part.result()
    sync_file(path)


def _bytes_of(checkpoint: Checkpoint, name: str, entry: TensorInfo | NewTensor) -> tuple[memoryview, bool]:
    """The bytes of a tensor, and whether all its numbers are finite.

    Raises:
        CheckpointError: It is new and not finite.
    """
    tensor = entry.make() if isinstance(entry, NewTensor) else checkpoint.read(name)
    if tuple(tensor.shape) != tuple(entry.shape) or stored_name(tensor.dtype) != entry.dtype:
        raise AssertionError(
            f"{name}: made {tensor.dtype} {tuple(tensor.shape)}, planned {entry.dtype} {entry.shape}"
        )
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    finite = all_finite(flat, entry.dtype)
    if isinstance(entry, NewTensor) and not finite:
        raise CheckpointError(
            "NaN or infinity in the result",
            where=name,
            fix="check that tensor in the source; fp16 sources can overflow, try bf16 or fp32",
        )
    return flat.data, finite
