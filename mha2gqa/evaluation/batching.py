"""Windows to batches: of one length as soon as they fill one, the rest sorted by length and padded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data.seq2seq import encoder_positions, pad_encoder
from .protocols import Window

POOL_BATCHES = 32  # windows of this many full batches, at most, are sorted by length together


@dataclass(frozen=True)
class Batch:
    """Windows of similar length, padded on the right (causal models never look there).

    Args:
        windows: The windows, in the order of the rows.
        inputs: int64 `[B, T]`.
        targets: int64 `[N]`, the scored targets, row after row.
        positions: int64 `[N]`, where in `inputs.view(-1)` each is predicted.
        context: int64 `[N]`, how many inputs the model has seen there.
        highest: The highest id among inputs and targets.
        encoder: int64 `[B, S]` or float32 features `[B, …]`, and a mask `[B, S]` (None where features are not
            padded); or None.
    """

    windows: Sequence[Window]
    inputs: Tensor
    targets: Tensor
    positions: Tensor
    context: np.ndarray
    highest: int
    encoder: tuple[Tensor, Tensor | None] | None = None

    def pinned(self) -> Batch:
        """A copy in page-locked memory: its way to a GPU does not wait for the work queued there."""
        return replace(self, **{f.name: _pinned(getattr(self, f.name)) for f in fields(self)})


def _pinned(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_pinned, value))
    return value.pin_memory() if isinstance(value, Tensor) else value


def make_batches(windows: Iterable[Window], batch_size: int, window: int) -> Iterator[Batch]:
    """Group windows of similar length into batches of at most `batch_size * window` inputs.

    Windows of one length leave as soon as they fill a batch, so that a model can begin; the others gather
    until there are many to sort, so that little is padded.
    """
    room = batch_size * window
    pool: defaultdict[int, list[Window]] = defaultdict(list)  # by length
    held = 0
    for item in windows:
        length = _length(item)
        pool[length].append(item)
        held += 1
        if (len(pool[length]) + 1) * length > room:
            held -= len(pool[length])
            yield collate(pool.pop(length))
        elif held >= POOL_BATCHES * batch_size:
            yield from _cut(pool, room)
            held = 0
            pool.clear()
    yield from _cut(pool, room)


def _cut(pool: Mapping[int, Sequence[Window]], room: int) -> Iterator[Batch]:
    rows: list[Window] = []
    for length in sorted(pool):
        for item in pool[length]:
            if rows and (len(rows) + 1) * length > room:  # sorted: this one is the longest
                yield collate(rows)
                rows = []
            rows.append(item)
    if rows:
        yield collate(rows)


def _length(item: Window) -> int:
    read = item.encoder
    return len(item.ids) - 1 + (0 if read is None else encoder_positions(read.shape, read.dtype.kind == "i"))


def _padded(rows: Sequence[np.ndarray]) -> np.ndarray:
    out = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
    for row, ids in zip(out, rows, strict=True):
        row[: len(ids)] = ids
    return out


def collate(windows: Sequence[Window]) -> Batch:
    """One batch of these windows."""
    ids = _padded([w.ids for w in windows])  # [B, T + 1]
    column = np.arange(ids.shape[1] - 1)
    first = np.array([[w.first] for w in windows])
    end = np.array([[len(w.ids) - 1] for w in windows])
    scored = (column >= first) & (column < end)  # [B, T]
    context = np.broadcast_to(column, scored.shape)[scored] + 1
    inputs = np.where(column < end, ids[:, :-1], 0)
    encoder: tuple[Tensor, Tensor | None] | None = None
    if windows[0].encoder is not None:
        rows, mask = pad_encoder([w.encoder for w in windows if w.encoder is not None])
        padded = not rows.is_floating_point() or not bool(mask.all())
        encoder = (rows, mask if padded else None)
    return Batch(
        windows,
        torch.from_numpy(inputs),
        torch.from_numpy(ids[:, 1:][scored]),
        torch.from_numpy(np.flatnonzero(scored)),
        context,
        int(ids.max()),
        encoder,
    )
