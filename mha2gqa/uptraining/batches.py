"""Token blocks to batches, in an order that depends on the seed and the step alone.

World size, micro-batch and interruptions do not change which blocks a step sees.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from ..data import SpanCorruption, cut
from ..errors import DataError
from .loss import IGNORE_INDEX
from .run_dir import cleanup_on_error


class Rows(Protocol):
    """Examples of pairs, by number or by several numbers."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: Any, /) -> Any: ...


IdBlocks = np.ndarray | Tensor  # integer ids [N, T + 1]
Blocks = IdBlocks | Rows
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


class Collate(Protocol):
    """Blocks to a batch; `counts_labels` says whether labelled tokens must be counted."""

    counts_labels: bool

    def __call__(self, blocks: Any, keys: Any = None) -> Batch: ...


@dataclass
class Collator:
    """Turns blocks `[B, T + 1]` into a batch: inputs, labels already shifted, positions if isolated.

    Args:
        eos: End-of-text id by which packed documents are kept apart, or None to let them attend.
        counts_labels: Whether some tokens carry no loss (they come as `-id - 1`).
    """

    eos: int | None = None
    counts_labels: bool = False

    def __call__(self, blocks: Any, keys: Any = None) -> Batch:
        """Make the batch.

        Args:
            blocks: Ids `[B, T + 1]`, or a list of such rows.
            keys: Numbers of the blocks in the run, `[B]`; for objectives that draw, so not here.
        """
        if isinstance(blocks, list):  # rows of a stream
            blocks = np.stack(blocks)
        ids = torch.as_tensor(np.asarray(blocks, dtype=np.int64))
        if self.counts_labels:
            ids, labelled = torch.where(ids < 0, -ids - 1, ids), ids >= 0
        batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
        if self.counts_labels:
            # Not in place: with a single row the slices of inputs and labels share memory.
            batch["labels"] = batch["labels"].masked_fill(~labelled[:, 1:], IGNORE_INDEX)
        if self.eos is not None:
            batch["position_ids"] = restarted_positions(batch["input_ids"], self.eos)
        return batch


@dataclass(frozen=True)
class SpanCollator:
    """Turns blocks `[B, L + 1]` into encoder ids, decoder ids and labels; the last column is not used.

    Args:
        corruption: Of blocks of L tokens.
    """

    corruption: SpanCorruption
    counts_labels = True  # a block of L tokens has fewer targets

    def __call__(self, blocks: Any, keys: Any = None) -> Batch:
        """Make the batch.

        Args:
            blocks: Ids `[B, L + 1]`, or a list of such rows.
            keys: What decides the noise of each block, `[B]`: its number in the run, so that each pass
                over the data takes other spans out. None: the block's own ids.
        """
        ids = np.asarray(np.stack(blocks) if isinstance(blocks, list) else blocks, dtype=np.int64)[:, :-1]
        if keys is None:
            keys = (ids * np.arange(1, ids.shape[1] + 1)).sum(1)
        encoder, targets = self.corruption(ids, keys)
        decoder = self.corruption.decoder_inputs(targets)
        rows = {"input_ids": encoder, "decoder_input_ids": decoder, "labels": targets}
        return {name: torch.from_numpy(x) for name, x in rows.items()}


class Cached(Protocol):
    """What was computed beforehand for each row of some blocks, see `teacher_cache`."""

    def read(self, rows: Sequence[int]) -> Batch: ...


class BlockOrder(Dataset):
    """Blocks in random order without replacement, pass after pass; item i of the run is a function of i.

    `caches`, where set, holds what is known beforehand about the rows of each source; batches carry it.

    Args:
        blocks: Ids `[N, T + 1]`, in memory or memory-mapped.
        count: Blocks of the whole run (steps * blocks per step).
        seed: Chooses the order.
        collate: Makes the batch.
    """

    def __init__(self, blocks: Blocks, count: int, seed: int, collate: Collate) -> None:
        self.blocks, self.count, self.seed, self.collate = blocks, count, seed, collate
        self._orders: OrderedDict[int, np.ndarray] = OrderedDict()
        self.caches: list[Cached] = []

    @property
    def sources(self) -> list[Blocks]:
        """The blocks of each source."""
        return [self.blocks]

    def locate(self, index: int) -> tuple[int, int]:
        """Source and row of item `index` of the run."""
        return 0, self.row(index)

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

    def fetch(self, indices: Sequence[int]) -> Blocks:
        """The blocks of some items, `[B, T + 1]`."""
        return self.blocks[[self.row(i) for i in indices]]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        batch = self.collate(self.fetch(indices), list(indices))
        if self.caches:
            places = [self.locate(i) for i in indices]
            known = [self.caches[source].read([row]) for source, row in places]
            batch |= {name: torch.cat([k[name] for k in known]) for name in known[0]}
        return batch

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])


