"""T5's span corruption: blocks of text to what the encoder reads and what the decoder must say.

15 % of the tokens are noise, in spans of 3 on average. The encoder reads the text with each span replaced
by a sentinel; the target lists, for every span, its sentinel and its tokens, and ends with the end token
(Raffel et al. 2020, section 3.1.4). Lengths follow T5's arithmetic, so every block of one length gives the
same encoder and target lengths and nothing is padded. What is noise depends on the seed and the block's
key alone: not on batch size, device, order or process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import DataError, UsageError
from .encoding import within

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NOISE, MEAN_SPAN = 0.15, 3.0
ENCODER_TOKENS = 512  # T5's own length
_SENTINELS = ("<extra_id_{}>", "▁<extra_id_{}>")  # T5's name and mT5's


def noise_counts(tokens: int, noise: float = NOISE, mean_span: float = MEAN_SPAN) -> tuple[int, int]:
    """Noise tokens and noise spans of a block, rounded as T5 rounds.

    Args:
        tokens: Length of the block, at least 2.
        noise: Fraction of the tokens that are noise.
        mean_span: Their mean span length.
    """
    count = min(max(round(tokens * noise), 1), tokens - 1)
    spans = min(max(round(count / mean_span), 1), tokens - count)
    return count, spans


def block_tokens(encoder_tokens: int, noise: float = NOISE, mean_span: float = MEAN_SPAN) -> int:
    """How many tokens of text make at most `encoder_tokens` encoder ids, the end token included.

    Example:
        >>> block_tokens(512)  # T5: 568 tokens of text, 114 targets
        568
    """

    def encoder_length(tokens: int) -> int:
        count, spans = noise_counts(tokens, noise, mean_span)
        return tokens - count + spans + 1

    if encoder_tokens < encoder_length(2):
        raise UsageError(f"{encoder_tokens} encoder ids are too few to corrupt", where="--window")
    tokens = 2
    while encoder_length(tokens + 1) <= encoder_tokens:
        tokens += 1
    return tokens


@dataclass(frozen=True)
class SpanCorruption:
    """The corruption of blocks of one length.

    Args:
        tokens: Length L of a block of text.
        sentinels: Ids that stand for the first, second, … span; at least as many as there are spans.
        eos: Id that ends encoder input and target.
        start: Id the decoder starts from.
        seed: Chooses other noise for the same keys.
        noise, mean_span: Fraction of noise, and mean length of its spans.

    Example:
        >>> corruption = span_corruption(tokenizer, config, 284)  # doctest: +SKIP
        >>> encoder, targets = corruption(blocks, keys=range(len(blocks)))  # doctest: +SKIP
    """

    tokens: int
    sentinels: tuple[int, ...]
    eos: int
    start: int
    seed: int = 0
    noise: float = NOISE
    mean_span: float = MEAN_SPAN

    @property
    def counts(self) -> tuple[int, int]:
        """Noise tokens and spans of a block."""
        return noise_counts(self.tokens, self.noise, self.mean_span)

    @property
    def encoder_length(self) -> int:
        """Encoder ids of a block, end included."""
        count, spans = self.counts
        return self.tokens - count + spans + 1

    @property
    def target_length(self) -> int:
        """Target ids of a block, end included."""
        count, spans = self.counts
        return count + spans + 1

    def noise_runs(self, keys: Any) -> np.ndarray:
        """Which run each token belongs to: 0 text, 1 noise, 2 text, … `[B, L]`.

        Args:
            keys: One whole number per block, `[B]`.
        """
        count, spans = self.counts
        text = self.tokens - count
        drawn = _random(self.seed, np.asarray(keys, dtype=np.int64), self.tokens)
        lengths = (_cut(drawn[:, : text - 1], spans), _cut(drawn[:, text:-1], spans))  # of text, of noise
        ends = np.stack(lengths, axis=2).reshape(len(drawn), -1).cumsum(axis=1)  # [B, 2 * spans]
        starts = np.zeros((len(drawn), self.tokens), dtype=np.int64)
        np.put_along_axis(starts, ends[:, :-1], 1, axis=1)
        return starts.cumsum(axis=1)

    def __call__(self, blocks: Any, keys: Any) -> tuple[np.ndarray, np.ndarray]:
        """Corrupt blocks.

        Args:
            blocks: Token ids `[B, L]`.
            keys: One whole number per block, `[B]`; equal keys get equal noise.

        Returns:
            int64 encoder ids `[B, encoder_length]` and targets `[B, target_length]`.
        """
        x = np.asarray(blocks, dtype=np.int64)
        assert x.shape[1] == self.tokens, (x.shape, self.tokens)
        rows = len(x)
        runs = self.noise_runs(keys)
        is_noise, span = runs % 2 == 1, runs // 2
        first = is_noise & (runs != np.pad(runs, ((0, 0), (1, 0)))[:, :-1])
        sentinel = np.asarray(self.sentinels, dtype=np.int64)[span]
        encoder = np.full((rows, self.encoder_length), self.eos, dtype=np.int64)
        encoder[:, :-1] = np.where(first, sentinel, x)[~is_noise | first].reshape(rows, -1)
        targets = np.full((rows, self.target_length), self.eos, dtype=np.int64)
        place = is_noise.cumsum(axis=1) - 1 + span  # of a span's sentinel; its tokens come one later
        row = np.broadcast_to(np.arange(rows)[:, None], x.shape)
        targets[row[first], place[first]] = sentinel[first]
        targets[row[is_noise], place[is_noise] + 1] = x[is_noise]
        return encoder, targets

    def decoder_inputs(self, targets: np.ndarray) -> np.ndarray:
        """What the decoder reads, `[B, target_length]`: the start id, then the targets but the last."""
        return np.concatenate([np.full_like(targets[:, :1], self.start), targets[:, :-1]], axis=1)


def span_corruption(
    tokenizer: PreTrainedTokenizerBase, config: Mapping[str, Any], tokens: int, seed: int = 0
) -> SpanCorruption:
    """The corruption a model was pretrained with, by its tokenizer's sentinels and its config.

    Args:
        tokenizer: With tokens `<extra_id_0>`, `<extra_id_1>`, … in whatever order of ids.
        config: The raw config; `decoder_start_token_id` (else `pad_token_id`) starts the decoder.
        tokens: Length of a block of text.
        seed: Of the noise.

    Raises:
        DataError: Too few sentinels, no end or start token, or another model's tokenizer.
        UsageError: The block is too short to corrupt.
    """
    if tokens < 3:
        raise UsageError(f"a block of {tokens} tokens cannot be corrupted", where="--window")
    _, spans = noise_counts(tokens)
    sentinels = sentinel_ids(tokenizer)
    where = getattr(tokenizer, "name_or_path", None) or "tokenizer"
    if len(sentinels) < spans:
        have = f"it has {len(sentinels)}" if sentinels else "it has none"
        longest = max((n for n in range(3, tokens) if noise_counts(n)[1] <= len(sentinels)), default=0)
        raise DataError(
            f"{spans} sentinel tokens (<extra_id_0> …) are needed for blocks of {tokens} tokens, {have}",
            where=where,
            fix=f"use a window of at most {longest}"
            if longest
            else "use the tokenizer the T5 came with; other models read pairs",
        )
    if tokenizer.eos_token_id is None:
        raise DataError("no end-of-text token", where=where, fix="set eos_token in tokenizer_config.json")
    start = config.get("decoder_start_token_id")
    start = config.get("pad_token_id", tokenizer.pad_token_id) if start is None else start
    if start is None:
        raise DataError("no decoder_start_token_id", where="config.json", fix="restore the original's")
    made = SpanCorruption(tokens, tuple(sentinels[:spans]), int(tokenizer.eos_token_id), int(start), seed)
    ids = np.array([*made.sentinels, made.eos, made.start])
    next(within([ids], config.get("vocab_size"), where))
    return made


def sentinel_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of the sentinels `<extra_id_0>`, `<extra_id_1>`, … by name, as far as they go."""
    vocabulary = tokenizer.get_vocab()
    found: list[int] = []
    while names := [n for form in _SENTINELS if (n := form.format(len(found))) in vocabulary]:
        found.append(vocabulary[names[0]])
    return found


def _cut(drawn: np.ndarray, parts: int) -> np.ndarray:
    """Lengths of a uniformly random partition of n items into `parts` non-empty runs.

    Args:
        drawn: Random numbers `[B, n - 1]`, one per place between two items.
        parts: Runs per row.
    """
    rows = len(drawn)
    cuts = drawn.argsort(axis=1) < parts - 1  # parts - 1 of the places, each set equally likely
    part = np.pad(cuts.cumsum(axis=1), ((0, 0), (1, 0)))  # [B, n]
    flat = part + parts * np.arange(rows)[:, None]
    return np.bincount(flat.ravel(), minlength=rows * parts).reshape(rows, parts)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: any two inputs give unrelated outputs."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _random(seed: int, keys: np.ndarray, count: int) -> np.ndarray:
    """Random uint64 `[B, count]`, a function of seed, key and column alone."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        base = _mix(
            keys.astype(np.uint64) * golden + _mix(np.array([seed], dtype=np.int64).astype(np.uint64))
        )
        return _mix(base[:, None] + golden * np.arange(1, count + 1, dtype=np.uint64))
