"""Documents to token ids, joined streams and blocks; exact counts, memory flat in the corpus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..errors import DataError, UsageError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

ENCODE_DOCUMENTS, ENCODE_BYTES = 256, 1 << 20  # one call of the tokenizer gets at most about this much


def bos_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The BOS id if the tokenizer's own post-processor puts one before a text, else None."""
    bos = tokenizer.bos_token_id
    if bos is None:
        return None
    own = list(tokenizer("a", verbose=False)["input_ids"])
    bare = list(tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"])
    return int(bos) if own[:1] == [bos] and bare[:1] != [bos] else None


def eos_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The end-of-text id that follows each document.

    Raises:
        DataError: The tokenizer names none.
    """
    if tokenizer.eos_token_id is None:
        raise DataError(
            "the tokenizer has no end-of-text token to put between documents",
            where=tokenizer.name_or_path or "tokenizer",
            fix="set eos_token in tokenizer_config.json",
        )
    return int(tokenizer.eos_token_id)


def batches_of(texts: Iterable[str], count: int, size: int) -> Iterator[list[str]]:
    """Lists of at most `count` texts, closed early once they hold `size` characters."""
    batch: list[str] = []
    held = 0
    for text in texts:
        batch.append(text)
        held += len(text)
        if len(batch) == count or held >= size:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def encode_documents(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> Iterator[np.ndarray]:
    """Token ids of each document as the protocol `blocks` joins them.

    No special tokens but these: the end-of-text token after each document, and a BOS before it where
    the tokenizer's own post-processor puts one.

    Args:
        tokenizer: A transformers tokenizer.
        texts: The documents.

    Yields:
        int32 ids `[n]` of one document after the other.

    Raises:
        DataError: The tokenizer has no end-of-text token.
    """
    bos, eos = bos_id(tokenizer), eos_id(tokenizer)
    head = [] if bos is None else [bos]
    for batch in batches_of(texts, ENCODE_DOCUMENTS, ENCODE_BYTES):
        for ids in tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]:
            yield np.array([*head, *ids, eos], dtype=np.int32)


def within(documents: Iterable[np.ndarray], embeddings: int | None, where: str) -> Iterator[np.ndarray]:
    """Encoded documents as they are, as long as the model has an embedding for every id.

    Args:
        documents: Token ids `[n]` of one document after the other; ids without loss may be `-id - 1`.
        embeddings: How many the model has; None if that is not known.
        where: The model, for the message.

    Raises:
        DataError: The tokenizer is another model's.
    """
    for ids in documents:
        highest = int(np.maximum(ids, ~ids).max(initial=0))
        if embeddings is not None and highest >= embeddings:
            raise DataError(
                f"the tokenizer gives id {highest}, the model has {embeddings} embeddings",
                where=where,
                fix="use the tokenizer the model was trained with",
            )
        yield ids


def iterate_blocks(
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str],
    window: int,
    *,
    max_tokens: int | None = None,
) -> Iterator[np.ndarray]:
    """Stream the blocks of `token_blocks` as int32 arrays `[window + 1]`.

    Raises:
        DataError: There is not one whole block.
    """
    return cut_blocks(encode_documents(tokenizer, texts), window, max_tokens=max_tokens)


def cut_blocks(
    documents: Iterable[np.ndarray], window: int, *, max_tokens: int | None = None
) -> Iterator[np.ndarray]:
    """Join encoded documents and cut blocks, as `iterate_blocks` does.

    Args:
        documents: Token ids `[n]` of one document after the other.
        window, max_tokens: As in `token_blocks`.

    Raises:
        DataError: There is not one whole block.
    """
    if window < 1:
        raise UsageError(f"a block of {window} tokens is not possible", where="--window")
    left = None if max_tokens is None else max_tokens // window
    if left == 0:
        raise DataError(
            f"{max_tokens} tokens are less than one block of {window}",
            where="--max-tokens",
            fix="raise it or lower --window",
        )
    kept, held, total, blocks = [], 0, 0, 0  # `kept` arrays hold `held` ids not yet in a block
    for ids in documents:
        kept.append(ids)
        held += len(ids)
        total += len(ids)
        if held <= window:
            continue
        stream = np.concatenate(kept)
        ready = (len(stream) - 1) // window
        for i in range(ready if left is None else min(ready, left - blocks)):
            yield stream[i * window : i * window + window + 1]
            blocks += 1
        if blocks == left:
            return
        kept = [stream[ready * window :].copy()]
        held = len(kept[0])
    if blocks == 0:
        raise DataError(
            f"the text has {total} tokens, one block needs {window + 1}",
            where="--data",
            fix="give more text or lower --window",
        )


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

    blocks = list(iterate_blocks(tokenizer, texts, window, max_tokens=max_tokens))
    return torch.from_numpy(np.stack(blocks)).long()


def count_tokens(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> int:
    """Tokens of the joined stream of `texts`, separators included."""
    return sum(len(ids) for ids in encode_documents(tokenizer, texts))
