"""Metrics of generated text in tables and sentences: word errors, BLEU, chrF, how often it is the original's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .numbers import fixed

Row = Mapping[str, Any]
# Heading, and what a difference is counted in.
METRICS = {
    "wer": ("WER %", "points of WER"),
    "cer": ("CER %", "points of CER"),
    "bleu": ("BLEU", "BLEU"),
    "chrf": ("chrF", "chrF"),
    "exact_match": ("as original %", "points"),
}
DECIMALS = 2


def generation_metrics(models: Sequence[Row]) -> list[str]:
    """Which metrics any of the models has."""
    return [name for name in METRICS if any(_of(row).get(name) is not None for row in models)]


def generation_columns(metrics: Sequence[str]) -> list[tuple[str, str]]:
    """Their columns, as those of `content.Table`."""
    return [(METRICS[name][0], ">") for name in metrics]


def generation_cells(row: Row, metrics: Sequence[str]) -> list[str]:
    """Their cells for one model."""
    return [fixed(_of(row).get(name), DECIMALS) for name in metrics]


def generation_differences(name: str, row: Row) -> Iterator[str]:
    """A sentence for each metric that was compared with the first model example by example."""
    of = {name: unit for name, (_, unit) in METRICS.items()}
    of["wer_without_loops"] = f"{of['wer']} where neither loops,"
    for metric, test in (_of(row).get("paired") or {}).items():
        difference, low, high = (fixed(test[key], DECIMALS, "+") for key in ("difference", "low", "high"))
        yield (
            f"{name}: {difference} {of[metric]} against the original, 95 % interval {low} to {high} "
            f"(paired over {test['units']} examples)"
        )


def _of(row: Row) -> Row:
    found: Row = row.get("generation") or {}
    return found
