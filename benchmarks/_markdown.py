"""Markdown of tables, and one line that says on what a row was measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others figures."""
    rule = ["---"] + ["--:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *rows))


def mean_and_spread(values: Sequence[float]) -> str:
    """`3.365`, or `3.365 ± 0.002` (standard deviation) where several seeds differ by that much."""
    if not values:
        return ""
    text = f"{statistics.mean(values):.3f}"
    if len(values) < 2:
        return text
    spread = statistics.stdev(values)
    return f"{text} ± {spread:.3f}" if spread >= 5e-4 else text


def measured_on(run: Mapping[str, Any]) -> str:
    """Hardware and versions of one run, as a line."""
    hardware, versions = run.get("hardware", {}), run.get("versions", {})
    cpu = f"{hardware['cpu']}, {hardware['cores']} cores" if "cpu" in hardware else "CPU"
    names = [f"{name} {versions[name]}" for name in ("mha2gqa", "torch", "transformers") if name in versions]
    return ", ".join([hardware.get("gpu") or cpu, *names])


def state(run: Mapping[str, Any]) -> str:
    """The version of the code that measured; rows of two states share no table.

    `code` is the start of a SHA-256 over the package's files (`_common.code_digest`).
    """
    version = run.get("versions", {}).get("mha2gqa")
    code = f"code {run['code'][:7]}" if "code" in run else "code not recorded"
    card = run.get("hardware", {}).get("gpu")
    return ", ".join(filter(None, [version and f"mha2gqa {version}", code, card]))
