"""Speeds for docs/serving.md, from served_speed.json (llama.cpp, CPU) and quantised_cache.json (transformers, GPU)."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from _markdown import markdown

Record = Mapping[str, Any]

CPU_HEAD = """Tokens per second are those of llama.cpp on a CPU (`mha2gqa bench --engine llama.cpp`), of a Llama with random weights:
speed depends on the shape alone. {layers} layers, width {hidden:,}, {heads} query heads, {heads} KV heads or {shared}; batch {batch},
context {context:,}, {threads}; medians of {rounds} rounds that measured every row in turn; {engine}; {cpu}. In brackets:
times the original with an f16 cache in the same round, the median, lowest and highest. At that batch and context the f16 weights are {weights:.1f} GB and
the original's f16 cache {cache:.1f} GB."""

GPU_HEAD = """### In transformers

transformers has quantised caches as well. They run in its own loop: every step turns the whole cache back into the model's
dtype before it attends. They save memory and cost time; with a quarter of the heads there is a quarter as much to turn back.
The loop copies its cache when it grows and may repeat shared heads for every query head, so fewer heads alone hardly show in
it: what `bench` times does neither. {layers} layers, width {hidden:,}, {heads} query heads, random weights in {dtype}; the plain cache in the same
loop; {device}, torch {torch}, transformers {transformers}.
"""


def speed_of(record: Record | None, original: bool, cache: str, weights: str) -> str:
    """A cell: tokens per second and times the original's; empty where it was not measured."""
    row, base = _row(record, original, cache, weights), _row(record, True, "f16", weights)
    if row is None or base is None:
        return ""
    ratios = _ratios(row, base)
    spread = f", {min(ratios):.2f} to {max(ratios):.2f}" if max(ratios) > min(ratios) else ""
    return f"{row['tokens_per_second']:,.1f} (×{statistics.median(ratios):.2f}{spread})"


def weights_of(record: Record | None) -> list[str]:
    """Precisions of weights that were measured."""
    rows = record["rows"] if record else []
    return list(dict.fromkeys(row["weights"] for row in rows if row["rounds"]))


def about_cpu(record: Record) -> str:
    """What the column of llama.cpp says, and what follows from it."""
    setup, first = record["setup"], record["rows"][0]
    text = CPU_HEAD.format(
        **{key: setup[key] for key in ("layers", "hidden", "heads", "batch", "context")},
        threads="1 thread" if setup["threads"] == 1 else f"{setup['threads']} threads",
        shared=setup["heads"] // setup["share"],
        rounds=min(len(row["rounds"]) for row in record["rows"]),
        engine=record["engine"],
        cpu=record["hardware"]["cpu"],
        weights=first["weight_bytes"] / 1e9,
        cache=first["kv_bytes"] / 1e9,
    )
    text += f" {record['note']}" if "note" in record else ""
    said = [_times(record, False, "f16"), _times(record, True, "q4_0"), _times(record, False, "q4_0")]
    if None in said:
        return text
    return (
        f"{text} With f16 weights, fewer heads decode ×{said[0]:.2f}, a 4-bit cache of about the same bytes ×{said[1]:.2f}, "
        f"both together ×{said[2]:.2f}.{_first_token(record)}"
    )


def _first_token(record: Record) -> str:
    """How much longer a prompt takes where keys and values are quantised as they are written."""
    found = [_row(record, True, cache, "f16") for cache in ("f16", "q8_0", "q4_0")]
    seconds = [
        row["first_token_milliseconds"] / 1e3 for row in found if row and "first_token_milliseconds" in row
    ]
    if len(seconds) < len(found):
        return ""
    return (
        f" The first token of the original takes {seconds[0]:.1f} s with an f16 cache, {seconds[1]:.1f} s with q8_0 and "
        f"{seconds[2]:.1f} s with q4_0."
    )


def gpu(record: Record | None) -> str:
    """The section on transformers' quantised caches; empty where nothing was measured."""
    rows = [row for row in record["rows"] if row.get("tokens_per_second")] if record else []
    if not record or not rows:
        return ""
    setup, most = record["setup"], max(row["kv_heads"] for row in record["rows"])
    base = {
        (row["batch"], row["context"]): row["tokens_per_second"]
        for row in rows
        if row["cache"] == "plain" and row["kv_heads"] == most
    }
    lines = []
    for row in sorted(rows, key=lambda row: (row["context"], row["batch"], -row["cache_bytes"])):
        whole = base.get((row["batch"], row["context"]))
        times = "" if whole is None else f"{row['tokens_per_second'] / whole:.2f}"
        cells = [f"{row['kv_heads']} KV heads", row["cache"], str(row["batch"]), f"{row['context']:,}"]
        lines.append([*cells, f"{row['cache_bytes'] / 1e9:.1f}", f"{row['tokens_per_second']:,.0f}", times])
    keys = ("layers", "hidden", "heads", "dtype", "device")
    versions = {key: setup["versions"][key] for key in ("torch", "transformers")}
    head = GPU_HEAD.format(**{key: setup[key] for key in keys}, **versions)
    columns = ["", "cache", "batch", "context", "cache in GB", "tokens/s", "times"]
    return "\n".join([head, markdown(columns, lines), ""])


def _row(record: Record | None, original: bool, cache: str, weights: str) -> Record | None:
    for row in record["rows"] if record else ():
        mine = (row["kv_heads"] == record["setup"]["heads"]) == original  # type: ignore[index]
        if mine and (row["cache"], row["weights"]) == (cache, weights) and row["rounds"]:
            return dict(row)
    return None


def _times(record: Record, original: bool, cache: str) -> float | None:
    row, base = _row(record, original, cache, "f16"), _row(record, True, "f16", "f16")
    return statistics.median(_ratios(row, base)) if row and base else None


def _ratios(row: Record, base: Record) -> list[float]:
    """How often as fast as another row, in each round."""
    pairs = zip(row["rounds"], base["rounds"], strict=False)
    return [mine["tokens_per_second"] / its["tokens_per_second"] for mine, its in pairs]
