"""Tables of models that others trained, from benchmarks/results/real_*.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from _markdown import markdown, measured_on

DATA = {
    "text": "WikiText-2",
    "molecules": "molecules",
    "synthetic": "synthetic speech",
    "real": "real recordings",
}


def real(record: Mapping[str, Any]) -> str:
    """One row for each conversion: loss, KL and agreement, and what generated text makes of it."""
    rows = record["rows"]
    names = list(rows[0]["scores"])
    blocks = [_of_one_data(record, name) for name in names]
    found = [row for row in rows if "grouping_found" in row]
    told = [
        f"G={row['groups']}, {row['name']}: the copies were found in {row['grouping_found']} of {row['layers']} layers."
        for row in found
    ]
    about = (
        f"`{record['model']}`, {record['heads']} KV heads, from {record['origin']['from']}.\n\n"
        f"Measured on: {measured_on(record['runs'][-1])}."
    )
    tasks = [row for row in rows if any("tasks" in score for score in row["scores"].values())]
    return "\n\n".join([about, *blocks, *told, *([_of_tasks(tasks)] if tasks else [])])


def _of_tasks(rows: Sequence[Mapping[str, Any]]) -> str:
    """Share of the questions of each local task that are answered right."""
    found = [
        (row, next(score["tasks"] for score in row["scores"].values() if "tasks" in score)) for row in rows
    ]
    names = list(found[0][1])
    head = ["right answers, % (four choices each)", "G", *(name.removeprefix("local_") for name in names)]
    lines = [
        [row["name"], str(row["groups"]), *(f"{100 * scores[name]:.1f}" for name in names)]
        for row, scores in found
    ]
    return markdown(head, lines)


def decoding(record: Mapping[str, Any]) -> str:
    """Tokens per second and memory of transformers' `generate`, a row for each model and batch."""
    rows = record["rows"]
    first = {(row["batch"], row["device"]): row for row in rows if row["name"] == "original"}
    lines = []
    for row in rows:
        speed = row["tokens_per_second"] / first[row["batch"], row["device"]]["tokens_per_second"]
        peak = row.get("generation_peak_bytes")
        lines.append(
            [
                row["name"].removeprefix(f"{record['model']}-"),
                str(row["batch"]),
                f"{row['tokens_per_second']:,.0f}",
                f"{speed:.2f}x",
                f"{row['cache_bytes'] / 2**20:,.0f}",
                "" if peak is None else f"{peak / 2**20:,.0f}",
            ]
        )
    head = ["model", "batch", "tokens/s", "to the original", "cache, MiB", "peak of generating, MiB"]
    what = (
        f"`{record['model']}` in transformers' `generate`, greedy, {rows[0]['tokens']} tokens each in {rows[0]['dtype']}, "
        "the encoder's time left out."
    )
    return f"{what}\n\nMeasured on: {measured_on(record['runs'][-1])}.\n\n{markdown(head, lines)}"


def _of_one_data(record: Mapping[str, Any], data: str) -> str:
    scores = [row["scores"][data] for row in record["rows"] if data in row["scores"]]
    spoken = any(score.get("wer") is not None for score in scores)
    exact = any(score.get("exact_match") is not None for score in scores)
    loops = any(score.get("looped") for score in scores)
    head = [DATA.get(data, data), "G", "loss", "KL to the original", "same next token"]
    head += ["word errors, %", "difference, 95 %"] if spoken else []
    head += ["loops", "without them, 95 %"] if loops else []
    head += ["texts equal, %"] if exact else []
    lines = []
    for row in record["rows"]:
        if data not in row["scores"]:
            continue
        score = row["scores"][data]
        first = row["name"] == "original"
        line = [
            row["name"],
            str(row["groups"]),
            f"{score['loss']:.3f}",
            "" if first or score["kl"] is None else _small(score["kl"]),
            "" if first or score["top1_agreement"] is None else f"{score['top1_agreement']:.1%}",
        ]
        if spoken:
            apart = score.get("wer_difference")
            line += [f"{score['wer']:.1f}", "" if first else _interval(apart)]
        if loops:
            sound = score.get("wer_without_loops_difference") or score.get("wer_difference")
            line += [str(score.get("looped", "")), "" if first else _interval(sound)]
        if exact:
            equal = score.get("exact_match")
            line.append("" if first or equal is None else f"{equal:.0f}")
        lines.append(line)
    return f"{scores[0]['tokens']:,} scored tokens.\n\n{markdown(head, lines)}"


def _interval(test: Mapping[str, Any] | None) -> str:
    return f"{test['low']:+.1f} to {test['high']:+.1f}" if test else ""


def _small(value: float) -> str:
    return f"{value:.3f}" if abs(value) >= 5e-4 else f"{value:.0e}"
