"""Python signatures from declared options: `f(x, **options: Unpack[…])` that `help` and editors show in full."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import TypeVar

from .option import Config, Declared, declared

F = TypeVar("F", bound=Callable[..., object])


def takes_options(*kinds: type[Config], without: Iterable[str] = ()) -> Callable[[F], F]:
    """Give a function with `**options` the signature that names every option, and their help to its docstring.

    The line `**options` of the docstring's `Args:` is replaced.

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
        function.__signature__ = own.replace(parameters=[*others, *keyword_only, *further])  # type: ignore[attr-defined]
        function.__doc__ = _documented(function.__doc__ or "", items)
        return function

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
