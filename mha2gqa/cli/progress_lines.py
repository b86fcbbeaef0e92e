"""Progress of a command on stderr: one bar on a terminal, plain lines elsewhere. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ..distributed import is_rank_zero
from ..progress import Bar, Lines, Progress, reporting
from .state import state


@contextmanager
def shown_progress(label: str) -> Iterator[Progress]:
    """Show inside the block what the job reports: a bar, or lines in a file; nothing with `-q`.

    The first thing is shown at once, before anything heavy is imported.

    Args:
        label: Name of the command.
    """
    if state().get("quiet") or not is_rank_zero():
        yield Progress(label)
        return
    shown: Progress = Bar(label) if sys.stderr.isatty() else Lines(label)
    try:
        with reporting(shown):
            shown.stage("starting")
            yield shown
    finally:
        shown.close()
