"""Options of the command line, made from the declarations in `config/`. Imports no torch."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast, get_args, get_origin

import rich_click as click

from ..config.coerce import Invalid, short
from ..config.generate import type_words
from ..config.key_values import fit_help
from ..config.option import CLI, PANELS, Config, Declared, OptionError, declared, plain
from ..config.signature import command_line
from ..errors import UsageError
from .state import FLAGS, setup_logging

F = TypeVar("F", bound=Callable[..., Any])
COMMON = "Common"


class DeclaredType(click.ParamType):
    """The value of a declared option, checked as it is typed."""

    def __init__(self, item: Declared) -> None:
        hint = plain(item.hint)
        self.item, self.name = item, type_words(hint).replace("`", "")
        self.choices = get_args(hint) if "Literal" in str(get_origin(hint)) else ()
        self.each = get_origin(hint) is tuple and not item.option.commas  # one option for each value

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The typed value, or an error that names the option."""
        if self.item.option.lenient:
            return _number(value)
        if self.item.option.commas and isinstance(value, str):
            value = tuple(part.strip() for part in value.split(",") if part.strip())
        try:
            return self.item.read((value,))[0] if self.each else self.item.read(value)
        except Invalid as error:
            self.fail(f"{error}, not {short(value)}", param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> Any:
        """The choices; files where anything may stand."""
        from click.shell_completion import CompletionItem

        if self.choices:
            return [CompletionItem(choice) for choice in self.choices if choice.startswith(incomplete)]
        return [CompletionItem(incomplete, type="file")] if "text" in self.name else []


def _number(value: Any) -> Any:
    """What was typed, as a number if it is one: the library knows the values that a model allows."""
    for kind in (int, float):
        try:
            return kind(value) if len(str(value)) < 40 else value
        except (ValueError, OverflowError):
            continue
    return value


def _option(item: Declared) -> Callable[[F], F]:
    hint, option = plain(item.hint), item.option
    flags, kind = list(item.flags), DeclaredType(item)
    needed = item.required
    more: dict[str, Any] = {"type": kind, "metavar": option.metavar or _metavar(item, kind)}
    if hint is bool:
        both = item.default is not False  # on by default, or decided by what else is given
        flags = [f"{flags[0]}/--no-{item.key.replace('_', '-')}"] if both else flags
        more = {"is_flag": True}
    elif isinstance(hint, type) and issubclass(hint, Config):
        more |= {"type": str, "multiple": True, "is_eager": True, "callback": _answer_help}
    elif get_origin(hint) is tuple and not option.commas:
        more["multiple"] = True
    if not needed:
        more["default"] = None
    return click.option(
        *flags, item.name, required=needed, help=_help(item, needed), panel=option.panel, **more
    )


_PAIR = re.compile(r"[A-Za-z_]\w*=")


class FitCommand(click.RichCommand):
    """A command whose `--fit` takes several pairs: `--fit steps=2000 patience=12` is `--fit` given twice."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Repeat the flag before each further pair that follows directly."""
        spread: list[str] = []
        for arg in args:
            if spread[-2:-1] == ["--fit"] and _PAIR.match(arg):
                spread.append("--fit")
            spread.append(arg)
        return super().parse_args(ctx, spread)


def _answer_help(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    """Answer `--fit help`, whatever else is given."""
    if "help" in value:
        click.echo(fit_help())
        ctx.exit()
    return value


def _metavar(item: Declared, kind: DeclaredType) -> str | None:
    """How a value is shown: choices in full, else its kind."""
    if kind.choices:
        return f"[{'|'.join(kind.choices)}]"
    return {int: "N", float: "X"}.get(plain(item.hint))


def _help(item: Declared, required: bool) -> str:
    text = _BACKQUOTED.sub(lambda match: _flag(match[1]), item.option.help)
    hints = "; ".join(hint for hint in (item.range.words, "" if required else _default(item)) if hint)
    return f"{text} [{hints}]" if hints else text


_BACKQUOTED = re.compile(r"`([^`]+)`")


def _flag(name: str) -> str:
    """An option named in help, as it is typed; anything else as it is."""
    return f"--{name.replace('_', '-')}" if re.fullmatch(r"[a-z_]+", name) else name


def _default(item: Declared) -> str:
    return f"default: {item.default_words() or 'none'}"


def _argument(item: Declared) -> Callable[[F], F]:
    several = get_origin(plain(item.hint)) is tuple
    shown = item.option.metavar or (f"{item.name.upper().removesuffix('S')}..." if several else None)
    return click.argument(item.name, nargs=-1 if several else 1, required=True, metavar=shown)


def takes(*kinds: type[Config]) -> Callable[[F], F]:
    """Give a command the arguments and options that are declared, and errors that name them as typed.

    The command is called with the given ones only; for all others the defaults of what it calls hold.

    Args:
        kinds: The declarations, in the order of their panels on the help page.
    """
    items = [item for kind in kinds for item in declared(kind).values() if CLI in item.option.where]
    arguments = [item for item in items if item.option.argument]
    options = [item for item in items if not item.option.argument]
    options.sort(key=lambda item: PANELS.index(item.option.panel))
    flags = {item.name: item.flags[0] for item in options} | {i.name: i.name.upper() for i in arguments}

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def called(**values: Any) -> Any:
            given = {name: value for name, value in values.items() if value is not None and value != ()}
            with spelled(flags):
                return function(**given)

        command: Any = called
        for item in reversed(options):
            command = _option(item)(command)
        for item in reversed(arguments):
            command = _argument(item)(command)
        return command

    return decorate


@contextmanager
def spelled(flags: Mapping[str, str]) -> Iterator[None]:
    """Errors about options name them as they are typed here: `--batch-tokens`, not `batch_tokens`.

    Args:
        flags: Field -> option or argument of the command line.
    """
    try:
        yield
    except OptionError as error:
        flag = flags.get(error.name, error.name.rstrip("_"))
        raise error.at(f"{flag}{error.shown}", flags) from error
    except UsageError as error:
        name, space, value = str(error.where or "").partition(" ")
        if name not in flags:
            raise
        raise type(error)(error.what, where=f"{flags[name]}{space}{value}", fix=error.fix) from error


def _remember(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Keep a common flag for the whole call: it may stand before or after the command's name."""
    state = ctx.find_root().ensure_object(dict)
    state[str(param.name)] = max(int(value), state.get(str(param.name), 0))
    if param.name == FLAGS[-1]:
        setup_logging(state)


def common(command: F) -> F:
    """What every command has: `--json`, `-v`, `-q`."""
    shared: dict[str, Any] = {"expose_value": False, "callback": _remember, "panel": COMMON}
    for decorator in (
        click.option("-q", "--quiet", is_flag=True, help="Only warnings, no progress.", **shared),
        click.option("-v", "--verbose", count=True, metavar="", help="More log, tracebacks.", **shared),
        click.option("--json", is_flag=True, help="One JSON object on stdout.", **shared),
    ):
        command = decorator(command)

    @functools.wraps(command)
    def typed(*args: Any, **given: Any) -> Any:
        with command_line():
            return command(*args, **given)

    return cast(F, typed)
