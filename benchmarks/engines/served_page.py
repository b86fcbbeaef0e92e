"""The section of docs/serving.md on loss as served, from benchmarks/results/served_quality*.json."""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from speed_page import about_cpu, gpu, speed_of, weights_of

Record = Mapping[str, Any]

HEAD = """## Quality as served

Loss in nats per token with weights as engines store them, of multi-head models and of their conversions: chunks of {context} tokens
of `{text}` ({chunks} of them), the second half of each scored, as llama-perplexity does. *Stored costs*: what storing adds to the loss of the
same model in float32 in the same engine, with the standard error over chunks; the last column is how much more it adds to
the conversion's. q4_k_m keeps some tensors in more bits, and those whose rows are no multiple of 256 numbers.
torchao's int8 rounds weights alone, CTranslate2's activations too.

{made}

Measured with {engines}; {hardware}.
"""
CERTAIN = 2  # standard errors from which on a difference is called one


def served(
    record: Record | None,
    speed: Record | None = None,
    quantised: Record | None = None,
    others: Sequence[Record] = (),
) -> str:
    """The section; empty where nothing was measured.

    Args:
        record: Losses of the model whose caches were quantised too.
        speed: Tokens per second in llama.cpp.
        quantised: Of transformers' quantised caches.
        others: Losses of other models, weights alone.
    """
    if not record or not record["rows"]:
        return ""
    records = [record, *others]
    chunks = [one["protocol"]["chunks"] for one in records]
    packages = dict(item for one in records for item in one["packages"].items())
    numbers = dict.fromkeys(
        one["llama_cpp"].removeprefix("version: ") for one in records if "llama_cpp" in one
    )
    engines = [f"llama.cpp {number}" for number in numbers]
    head = HEAD.format(
        context=record["protocol"]["context"],
        chunks=f"{min(chunks)} to {max(chunks)}" if len(set(chunks)) > 1 else chunks[0],
        text=record["text"]["name"],
        made="\n".join(line for one in records for line in _made(one)),
        engines=", ".join([*engines, *(f"{name} {number}" for name, number in packages.items())]),
        hardware=f"{record['hardware']['cpu']}, {record['hardware']['cores']} cores",
    )
    parts = [head, _weights(records), "", CACHES_HEAD, _caches(record, speed), "", gpu(quantised)]
    return "\n".join(parts).rstrip("\n") + "\n"


def _how(record: Record, name: str) -> str:
    """How a conversion was made, in a word."""
    about = record["models"][name].get("calibration") or {}
    if not about.get("unique_tokens"):
        return "merged"
    return "regressed" if about.get("token_visits") else "refitted"


def _made(record: Record) -> list[str]:
    """How each conversion was made, a line of a list each."""
    said = []
    for name in record["models"]:
        about = record["models"][name].get("calibration") or {}
        how = {
            "merged": "weights alone, without text",
            "refitted": f"merged on {about.get('unique_tokens') or 0:,} tokens, and output projections refitted in closed form",
            "regressed": f"the same on {about.get('unique_tokens') or 0:,} tokens, and {about.get('token_visits') or 0:,} "
            "token visits of regressions",
        }[_how(record, name)]
        same = (
            "; what it computes is what the original does, so that storing alone differs"
            if _same(record, name)
            else ""
        )
        said += [] if name == "original" else [f"- {_what(record, name)}: {how}{same}."]
    return said


def _same(record: Record, name: str) -> bool:
    """Whether a conversion has the original's loss in transformers, in float32."""
    rows = [row for row in record["rows"] if (row["engine"], row["weights"]) == ("transformers", "float32")]
    losses = {row["model"]: row["loss"] for row in rows if row["cache"] == "f32"}
    return {"original", name} <= set(losses) and abs(losses[name] - losses["original"]) < 1e-4


def _what(record: Record, name: str) -> str:
    heads = [_heads(record, model) for model in ("original", name)]
    return f"`{record['original']}`, {heads[0]} → {heads[1]}, {_how(record, name)}"


def _chunks(row: Record) -> list[float]:
    """Losses of its chunks; of a row that has none, its loss."""
    return list(row.get("chunk_losses") or [row["loss"]])


def _cost(record: Record, row: Record) -> list[float]:
    """What storing adds to each chunk's loss of the same model in float32 in the same engine."""
    for other in record["rows"]:
        whole = other["weights"] in ("f32", "float32") and other["cache"] in ("f16", "f32")
        if whole and (other["model"], other["engine"]) == (row["model"], row["engine"]):
            return [a - b for a, b in zip(_chunks(row), _chunks(other), strict=True)]
    raise ValueError(f"{record['original']}: {row['engine']} has no row of {row['model']} in float32")


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error; infinite where there is one value."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("inf")
    return statistics.fmean(values), error


def _signed(values: Sequence[float]) -> str:
    mean, error = _mean(values)
    return f"{mean:+.4f}" + (f" ± {error:.4f}" if error < float("inf") else "")


