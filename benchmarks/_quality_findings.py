"""What a ledger says about single choices: what the fits train, tokens per step of uptraining."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from _markdown import markdown
from _quality_cells import STEP_TOKENS, Cell
from _quality_flops import against_mean, shorter_fits
from _quality_frontier import (
    NOT_RUN,
    Rows,
    at_any_rate,
    by_configuration,
    form_name,
    key_of,
    on_the_same_seeds,
)
from _quality_summaries import bars_in_short, few_tokens, floors, no_user_data, wider

# What the fits train, by their names in `_quality_cells.FITS`; the first is the default, the second stands for whole layers.
TRAINED = {
    "fits": "attention, 1,000 steps",
    "layer03": "whole layers, the rest at 0.03 of the rate",
    "layer": "whole layers, the rest at 0.1",
    "layer30": "whole layers, the rest at 0.3",
    "fits1340": "attention, 1,340 steps",
}
KINDS = {"kd": "distilled", "mix": "half distilled, half text"}


def what_fits_train(record: Mapping[str, Any]) -> str:
    """Losses of the tuning part by what the fits train, each at its best rate, and gaps of those that have rows."""
    rows = by_configuration(record["entries"])
    tried: dict[str, list[Mapping[str, Any]]] = {}
    for row in record["tuning"]:
        if row["tunes"] == "fit" and row["start"] == "joint" and row.get("wide", 1) == 1:
            tried.setdefault(row["fit"], []).append(row)
    best = {fit: min(tried[fit], key=lambda row: row["loss"]) for fit in TRAINED if fit in tried}
    plain, whole = best["fits"], best["layer03"]
    lines = [
        [
            TRAINED[fit],
            f"{row['loss']:.4f}",
            f"{row['flops'] / plain['flops']:.2f}",
            ", ".join(f"{other['rate']:g}" for other in sorted(tried[fit], key=lambda other: other["rate"])),
            at_any_rate(rows, f"joint/G{row['groups']}/{fit}"),
        ]
        for fit, row in best.items()
    ]
    head = ["trained", "loss, tuning part", "times the FLOPs", "rates tried", "gap, validation set"]
    ours, theirs = same_seeds(
        rows, Cell("joint", whole["groups"], "layer03"), Cell("joint", plain["groups"], "fits")
    )
    return (
        f"Local fits at GQA-{plain['groups']}.\n\n{markdown(head, lines)}\n\n"
        f"- Whole layers take away {1 - ours / theirs:.0%} of the gap of the fits of attention ({ours:+.4f} and {theirs:+.4f}, one "
        f"seed) for {whole['flops'] / plain['flops']:.2f} times the FLOPs.\n"
        f"- All fits read {plain['unique_tokens']:,} unique tokens, a thousand steps visit each "
        f"{plain['token_visits'] / plain['unique_tokens']:.0f} times."
    )


def same_seeds(rows: Rows, ours: Cell, theirs: Cell, name: str = "gap") -> tuple[float, float]:
    """Means of two configurations over the seeds that both have."""
    one, other = on_the_same_seeds(rows, key_of(ours), key_of(theirs))
    return statistics.mean(row[name] for row in one), statistics.mean(row[name] for row in other)


def small_steps(record: Mapping[str, Any]) -> str:
    """Uptraining in steps of `STEP_TOKENS` beside the product's own, on the same tokens and seeds."""
    rows = by_configuration(record["entries"])
    lines, lower, closer = [], list[float](), list[float]()
    steps: set[int] = set()
    sizes = sorted({row["groups"] for found in rows.values() for row in found}, reverse=True)
    for form in (Cell("joint", groups, "fits", wide=r) for groups in sizes for r in (1, 2)):
        line = [form_name(form) + (f" (cache of GQA-{form.groups})" if form.wide > 1 else "")]
        for kind in KINDS:
            normal = replace(form, objective=kind, tokens=2_713_000)
            small = replace(normal, batch=STEP_TOKENS)
            if not {key_of(normal), key_of(small)} <= rows.keys():
                line += [NOT_RUN] * 2
                continue
            after, before = same_seeds(rows, small, normal)
            line += [f"{before:+.4f}", f"{after:+.4f}"]
            lower.append(before - after)
            apart = same_seeds(rows, small, normal, "kl")
            closer.append(apart[0] / apart[1])
            steps |= {rows[key_of(cell)][0]["steps"] for cell in (normal, small)}
        if set(line[1:]) != {NOT_RUN}:
            lines.append(line)
    head = [
        "gap after 2.71M tokens",
        *(f"{name}, {size}" for name in KINDS.values() for size in ("32,768 a step", "8,192")),
    ]
    tried = [text for kind in KINDS if (text := _rates(record["tuning"], kind))]
    return (
        f"{markdown(head, lines)}\n\n- {max(steps)} steps in place of {min(steps)} end lower in "
        f"{sum(by > 0 for by in lower)} of {len(lower)} pairs, by {min(lower):+.4f} to {max(lower):+.4f} (one seed each), with "
        f"{min(closer):.2f} to {max(closer):.2f} times the KL from the original.\n"
        + "\n".join(f"- Tuning part, {text}." for text in tried)
    )


def _rates(tuning: Sequence[Mapping[str, Any]], kind: str) -> str:
    """Losses of the rates that were tried with steps of `STEP_TOKENS`, and the best of larger steps; empty for none."""
    found = [
        row for row in tuning if row["tunes"] == kind and row["start"] == "joint" and row.get("wide", 1) == 1
    ]
    small = sorted((row["rate"], row["loss"]) for row in found if row.get("batch") == STEP_TOKENS)
    if not small:
        return ""
    best = min((row["loss"], row["rate"]) for row in found if not row.get("batch"))
    listed = ", ".join(f"{rate:g}: {loss:.4f}" for rate, loss in small)
    least = min(small, key=lambda found: found[1])
    listed += " (the best lies at the edge)" if least in (small[0], small[-1]) else ""
    return f"{KINDS[kind]}, steps of {STEP_TOKENS:,} at {listed}; the best of larger steps, {best[1]:g}: {best[0]:.4f}"


FINDINGS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "what-fits-train": what_fits_train,
    "small-steps": small_steps,
    "bars-in-short": bars_in_short,
    "against-mean": against_mean,
    "shorter-fits": shorter_fits,
    "few-tokens": few_tokens,
    "floors": floors,
    "no-user-data": no_user_data,
    "wider": wider,
}
