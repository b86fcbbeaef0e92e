"""Bounds on what a chat template may take: it is a program that comes with a model."""

from __future__ import annotations

import ctypes
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import DataError

SECONDS, BYTES = 30.0, 2 << 30  # of one chat, its tokens included
_MARKS = re.compile(r"{%[-+]?\s*(end)?generation\s*[-+]?%}")  # which transformers alone knows
_INTERVAL = 0.2  # seconds between two looks


class _Spent(Exception):
    """Raised inside a template that takes more than it may."""


class Watch:
    """Ends a template that takes too long or too much memory, in whatever thread it runs.

    Example:
        >>> with Watch() as watch, watch.over("chat.jsonl:1"):
        ...     pass
    """

    def __init__(self) -> None:
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._thread, self._until, self._most = 0, 0.0, 0
        self._looking = threading.Thread(target=self._look, name="chat template watch", daemon=True)

    def __enter__(self) -> Watch:
        self._looking.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._looking.join()

    @contextmanager
    def over(self, where: str) -> Iterator[None]:
        """Watch what is done inside.

        Args:
            where: The chat, for the message.

        Raises:
            DataError: It took more than it may.
        """
        with self._lock:
            self._thread = threading.get_ident()
            self._until, self._most = time.monotonic() + SECONDS, _memory() + BYTES
        try:
            yield
        except _Spent as error:
            raise DataError(
                f"the chat template takes more than {SECONDS:.0f} s or {BYTES >> 30} GiB",
                where=where,
                fix="correct the template",
            ) from error
        finally:
            with self._lock:
                self._thread = 0

    def _look(self) -> None:
        while not self._stopped.wait(_INTERVAL):
            with self._lock:
                if self._thread and (time.monotonic() > self._until or _memory() > self._most):
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(self._thread), ctypes.py_object(_Spent)
                    )
                    self._thread = 0


def check_template(template: str, where: object) -> None:
    """Refuse a template that no watch could end: a power can keep one operation busy for years.

    Raises:
        DataError: It computes powers.
    """
    from jinja2 import Environment, TemplateSyntaxError, nodes

    try:
        parsed = Environment(extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do"]).parse(
            _MARKS.sub("", template)
        )
    except TemplateSyntaxError:  # of which the tokenizer says more
        return
    if parsed.find(nodes.Pow):
        raise DataError("the chat template computes powers", where=where, fix="correct the template")


def _memory() -> int:
    """Bytes that this process holds in memory; 0 where the system does not say."""
    sizes = Path("/proc/self/statm")
    try:
        return int(sizes.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
