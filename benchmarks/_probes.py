"""Probes of what loss hides: questions whose answers stand earlier in the text, each a choice among 16 tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

CHOICES = 16  # the right token and 15 others; chance is 1 in 16
QUESTIONS = 16  # of one copied text
LEAST_LETTERS = 4


@dataclass(frozen=True)
class Questions:
    """Texts of one length, and what is asked in them.

    Args:
        ids: `[N, T]`.
        at: Positions whose next token is asked for, `[N, Q]`.
        choices: Token ids to choose from, the right one first, `[N, Q, CHOICES]`.
    """

    ids: Tensor
    at: Tensor
    choices: Tensor


@dataclass(frozen=True)
class Source:
    """What probes are written with.

    Args:
        tokenizer: Of the model.
        words: Ids of single tokens that are a space and a word.
        text: Ids of held-out text, one document after the other, `[n]`.
    """

    tokenizer: Any
    words: np.ndarray
    text: np.ndarray

    @classmethod
    def of(cls, tokenizer: Any, text: np.ndarray) -> Source:
        """Find the words of a tokenizer."""
        pieces = ((i, tokenizer.decode([i])) for i in range(len(tokenizer)))
        words = [i for i, x in pieces if x[:1] == " " and x[1:].isalpha() and len(x) > LEAST_LETTERS]
        return cls(tokenizer, np.array(words), text)

    def ids(self, text: str) -> list[int]:
        """Ids of a text without special tokens."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Different words."""
        return rng.choice(self.words, count, replace=False)


def copying(source: Source, length: int, count: int, seed: int) -> Questions:
    """Random words, then the same again: the next one is asked for in the second half."""
    rng, half = np.random.default_rng(seed), length // 2
    ids, at, choices = [], [], []
    for _ in range(count):
        first = rng.choice(source.words, half)
        asked = rng.choice(np.arange(half // 4, half - 1), QUESTIONS, replace=False)
        ids.append(np.concatenate([first, first]))
        at.append(half + asked)
        choices.append([_among(rng, first[i + 1], first) for i in asked])
    return _questions(ids, at, choices)


def recall(source: Source, length: int, count: int, seed: int) -> Questions:
    """Pairs of words with a comma behind; the last word is a key again, and its value is asked for."""
    rng, comma = np.random.default_rng(seed), source.ids(",")
    ids, at, choices = [], [], []
    for _ in range(count):
        pairs = (length - 1) // (2 + len(comma))
        keys, values = source.draw(rng, 2 * pairs).reshape(2, pairs)
        text = [x for key, value in zip(keys, values, strict=True) for x in (key, value, *comma)]
        asked = rng.integers(pairs)
        ids.append(np.array([*text, keys[asked]]))
        at.append([len(text)])
        choices.append([_among(rng, values[asked], values)])
    return _questions(ids, at, choices)


def needle(source: Source, length: int, count: int, seed: int) -> Questions:
    """A sentence somewhere in held-out text, and its beginning again at the end."""
    rng = np.random.default_rng(seed)
    ids, at, choices = [], [], []
    while len(ids) < count:
        name, *words = source.draw(rng, 1 + CHOICES)
        asking = [*source.ids("\nThe secret word of the"), int(name), *source.ids(" is")]
        told = [*asking, int(words[0]), *source.ids(".\n")]
        room = length - len(told) - len(asking)
        start = int(rng.integers(len(source.text) - room))
        hay, place = source.text[start : start + room], int(rng.integers(room))
        ids.append(np.concatenate([hay[:place], told, hay[place:], asking]))
        at.append([length - 1])
        choices.append([words])
    return _questions(ids, at, choices)


PROBES: dict[str, Callable[[Source, int, int, int], Questions]] = {
    "copying": copying,
    "key-value recall": recall,
    "needle": needle,
}


def _among(rng: np.random.Generator, right: int, others: np.ndarray) -> np.ndarray:
    """The right token, then different wrong ones of the same text."""
    wrong = np.setdiff1d(others, [right])
    return np.concatenate([[right], rng.choice(wrong, CHOICES - 1, replace=False)])


def _questions(ids: Sequence[Any], at: Sequence[Any], choices: Sequence[Any]) -> Questions:
    return Questions(*(torch.from_numpy(np.array(x).astype(np.int64)) for x in (ids, at, choices)))


@torch.no_grad()
def answered(model: Any, asked: Questions, batch_tokens: int = 16_384) -> np.ndarray:
    """The share of each text's questions whose right token has the largest logit of the choices, `[N]`."""
    device, size = next(model.parameters()).device, max(1, batch_tokens // asked.ids.shape[1])
    shares = []
    for ids, at, choices in zip(*(x.split(size) for x in (asked.ids, asked.at, asked.choices)), strict=True):
        logits = model(input_ids=ids.to(device), use_cache=False).logits.float()
        rows = logits.gather(1, at.to(device)[..., None].expand(-1, -1, logits.shape[-1]))
        shares.append((rows.gather(2, choices.to(device)).argmax(2) == 0).float().mean(1).cpu().numpy())
    return np.concatenate(shares)


def standard_error(shares: np.ndarray) -> float:
    """Of the mean over texts."""
    return float(shares.std(ddof=1)) / math.sqrt(len(shares))


def counts(shares: np.ndarray) -> bool:
    """Whether the original is at least three standard errors above chance: its own, or those of single guesses."""
    chance = 1 / CHOICES
    by_chance = math.sqrt(chance * (1 - chance) / len(shares))
    return float(shares.mean()) >= chance + 3 * max(standard_error(shares), by_chance)
