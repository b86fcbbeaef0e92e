"""Documents to token ids, several texts at a time on all cores, with a measure of the text they stand for."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..data import Document
from ..errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENCODE_DOCUMENTS, ENCODE_CHARACTERS = 64, 1 << 15  # one call of the tokenizer gets at most about this much
ENCODE_THREADS = 8  # at most

# Whether a character is white space, as `str.split` sees it; all beyond the last of these are not.
SPACES = np.array([chr(i).isspace() for i in range(0x3002)])


class TextSize:
    """UTF-8 bytes of every prefix of a text, and the words that begin in it.

    Args:
        text: The text.
    """

    def __init__(self, text: str) -> None:
        if text.isascii():
            codes = np.frombuffer(text.encode("ascii"), dtype=np.uint8)
            self._bytes = None
        else:
            codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
            wide = (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000) + 1
            self._bytes = np.cumsum(wide)
        begins = ~SPACES.take(codes, mode="clip")  # not a space, …
        begins[1:] &= ~begins[:-1].copy()  # … and after one
        self._words = np.cumsum(begins, dtype=np.int64)

    def __call__(self, end: int) -> tuple[int, int]:
        """Bytes of the first `end` characters, and words that begin among them."""
        if end == 0:
            return 0, 0
        size = end if self._bytes is None else int(self._bytes[end - 1])
        return size, int(self._words[end - 1])


@dataclass
class Encoded:
    """Token ids of a document, and how much of its text each prefix of them stands for.

    `bytes_words(i)` must be called with rising `i`.
    """

    ids: np.ndarray  # int32 [n], no special tokens
    text: str
    source: str
    size: TextSize
    char_end: Callable[[int], int]  # token index -> end of its characters in the text
    _before: tuple[int, int] = (0, 0)  # bytes and words of earlier documents
    _end: int = 0  # character reached: tokens may share characters, a later one never ends before

    def start_from(self, size: int, words: int) -> None:
        """Count on from the text of earlier documents."""
        self._before = (size, words)

    def bytes_words(self, count: int) -> tuple[int, int]:
        """UTF-8 bytes of the text of the first `count` tokens, and words that begin in it."""
        end = 0 if count == 0 else len(self.text) if count >= len(self.ids) else self.char_end(count - 1)
        self._end = max(self._end, end)
        size, words = self.size(self._end)
        return self._before[0] + size, self._before[1] + words


def encode(tokenizer: PreTrainedTokenizerBase, documents: Iterable[Document]) -> Iterator[Encoded]:
    """Tokenise documents without special tokens, in order, a bounded number ahead of what is drawn.

    Python threads share the work, whether or not the tokenizer's own are switched on
    (`TOKENIZERS_PARALLELISM`): the first few documents are there early, and none waits for a long one.
    """
    tokenizer("a", add_special_tokens=False, verbose=False)  # undoes stored padding and truncation, once
    waiting: deque[Future[list[Encoded]]] = deque()
    threads = encode_threads(tokenizer)
    with ThreadPoolExecutor(threads, thread_name_prefix="tokenise") as pool:
        try:
            for future in _submit(pool, tokenizer, documents):
                waiting.append(future)
                if len(waiting) > threads:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def encode_threads(tokenizer: PreTrainedTokenizerBase) -> int:
    """How many threads tokenise at once: one for a tokenizer written in Python, which gains by no more."""
    if not getattr(tokenizer, "is_fast", False):
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(ENCODE_THREADS, cores)


def _submit(
    pool: ThreadPoolExecutor, tokenizer: PreTrainedTokenizerBase, documents: Iterable[Document]
) -> Iterator[Future[list[Encoded]]]:
    """Documents under way; one that cannot be read fails in its turn, after all before it."""
    try:
        for batch in _batches(documents):
            yield pool.submit(_encode, tokenizer, batch)
    except DataError as error:
        failed: Future[list[Encoded]] = Future()
        failed.set_exception(error)
        yield failed


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    held = 0
    for document in documents:
        if document.messages is not None:
            raise DataError(
                "the column holds chat messages, not text",
                where=document.source,
                fix="name a column of plain text with --text-column",
            )
        batch.append(document)
        held += len(document.text)
        if len(batch) == ENCODE_DOCUMENTS or held >= ENCODE_CHARACTERS:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def _encode(tokenizer: PreTrainedTokenizerBase, documents: list[Document]) -> list[Encoded]:
    """One call of the tokenizer."""
    encoding = tokenizer(
        [d.text for d in documents],
        add_special_tokens=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    encoded = []
    for row, document in enumerate(documents):
        ids = np.array(encoding["input_ids"][row], dtype=np.int32)
        end = _char_end(tokenizer, encoding, row, ids)
        encoded.append(Encoded(ids, document.text, document.source, TextSize(document.text), end))
    return encoded


def _char_end(
    tokenizer: PreTrainedTokenizerBase, encoding: object, row: int, ids: np.ndarray
) -> Callable[[int], int]:
    fast = getattr(encoding, "encodings", None)
    if not fast:  # a slow tokenizer keeps no offsets: measure what the prefix decodes to
        return lambda i: len(tokenizer.decode(ids[: i + 1], skip_special_tokens=True))
    one = fast[row]

    def end(index: int) -> int:
        span = one.token_to_chars(index)
        return 0 if span is None else span[1]  # a special token stands for no text

    return end
