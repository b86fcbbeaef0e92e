"""Hidden states of many rows of text, kept on the GPU, in pinned host memory, or in a file."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from ..checkpoints.atomic import writing_to
from ..checkpoints.loading import free_memory

Place = Literal["device", "host", "disk"]
STREAMS = (
    3  # stores of a walk: hidden states of the original and the converted model, and what a layer returns
)
DEVICE_BYTES = 2 << 30  # a set of stores no larger than this stays on the GPU
HOST_SHARE = 0.8  # of the free host memory that a set of stores may take


@dataclass(frozen=True)
class Memory:
    """Where the stores of one walk lie.

    Args:
        place: `device`, `host` (pinned where the device is a GPU) or `disk`.
        device: Where rows are computed with.
        folder: Holds the files of `disk`; they are deleted as they are opened.
    """

    place: Place = "device"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    folder: Path | None = None


def choose_place(nbytes: int, device: torch.device, sharing: int = 1) -> Place:
    """Where the stores of a walk fit: beside the computation, in host memory, or only on disk.

    Args:
        nbytes: Bytes of all `STREAMS` of them together.
        device: Where rows are computed with.
        sharing: Processes that want as much of the same host memory.
    """
    if device.type != "cpu" and nbytes <= DEVICE_BYTES:
        return "device"
    free = free_memory(torch.device("cpu"))
    needed = pinned_bytes(nbytes) if device.type == "cuda" else nbytes
    if free is not None and needed * sharing > HOST_SHARE * free:
        return "disk"
    return "device" if device.type == "cpu" else "host"


def pinned_bytes(nbytes: int) -> int:
    """Page-locked memory that the stores of a walk take: torch rounds each up to a power of two.

    Args:
        nbytes: Bytes of all `STREAMS` of them together.
    """
    each = math.ceil(nbytes / STREAMS)
    return STREAMS << (each - 1).bit_length()


class RowStore:
    """A tensor `[N, …]` of rows, read and written in pieces.

    Args:
        shape: Of the whole tensor; its first dimension counts rows.
        dtype: Of the elements.
        memory: Where it lies.

    Raises:
        CheckpointError: The disk does not take it.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, memory: Memory) -> None:
        self.memory = memory
        if memory.place == "device":
            self.data = torch.empty(tuple(shape), dtype=dtype, device=memory.device)
        elif memory.place == "host":
            pinned = memory.device.type == "cuda"
            self.data = torch.empty(tuple(shape), dtype=dtype, pin_memory=pinned)
        else:
            with (
                writing_to(memory.folder or Path(tempfile.gettempdir())),
                tempfile.NamedTemporaryFile(dir=memory.folder, suffix=".rows") as file,
            ):
                count = torch.Size(shape).numel()
                if hasattr(os, "posix_fallocate"):  # a file with holes would end the process on a full disk
                    os.posix_fallocate(file.fileno(), 0, max(1, count * dtype.itemsize))
                flat = torch.from_file(file.name, shared=True, size=count, dtype=dtype)
                self.data = flat.view(tuple(shape))

    def __len__(self) -> int:
        return len(self.data)

    @property
    def distant(self) -> bool:
        """Whether rows must be brought to the device."""
        return self.data.device != self.memory.device

    def read(self, rows: slice | Tensor) -> Tensor:
        """Some rows on the device: `[n, …]`, a view where they lie there already."""
        if isinstance(rows, slice):
            return self.data[rows].to(self.memory.device, non_blocking=True)
        if not self.distant:
            return self.data[rows.to(self.data.device)]
        out = self.data.new_empty((len(rows), *self.data.shape[1:]), device=self.memory.device)
        for i, row in enumerate(
            rows.tolist()
        ):  # pinned rows are copied as they lie, with no gather on the host
            out[i].copy_(self.data[row], non_blocking=True)
        return out

    def write(self, rows: slice, values: Tensor) -> None:
        """Replace some rows."""
        self.data[rows].copy_(values, non_blocking=True)


@lru_cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which rows are brought to a GPU ahead of their turn.

    One for all fits: torch lends memory that a stream has let go of to that stream alone, so that each further stream
    would keep batches of its own.
    """
    return torch.cuda.Stream(device)


T = TypeVar("T", bound=tuple[Tensor, ...])


class Prefetched(Generic[T]):
    """The results of an iterator of device tensors, each begun on a side stream while the last one is used."""

    def __init__(self, items: Iterator[T], device: torch.device) -> None:
        self.items = items
        self.side = side_stream(device) if device.type == "cuda" else None
        if self.side is not None:
            self.side.wait_stream(torch.cuda.current_stream(device))
            self.device, self.next = device, self._begin()

    def __iter__(self) -> Iterator[T]:
        return self

    def _begin(self) -> T:
        with torch.cuda.stream(self.side):
            return next(self.items)

    def __next__(self) -> T:
        if self.side is None:
            return next(self.items)
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self.side)
        ready = self.next
        for x in ready:
            if x.is_cuda:
                x.record_stream(current)
        self.next = self._begin()
        return ready
