"""Training and held-out text of a run: read, kept apart, shuffled, cut into blocks once."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoints.atomic import write_json
from ..data import Document, cut_blocks, encode_documents, held_out, read_records, within
from ..data.chat import encode_chats
from ..distributed import is_rank_zero
from ..errors import CheckpointError, DataError, UsageError, reason
from ..progress import current
from .batches import BlockOrder, Blocks, BlockStream, Collate, Collator, Mixture, save_blocks, share_out
from .budget import Budget, UptrainConfig
from .run_dir import check_sources

Warn = Callable[[str], None]
CUT_AGAIN = "delete it: the text is cut again"
SHUFFLED_BYTES = 4 << 30  # text held in memory to be shuffled; beyond it only the beginning is used


@dataclass
class Corpus:
    """What a run trains on.

    Args:
        train: Blocks in the order of the run, or a stream of them.
        held_out: Held-out blocks `[M, T + 1]`, or None.
        unique_tokens: Tokens of the training blocks, None for a stream.
        collate: Makes batches.
        tokens_by_step: Of pairs, whose lengths differ: target tokens after each step, `[steps + 1]`.
    """

    train: BlockOrder | BlockStream
    held_out: Blocks | None
    unique_tokens: int | None
    collate: Collate
    tokens_by_step: np.ndarray | None = None

    def tokens_at(self, step: int, budget: Budget) -> int:
        """Tokens trained after a step."""
        if self.tokens_by_step is None:
            return step * budget.batch_tokens
        return int(self.tokens_by_step[step])

    @property
    def cached(self) -> bool:
        """Whether what a teacher predicts comes with the batches."""
        return isinstance(self.train, BlockOrder) and bool(self.train.caches)


def content(document: Document) -> str:
    """What identifies a document: its text without regard to white space, or its messages."""
    if document.messages is not None:
        return json.dumps(document.messages, sort_keys=True, ensure_ascii=False, default=str)
    return " ".join(document.text.split())


class SplitDocuments:
    """The documents of a run, train and held-out side disjoint by content.

    Args:
        config: The run.
    """

    def __init__(self, config: UptrainConfig) -> None:
        self.config = config
        self.known = {content(d) for d in self.held_out()} if config.eval_data is not None else set()

    def _read(self, paths: Sequence[str]) -> Iterator[Document]:
        return read_records(list(paths), text_column=self.config.text_column)

    def _is_held_out(self, document: Document) -> bool:
        if self.config.eval_data is not None:
            return content(document) in self.known
        return self.config.holdout > 0 and held_out(content(document), self.config.holdout, 0)

    def train(self, paths: Sequence[str] | None = None) -> Iterator[Document]:
        """Training documents of some sources (all by default), in the order of the data."""
        seen = kept = 0
        for document in self._read(paths or self.config.data):
            seen += 1
            if not self._is_held_out(document):
                kept += 1
                yield document
        if not kept:
            raise DataError(
                f"all its {seen} documents are held out",
                where=", ".join(paths or self.config.data),
                fix="give other eval_data" if self.config.eval_data is not None else "lower holdout",
            )

    def held_out(self) -> Iterator[Document]:
        """Held-out documents in the order of the data."""
        if self.config.eval_data is not None:
            return self._read(self.config.eval_data)
        if self.config.holdout == 0:
            return iter(())
        return (d for d in self._read(self.config.data) if self._is_held_out(d))

    def are_chats(self) -> bool:
        """Whether the data holds chat messages, by its first document."""
        return next(self._read(self.config.data)).messages is not None


def has_labels(blocks: np.ndarray, rows: int = 1024) -> bool:
    """Whether any target of some chats' blocks `[N, T + 1]` carries loss, looking at so many rows at a time."""
    return any((blocks[start : start + rows, 1:] >= 0).any() for start in range(0, len(blocks), rows))


class BlockCutter:
    """Turns documents into blocks, and keeps them in files for a resumed run.

    Args:
        config, budget: The run.
        tokenizer: Of the model.
        chats: Whether the documents are chats.
        folder: Where the files go.
        embeddings: How many the model has, None if that is not known.
    """

    def __init__(
        self,
        config: UptrainConfig,
        budget: Budget,
        tokenizer: Any,
        chats: bool,
        folder: Path,
        embeddings: int | None = None,
    ) -> None:
        self.config, self.budget, self.tokenizer = config, budget, tokenizer
        self.chats, self.folder, self.embeddings = chats, folder, embeddings

    def encode(self, documents: Iterable[Document]) -> Iterator[np.ndarray]:
        """Ids of each document, through the chat template where they are chats."""
        if self.chats:
            ids = encode_chats(self.tokenizer, documents, self.config.assistant_only_loss)
        else:
            ids = encode_documents(self.tokenizer, (_text(d) for d in documents))
        return within(ids, self.embeddings, self.config.model)

    def shuffled(self, documents: Iterable[Document], warn: Warn) -> Iterator[Document]:
        """The documents in an order given by the seed."""
        held, size = [], 0
        for document in documents:
            held.append(document)
            size += len(document.text) or len(content(document))
            if size >= SHUFFLED_BYTES:
                warn(
                    f"only the first {size / 1e9:.1f} GB of text are used; streaming reads all of it in order"
                )
                break
        random.Random(self.config.seed).shuffle(held)
        yield from held

    def blocks(self, name: str, documents: Iterable[Document], max_tokens: int) -> np.ndarray:
        """Blocks `[N, T + 1]`, cut once and memory-mapped from then on: a resumed run sees the same ones."""
        path = self.folder / f"{name}.npy"
        if not path.exists():
            ids = self.encode(documents)
            cut = cut_blocks(ids, self.budget.window, max_tokens=max_tokens)
            save_blocks(path, cut, 0 if self.chats else len(self.tokenizer))
        found = _load_blocks(path, self.budget.window)
        if self.chats and not has_labels(found):
            raise DataError(
                "no token of these chats is an assistant's",
                where="--eval-data" if name == "held_out" and self.config.eval_data is not None else "--data",
                fix="give chats with assistant turns, or set assistant_only_loss false",
            )
        return found


