"""Parameter types of the command line, and what every command has: `--json`, `-v`, `-q`. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from ..config import parse_count, parse_size
from ..errors import UsageError
from .state import FLAGS, setup_logging


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
