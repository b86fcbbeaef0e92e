"""Who computes the costs of a search: threads of this process, and of the processes that search along with it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..reconstruct.ranks import Ranks


@dataclass(frozen=True)
class Workers:
    """Threads, one a core, of this process and of the others that ask for the same at the same time.

    Args:
        pool: The threads of this process; torch takes one core in each, which is what a small eigenproblem needs.
        count: Threads of all processes.
        ranks: The processes.
    """

    pool: ThreadPoolExecutor
    count: int
    ranks: Ranks

    def each(self, call: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """What `call` says of every item, in order: computed once, by one of the processes, and told to all.

        Args:
            call: Gives figures, the same ones in every process.
            items: Equal in every process.
        """
        mine = list(self.pool.map(call, items[self.ranks.rank :: self.ranks.count]))
        found: list[Any] = [None] * len(items)
        for rank, part in enumerate(self.ranks.gather(mine)):
            found[rank :: self.ranks.count] = part
        return found


@contextmanager
def workers(ranks: Ranks) -> Iterator[Workers]:
    """The threads of these processes while open; every process has to open it."""
    own = torch.get_num_threads()
    threads = _threads(own, ranks)
    with one_core_threads(threads) as pool:
        torch.set_num_threads(threads)
        yield Workers(pool, sum(ranks.gather(threads)), ranks)


@contextmanager
def own_workers(ranks: Ranks) -> Iterator[Workers]:
    """Threads of this process alone, beside its other work; every process has to open it.

    They take half of its cores and leave torch's own threads as they are: what runs beside them has time enough for a
    search, and none to wait for a core or for the interpreter.
    """
    threads = max(1, _threads(torch.get_num_threads(), ranks) // 2)
    with one_core_threads(threads) as pool:
        yield Workers(pool, threads, Ranks())


@contextmanager
def one_core_threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """Threads in each of which torch takes one core; at the end, calls that have not begun are dropped.

    A number of cores that one thread sets holds for it and for all threads made later: at the end it is as it was.

    Args:
        count: How many threads.
    """
    own = torch.get_num_threads()
    pool = ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(own)


def _threads(own: int, ranks: Ranks) -> int:
    """Threads that a search may take in this process.

    Torch's, as a user or the machine has set them. Launchers set one for each process of several, whose fits leave the
    cores idle: then its share of the cores that it is bound to, with those processes that are bound to the same ones.
    """
    if own > 1 or ranks.count == 1 or not hasattr(os, "sched_getaffinity"):
        return max(1, min(own, os.cpu_count() or 1))
    here = socket.gethostname(), os.sched_getaffinity(0)
    beside = [cores for host, cores in ranks.gather(here) if host == here[0] and cores & here[1]]
    return max(1, len(here[1]) // len(beside))