def _load_blocks(path: Path, window: int) -> np.ndarray:
    """Blocks `[N, T + 1]` that were cut before, mapped into memory.

    Raises:
        CheckpointError: The file is damaged.
    """
    try:
        found = np.load(path, mmap_mode="r")
    except (EOFError, OSError, ValueError) as error:
        raise CheckpointError(f"damaged ({reason(error, 80)})", where=path, fix=CUT_AGAIN) from error
    if found.ndim != 2 or found.shape[1] != window + 1 or found.dtype.kind not in "iu":
        what = f"damaged (holds {found.dtype} {list(found.shape)}, not blocks of {window + 1} ids)"
        raise CheckpointError(what, where=path, fix=CUT_AGAIN)
    return found


@contextmanager
def blaming_eval_data(eval_data: bool = True) -> Iterator[None]:
    """Name `--eval-data` in errors of text that is too short or empty: readers know the text as `--data`."""
    try:
        yield
    except DataError as error:
        if not eval_data or error.where != "--data":
            raise
        raise DataError(error.what, where="--eval-data", fix=error.fix) from error


def _text(document: Document) -> str:
    if document.messages is not None:
        raise DataError(
            "a chat among texts", where=document.source, fix="train on one kind of data at a time"
        )
    return document.text


def load_corpus(
    config: UptrainConfig,
    budget: Budget,
    tokenizer: Any,
    folder: Path,
    collate: Collate,
    warn: Warn,
    embeddings: int | None = None,
) -> Corpus:
    """Read and cut the data of a run; what is cut is kept in `folder` for a resumed run.

    Args:
        config, budget: The run.
        tokenizer: Of the model.
        folder: The run directory.
        collate: Makes batches.
        warn: Tells the user something.
        embeddings: How many the model has, None if that is not known.

    Raises:
        DataError: There is no training text, less than one block of it, or another model's tokenizer.
        UsageError: The data is of a kind that the options do not fit, or a file of a stream has changed.
    """
    current().stage("reading text")
    warnings = check_sources(config, folder, is_rank_zero())
    with blaming_eval_data(config.eval_data is not None):
        texts = SplitDocuments(config)
    chats = texts.are_chats()
    if chats:
        if not isinstance(collate, Collator) or config.isolate_documents:
            where = "isolate_documents" if config.isolate_documents else "objective span-corruption"
            raise UsageError("cannot be used with chats", where=where, fix="leave it out, or train on text")
        collate = Collator(counts_labels=True)
    cutter = BlockCutter(config, budget, tokenizer, chats, folder, embeddings)
    scored = _held_out_blocks(cutter, texts, warnings.append)
    if config.streaming:

        def documents(first: int) -> Iterator[np.ndarray]:
            return cutter.encode(islice(texts.train(), first, None))

        stream = BlockStream(documents, budget.window, budget.blocks_per_step)
        corpus = Corpus(stream, scored, None, collate)
    else:
        order = _order(cutter, texts, collate, warnings.append)
        unique = sum(len(blocks) for blocks in order.sources) * budget.window
        corpus = Corpus(order, scored, unique, collate)
    for warning in warnings:  # not before it is known that there is something to train on
        warn(warning)
    return corpus


def _order(cutter: BlockCutter, texts: SplitDocuments, collate: Collate, warn: Warn) -> BlockOrder:
    """Training blocks in memory-mapped files, in the order of the run; says where data is repeated."""
    config, budget = cutter.config, cutter.budget
    count = budget.steps * budget.blocks_per_step
    groups = [config.data] if config.data_weights is None else [(path,) for path in config.data]
    quotas = share_out(count, config.data_weights or (1.0,))
    found = []
    for number, (paths, quota) in enumerate(zip(groups, quotas, strict=True)):
        if quota == 0:
            raise UsageError(
                f"its share is less than one of the {count} blocks of the run",
                where=f"data_weights of {paths[0]}",
                fix="raise it, or leave that source out",
            )
        documents = cutter.shuffled(texts.train(paths), warn)  # read only if they must be cut
        blocks = cutter.blocks(f"train-{number}", documents, quota * budget.window)
        if len(blocks) < quota:
            warn(
                f"{paths[0] if len(paths) == 1 else 'the data'} has {len(blocks) * budget.window:,} tokens in "
                f"whole blocks: {quota / len(blocks):.2f} passes over it"
            )
        found.append(blocks)
    if len(found) > 1:
        return Mixture(found, config.data_weights or (), count, config.seed, collate)
    return BlockOrder(found[0], count, config.seed, collate)


def _held_out_blocks(cutter: BlockCutter, texts: SplitDocuments, warn: Warn) -> np.ndarray | None:
    config, none = cutter.config, cutter.folder / "held_out.none"
    if none.exists():
        return None
    limit = max(config.eval_tokens, cutter.budget.window)
    if config.eval_data is not None:
        with blaming_eval_data():
            return cutter.blocks("held_out", texts.held_out(), limit)
    try:
        return cutter.blocks("held_out", texts.held_out(), limit)
    except DataError as error:
        if config.holdout > 0:
            warn(f"no held-out evaluation during training: {error.what}; give eval_data")
        write_json(none, {"why": error.what})
        return None
