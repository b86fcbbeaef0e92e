"""Sums of one pass over the text: by document, by length of context, and in all. A few bytes a document."""

from __future__ import annotations

from array import array

import numpy as np

from .batching import Batch
from .protocols import Window
from .result import PositionLoss
from .scoring import TokenScores


class Positions:
    """Sums of a quantity by length of context."""

    def __init__(self) -> None:
        self.sums = np.zeros(1)  # by tokens of context
        self.counts = np.zeros(1, dtype=np.int64)

    def add(self, values: np.ndarray, context: np.ndarray) -> None:
        """Add `values [N]` predicted from `context [N]` tokens each."""
        sums = np.bincount(context, weights=values, minlength=len(self.sums))
        if len(sums) > len(self.sums):
            more = (0, len(sums) - len(self.sums))
            self.sums, self.counts = np.pad(self.sums, more), np.pad(self.counts, more)
        self.sums += sums
        self.counts += np.bincount(context, minlength=len(sums))

    @property
    def total(self) -> float:
        """Sum over all."""
        return float(self.sums.sum())

    def curve(self) -> list[PositionLoss]:
        """Means over contexts of 1, 2, 3-4, 5-8, 9-16, … tokens, where there are any."""
        means = []
        low, high = 1, 1
        while low < len(self.sums):
            part = slice(low, high + 1)
            tokens = int(self.counts[part].sum())
            if tokens:
                means.append(PositionLoss(low, high, tokens, float(self.sums[part].sum() / tokens)))
            low, high = high + 1, 2 * high
        return means


class Units:
    """Growing columns, one entry per document or block: loss, tokens, bytes, words."""

    def __init__(self) -> None:
        self.columns = np.zeros((4, 1024))

    def add(self, windows: list[Window], losses: np.ndarray) -> None:
        """Add the summed loss `[len(windows)]` of each window to its unit."""
        units = np.array([w.unit for w in windows])
        while units.max() >= self.columns.shape[1]:
            self.columns = np.concatenate([self.columns, np.zeros_like(self.columns)], axis=1)
        amounts = np.array([(w.scored, w.bytes, w.words) for w in windows], dtype=np.float64).T
        for column, values in zip(self.columns, [losses, *amounts], strict=True):
            np.add.at(column, units, values)

    @property
    def nll(self) -> np.ndarray:
        return self.columns[0]

    @property
    def tokens(self) -> np.ndarray:
        return self.columns[1]

    @property
    def bytes(self) -> np.ndarray:
        return self.columns[2]

    @property
    def words(self) -> np.ndarray:
        return self.columns[3]


class Sources:
    """`file:line` of every unit, held as numbers."""

    def __init__(self) -> None:
        self.files: dict[str, int] = {}
        self.file, self.line = array("q"), array("q")

    def add(self, unit: int, source: str) -> None:
        """Note where `unit` comes from; units arrive in order."""
        name, _, line = source.rpartition(":")
        name, number = (name, int(line)) if name and line.isdigit() else (source, -1)
        index = self.files.setdefault(name, len(self.files))
        while len(self.file) < unit:  # documents too short to be scored
            self.file.append(-1)
            self.line.append(-1)
        if len(self.file) == unit:
            self.file.append(index)
            self.line.append(number)

    def __getitem__(self, unit: int) -> str:
        name = list(self.files)[self.file[unit]]
        return name if self.line[unit] < 0 else f"{name}:{self.line[unit]}"


class Tally:
    """All sums of one model over one pass."""

    def __init__(self) -> None:
        self.units = Units()
        self.positions = Positions()
        self.divergence = Positions()
        self.agreed = 0
        self.sha256 = ""
        self.seconds = 0.0

    def add(self, batch: Batch, nll: np.ndarray) -> None:
        """Add the losses `[N]` of a batch."""
        values = nll.astype(np.float64)
        starts = np.cumsum([0, *(w.scored for w in batch.windows)])[:-1]
        self.units.add(list(batch.windows), np.add.reduceat(values, starts))
        self.positions.add(values, batch.context)

    def add_comparison(self, batch: Batch, scores: TokenScores) -> None:
        """Add the agreement of a batch with the reference model."""
        assert scores.divergence is not None and scores.agreement is not None
        self.divergence.add(scores.divergence.numpy().astype(np.float64), batch.context)
        self.agreed += int(scores.agreement.sum())

    @property
    def tokens(self) -> int:
        """Tokens scored."""
        return int(self.units.tokens.sum())
