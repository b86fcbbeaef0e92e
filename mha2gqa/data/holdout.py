"""Keep train and held-out text apart, by content alone."""

from __future__ import annotations

import hashlib


def held_out(text: str, holdout: float, seed: int = 0) -> bool:
    """Whether a document belongs to the held-out side: a function of its words and the seed alone.

    The same text, differing at most in white space, is on the same side in every corpus, order and run.
    """
    digest = hashlib.blake2b(" ".join(text.split()).encode(), digest_size=8, key=f"{seed}".encode()).digest()
    return int.from_bytes(digest, "big") < holdout * 2**64
