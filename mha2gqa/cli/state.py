"""Options of every command (`--json`, `-v`, `-q`) and the log. Imports nothing heavy."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from contextlib import suppress
from io import StringIO
from typing import Any, TextIO

import click

from .. import distributed

logger = logging.getLogger("mha2gqa")
FLAGS = ("json", "verbose", "quiet")


def state() -> dict[str, int]:
    """The flags of this call, and what has happened in it."""
    context = click.get_current_context(silent=True)
    return (context.find_root().obj or {}) if context else {}


class Unfailing:
    """A stream whose lines are told if they can be: a full disk or a reader that is gone ends no job of days.

    Args:
        stream: The standard error stream; None where the process has none.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream: TextIO = stream or StringIO()

    def write(self, text: str) -> int:
        """Write what can be written."""
        with suppress(OSError, ValueError):  # closed, among others
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush what can be flushed."""
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to the standard error stream of the moment, so that a log line stands above a bar."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def setup_logging(state: dict[str, int]) -> None:
    """Our log on stderr; other libraries only speak with -v."""
    level = logging.DEBUG if state.get("verbose") else logging.WARNING if state.get("quiet") else logging.INFO
    if not logger.handlers:
        handler = _Stderr()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(level if distributed.is_rank_zero() else logging.ERROR)
    if not state.get("verbose"):
        for name in ("TRANSFORMERS_VERBOSITY", "DATASETS_VERBOSITY", "HF_HUB_VERBOSITY"):
            os.environ.setdefault(name, "error")
        warnings.filterwarnings("ignore")
    if state.get("quiet") or not sys.stderr.isatty():  # bars in a log file are noise
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
