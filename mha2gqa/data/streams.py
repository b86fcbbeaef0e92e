"""Helpers on streams of documents: draw ahead in a thread, keep train and held-out text apart."""

from __future__ import annotations

import contextlib
import hashlib
import queue
import threading
from collections.abc import Generator, Iterable, Iterator
from typing import TypeVar

from ..errors import DataError, UsageError

T = TypeVar("T")


class prefetch(Iterator[T]):
    """Draw `items` in a thread from now on, at most `depth` ahead: tokenising overlaps with other work.

    An exception of the producer is raised here, at the item where it happened. `close`, or leaving a
    `with` block, ends the thread and closes `items`.

    Args:
        items: What to draw; a generator is closed in the thread that draws it.
        depth: How many wait at most.

    Example:
        >>> with prefetch(batches) as ready:  # doctest: +SKIP
        ...     for batch in ready: ...
    """

    def __init__(self, items: Iterable[T], depth: int = 8) -> None:
        self._ahead: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(depth)
        self._stop = threading.Event()
        # The thread must not refer to this object: one that is dropped without `close` ends it as well.
        self._thread = threading.Thread(
            target=_produce, args=(items, self._ahead, self._stop), name="prefetch", daemon=True
        )
        self._thread.start()

    def __next__(self) -> T:
        if self._stop.is_set():
            raise StopIteration
        item, error = self._ahead.get()
        if error is None:
            return item  # type: ignore[return-value]
        self.close()
        raise error

    def close(self) -> None:
        """End the thread; there are no more items."""
        self._stop.set()
        with contextlib.suppress(queue.Empty):
            while True:  # make room for an item it waits to hand over
                self._ahead.get_nowait()
        self._thread.join()

    def __enter__(self) -> prefetch[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._stop.set()


def _produce(
    items: Iterable[T], ahead: queue.Queue[tuple[T | None, BaseException | None]], stop: threading.Event
) -> None:
    """Put `(item, None)` for every item, then `(None, how it ended)`."""

    def put(item: T | None, error: BaseException | None) -> bool:
        while not stop.is_set():
            try:
                ahead.put((item, error), timeout=0.1)
                return not stop.is_set()
            except queue.Full:
                continue
        return False

    source = iter(items)
    try:
        while put(next(source), None):
            pass
    except BaseException as error:  # handed to the consumer, which raises it
        put(None, error)
    finally:
        if isinstance(source, Generator):
            source.close()


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
