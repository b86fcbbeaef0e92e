"""The protocols: which tokens a model sees, and which of them are scored.

Each protocol turns documents into `Window`s. Within one call every scored token is a target once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..data import Block, Document, Pair, bos_id, cut, eos_id, span_corruption
from ..data.encoding import Encoded, encode
from ..errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..data.seq2seq import PairEncoder


@dataclass(frozen=True)
class Window:
    """One sequence a model sees: it reads `ids[:-1]` and is scored on `ids[first + 1:]`.

    Args:
        ids: int32 `[n + 1]`.
        first: Index of the first scored target, counted from `ids[1]`; those before are context.
        unit: Number of the document (or block) it belongs to; units are what is resampled.
        source: Where the unit comes from, `file:line`.
        bytes: UTF-8 bytes of the text its scored tokens stand for.
        words: Words that begin in that text.
        documents: Documents read so far, this one included.
        encoder: int32 `[m]` or float32 features, what the encoder reads; `ids` are then the decoder's (start
            token first).
    """

    ids: np.ndarray
    first: int
    unit: int
    source: str
    bytes: int = 0
    words: int = 0
    documents: int = 0
    encoder: np.ndarray | None = None

    @property
    def scored(self) -> int:
        """Number of scored targets."""
        return len(self.ids) - 1 - self.first


@dataclass
class Skipped:
    """What a pass over the text did not score.

    Args:
        empty: Empty rows.
        short: Documents with no token to score.
        rest: Tokens after the last whole block.
    """

    empty: int = 0
    short: int = 0
    rest: int = 0


@dataclass(frozen=True)
class Settings:
    """What a protocol needs to know.

    Args:
        window: Inputs a model sees at once, BOS included.
        stride: New tokens per window (`window` protocol only).
        bos: Id of the BOS, or None for none.
        max_tokens: Stop after this many scored tokens.
        config: The model's raw config (`span-corruption` reads how its decoder starts).
        skipped: Where the protocol counts what it does not score.
        encoder: Of pairs (`pairs` only).
    """

    window: int
    stride: int
    bos: int | None = None
    max_tokens: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    skipped: Skipped = field(default_factory=Skipped)
    encoder: PairEncoder | None = None


def _prefix(token: int | None) -> np.ndarray:
    """int32 ids of one token, or of none."""
    return np.array([] if token is None else [token], dtype=np.int32)


def _too_short(there: int, needed: int, limit: int | None) -> DataError:
    if there >= needed:
        return DataError(
            f"{limit} tokens are less than one block", where="--max-tokens", fix="raise it or lower --window"
        )
    return DataError(
        f"the text has {there} tokens, one block needs {needed}",
        where="--data",
        fix="give more text or lower --window",
    )


# --- protocols -----------------------------------------------------------------------------------------


class _Joined:
    """Documents between BOS (if used) and end-of-text, with a measure of their text."""

    def __init__(self, documents: Iterable[Encoded], bos: int | None, eos: int) -> None:
        self.documents, self.bos = documents, bos
        self.head, self.tail = _prefix(bos), _prefix(eos)
        self.number = 0  # of documents read
        self.tokens = 0  # of the documents read
        self.reached = (0, 0)  # bytes and words of the text up to and with the end of the last block
        self._last: Encoded | None = None
        self._before = 0  # ids put before those of the last document
        self._places: dict[int, tuple[str, int]] = {}  # source and length of those still in use

    def ids(self) -> Iterator[np.ndarray]:
        """The ids of each document."""
        read = (0, 0)
        for number, encoded in enumerate(self.documents):
            document = encoded if encoded.tokenised else encoded.without_bos(self.bos)
            self.number, self._last = number + 1, document
            document.start_from(*read)
            ids = document.ids
            self._before = 0 if document.tokenised else len(self.head)
            if not document.tokenised:
                ids = np.concatenate([self.head, ids, self.tail])
            if number == 0:
                self.reached = document.bytes_words(1 - self._before)  # the first id is not a target
            self.tokens += len(ids)
            self._places[number] = (document.source, len(ids))
            yield ids
            read = document.bytes_words(len(document.ids))

    def text_of(self, block: Block) -> tuple[int, int]:
        """Bytes and words of the text of a block's targets; blocks come in order."""
        assert self._last is not None and block.last.document == self.number - 1
        before = self.reached
        self.reached = self._last.bytes_words(max(0, block.last.token + 1 - self._before))
        return self.reached[0] - before[0], self.reached[1] - before[1]

    def source_of(self, block: Block) -> str:
        """Where a block's first target is from."""
        number, token = block.first
        for old in [n for n in self._places if n < number]:
            del self._places[old]
        source, length = self._places[number]
        return source if token + 1 < length else self._places[number + 1][0]


