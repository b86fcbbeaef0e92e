"""Documents to token ids, several texts at a time on all cores, in order and a bounded number ahead."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..errors import DataError
from .reading import Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
ENCODE_DOCUMENTS, ENCODE_CHARACTERS = 64, 1 << 15  # one call of the tokenizer gets at most about this much,
FIRST_CHARACTERS = 1 << 13  # … and this much at first: the model waits for the first few documents
ENCODE_THREADS = 8  # at most

# Whether a character is white space; all beyond the last of these are not.
SPACES = np.array([chr(i).isspace() for i in range(0x3002)])


# --- special tokens and vocabulary ---------------------------------------------------------------------


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


# --- ids -----------------------------------------------------------------------------------------------


def encode_documents(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[str | Document]
) -> Iterator[np.ndarray]:
    """Token ids of each document as the protocol `blocks` joins them.

    No special tokens but these: the end-of-text token after each document, and a BOS before it where
    the tokenizer's own post-processor puts one and the text does not begin with it itself. Documents that
    are token ids already are taken as they are.

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

    def ids(documents: list[Document]) -> list[np.ndarray]:
        found = iter(_call(tokenizer, [d for d in documents if d.ids is None])["input_ids"])
        return [_joined(head, next(found), eos) if d.ids is None else d.ids for d in documents]

    documents = (Document(text, "") if isinstance(text, str) else text for text in texts)
    return _in_threads(tokenizer, documents, ids)


def _joined(head: list[int], ids: list[int], eos: int) -> np.ndarray:
    own_bos = bool(head) and ids[:1] == head
    return np.array([*([] if own_bos else head), *ids, eos], dtype=np.int32)


def word_starts(text: str) -> np.ndarray:
    """Which characters begin a word, as `str.split` sees them: bool `[len(text)]`."""
    narrow = text.isascii()
    stored = text.encode("ascii" if narrow else "utf-32-le", "surrogatepass")
    codes = np.frombuffer(stored, dtype=np.uint8 if narrow else "<u4")
    starts = ~SPACES.take(codes, mode="clip")  # not a space, …
    starts[1:] &= ~starts[:-1].copy()  # … and after one
    return starts


@dataclass
class Encoded:
    """Token ids of a document, and how much of its text each prefix of them stands for.

    `bytes_words(i)` must be called with rising `i`: it walks the text once.
    """

    ids: np.ndarray  # int32 [n], no special tokens but those the text itself spells
    text: str
    source: str
    starts: np.ndarray  # which characters begin a word
    char_end: Callable[[int], int]  # token index -> end of its characters in the text
    row: int = 0  # rows read up to and with this document, empty ones included
    tokenised: bool = False  # whether the data held token ids, to be taken as they are
    _at: tuple[int, int, int] = (0, 0, 0)  # (character, bytes, words) reached

    def start_from(self, size: int, words: int) -> None:
        """Count on from the text of earlier documents."""
        self._at = (0, size, words)

    def bytes_words(self, count: int) -> tuple[int, int]:
        """UTF-8 bytes of the text of the first `count` tokens, and words that begin in it."""
        start, size, words = self._at
        end = 0 if count == 0 else len(self.text) if count >= len(self.ids) else self.char_end(count - 1)
        if end > start:
            part = self.text[start:end].encode("utf-8", "surrogatepass")
            begun = int(np.count_nonzero(self.starts[start:end]))
            self._at = (end, size + len(part), words + begun)
        return self._at[1], self._at[2]

    def without_bos(self, bos: int | None) -> Encoded:
        """The document without a BOS that its own text begins with, where one is put before it."""
        if bos is None or not len(self.ids) or self.ids[0] != bos:
            return self
        end, rest = self.char_end(0), self.char_end
        return replace(
            self,
            ids=self.ids[1:],
            text=self.text[end:],
            starts=word_starts(self.text[end:]),
            char_end=lambda index: rest(index + 1) - end,
        )

    @property
    def fields(self) -> int:
        r"""What `re.split(r"\s+", text)` gives: an empty field where the text begins or ends with a space."""
        inner = int(np.count_nonzero(self.starts))
        return max(1, inner + self.text[:1].isspace() + self.text[-1:].isspace())


