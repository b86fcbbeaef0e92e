"""Helpers on streams of documents: draw ahead in a thread, keep train and held-out text apart."""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from ..errors import DataError, UsageError

T = TypeVar("T")


def prefetch(items: Iterable[T], depth: int = 8) -> Iterator[T]:
    """Draw `items` in a thread, at most `depth` ahead: tokenising overlaps with the model's work.

    An exception of the producer is raised here, at the item where it happened.
    """
    ahead: queue.Queue[Any] = queue.Queue(depth)
    stop = threading.Event()
    end = object()

    def put(item: object) -> bool:
        while not stop.is_set():
            try:
                ahead.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def produce() -> None:
        try:
            for item in items:
                if not put((item, None)):
                    return
            put((end, None))
        except BaseException as error:  # handed to the consumer, which raises it
            put((end, error))

    thread = threading.Thread(target=produce, daemon=True)
    thread.start()
    try:
        while True:
            item, error = ahead.get()
            if error is not None:
                raise error
            if item is end:
                return
            yield item
    finally:
        stop.set()
        thread.join()


def held_out(text: str, holdout: float, seed: int = 0) -> bool:
    """Whether a document belongs to the held-out side: a function of its words and the seed alone.

    The same text, differing at most in white space, is on the same side in every corpus, order and run.
    """
    digest = hashlib.blake2b(" ".join(text.split()).encode(), digest_size=8, key=f"{seed}".encode()).digest()
    return int.from_bytes(digest, "big") < holdout * 2**64


def split_documents(texts: Iterable[str], holdout: float, seed: int = 0) -> tuple[list[str], list[str]]:
    """Split documents into train and held-out text that share no document.

    Args:
        texts: The documents (all of them are held; filter a stream with `held_out` instead).
        holdout: Expected fraction of documents to hold out, between 0 and 1.
        seed: Chooses another split.

    Returns:
        `(train, heldout)`, each in the order of `texts`.

    Raises:
        UsageError: `holdout` is not between 0 and 1.
        DataError: One side would be empty.
    """
    if not 0 < holdout < 1:
        raise UsageError(
            f"{holdout} is no fraction between 0 and 1", where="--holdout", fix="try 0.01 for one percent"
        )
    sides: tuple[list[str], list[str]] = ([], [])
    for text in texts:
        sides[held_out(text, holdout, seed)].append(text)
    if not sides[0] or not sides[1]:
        raise DataError(
            f"one side of {sum(map(len, sides))} documents would be empty at {holdout}",
            where="--holdout",
            fix="raise it, or give separate held-out text",
        )
    return sides
