"""Draw items ahead in a thread: tokenising overlaps with other work."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Generator, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


class Prefetcher(Iterator[T]):
    """Draw `items` in a thread from now on, at most `depth` ahead: tokenising overlaps with other work.

    An exception of the producer is raised here, at the item where it happened. `close`, or leaving a
    `with` block, ends the thread and closes `items`.

    Args:
        items: What to draw; a generator is closed in the thread that draws it.
        depth: How many wait at most.

    Example:
        >>> with Prefetcher(batches) as ready:  # doctest: +SKIP
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

    def __enter__(self) -> Prefetcher[T]:
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
