"""YAML text as plain data with the line of every key, in bounded time and memory."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import UsageError

DEEPEST, MOST = 20, 20_000  # levels, and values after aliases are expanded
LONGEST = 1_000_000  # characters of a file


class NotYaml(UsageError):
    """Text that cannot be read; `line` says where, if anywhere."""

    def __init__(self, what: str, line: int | None = None, where: object = None) -> None:
        super().__init__(what, where=where)
        self.line = line


@cache
def _loader() -> Any:
    """SafeLoader that reads 1e-5 as a number, as YAML 1.2 does (YAML 1.1 wants 1.0e-5), and no dates."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in found if not tag.endswith(":timestamp")]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    number = re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    return Loader


def parse(text: str) -> tuple[Any, dict[str, int]]:
    """Text as plain data (mappings, lists, scalars), and the line of every dotted key.

    Args:
        text: One YAML document.

    Returns:
        The data, None for an empty document; and `{"convert.groups": 4, …}`.

    Raises:
        NotYaml: No YAML, a key given twice, too deep, too large, or an alias to itself.
    """
    import yaml  # not at the top: `mha2gqa --help` reads this module

    if len(text) > LONGEST:
        raise NotYaml(f"must be at most {LONGEST:,} characters, not {len(text):,}")
    try:
        _check_depth(yaml.parse(text, _loader()))
        loader = _loader()(text)
        try:
            node = loader.get_single_node()
            return (None, {}) if node is None else _Reader(loader).read(node)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = str(getattr(error, "problem", None) or error)[:200]
        raise NotYaml(f"is not YAML ({' '.join(problem.split())})", mark and mark.line + 1) from error


def _check_depth(events: Any) -> None:
    """Refuse deep nesting while it is scanned: the parser's time grows with the square of it."""
    depth = 0
    for event in events:
        name = type(event).__name__
        depth += name.endswith("StartEvent") and name[:3] in ("Map", "Seq")
        depth -= name.endswith("EndEvent") and name[:3] in ("Map", "Seq")
        if depth > DEEPEST:
            raise NotYaml(f"must have at most {DEEPEST} levels", event.start_mark.line + 1)


class _Reader:
    """Builds data from a graph of nodes, each node once, however often aliases name it."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.lines: dict[str, int] = {}
        self.built: dict[int, tuple[Any, int]] = {}  # node -> its value, and how many values that expands to

    def read(self, node: Any) -> tuple[Any, dict[str, int]]:
        """The value of the root, and the lines of its keys."""
        value, _ = self.build(node)
        self.note_lines(node, "")
        return value, self.lines

    def build(self, node: Any, outer: tuple[int, ...] = ()) -> tuple[Any, int]:
        """The value of a node and the number of values in it."""
        if id(node) in outer:
            raise NotYaml("holds an alias to itself", node.start_mark.line + 1)
        if id(node) not in self.built:
            inside = (*outer, id(node))
            if node.id != "scalar" and node.tag.rpartition(":")[2] not in ("map", "seq"):
                raise NotYaml(f"tag {node.tag[:60]} is not allowed", node.start_mark.line + 1)
            found: tuple[Any, int]
            if node.id == "mapping":
                found = self.mapping(node, inside)
            elif node.id == "sequence":
                items = [self.build(item, inside) for item in node.value]
                found = [value for value, _ in items], 1 + sum(size for _, size in items)
            else:
                found = self.scalar(node), 1
            if found[1] > MOST:
                raise NotYaml(f"must hold at most {MOST:,} values", node.start_mark.line + 1)
            self.built[id(node)] = found
        return self.built[id(node)]

    def mapping(self, node: Any, outer: tuple[int, ...]) -> tuple[dict[Any, Any], int]:
        """A mapping; what `<<` merges in comes first and is overridden."""
        own: dict[Any, Any] = {}
        merged: dict[Any, Any] = {}
        size = 1
        for key_node, value_node in node.value:
            value, more = self.build(value_node, outer)
            size += more
            if key_node.tag.endswith(":merge"):
                for part in value if isinstance(value, list) else [value]:
                    if not isinstance(part, dict):
                        raise NotYaml("<< must name mappings", key_node.start_mark.line + 1)
                    merged = part | merged
                continue
            if key_node.id != "scalar":
                raise NotYaml("a key must be text", key_node.start_mark.line + 1)
            own[self.scalar(key_node)] = value
        return merged | own, size

    def scalar(self, node: Any) -> Any:
        """Text, a number, a switch or nothing."""
        try:
            value = self.loader.construct_object(node, deep=True)
        except (ValueError, KeyError, IndexError, TypeError, OverflowError, AttributeError):
            value = ...
        if value is not None and not isinstance(value, (str, int, float)):  # a date, bytes, or no such value
            kind = node.tag.rpartition(":")[2]
            raise NotYaml(f"is not YAML (no {kind}: {str(node.value)[:60]!r})", node.start_mark.line + 1)
        return value

    def note_lines(self, node: Any, prefix: str) -> None:
        """The line of every key that is written out; one given twice is refused, YAML would keep the last."""
        if node.id != "mapping":
            return
        here: dict[str, int] = {}
        for key, value in node.value:
            name, line = f"{prefix}{key.value}", key.start_mark.line + 1
            if key.tag.endswith(":merge"):
                continue
            if name in here:
                raise NotYaml(f"{name[:100]}: key given twice (first at line {here[name]})", line)
            here[name] = self.lines[name] = line
            if prefix.count(".") < 3:
                self.note_lines(value, f"{name}.")


def parse_value(text: str) -> Any:
    """The value after `KEY=` as YAML reads it; what is not YAML is an error of its caller.

    Raises:
        NotYaml: As `parse`.
    """
    return parse(text)[0]


def read_text(path: Path) -> str:
    """A small file of text.

    Raises:
        UsageError: It cannot be read, is not UTF-8, or is far too large for a recipe.
    """
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(LONGEST + 1)
    except OSError as error:
        raise UsageError(
            f"cannot be read ({error.strerror})",
            where=path,
            fix="give a recipe file; `mha2gqa recipes` lists those of the package",
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"is not UTF-8 (byte {error.start})", where=path) from error
    except ValueError as error:  # a NUL in the name
        raise UsageError("is not a file name", where=repr(str(path))[:100]) from error
    return text