def blocks(
    tokenizer: PreTrainedTokenizerBase, documents: Iterable[Document], settings: Settings
) -> Iterator[Window]:
    """Documents, each between BOS (if used) and end-of-text, joined and cut; the last part is dropped."""
    encoded = _encoded(tokenizer, documents, settings)
    joined = _Joined(encoded, settings.bos, eos_id(tokenizer))
    unit = -1
    for unit, block in enumerate(cut(joined.ids(), settings.window, max_tokens=settings.max_tokens)):
        source, text = joined.source_of(block), joined.text_of(block)
        yield Window(block.ids, 0, unit, source, *text, joined.number)
    if settings.max_tokens is None:
        settings.skipped.rest = joined.tokens - 1 - (unit + 1) * settings.window


def _encoded(
    tokenizer: PreTrainedTokenizerBase, documents: Iterable[Document], settings: Settings
) -> Iterator[Encoded]:
    """The documents as ids; counts the empty rows between them."""
    for number, document in enumerate(encode(tokenizer, documents), 1):
        settings.skipped.empty = max(0, document.row - number)
        yield document


def window(
    tokenizer: PreTrainedTokenizerBase, documents: Iterable[Document], settings: Settings
) -> Iterator[Window]:
    """Per document, a window that moves by `stride`; only tokens no earlier window scored are scored.

    Without BOS the document's first token has no context and is not scored. With BOS every window
    starts with it, and it is never scored itself.
    """
    left = settings.max_tokens
    head = _prefix(settings.bos)
    size = settings.window - len(head)  # document tokens among the inputs
    skipped = 1 - len(head)  # leading tokens without context
    for unit, encoded in enumerate(_encoded(tokenizer, documents, settings)):
        document = encoded.without_bos(settings.bos)
        ids = document.ids
        settings.skipped.short += len(ids) <= skipped
        if left is not None and len(ids) - skipped > left:
            ids = ids[: left + skipped]
        mark = document.bytes_words(skipped)
        done, begin = skipped, 0  # tokens scored so far; first token of the window
        while done < len(ids):
            end = min(begin + size + 1, len(ids))
            seen = np.concatenate([head, ids[begin:end]])
            reached = document.bytes_words(end)
            new = end - done
            text = (reached[0] - mark[0], reached[1] - mark[1])
            yield Window(seen, len(seen) - 1 - new, unit, document.source, *text, unit + 1)
            mark, done, begin = reached, end, begin + settings.stride
        if left is not None:
            left -= max(0, len(ids) - skipped)
            if left <= 0:
                return


