"""Python signatures from declared options: `f(x, **options: Unpack[…])` that `help` and editors show in full."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, cast

from ..errors import Mha2gqaError
from .option import Config, Declared, declared

F = TypeVar("F", bound=Callable[..., object])
_VALUES = (
    "generate",
    "none",
    "auto",
    "mean",
    "joint",
    "llama.cpp",
)  # values that messages name behind an option
_TYPED = ContextVar("typed", default=False)  # whether options were typed on the command line


@contextmanager
def command_line() -> Iterator[None]:
    """While it is open, errors name options as the command line does (`--eval-data`), else as Python (`eval_data`)."""
    token = _TYPED.set(True)
    try:
        yield
    finally:
        _TYPED.reset(token)


def python_names(text: str, flags: Mapping[str, str]) -> str:
    """`text` with options of the command line under their names in Python.

    Args:
        text: Part of a message.
        flags: Flag -> argument; others are left as they are.

    Example:
        >>> python_names("use --eval-data, or --no-refit", {"--eval-data": "eval_data", "--refit": "refit"})
        'use eval_data, or refit=False'
        >>> python_names("give --data FILE or --data generate", {"--data": "data"})
        'give data=FILE or data="generate"'
    """

    def named(match: re.Match[str]) -> str:
        flag, value = match[1], match[2] or ""
        if flag in flags:
            name = flags[flag]
            if not value or name.endswith("=True"):
                return name + value
            return f"{name}={value.strip()}" if value.isupper() else f'{name}="{value.strip()}"'
        positive = flag.replace("--no-", "--", 1)
        name = f"{flags[positive].removesuffix('=True')}=False" if positive in flags else flag
        return name + value

    return re.sub(rf"(--[a-z][a-z0-9-]*)( (?:[A-Z]+|{'|'.join(_VALUES)})\b)?", named, text)


def _in_python(error: Mha2gqaError, flags: Mapping[str, str]) -> None:
    """Respell the options in an error, which stays the same object."""
    error.what = python_names(error.what, flags)
    error.where = None if error.where is None else python_names(str(error.where), flags)
    error.fix = None if error.fix is None else python_names(error.fix, flags)
    error.args = (error.message(),)


def names_in_python(*kinds: type[Config]) -> Callable[[F], F]:
    """Let the errors of a function name options as Python does, unless a command of the command line has called it.

    Args:
        kinds: The `Config`s whose options the errors may name.
    """
    every = {
        flag: f"{name}=True" if item.default is False else name
        for kind in kinds
        for name, item in declared(kind).items()
        for flag in item.flags
    }

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def called(*args: Any, **options: Any) -> Any:
            try:
                return function(*args, **options)
            except Mha2gqaError as error:
                if not _TYPED.get():
                    _in_python(error, every)
                raise

        return cast(F, called)

    return decorate


def takes_options(*kinds: type[Config], without: Iterable[str] = ()) -> Callable[[F], F]:
    """Give a function with `**options` the signature that names every option, and their help to its docstring.

    The line `**options` of the docstring's `Args:` is replaced. Its errors name options as Python does, unless a
    command of the command line has called it.

    Args:
        kinds: The `Config`s whose options it takes; those that the function names itself stay as it has them.
        without: Fields that it does not take.
    """

    def decorate(function: F) -> F:
        own = inspect.signature(function)
        named = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        skip = {*without, *(p.name for p in named)}
        items = [item for kind in kinds for name, item in declared(kind).items() if name not in skip]
        further = [
            inspect.Parameter(
                item.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if item.required else item.default,
                annotation=_annotation(kinds, item.name),
            )
            for item in items
        ]
        keyword_only = [p for p in named if p.kind is p.KEYWORD_ONLY]
        others = [p for p in named if p.kind is not p.KEYWORD_ONLY]
        called = names_in_python(*kinds)(function)
        called.__signature__ = own.replace(parameters=[*others, *keyword_only, *further])  # type: ignore[attr-defined]
        called.__doc__ = _documented(function.__doc__ or "", items)
        return called

    return decorate


def _annotation(kinds: Iterable[type[Config]], name: str) -> object:
    return next(f.type for kind in kinds for f in dataclasses.fields(kind) if f.name == name)


def _documented(doc: str, items: Iterable[Declared]) -> str:
    """A docstring with one line for each option in place of `**options`."""
    lines = doc.splitlines()
    start = next((i for i, line in enumerate(lines) if line.strip().startswith("**options:")), None)
    if start is None:
        return doc
    indent = len(lines[start]) - len(lines[start].lstrip())
    end = start + 1
    while end < len(lines) and lines[end].strip() and len(lines[end]) - len(lines[end].lstrip()) > indent:
        end += 1
    described = [f"{' ' * indent}{item.name}: {item.option.help}{_default(item)}" for item in items]
    return "\n".join([*lines[:start], *described, *lines[end:]])


def _default(item: Declared) -> str:
    words = item.default_words()
    return f" Default: {words}." if words else ""
