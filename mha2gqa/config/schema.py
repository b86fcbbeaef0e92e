"""The JSON schema of recipes, for editors that check YAML while it is typed."""

from __future__ import annotations

from typing import Any, get_args, get_origin

from .option import Config, Declared, optional, plain
from .recipe import SECTIONS, Recipe, keys
from .training_arguments import TrainerOptions

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_BOUNDS = {">": "exclusiveMinimum", ">=": "minimum", "<": "exclusiveMaximum", "<=": "maximum"}


def recipe_schema() -> dict[str, Any]:
    """The schema, as JSON data.

    Example:
        >>> recipe_schema()["properties"]["convert"]["properties"]["groups"]["type"]
        ['integer', 'string']
    """
    top = {key: _option(item) for key, item in keys(Recipe).items()}
    sections = {name: _section(kind) for name, kind in SECTIONS.items()}
    uptrain = sections["uptrain"]["properties"]
    further = {key: _option(item) for key, item in keys(TrainerOptions).items()}
    uptrain |= further | {"training_args": {"type": "object", "properties": further}}
    return {
        "$schema": DIALECT,
        "title": "mha2gqa recipe",
        "type": "object",
        "properties": top | sections,
        "additionalProperties": False,
    }


def _section(kind: type[Config]) -> dict[str, Any]:
    return {
        "description": (kind.__doc__ or "").partition("\n")[0],
        "type": ["object", "null"],
        "properties": {key: _option(item) for key, item in keys(kind).items()},
        "additionalProperties": False,
    }


def _option(item: Declared) -> dict[str, Any]:
    """One key: its type, range, choices, default and help."""
    description = item.option.help.replace("`", "")
    if not item.required and item.default in (None, ()) and item.option.unset:
        description += f" Default: {item.option.unset}."
    found = {"description": description} | _type(
        item.hint, {_BOUNDS[sign]: bound for sign, bound in item.range.bounds}
    )
    if not item.required and item.default not in (None, ()):
        found["default"] = list(item.default) if isinstance(item.default, tuple) else item.default
    return found


def _type(hint: Any, bounds: dict[str, float]) -> dict[str, Any]:
    """A type as JSON schema; numbers may be text with a unit (`64k`), and one text stands for a list of one."""
    inner, origin, args = plain(hint), get_origin(plain(hint)), get_args(plain(hint))
    several = [part for part in get_args(hint) if part is not type(None)] if optional(hint) else []
    if len(several) > 1:
        return {"anyOf": [_type(part, bounds) for part in several] + [{"type": "null"}]}
    null = ["null"] if optional(hint) else []
    if isinstance(inner, type) and issubclass(inner, Config):
        return _section(inner)
    if "Literal" in str(origin):
        return {"enum": [*args, *([None] if null else [])]}
    if origin is tuple:
        each = _type(args[0], bounds)
        items = {"type": "array", "items": each}
        if args[-1] is not Ellipsis:
            return items | {"minItems": len(args), "maxItems": len(args)}
        return {"anyOf": [items, each, *([{"type": "null"}] if null else [])]}
    whole = inner is int or getattr(inner, "__metadata__", ("",))[0] == "bytes"
    if inner in (bool, str, dict) or origin is dict:
        names = {bool: ["boolean"], str: ["string", "number"], dict: ["object"]}
        return {"type": names[origin or inner] + null}
    return {"type": ["integer" if whole else "number", "string", *null]} | bounds
