"""Changes to inputs, drawn from a random generator: values that no program expects, broken bytes, broken JSON."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 4, 5, 8, 2**31, 2**63, -(2**63), 10**30, 0.5, -0.5, 4.0, 1e308,
    float("nan"), float("inf"), "", " ", "x", "4", "llama", "\0", "é" * 30, "\u202e", "../x", "/etc/passwd",
    "~", "a" * 3000, "<b>", "{{7*7}}", "%s", "\n", "\ud800", [], [[]], [None], [1, 2, 3, 4], ["x"], {}, {"a": 1},
    {"": None}, [{}], list(range(99)), {"rope_type": "yarn"}, {"0": {"num_key_value_heads": 2}}, {"0": 3},
)  # fmt: skip
# What stands in a JSON text where a value should: most of it is not JSON.
RAW = (
    "1" * 5000, '"\\ud800"', "[" * 50 + "]" * 50, "[" * 3000 + "]" * 3000, '{"a":' * 3000 + "1" + "}" * 3000,
    "-0", "1e400", "00", "+1", "'x'", "nan", "", "/**/1", '"\x01"', "0x10", "NaN", "-Infinity",
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside a JSON value."""
    inside = (
        value.items() if isinstance(value, dict) else enumerate(value[:6]) if isinstance(value, list) else ()
    )
    for key, part in inside:
        yield (*path, key)
        yield from places(part, (*path, key))


def changed_json(rng: Random, value: Any, keys: Sequence[str] = ()) -> tuple[bytes, str]:
    """A JSON document with one to three changes.

    Args:
        rng: Draws them.
        value: The document.
        keys: Keys at its top that are changed more often than others.

    Returns:
        Its bytes, and what was done.
    """
    document, said, raws = copy.deepcopy(value), [], {}
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        found = list(places(document))
        if not found:
            break
        path = (rng.choice(keys),) if keys and rng.random() < 0.5 else rng.choice(found)
        parent = document
        for key in path[:-1]:
            parent = parent[key]
        said.append(_change(rng, parent, path, raws))
    text = json.dumps(document)
    for mark, raw in raws.items():
        text = text.replace(json.dumps(mark), raw)
    data = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.1:
        data, how = changed_bytes(rng, data)
        said.append(how)
    return data, "; ".join(said)


def _change(rng: Random, parent: Any, path: tuple[Any, ...], raws: dict[str, str]) -> str:
    """Change the last part of a path in its parent; what was done."""
    last = path[-1]
    there = isinstance(parent, list) or last in parent
    kind = rng.choice(("value", "value", "value", "raw", "delete", "nest", "near", "rename"))
    if kind == "delete" and there:
        del parent[last]
    elif kind == "rename" and isinstance(parent, dict):
        parent[rng.choice(("", "x", "a.b", "0", str(last).upper()))] = parent.pop(last, None)
    elif kind == "raw":
        mark = f"@@{len(raws)}@@"
        raws[mark] = rng.choice(RAW)
        parent[last] = mark
        return f"{path} is {raws[mark][:20]!r}"
    elif kind == "nest" and there:
        parent[last] = rng.choice(([parent[last]], {"a": parent[last]}))
    elif kind == "near" and there and type(parent[last]) in (int, float):
        x = parent[last]
        parent[last] = rng.choice((x + 1, x - 1, -x, x * 2, x // 2, str(x), float(x), x + 0.5, x * 10**6))
    else:
        parent[last] = copy.deepcopy(rng.choice(ODD))
        return f"{path} is {str(parent[last])[:30]!r}"
    return f"{kind} {path}"


def changed_bytes(rng: Random, data: bytes) -> tuple[bytes, str]:
    """Bytes that are cut, turned, longer, or others altogether; and how."""
    kind = rng.choice(
        ("cut", "turn", "turn many", "bom", "zeros", "utf-16", "empty", "noise", "insert", "latin")
    )
    at = rng.randrange(len(data) + 1)
    match kind:
        case "cut":
            return data[:at], kind
        case "turn" | "turn many":
            turned = bytearray(data)
            for _ in range(1 if kind == "turn" else 20):
                if turned:
                    turned[rng.randrange(len(turned))] ^= 1 << rng.randrange(8)
            return bytes(turned), kind
        case "bom":
            return b"\xef\xbb\xbf" + data, kind
        case "zeros":
            return data[:at] + bytes(rng.choice((1, 100))) + data[at:], kind
        case "utf-16":
            return data.decode("utf-8", "replace").encode("utf-16", "surrogatepass"), kind
        case "empty":
            return b"", kind
        case "noise":
            return rng.randbytes(rng.choice((1, 7, 8, 9, 100, 4000))), kind
        case "insert":
            return data[:at] + rng.choice((b"}", b"{", b"[", b",", b'"', b"\\", b"\n", b"\r", b"1")) + data[
                at:
            ], kind
        case _:
            return data + b"\xe9\xff", kind
