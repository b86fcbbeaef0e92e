"""Training and held-out text of a run: read, kept apart, shuffled, cut into blocks once."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ..data import encode_documents, held_out, iterate_blocks, read_documents
from ..errors import DataError
from .batches import BlockOrder, Blocks, BlockStream, Collate, save_blocks
from .budget import Budget, UptrainConfig
from .workspace import write_json

logger = logging.getLogger(__name__)

SHUFFLED_BYTES = 4 << 30  # text held in memory to be shuffled; beyond it only the beginning is used


@dataclass
class Corpus:
    """What a run trains on.

    Args:
        train: Blocks in the order of the run, or a stream of them.
        held_out: Held-out blocks `[M, T + 1]`, or None.
        unique_tokens: Tokens of the training blocks, None for a stream.
        notices: What the user should know.
    """

    train: BlockOrder | BlockStream
    held_out: Blocks | None
    unique_tokens: int | None
    collate: Collate
    notices: list[str] = field(default_factory=list)


def _same_text(text: str) -> str:
    return " ".join(text.split())


class Texts:
    """The documents of a run, train and held-out side disjoint by content."""

    def __init__(self, config: UptrainConfig) -> None:
        self.config = config
        self.known = {_same_text(text) for text in self.held_out()} if config.eval_data is not None else set()

    def _read(self, paths: tuple[str, ...]) -> Iterator[str]:
        return read_documents(list(paths), text_column=self.config.text_column)

    def _is_held_out(self, text: str) -> bool:
        if self.config.eval_data is not None:
            return _same_text(text) in self.known
        return self.config.holdout > 0 and held_out(text, self.config.holdout, 0)

    def train(self) -> Iterator[str]:
        """Training documents in the order of the data."""
        return (text for text in self._read(self.config.data) if not self._is_held_out(text))

    def held_out(self) -> Iterator[str]:
        """Held-out documents in the order of the data."""
        if self.config.eval_data is not None:
            return self._read(self.config.eval_data)
        if self.config.holdout == 0:
            return iter(())
        return (text for text in self._read(self.config.data) if self._is_held_out(text))


def _shuffled(texts: Iterable[str], seed: int, notices: list[str]) -> list[str]:
    held, size = [], 0
    for text in texts:
        held.append(text)
        size += len(text)
        if size >= SHUFFLED_BYTES:
            notices.append(
                f"only the first {size / 1e9:.1f} GB of text are used; streaming reads all of it in order"
            )
            break
    random.Random(seed).shuffle(held)
    return held


def _blocks_file(path: Path, make: Callable[[], Iterable[np.ndarray]], vocabulary: int) -> np.ndarray:
    """Blocks cut once and memory-mapped from then on, so that a resumed run sees the same ones."""
    if not path.exists():
        save_blocks(path, make(), vocabulary)
    return np.load(path, mmap_mode="r")


def load_corpus(
    config: UptrainConfig,
    budget: Budget,
    tokenizer: Any,
    folder: Path,
    vocabulary: int,
    collate: Collate,
) -> Corpus:
    """Read and cut the data of a run; what is cut is kept in `folder` for a resumed run.

    Args:
        config, budget: The run.
        tokenizer: Of the model.
        folder: The workspace.
        vocabulary: Output columns of the model.
        collate: Makes batches.

    Raises:
        DataError: There is no training text, or less than one block of it.
    """
    texts, notices = Texts(config), list[str]()
    window = budget.window
    scored = _held_out_blocks(config, budget, tokenizer, folder, vocabulary, texts, notices)
    if config.streaming:

        def documents(first: int) -> Iterator[np.ndarray]:
            return encode_documents(tokenizer, islice(texts.train(), first, None))

        stream = BlockStream(documents, window, budget.blocks_per_step)
        return Corpus(stream, scored, None, collate, notices)

    def cut() -> Iterator[np.ndarray]:
        shuffled = _shuffled(texts.train(), config.seed, notices)
        return iterate_blocks(tokenizer, shuffled, window, max_tokens=budget.tokens)

    blocks = _blocks_file(folder / "train.npy", cut, vocabulary)
    unique = len(blocks) * window
    if unique < budget.tokens:
        notices.append(
            f"the data has {unique:,} tokens in whole blocks: {budget.tokens / unique:.2f} passes over it"
        )
    order = BlockOrder(blocks, budget.steps * budget.blocks_per_step, config.seed, collate)
    return Corpus(order, scored, unique, collate, notices)


def _held_out_blocks(
    config: UptrainConfig,
    budget: Budget,
    tokenizer: Any,
    folder: Path,
    vocabulary: int,
    texts: Texts,
    notices: list[str],
) -> np.ndarray | None:
    path, none = folder / "held_out.npy", folder / "held_out.none"
    if none.exists():
        return None
    limit = max(config.eval_tokens, budget.window)
    try:
        return _blocks_file(
            path,
            lambda: iterate_blocks(tokenizer, texts.held_out(), budget.window, max_tokens=limit),
            vocabulary,
        )
    except DataError as error:
        if config.eval_data is not None:
            raise
        if config.holdout > 0:
            notices.append(f"no held-out evaluation during training: {error.what}; give eval_data")
        write_json(none, {"why": error.what})
        return None
