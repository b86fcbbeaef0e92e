"""Encoded documents joined and cut into blocks: the one place where token ids are cut."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import DataError, UsageError, quoted
from .encoding import encode_documents

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


class Place(NamedTuple):
    """A place in a stream of documents: number of the document from 0, tokens of it that come before."""

    document: int
    token: int


class Block(NamedTuple):
    """One block.

    Args:
        ids: `[window + overlap]`.
        first: Place of its first id.
        last: Place of its last id; with an overlap of 1 the next block begins there.
    """

    ids: np.ndarray
    first: Place
    last: Place


def cut(
    documents: Iterable[np.ndarray],
    window: int,
    *,
    overlap: int = 1,
    skip: int = 0,
    max_tokens: int | None = None,
) -> Iterator[Block]:
    """Join encoded documents and cut blocks, each given as soon as the document that fills it is read.

    Args:
        documents: Token ids `[n]` of one document after the other.
        window: Ids between the starts of two blocks.
        overlap: Ids that a block shares with the next (1: inputs, and targets one later).
        skip: Tokens of the first document to leave out; fewer than it has.
        max_tokens: At most so many ids, in whole blocks of `window`.

    Yields:
        The blocks; the last partial block is dropped.

    Raises:
        DataError: There is not one whole block.
    """
    if window < 1:
        raise UsageError("must be at least 1", where=f"--window {window}")
    limit = None if max_tokens is None else max_tokens // window
    if limit == 0:
        raise DataError(
            f"{max_tokens} tokens are less than one block of {window}",
            where="--max-tokens",
            fix="raise it or lower --window",
        )
    size = window + overlap
    kept: list[np.ndarray] = []  # ids from the first of the next block on
    lengths: deque[tuple[int, int]] = deque()  # (number, length) of the documents they are of
    held, offset, total, made = 0, skip, -skip, 0
    for number, ids in enumerate(documents):
        kept.append(ids if number else ids[skip:])
        lengths.append((number, len(ids)))
        held += len(kept[-1])
        total += len(ids)
        if held < size:
            continue
        stream, start = np.concatenate(kept), 0
        while start + size <= len(stream):
            while offset >= lengths[0][1]:
                offset -= lengths.popleft()[1]
            after = len(stream) - start - size  # ids of this document beyond the block
            first, last = Place(lengths[0][0], offset), Place(number, len(ids) - after - 1)
            block = Block(stream[start : start + size], first, last)
            start, offset, made = start + window, offset + window, made + 1
            yield block
            if made == limit:
                return
        kept = [stream[start:].copy()]
        held = len(kept[0])
    if made == 0:
        raise DataError(
            f"the text has {total} tokens, one block needs {size}",
            where="--data",
            fix="give more text or lower --window",
        )


def cut_blocks(
    documents: Iterable[np.ndarray], window: int, *, overlap: int = 1, max_tokens: int | None = None
) -> Iterator[np.ndarray]:
    """The ids `[window + overlap]` of the blocks of `cut`."""
    return (block.ids for block in cut(documents, window, overlap=overlap, max_tokens=max_tokens))


def require_blocks(
    name: str, blocks: Any, embeddings: int | None, *, masked: bool = False, positions: int | None = None
) -> None:
    """Refuse what is not token blocks of a model.

    Args:
        name: The argument.
        blocks: What was given for it: ids `[N, T + 1]`, of torch or numpy.
        embeddings: How many the model has; None if that is not known.
        masked: Whether ids without loss may be `-id - 1`.
        positions: How many the model has a table of; None where it computes them.

    Raises:
        UsageError: It has another shape or type, no row, no target, or ids or positions that the model has no
            embedding for.
    """
    shape, kind = tuple(getattr(blocks, "shape", ())), str(getattr(blocks, "dtype", ""))
    if len(shape) != 2 or "int" not in kind:
        said = quoted(blocks) if len(shape) != 2 else f"{kind.rpartition('.')[2]} {list(shape)}"
        raise UsageError(
            f"must be token ids [N, T + 1], not {said}", where=name, fix="data.token_blocks makes them"
        )
    if shape[0] < 1 or shape[1] < 2:
        raise UsageError(f"{list(shape)} are no rows of at least two ids", where=name, fix="give more text")
    if positions is not None and shape[1] - 1 > positions:
        raise UsageError(
            f"has rows of {shape[1] - 1:,} tokens, the model has {positions:,} positions",
            where=name,
            fix="cut shorter blocks",
        )
    ids: Any = blocks
    lowest, highest = int(ids.min()), int(ids.max())
    highest = max(highest, -lowest - 1)
    if embeddings is not None and (highest >= embeddings or (lowest < 0 and not masked)):
        raise UsageError(
            f"holds id {lowest if lowest < 0 and not masked else highest}, the model has {embeddings} embeddings",
            where=name,
            fix="use the tokenizer the model was trained with",
        )


def first_tokens(documents: Iterable[np.ndarray], count: int) -> np.ndarray:
    """The first `count` ids of joined documents, fewer where there are no more; no document beyond is read."""
    parts, held = [np.empty(0, dtype=np.int32)], 0
    for ids in documents:
        parts.append(ids[: count - held])
        held += len(parts[-1])
        if held >= count:
            break
    return np.concatenate(parts)


def token_blocks(
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str],
    window: int,
    *,
    max_tokens: int | None = None,
) -> torch.Tensor:
    """Join documents and cut non-overlapping blocks; the last partial block is dropped.

    Args:
        tokenizer: A transformers tokenizer.
        texts: The documents.
        window: Inputs per block, in tokens.
        max_tokens: At most this many inputs (whole blocks of them) are read.

    Returns:
        int64 `[N, window + 1]`: block i is `stream[i * window : i * window + window + 1]`, so that
        inputs are `[:, :-1]`, targets `[:, 1:]`, and every token but the first is a target once.

    Raises:
        DataError: There is not one whole block (the message says how many tokens there are).

    Example:
        >>> blocks = token_blocks(tokenizer, read_documents("train.jsonl"), 512, max_tokens=524_288)
    """
    import torch

    blocks = list(cut_blocks(encode_documents(tokenizer, texts), window, max_tokens=max_tokens))
    return torch.from_numpy(np.stack(blocks)).long()
