"""Stopping on a signal: at the end of a step, with everything saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from transformers import TrainerCallback

from ..errors import TrainingError

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class Interrupted(TrainingError):
    """The run received a signal to stop; everything needed to resume is saved."""

    exit_code = 130


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collect SIGTERM, SIGHUP (a terminal that closes) and the first SIGINT instead of dying of them.

    Yields:
        A list that receives the signal numbers; a second SIGINT interrupts as usual.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    if before[signal.SIGHUP] == signal.SIG_IGN:  # of nohup
        del before[signal.SIGHUP]

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, before[signal.SIGINT])

    for number in before:
        signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StopAndSave(TrainerCallback):
    """Saves and stops at the end of the step at which all processes know of a signal that one of them received.

    Args:
        begin: Called when the training begins or goes on.
    """

    def __init__(self, begin: Callable[[], None]) -> None:
        self.agreed, self.begin = False, begin

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Go on with the log entry that an interruption cut."""
        self.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Set save and stop."""
        if self.agreed and state.global_step < state.max_steps:
            control.should_save = True
            control.should_training_stop = True
        return control
