"""Tables of models that others trained, from benchmarks/results/real_*.json."""

from __future__ import annotations

from collections.abc import Mapping
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
    return "\n\n".join([about, *blocks, *told])


def _of_one_data(record: Mapping[str, Any], data: str) -> str:
    scores = [row["scores"][data] for row in record["rows"] if data in row["scores"]]
    spoken = any(score.get("wer") is not None for score in scores)
    exact = any(score.get("exact_match") is not None for score in scores)
    head = [DATA.get(data, data), "G", "loss", "KL to the original", "same next token"]
    head += ["word errors, %", "difference, 95 %"] if spoken else []
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
            line.append(f"{score['wer']:.1f}")
            line.append("" if first or not apart else f"{apart['low']:+.1f} to {apart['high']:+.1f}")
        if exact:
            equal = score.get("exact_match")
            line.append("" if first or equal is None else f"{equal:.0f}")
        lines.append(line)
    return f"{scores[0]['tokens']:,} scored tokens.\n\n{markdown(head, lines)}"


def _small(value: float) -> str:
    return f"{value:.3f}" if abs(value) >= 5e-4 else f"{value:.0e}"