def encode(tokenizer: PreTrainedTokenizerBase, documents: Iterable[Document]) -> Iterator[Encoded]:
    """Tokenise documents without special tokens, in order, a bounded number ahead of what is drawn.

    Python threads share the work, whether or not the tokenizer's own are switched on
    (`TOKENIZERS_PARALLELISM`): the first few documents are there early, and none waits for a long one.
    """
    return _in_threads(tokenizer, documents, lambda batch: _encode(tokenizer, batch))


def _in_threads(
    tokenizer: PreTrainedTokenizerBase,
    documents: Iterable[Document],
    work: Callable[[list[Document]], list[T]],
) -> Iterator[T]:
    """The results of `work` on small batches of documents, one a document, in their order."""
    tokenizer("a", add_special_tokens=False, verbose=False)  # undoes stored padding and truncation, once
    waiting: deque[Future[list[T]]] = deque()
    threads = encode_threads(tokenizer)
    with ThreadPoolExecutor(threads, thread_name_prefix="tokenise") as pool:
        try:
            for future in _submit(pool, documents, work):
                waiting.append(future)
                if len(waiting) > threads:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def encode_threads(tokenizer: PreTrainedTokenizerBase) -> int:
    """How many threads tokenise at once.

    One for a tokenizer written in Python, which gains by no more, and for one of translation models,
    which sets itself to the source language at every call.
    """
    from transformers import PreTrainedTokenizerBase

    switch = "_switch_to_input_mode"
    switches = getattr(type(tokenizer), switch, None) is not getattr(PreTrainedTokenizerBase, switch, None)
    if switches or not getattr(tokenizer, "is_fast", False):
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(ENCODE_THREADS, cores)


def _submit(
    pool: ThreadPoolExecutor, documents: Iterable[Document], work: Callable[[list[Document]], list[T]]
) -> Iterator[Future[list[T]]]:
    """Documents under way; one that cannot be read fails in its turn, after all before it."""
    try:
        for batch in _batches(documents):
            yield pool.submit(work, batch)
    except DataError as error:
        failed: Future[list[T]] = Future()
        failed.set_exception(error)
        yield failed


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    held, read = 0, 0
    for document in documents:
        if document.messages is not None:
            raise DataError(
                "the column holds chat messages, not text",
                where=document.source,
                fix="name a column of plain text with --text-column",
            )
        batch.append(document)
        held += len(document.text)
        room = min(ENCODE_CHARACTERS, max(FIRST_CHARACTERS, read // ENCODE_THREADS))
        if len(batch) == ENCODE_DOCUMENTS or held >= room:
            yield batch
            batch, held, read = [], 0, read + held
    if batch:
        yield batch


def _call(tokenizer: PreTrainedTokenizerBase, documents: list[Document]) -> Any:
    """One call of the tokenizer, without special tokens."""
    if not documents:
        return {"input_ids": []}
    return tokenizer(
        [d.text for d in documents],
        add_special_tokens=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )


def _encode(tokenizer: PreTrainedTokenizerBase, documents: list[Document]) -> list[Encoded]:
    """Documents with the measure of their text."""
    texts = [d for d in documents if d.ids is None]
    encoding, place = _call(tokenizer, texts), 0
    encoded = []
    for document in documents:
        if document.ids is not None:
            encoded.append(_decoded(tokenizer, document, document.ids))
            continue
        ids = np.array(encoding["input_ids"][place], dtype=np.int32)
        end = _char_end(tokenizer, encoding, place, ids)
        starts = word_starts(document.text)
        encoded.append(Encoded(ids, document.text, document.source, starts, end, document.row))
        place += 1
    return encoded


def _decoded(tokenizer: PreTrainedTokenizerBase, document: Document, ids: np.ndarray) -> Encoded:
    """A document of token ids with the text that they stand for."""

    def text(count: int) -> str:
        return str(tokenizer.decode(ids[:count], skip_special_tokens=True))

    whole = text(len(ids))
    return Encoded(
        ids, whole, document.source, word_starts(whole), lambda i: len(text(i + 1)), document.row, True
    )


def _char_end(
    tokenizer: PreTrainedTokenizerBase, encoding: Any, row: int, ids: np.ndarray
) -> Callable[[int], int]:
    fast = getattr(encoding, "encodings", None)
    if not fast:  # a slow tokenizer keeps no offsets: measure what the prefix decodes to
        return lambda i: len(tokenizer.decode(ids[: i + 1], skip_special_tokens=True))
    one = fast[row]

    def end(index: int) -> int:
        span = one.token_to_chars(index)
        return 0 if span is None else span[1]  # a special token stands for no text

    return end
