"""Token blocks to batches, in an order that depends on the seed and the step alone.

World size, micro-batch and interruptions do not change which blocks a step sees.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from ..errors import DataError
from .losses import IGNORED

Blocks = np.ndarray | Tensor  # integer ids [N, T + 1]
Batch = dict[str, Tensor]
KEPT_POSITIONS = 512  # step boundaries whose stream position is remembered


def restarted_positions(inputs: Tensor, eos: int) -> Tensor:
    """Position ids that start over after each end-of-text token.

    Args:
        inputs: Token ids `[B, T]`.
        eos: The end-of-text id.

    Returns:
        int64 `[B, T]`; transformers keeps documents apart by them where no attention mask is given.
    """
    index = torch.arange(inputs.shape[1]).expand_as(inputs)
    starts = torch.zeros_like(inputs)
    starts[:, 1:] = torch.where(inputs[:, :-1] == eos, index[:, 1:], 0)
    return index - starts.cummax(dim=1).values


@dataclass(frozen=True)
class Collator:
    """Turns blocks `[B, T + 1]` into a batch: inputs, labels already shifted, positions if isolated.

    Args:
        eos: End-of-text id by which packed documents are kept apart, or None to let them attend.
    """

    eos: int | None = None
    counts_labels = False  # every position has a label

    def __call__(self, blocks: Any, mask: Any = None, keys: Any = None) -> Batch:
        """Make the batch.

        Args:
            blocks: Ids `[B, T + 1]`, or a list of such rows.
            mask: True where the target of a position counts, `[B, T]`; None for all.
            keys: Numbers of the blocks in the run, `[B]`; for objectives that draw, so not here.
        """
        if isinstance(blocks, list):  # rows of a stream
            blocks = np.stack(blocks)
        ids = torch.as_tensor(np.asarray(blocks, dtype=np.int64))
        batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
        if mask is not None:
            batch["labels"].masked_fill_(~torch.as_tensor(np.asarray(mask, dtype=bool)), IGNORED)
        if self.eos is not None:
            batch["position_ids"] = restarted_positions(batch["input_ids"], self.eos)
        return batch


class Collate(Protocol):
    """Blocks to a batch; `counts_labels` says whether labelled tokens must be counted."""

    counts_labels: bool

    def __call__(self, blocks: Any, mask: Any = None, keys: Any = None) -> Batch: ...


class BlockOrder(Dataset):
    """Blocks in random order without replacement, pass after pass; item i of the run is a function of i.

    Args:
        blocks: Ids `[N, T + 1]`, in memory or memory-mapped.
        count: Blocks of the whole run (steps * blocks per step).
        seed: Chooses the order.
        collate: Makes the batch.
        mask: See `Collator`, `[N, T]`.
    """

    def __init__(
        self, blocks: Blocks, count: int, seed: int, collate: Collate, mask: np.ndarray | None = None
    ) -> None:
        self.blocks, self.count, self.seed, self.collate, self.mask = blocks, count, seed, collate, mask
        self._orders: OrderedDict[int, np.ndarray] = OrderedDict()

    def __len__(self) -> int:
        return self.count

    def row(self, index: int) -> int:
        """The row of `blocks` that is item `index` of the run."""
        turn, place = divmod(index, len(self.blocks))
        if turn not in self._orders:
            self._orders[turn] = np.random.default_rng([self.seed, turn]).permutation(len(self.blocks))
            while len(self._orders) > 2:  # a batch may span two passes
                self._orders.popitem(last=False)
        return int(self._orders[turn][place])

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        rows = [self.row(i) for i in indices]
        mask = None if self.mask is None else self.mask[rows]
        return self.collate(self.blocks[rows], mask, list(indices))

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])


def as_is(batch: Batch) -> Batch:
    """The collate function of a data set that already returns whole batches."""
    return batch


@dataclass(frozen=True)
class Position:
    """Where a stream continues: pass over the data, document within the pass, token within the document."""

    turn: int = 0
    document: int = 0
    token: int = 0


class BlockStream(IterableDataset):
    """Blocks cut from a stream of documents as it comes; its position at every step can be saved.

    Args:
        documents: Opens the stream anew: documents as ids `[n]` from the given document on.
        window: Inputs per block.
        blocks_per_step: Positions are remembered at multiples of this many blocks.
        start: Where to begin, and the number of blocks made before it.
    """

    def __init__(
        self,
        documents: Callable[[int], Iterable[np.ndarray]],
        window: int,
        blocks_per_step: int,
        start: Position | None = None,
        made: int = 0,
    ) -> None:
        self.documents, self.window, self.blocks_per_step = documents, window, blocks_per_step
        self.start, self.made = start or Position(), made
        self.positions: OrderedDict[int, Position] = OrderedDict({made: self.start})
        self.turns = 0  # passes completed

    def position(self, made: int) -> Position:
        """Where block number `made` begins; known for recent multiples of `blocks_per_step`."""
        return self.positions[made]

    def _stream(self) -> Iterator[tuple[int, int, np.ndarray]]:
        turn, first = self.start.turn, self.start.document
        while True:
            number = first
            for number, ids in enumerate(self.documents(first), first):
                yield turn, number, ids
            if number == first == 0:
                raise DataError("the stream of documents is empty", where="data", fix="check the path")
            turn, first = turn + 1, 0
            self.turns = turn

    def __iter__(self) -> Iterator[np.ndarray]:
        made, offset = self.made, self.start.token
        held: list[tuple[int, int, np.ndarray]] = []  # documents not yet used up, `offset` into the first
        size = -offset
        for document in self._stream():
            held.append(document)
            size += len(document[2])
            if size <= self.window:
                continue
            ids = np.concatenate([d[2] for d in held])[offset:]
            used = 0
            while used + self.window < len(ids):
                block = ids[used : used + self.window + 1]
                used, made, offset = used + self.window, made + 1, offset + self.window
                while offset >= len(held[0][2]):
                    offset -= len(held.pop(0)[2])
                if made % self.blocks_per_step == 0:
                    self.positions[made] = Position(held[0][0], held[0][1], offset)
                    while len(self.positions) > KEPT_POSITIONS:
                        self.positions.popitem(last=False)
                yield block
            size = len(ids) - used


def save_blocks(path: Path, blocks: Iterable[np.ndarray], vocabulary: int) -> int:
    """Write blocks to an `.npy` file (complete or not at all) and count them.

    Args:
        path: The file.
        blocks: Integer rows `[T + 1]` of one length.
        vocabulary: Size of the vocabulary, which decides the integer type on disk.
    """
    kind = np.uint16 if vocabulary <= 2**16 else np.int32
    rows = np.stack([row.astype(kind) for row in blocks])
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.save(file, rows)
    partial.replace(path)
    return len(rows)