class Mixture(BlockOrder):
    """Several sources in fixed shares, each in its own random order; item i is a function of i.

    Args:
        sources: Blocks `[N, T + 1]` of each source.
        shares: Positive shares of the run, one per source; they need not add up to 1.
        count, seed, collate: As in `BlockOrder`.
    """

    def __init__(
        self, sources: Sequence[Blocks], shares: Sequence[float], count: int, seed: int, collate: Collate
    ) -> None:
        super().__init__(sources[0], count, seed, collate)
        quotas = share_out(count, shares)
        labels = np.repeat(np.arange(len(sources), dtype=np.uint8), quotas)
        self.source = np.random.default_rng([seed, count]).permutation(labels)  # of each item
        self.place = np.empty(count, dtype=np.int64)  # of each item among its source's
        for number, quota in enumerate(quotas):
            self.place[self.source == number] = np.arange(quota)
        self.orders = [
            BlockOrder(blocks, quota, seed + number, collate)
            for number, (blocks, quota) in enumerate(zip(sources, quotas, strict=True))
        ]

    @property
    def sources(self) -> list[Blocks]:
        """The blocks of each source."""
        return [order.blocks for order in self.orders]

    def locate(self, index: int) -> tuple[int, int]:
        """Source and row of item `index` of the run."""
        source = int(self.source[index])
        return source, self.orders[source].row(int(self.place[index]))

    def fetch(self, indices: Sequence[int]) -> Blocks:
        """The blocks of some items, `[B, T + 1]`."""
        found = [self.orders[source].blocks[row] for source, row in map(self.locate, indices)]
        whole = isinstance(found[0], np.ndarray | Tensor)
        return np.stack([np.asarray(block) for block in found]) if whole else found


def share_out(count: int, shares: Sequence[float]) -> list[int]:
    """Whole numbers in the given proportions that add up to `count` (largest remainders first)."""
    exact = [count * share / sum(shares) for share in shares]
    quotas = [int(x) for x in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: quotas[i] - exact[i])
    for i in by_remainder[: count - sum(quotas)]:
        quotas[i] += 1
    return quotas


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
            empty = first == 0
            for number, ids in enumerate(self.documents(first), first):
                yield turn, number, ids
                empty = False
            if empty:
                raise DataError("the stream of documents is empty", where="--data", fix="check the path")
            turn, first = turn + 1, 0
            self.turns = turn

    def __iter__(self) -> Iterator[np.ndarray]:
        in_use: deque[tuple[int, int]] = deque()  # (pass, document) of those not used up
        dropped = 0

        def documents() -> Iterator[np.ndarray]:
            for turn, number, ids in self._stream():
                in_use.append((turn, number))
                yield ids

        blocks = cut(documents(), self.window, skip=self.start.token)
        for made, block in enumerate(blocks, self.made + 1):
            while dropped < block.last.document:
                in_use.popleft()
                dropped += 1
            if made % self.blocks_per_step == 0:
                self.positions[made] = Position(*in_use[0], block.last.token)
                while len(self.positions) > KEPT_POSITIONS:
                    self.positions.popitem(last=False)
            yield block.ids


def save_blocks(path: Path, blocks: Iterable[np.ndarray], vocabulary: int) -> int:
    """Write blocks to an `.npy` file (complete or not at all) and count them.

    Args:
        path: The file.
        blocks: Integer rows `[T + 1]` of one length.
        vocabulary: Ids are below this, which decides the integer type on disk; 0 if some are negative.
    """
    kind = np.uint16 if 0 < vocabulary <= 2**16 else np.int32
    rows = np.stack([row.astype(kind) for row in blocks])
    partial = path.with_suffix(".partial")
    with cleanup_on_error(partial):
        with partial.open("wb") as file:
            np.save(file, rows)
        partial.replace(path)
    return len(rows)