class Compared(NamedTuple):
    """An original and a conversion with weights stored in one way.

    Args:
        model: The original and the numbers of heads.
        how: The conversion was made.
        engine, weights: Where and how weights were stored.
        more: What storing adds to the conversion's loss beyond what it adds to the original's, by chunk.
        gap: What sharing heads costs without storing.
    """

    model: str
    how: str
    engine: str
    weights: str
    more: list[float]
    gap: float


def _weights(records: Sequence[Record]) -> str:
    """Every way of storing weights, the original and a conversion in a line."""
    head = [
        "",
        "engine",
        "weights",
        "original",
        "stored costs",
        "conversion",
        "stored costs",
        "conversion pays more by",
    ]
    lines, compared = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"], []
    for record in records:
        rows = [row for row in record["rows"] if row["cache"] in ("f16", "f32")]
        by_key = {(row["model"], row["engine"], row["weights"]): row for row in rows}
        names = [name for name in record["models"] if name != "original"]
        stored = [key[1:] for key in by_key if key[0] == "original" and key[2] not in ("f32", "float32")]
        for name, (engine, weights) in itertools.product(names, stored):
            first, mine = (by_key.get((model, engine, weights)) for model in ("original", name))
            if first is None or mine is None:
                continue
            costs = [_cost(record, row) for row in (first, mine)]
            more = [b - a for a, b in zip(*costs, strict=True)]
            bases = [row["loss"] - _mean(cost)[0] for row, cost in zip((first, mine), costs, strict=True)]
            cells = [
                _what(record, name),
                engine,
                weights,
                f"{bases[0]:.4f}",
                _signed(costs[0]),
                f"{bases[1]:.4f}",
            ]
            lines.append("| " + " | ".join([*cells, _signed(costs[1]), _signed(more)]) + " |")
            model, how = _what(record, name).rsplit(", ", 1)
            compared.append(Compared(model, how, engine, weights, more, bases[1] - bases[0]))
    return "\n".join([*lines, *_said([one for one in compared if len(one.more) > 1])])


def _said(known: Sequence[Compared]) -> list[str]:
    """What follows from the table, of comparisons that have errors."""
    if not known:
        return []
    sure = [one for one in known if abs(_mean(one.more)[0]) > CERTAIN * _mean(one.more)[1]]
    more = [one for one in sure if _mean(one.more)[0] > 0]
    text = (
        f"Of {len(known)} comparisons the conversion pays more by over {CERTAIN} standard errors in {len(more)}, and less in "
        f"{len(sure) - len(more)}."
    )
    for weights in dict.fromkeys(one.weights for one in known):
        means = [_mean(one.more)[0] for one in known if one.weights == weights]
        text += f" {weights}: {min(means):+.4f} to {max(means):+.4f}."
    if more:
        most = max(more, key=lambda one: _mean(one.more)[0])
        text += (
            f" The most it pays is {_signed(most.more)} ({most.model}, {most.how}, {most.weights} in {most.engine}), where "
            f"sharing heads itself costs {most.gap:.4f}."
        )
    return ["", text + _fitted_further(known)]


def _fitted_further(known: Sequence[Compared]) -> str:
    """What storing costs the same heads where they were regressed besides."""
    refitted = {(one.model, one.engine, one.weights): one for one in known if one.how == "refitted"}
    said = [
        f"{one.model}, {one.weights} in {one.engine} {_signed(before.more)} refitted, {_signed(one.more)} regressed"
        for one in known
        if one.how == "regressed" and (before := refitted.get((one.model, one.engine, one.weights)))
    ]
    return f" Fitted further, the same heads: {'; '.join(said)}." if said else ""


def _heads(record: Record, name: str) -> int:
    return int(record["models"][name]["kv_heads"])


def _name(record: Record, name: str) -> str:
    heads = _heads(record, name)
    return f"original, {heads} KV heads" if name == "original" else f"GQA-{heads}"


CACHES_HEAD = """### Fewer heads or fewer bits

Of the first of these models. KV caches in 8 and 4 bits (llama.cpp's `-ctk` and `-ctv`; scales counted) are what people do instead, and they work with fewer
heads too. Sorted by the bytes that a token takes; losses with weights in float32.
"""

IN_TRANSFORMERS = """*Loss in transformers*: its own quantised caches (hqq, as many bits), of which the second half of a chunk reads the
first."""

CACHES_TAIL = """
This GQA-4 is a small conversion, merged and refitted on a processor; after all fits, and after distillation, GQA-4 loses a
small part of that ([quality on unseen text](results/quality.md)). On loss alone the original with a 4-bit cache, at about the
same bytes, is ahead of GQA-4 after all fits, and behind GQA-4 that was uptrained on some ten million tokens: where the engine
has such a cache, try it first, and share heads to go below it."""


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
