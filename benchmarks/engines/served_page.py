"""The section of docs/serving.md on loss as served, from benchmarks/results/served_quality.json."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from speed_page import about_cpu, gpu, speed_of, weights_of

Record = Mapping[str, Any]

HEAD = """## Quality as served

Loss in nats per token of `{original}` and of its conversions, with weights and caches as engines store them: {chunks}
chunks of {context} tokens of `{text}`, the second half of each scored, as llama-perplexity does. In brackets: what storing
costs, against the same model in float32 in the same engine. {made}

Measured with {llama_cpp} (llama.cpp), {packages}; {hardware}.
"""


def served(record: Record | None, speed: Record | None = None, quantised: Record | None = None) -> str:
    """The section; empty where nothing was measured.

    Args:
        record: Losses.
        speed: Tokens per second in llama.cpp.
        quantised: Of transformers' quantised caches.
    """
    if not record or not record["rows"]:
        return ""
    protocol = record["protocol"]
    head = HEAD.format(
        original=record["original"],
        chunks=protocol["chunks"],
        context=protocol["context"],
        text=record["text"]["name"],
        made=_made(record),
        llama_cpp=record["llama_cpp"],
        packages=", ".join(f"{name} {number}" for name, number in record["packages"].items()),
        hardware=f"{record['hardware']['cpu']}, {record['hardware']['cores']} cores",
    )
    parts = [head, _weights(record), "", CACHES_HEAD, _caches(record, speed), "", gpu(quantised)]
    return "\n".join(parts).rstrip("\n") + "\n"


def _made(record: Record) -> str:
    """How each conversion was made."""
    said = []
    for name, model in record["models"].items():
        about = model.get("calibration")
        if about:
            visits = about.get("token_visits") or 0
            said.append(
                f"`{name}`: GQA-{model['kv_heads']}, calibrated on {about['unique_tokens']:,} tokens, "
                f"{visits:,} token visits of fits (a small conversion: what counts here is the difference)."
            )
    return " ".join(said)


def _base(record: Record, row: Record) -> float | None:
    """The loss of the same model in float32 in the same engine."""
    for other in record["rows"]:
        whole = other["weights"] in ("f32", "float32") and other["cache"] in ("f16", "f32")
        if whole and (other["model"], other["engine"]) == (row["model"], row["engine"]):
            return float(other["loss"])
    return None


def _cell(record: Record, row: Record | None) -> str:
    if row is None:
        return ""
    base = _base(record, row)
    more = "" if base is None or base == row["loss"] else f" ({row['loss'] - base:+.4f})"
    return f"{row['loss']:.4f}{more}"


def _weights(record: Record) -> str:
    """Weights of each kind, models across."""
    names = list(record["models"])
    rows = [row for row in record["rows"] if row["cache"] in ("f16", "f32")]
    kinds = list(dict.fromkeys((row["engine"], row["weights"]) for row in rows))
    lines = ["| engine | weights | " + " | ".join(_name(record, n) for n in names) + " | GQA pays more by |"]
    lines.append("|---" * (len(names) + 3) + "|")
    for engine, weights in kinds:
        mine = {row["model"]: row for row in rows if (row["engine"], row["weights"]) == (engine, weights)}
        cells = [_cell(record, mine.get(name)) for name in names]
        lines.append(f"| {engine} | {weights} | " + " | ".join(cells) + f" | {_excess(record, mine)} |")
    return "\n".join(lines)


def _excess(record: Record, mine: Mapping[str, Record]) -> str:
    """How much more storing costs each conversion than the original."""
    cost = {name: row["loss"] - (_base(record, row) or row["loss"]) for name, row in mine.items()}
    if "original" not in cost or not any(cost.values()):
        return ""
    return ", ".join(f"{x - cost['original']:+.4f}" for name, x in cost.items() if name != "original")


def _name(record: Record, name: str) -> str:
    heads = record["models"][name]["kv_heads"]
    return f"original, {heads} KV heads" if name == "original" else f"GQA-{heads}"


CACHES_HEAD = """### Fewer heads or fewer bits

KV caches in 8 and 4 bits (llama.cpp's `-ctk` and `-ctv`; scales counted) are what people do instead, and they work with fewer
heads too. Sorted by the bytes that a token takes; losses with weights in float32.
"""

IN_TRANSFORMERS = """*Loss in transformers*: its own quantised caches (hqq, as many bits), of which the second half of a chunk reads the
first."""

CACHES_TAIL = """
This GQA-4 is a small conversion, merged and refitted on a processor; after all fits, and after distillation, GQA-4 loses a
small part of that ([quality on unseen text](results/quality.md)). On loss alone the original with a 4-bit cache, at about the
same bytes, is ahead of every GQA-4 measured so far on this model: where the engine has such a cache, try it first, and
share heads to go below it."""


def _caches(record: Record, speed: Record | None) -> str:
    rows = [row for row in record["rows"] if row["engine"] == "llama.cpp" and row["weights"] == "f32"]

    def size(row: Record) -> float:
        return float(record["models"][row["model"]]["cache_bytes_per_token"][row["cache"]])

    whole = max(map(size, rows))
    base = next(r["loss"] for r in rows if r["model"] == "original" and r["cache"] == "f16")
    timed, other = weights_of(speed), _in_transformers(record)
    head = ["cache", "bytes per token", "of the original's", "loss", "above the original"]
    head += ["loss in transformers"] if other else []
    head += [f"tokens/s, {weights} weights" for weights in timed]
    lines = ["| | " + " | ".join(head) + " |", "|---" * (len(head) + 1) + "|"]
    for row in sorted(rows, key=size, reverse=True):
        cells = [_name(record, row["model"]), row["cache"], f"{size(row):,.0f}", f"{size(row) / whole:.0%}"]
        cells += [f"{row['loss']:.4f}", f"{row['loss'] - base:+.4f}"]
        if other:
            loss = other.get((row["model"], row["cache"]))
            cells.append("" if loss is None else f"{loss:.4f}")
        same = _same_share(record, speed, row["model"])
        cells += [speed_of(speed, row["model"] == "original", row["cache"], w) if same else "" for w in timed]
        lines.append("| " + " | ".join(cells) + " |")
    about = ["", IN_TRANSFORMERS] if other else []
    about += ["", about_cpu(speed)] if speed and timed else []
    open_end = "" if timed else " Tokens per second of the two have not been compared."
    return "\n".join([*lines, *about, CACHES_TAIL + open_end])


def _in_transformers(record: Record) -> dict[tuple[str, str], float]:
    """Losses with transformers' caches (hqq), by model and the cache of llama.cpp that takes as many bytes."""
    like = {"f32": "f16", "hqq-8": "q8_0", "hqq-4": "q4_0"}
    rows = [row for row in record["rows"] if (row["engine"], row["weights"]) == ("transformers", "float32")]
    if not any(row["cache"] in ("hqq-8", "hqq-4") for row in rows):
        return {}
    return {(row["model"], like[row["cache"]]): float(row["loss"]) for row in rows}


def _same_share(record: Record, speed: Record | None, name: str) -> bool:
    """Whether the timed form shares heads as this model does."""
    if name == "original" or speed is None:
        return True
    heads = [record["models"][model]["kv_heads"] for model in ("original", name)]
    return bool(heads[0] == heads[1] * speed["setup"]["share"])
