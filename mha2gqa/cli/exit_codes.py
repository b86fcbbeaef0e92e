"""Running the command line: exit codes, one line for an error, signals. Imports no torch."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import rich_click as click

from .. import distributed
from ..errors import Mha2gqaError
from .state import Unfailing

INTERRUPTED = 130
FIRST_SPEAKS = 10.0  # seconds in which rank 0 meets what another process has met


def run_command(command: click.Group, argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 ok, 1 failed, 2 usage, 3 gate, 130 interrupted.

    Args:
        command: The group of commands.
        argv: Arguments; those of the process by default.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    state: dict[str, int] = {}
    if not isinstance(sys.stderr, Unfailing):
        sys.stderr = Unfailing(sys.stderr)  # type: ignore[assignment]
    sys.excepthook = lambda kind, error, trace: _unexpected(state, args, error)
    try:
        with _terminated_as_interrupted():
            code = command.main(args, prog_name="mha2gqa", standalone_mode=False, obj=state)
        distributed.destroy()
        sys.exit(code if isinstance(code, int) else 0)
    except (click.Abort, KeyboardInterrupt):
        _fail(state, args, None, "interrupted", INTERRUPTED)
    except click.UsageError as error:
        where = f"{error.ctx.command_path}: " if error.ctx else ""
        hint = f" (see {error.ctx.command_path} --help)" if error.ctx else ""
        _fail(state, args, error, where + " ".join(error.format_message().split()) + hint, 2)
    except Mha2gqaError as error:
        _fail(state, args, error, str(error), error.exit_code)
    except BrokenPipeError:  # `mha2gqa archs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM and SIGHUP end a command as Ctrl-C does: what is half made is cleared away, and the exit code is 130.

    Not where processes wait for each other in libraries that let no Python run: those must die of it.
    """
    mine = threading.current_thread() is threading.main_thread() and not distributed.is_launched()
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if mine and signal.getsignal(n) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _unexpected(state: dict[str, int], args: list[str], error: BaseException) -> None:
    """A fault of ours or of a library: one line, and how to see more. Python then exits with 1."""
    words = " ".join(str(error).split()) or "no message"
    _report(state, args, error, f"{type(error).__name__}: {words[:500]} (-v shows where)", 1)


def _fail(
    state: dict[str, int], args: list[str], error: BaseException | None, message: str, code: int
) -> NoReturn:
    _report(state, args, error, message, code)
    sys.exit(code)


def _report(
    state: dict[str, int], args: list[str], error: BaseException | None, message: str, code: int
) -> None:
    """One line on stderr, from the first process; from another only what the first does not meet as well."""
    who = ""
    if not distributed.is_rank_zero():
        if code == INTERRUPTED:  # all of them are, and agreed on it
            return
        time.sleep(FIRST_SPEAKS)  # torchrun ends this process as soon as the first has failed
        who = f" (process {distributed.rank()})"
    if error is not None and (state.get("verbose") or os.environ.get("MHA2GQA_DEBUG") == "1"):
        import traceback

        traceback.print_exception(error)
    click.echo(f"mha2gqa: {message}" if code == INTERRUPTED else f"error{who}: {message}", err=True)
    wanted = ("--json" in args or state.get("json")) and distributed.is_rank_zero()
    if wanted and not state.get("emitted"):  # else the result itself says what failed
        from ..results import SCHEMA_VERSION

        names = [arg for arg in args if not arg.startswith("-")]
        body = {"schema_version": SCHEMA_VERSION, "command": names[0] if names else ""}
        click.echo(json.dumps(body | {"error": {"message": message, "exit_code": code}}, ensure_ascii=False))
