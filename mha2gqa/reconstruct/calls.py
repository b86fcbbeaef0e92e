"""Calls of one module, gathered from a stream and repeated in batches of one size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..calibration import Batch
from .hidden_states import Stream
from .module_calls import first_tensor
from .row_store import RowStore


@dataclass
class Calls:
    """Calls of one module, ready to be repeated in batches of one size.

    Args:
        rows: Parameter name -> rows `[N, T, D]`.
        target: `[N, T, D]` what the module should return.
        span: Which of the rows take part.
        fixed: Number of a batch -> the other arguments.
        size: Rows per batch; masks may depend on it.
        masked: Whether every batch has masks of its own: only its rows go together then.
        real: bool `[N, T]`, which positions of the rows are real and count; None for all.
        scale: Squared errors are relative to this.
    """

    rows: Mapping[str, RowStore]
    target: RowStore
    span: range
    fixed: Callable[[int], Mapping[str, Any]]
    size: int
    masked: bool = False
    real: Tensor | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.real is not None and self.real.shape != self.target.data.shape[:2]:
            self.real = None

    def __len__(self) -> int:
        return len(self.span)

    def in_order(self) -> Iterator[Tensor]:
        """Row numbers of one batch after the other."""
        yield from torch.arange(len(self)).split(self.size)

    def fetch(self, index: Tensor) -> tuple[Tensor, ...]:
        """The target and the inputs of some rows, on the device.

        Args:
            index: Numbers within the span.
        """
        where = index + self.span.start
        consecutive = bool((where.diff() == 1).all())
        rows = slice(int(where[0]), int(where[-1]) + 1) if consecutive else where
        return (self.target.read(rows), *(store.read(rows) for store in self.rows.values()))

    def output(self, module: nn.Module, inputs: Sequence[Tensor], index: Tensor) -> Tensor:
        """Run `module` alone on fetched inputs (`size` of them)."""
        batch = (self.span.start + int(index[0])) // self.size if self.masked else 0
        return first_tensor(module(**dict(zip(self.rows, inputs, strict=True)), **self.fixed(batch)))

    def real_of(self, index: Tensor) -> Tensor | None:
        """Which positions of some rows are real, bool `[n, T]` on the device; None for all."""
        if self.real is None:
            return None
        return self.real[(index + self.span.start).to(self.real.device)].to(self.target.memory.device)

    def loss(self, output: Tensor, target: Tensor, index: Tensor) -> Tensor:
        """Mean squared error over the real positions of some rows, relative to `scale`."""
        errors, real = (output.float() - target.float()).square(), self.real_of(index)
        return (errors if real is None else errors[real]).mean() / self.scale

    def weight(self, index: Tensor) -> int:
        """What some rows count for in a mean: rows, or their real positions."""
        real = self.real_of(index)
        return len(index) if real is None else int(real.sum())


def gather(
    source: Stream, read: nn.Module, target: Callable[[int], Tensor], student: Stream, module: nn.Module
) -> Calls:
    """Calls of a module of the student: what it reads, and what it should return.

    Args:
        source, read: The stream, and the module in its model, whose inputs are taken.
        target: Batch -> what the module should return.
        student, module: The student's stream and module: its masks and positions are used.
    """
    count = len(source.batches)
    names = list(student.call(module, 0, before=True).rows)  # parameter names may differ between classes
    rows: list[RowStore] = []
    targets: RowStore | None = None
    for i in range(count):
        values, wanted = list(source.call(read, i, before=True).rows.values()), target(i)
        where = source.rows_of(i)
        rows = rows or [RowStore((source.count, *x.shape[1:]), x.dtype, source.memory) for x in values]
        targets = targets or RowStore((source.count, *wanted.shape[1:]), wanted.dtype, source.memory)
        targets.write(where, wanted)
        for store, x in zip(rows, values, strict=True):
            store.write(where, x)
    assert targets is not None
    fixed = {i: student.call(module, i, before=True).fixed for i in range(count if student.masked else 1)}
    stores = dict(zip(names, rows, strict=True))
    span = range(source.count)
    return Calls(stores, targets, span, fixed.__getitem__, source.size, student.masked, student.real)


def slice_rows(inputs: Batch | Tensor, stop: int) -> Batch | Tensor:
    """The first rows of ids or of every keyword tensor."""
    if isinstance(inputs, Mapping):
        return {name: x[:stop] for name, x in inputs.items()}
    return inputs[:stop]
