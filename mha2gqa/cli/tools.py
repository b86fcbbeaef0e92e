"""What every command shares: parameter types, output, logging, exit codes. Imports no torch."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from .. import distributed
from ..config import parse_count, parse_size
from ..errors import Mha2gqaError, UsageError

if TYPE_CHECKING:
    from ..results import Result

logger = logging.getLogger("mha2gqa")
FLAGS = ("json", "verbose", "quiet")
INTERRUPTED = 130
FIRST_SPEAKS = 10.0  # seconds in which the first process meets what another one has met


class Count(click.ParamType):
    """A whole number; `100B`, `1.4T`, `512k` and `1e9` are understood."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_count(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Size(click.ParamType):
    """Bytes; `5GB` and `512MiB` are understood."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Names(click.ParamType):
    """Names with commas between them."""

    name = "names"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        return tuple(part.strip() for part in value.split(",") if part.strip())


class Groups(click.ParamType):
    """G as typed: what is no whole number goes on to the library, which knows the model's valid values."""

    name = "G"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        for kind in (int, float):
            try:
                return kind(value)
            except ValueError:
                continue
        return value


COUNT, SIZE, GROUPS, NAMES = Count(), Size(), Groups(), Names()
option = click.option


def options(*decorators: Callable[..., Any]) -> Callable[..., Any]:
    """Several option decorators as one; help lists them in the order given."""

    def apply(command: Callable[..., Any]) -> Callable[..., Any]:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return apply


def _remember(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Keep a common flag for the whole call: it may stand before or after the command's name."""
    state = ctx.find_root().ensure_object(dict)
    state[str(param.name)] = max(int(value), state.get(str(param.name), 0))
    if param.name == FLAGS[-1]:
        setup_logging(state)


common = options(
    option("--json", is_flag=True, expose_value=False, callback=_remember, help="One JSON object on stdout."),
    option(
        "-v", "--verbose", count=True, expose_value=False, callback=_remember, help="More log, tracebacks."
    ),
    option(
        "-q", "--quiet", is_flag=True, expose_value=False, callback=_remember, help="Only warnings, no bars."
    ),
)


def given(words: dict[str, Any]) -> dict[str, Any]:
    """The options that were given; the others keep the default of what is called."""
    return {name: value for name, value in words.items() if value is not None and value != ()}


def training_words(overrides: Sequence[str]) -> dict[str, Any]:
    """`--set KEY=VALUE` of the uptrain command as typed keyword arguments.

    Raises:
        UsageError: Not of that form, or a value of the wrong kind.
    """
    from ..config import recipe_from_overrides

    section = recipe_from_overrides([f"uptrain.{text}" for text in overrides]).uptrain
    return {} if section is None else section.options()


def given_once(options: dict[str, Any], further: dict[str, Any]) -> dict[str, Any]:
    """Options and `--set` words together.

    Raises:
        UsageError: A word is given in both ways.
    """
    for name in options.keys() & further.keys():
        raise UsageError(
            f"is given as --{name.replace('_', '-')} too", where=f"--set {name}", fix="leave one out"
        )
    return options | further


def fit_words(overrides: Sequence[str]) -> dict[str, Any]:
    """`--fit KEY=VALUE` of the convert command as typed keyword arguments.

    Raises:
        UsageError: Not of that form, an unknown key, or a value of the wrong kind.
    """
    from ..config import recipe_from_overrides

    fit = recipe_from_overrides([f"convert.fit.{text}" for text in overrides]).convert.fit
    return {} if fit is None else fit.options()


# --- output --------------------------------------------------------------------------------------------


def emit(result: Result | dict[str, Any]) -> None:
    """Print a result: one JSON object with `--json`, else its rendering for people."""
    data = result if isinstance(result, dict) else result.to_dict()
    if not distributed.is_rank_zero():
        return
    state = _state()
    state["emitted"] = 1
    if state.get("json"):
        click.echo(json.dumps(data, ensure_ascii=False))
    else:
        from ..report.terminal import render

        click.echo(render(data))


def check_output(path: str | None) -> None:
    """Before the work whose result goes into a file: can it be written there?

    Raises:
        UsageError: There is no such folder, or it may not be written.
    """
    if path is None or not distributed.is_rank_zero():
        return
    file = Path(path)
    problem = None
    if file.is_dir():
        problem = "is a folder", "name a file in it"
    elif not file.parent.is_dir():
        problem = f"there is no folder {file.parent}", "make it first"
    elif not os.access(file if file.exists() else file.parent, os.W_OK):
        problem = "may not be written", "choose another place"
    if problem:
        raise UsageError(problem[0], where=f"--output {path}", fix=problem[1])


def write_json(data: dict[str, Any], path: str) -> None:
    """Write a result to a file, in the first process only.

    Raises:
        Mha2gqaError: It cannot be written.
    """
    if not distributed.is_rank_zero():
        return
    text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise Mha2gqaError(f"cannot be written ({error.strerror})", where=path) from error


def setup_logging(state: dict[str, int]) -> None:
    """Our log on stderr; other libraries only speak with -v."""
    level = logging.DEBUG if state.get("verbose") else logging.WARNING if state.get("quiet") else logging.INFO
    if not logger.handlers:
        handler = logging.StreamHandler()  # stderr
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


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar of bytes on stderr, as `progress(done, total)`; None where nobody is looking."""
    if _state().get("quiet") or not distributed.is_rank_zero() or not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(desc=label, unit="B", unit_scale=True, leave=False) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


@contextmanager
def progress_stages() -> Iterator[Callable[[str, int, int], None] | None]:
    """A bar for each stage on stderr, as `progress(stage, done, total)`; None where nobody is looking."""
    if _state().get("quiet") or not distributed.is_rank_zero() or not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(leave=False) as bar:
        current = ""

        def show(name: str, done: int, total: int) -> None:
            nonlocal current
            if name != current:
                current = name
                bar.reset(total)
                bar.set_description(name)
            bar.update(done - bar.n)

        yield show


@contextmanager
def progress_count(label: str) -> Iterator[Callable[[str, int], None] | None]:
    """Counts on stderr, as `progress(name, count so far)`; None where nobody is looking."""
    if _state().get("quiet") or not distributed.is_rank_zero() or not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(desc=label, unit=" tokens", unit_scale=True, leave=False) as bar:
        current = label

        def show(name: str, count: int) -> None:
            nonlocal current
            if name != current:
                current = name
                bar.set_description(name[-40:])
                bar.reset()
            bar.update(count - bar.n)

        yield show


def _state() -> dict[str, int]:
    context = click.get_current_context(silent=True)
    return (context.find_root().obj or {}) if context else {}


# --- errors --------------------------------------------------------------------------------------------


def run_command(command: click.Group, argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 ok, 1 failed, 2 usage, 3 gate, 130 interrupted.

    Args:
        command: The group of commands.
        argv: Arguments; those of the process by default.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    state: dict[str, int] = {}
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
    """SIGTERM ends a command as Ctrl-C does: what is half made is cleared away, and the exit code is 130.

    Not where processes wait for each other in libraries that let no Python run: those must die of it.
    """
    mine = threading.current_thread() is threading.main_thread() and not distributed.is_launched()
    if not mine or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


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