def wikitext2(
    tokenizer: PreTrainedTokenizerBase, documents: Iterable[Document], settings: Settings
) -> Iterator[Window]:
    """The literature's figure: rows joined by blank lines, cut in blocks of `window` tokens.

    A block's first token is not scored; BOS stands once, at the start of the text.
    """
    rows = list(documents)
    joined = "\n\n".join(row.text for row in rows)
    source = rows[0].source if rows else ""
    if tokenised := next((row for row in rows if row.ids is not None), None):
        raise DataError(
            "token ids cannot be joined as text", where=tokenised.source, fix="try --protocol blocks"
        )
    (encoded,) = encode(tokenizer, [Document(joined, source)])
    document = encoded.without_bos(settings.bos)
    head = _prefix(settings.bos)
    ids, size = np.concatenate([head, document.ids]), settings.window
    count = len(ids) // size
    if settings.max_tokens is not None:
        count = min(count, settings.max_tokens // (size - 1))
    if count == 0:
        raise _too_short(len(ids), size, settings.max_tokens)
    if settings.max_tokens is None:
        settings.skipped.rest = len(ids) - count * size
    for unit in range(count):
        begin = unit * size
        mark = document.bytes_words(max(0, begin + 1 - len(head)))
        reached = document.bytes_words(begin + size - len(head))
        text = (reached[0] - mark[0], reached[1] - mark[1])
        yield Window(ids[begin : begin + size], 0, unit, source, *text, len(rows))


def rolling(
    tokenizer: PreTrainedTokenizerBase, documents: Iterable[Document], settings: Settings
) -> Iterator[Window]:
    """lm-eval's `loglikelihood_rolling`: every token scored once, the first one after BOS (else EOS).

    Windows do not overlap, but the last of a document is filled up with context to `window` inputs.
    Words are counted as lm-eval counts them.
    """
    head = _prefix(settings.bos if settings.bos is not None else eos_id(tokenizer))
    left, size = settings.max_tokens, settings.window
    for unit, encoded in enumerate(_encoded(tokenizer, documents, settings)):
        document = encoded.without_bos(settings.bos)
        ids = np.concatenate([head, document.ids])
        settings.skipped.short += len(ids) < 2
        if left is not None and len(ids) - 1 > left:
            ids = ids[: left + 1]
        whole = len(ids) == len(document.ids) + 1
        done, mark = 0, (0, 0)
        while done < len(ids) - 1:
            end = min(done + size, len(ids) - 1)  # targets are ids[done + 1 : end + 1]
            begin = max(0, end - size) if done else 0
            reached = document.bytes_words(end)
            if whole and end == len(ids) - 1:
                reached = (reached[0], document.fields)
            text = (reached[0] - mark[0], reached[1] - mark[1])
            yield Window(ids[begin : end + 1], done - begin, unit, document.source, *text, unit + 1)
            mark, done = reached, end
        if left is not None:
            left -= len(ids) - 1
            if left <= 0:
                return


def span_corruption_blocks(
    tokenizer: PreTrainedTokenizerBase, documents: Iterable[Document], settings: Settings
) -> Iterator[Window]:
    """For encoder-decoders: blocks of `window` tokens of text, corrupted as in T5's pretraining.

    Every target is scored: sentinels, the tokens of the spans, the end. Block i is always corrupted
    alike, whatever the batch size. Bytes and words are those of the block's whole text.
    """
    made = span_corruption(tokenizer, settings.config, settings.window)
    limit = settings.max_tokens
    if limit is not None:
        limit = limit // made.target_length * settings.window
    for item in blocks(tokenizer, documents, replace(settings, max_tokens=limit)):
        encoder, targets = made(item.ids[None, :-1], [item.unit])
        ids = np.concatenate([[made.start], targets[0]]).astype(np.int32)
        yield replace(item, ids=ids, encoder=encoder[0].astype(np.int32))


def pairs(
    tokenizer: PreTrainedTokenizerBase, documents: Iterable[Pair], settings: Settings
) -> Iterator[Window]:
    """For encoder-decoders: each pair alone, every target after the prompt (start, language, task) scored.

    Bytes and words are those of the target's text. `max_tokens` ends it after a whole pair.
    """
    assert settings.encoder is not None
    left = settings.max_tokens
    for unit, pair in enumerate(documents):
        example = settings.encoder.encode(pair)
        text = example.target
        size, words = len(text.encode("utf-8", "surrogatepass")), len(text.split())
        yield Window(
            example.decoder, example.prompt - 1, unit, pair.place, size, words, unit + 1, example.encoder
        )
        if left is not None:
            left -= len(example.decoder) - example.prompt
            if left <= 0:
                return


Protocol = Callable[["PreTrainedTokenizerBase", Iterable[Any], Settings], Iterator[Window]]

# Those whose windows carry what an encoder reads are also named in `SEQ2SEQ`.
SPAN_CORRUPTION: Final = "span-corruption"  # of encoder-decoders pretrained by it, on text
PAIRS: Final = "pairs"  # of encoder-decoders
PROTOCOLS: dict[str, Protocol] = {
    "blocks": blocks,
    "window": window,
    "wikitext2": wikitext2,
    "rolling": rolling,
    SPAN_CORRUPTION: span_corruption_blocks,
    PAIRS: pairs,
}
SEQ2SEQ = frozenset({SPAN_CORRUPTION, PAIRS})


def choose_bos(tokenizer: PreTrainedTokenizerBase, protocol: str, policy: str) -> int | None:
    """The BOS id that a protocol will use, or None.

    Args:
        tokenizer: A transformers tokenizer.
        protocol: A name of `PROTOCOLS`; `rolling` always starts with a BOS where the tokenizer has one.
        policy: `auto` (use it where the tokenizer's own post-processor does), `always`, `never`.

    Raises:
        DataError: `always`, and the tokenizer has none.
    """
    if policy == "never" or protocol == PAIRS:
        return None
    if policy == "always" and tokenizer.bos_token_id is None:
        raise DataError("the tokenizer has no BOS token", where="--bos always", fix="use --bos auto")
    if policy == "always" or protocol == "rolling":
        return tokenizer.bos_token_id
    return bos_id(tokenizer)


def describe_bos(tokenizer: PreTrainedTokenizerBase, protocol: str, bos: int | None) -> str:
    """One line for reports: where a BOS stands and whether it is scored."""
    if protocol == "rolling":
        token = bos if bos is not None else tokenizer.eos_token_id
        name = tokenizer.convert_ids_to_tokens(token)
        kind = "BOS" if bos is not None else "EOS, for want of a BOS"
        return f"{name} ({kind}) before each document, not scored"
    if bos is None:
        return "none"
    name = tokenizer.convert_ids_to_tokens(bos)
    return {
        "blocks": f"{name} before each document, scored like any token",
        SPAN_CORRUPTION: f"{name} before each document, part of the text",
        "window": f"{name} starts every window, never scored",
        "wikitext2": f"{name} once, at the start of the text, not scored",
    }.get(protocol, f"{name} as the protocol {protocol} places it")
