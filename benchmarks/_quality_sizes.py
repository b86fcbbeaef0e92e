"""Tables over several models: originals of several sizes, and wide heads of further references."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import _ledger
from _markdown import markdown, measured_on
from _quality_frontier import (
    NOT_RUN,
    RESULTS,
    alike,
    by_configuration,
    is_original,
    listed,
    mean_gap,
    spread,
)


def sizes(record: Mapping[str, Any]) -> str:
    """Gaps of originals of several sizes at the same shares of KV heads, each by its own ledger."""
    head, stages = ["KV heads", "original", "parameters", "loss"], ("fits", "fits/kd-2.71M", "fits/mix-2.71M")
    head += ["after fits", "distilled on 2.71M tokens", "half distilled, half text, on 2.71M tokens"]
    lines = []
    ledgers = [(of, _ledger.record(RESULTS / of["ledger"])) for of in record["ledgers"]]
    for share in record["shares"]:
        for of, ledger in ledgers:
            rows, groups = by_configuration(ledger["entries"]), ledger["num_kv_heads"] // share
            original = next(e["loss"] for e in ledger["entries"] if is_original(e))
            gaps = []
            for stage in stages:
                keys, _ = alike(rows, f"joint/G{groups}/{stage}")
                gaps.append(spread(rows[keys[0]]) if keys else NOT_RUN)
            lines.append([f"{share}:1", f"`{ledger['model']}`", of["parameters"], f"{original:.4f}", *gaps])
    return f"Gap to the original. {record['about']}\n\n{markdown(head, lines)}{_over_size(ledgers, record['shares'])}"


def _over_size(ledgers: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], shares: Sequence[int]) -> str:
    """How far the last original's gaps are below the first's, and where its uptraining ends behind its fits."""
    rows = [(by_configuration(ledger["entries"]), ledger["num_kv_heads"]) for _, ledger in ledgers]
    gaps = [[mean_gap(found, f"joint/G{heads // share}/fits") for share in shares] for found, heads in rows]
    times = [first / last for first, last in zip(gaps[0], gaps[-1], strict=True) if first and last]
    if len(ledgers) < 2 or not times:
        return ""
    found, heads = rows[-1]
    changed = []
    for stage, name in (("kd-2.71M", "distillation"), ("mix-2.71M", "half of each")):
        ends = [mean_gap(found, f"joint/G{heads // share}/fits/{stage}") for share in shares]
        by = [a - b for a, b in zip(ends, gaps[-1], strict=True) if a is not None and b is not None]
        changed += [f"{name} by {min(by):+.4f} to {max(by):+.4f}"] if by else []
    return listed(
        [
            f"after fits the gap of `{ledgers[-1][1]['model']}` is {min(times):.1f} to {max(times):.1f} times smaller",
            *([f"uptraining changes its gap: {', '.join(changed)}"] if changed else []),
        ]
    )


# --- rows of one configuration ----------------------------------------------------------------------------------------------


def wide_references(record: Mapping[str, Any]) -> str:
    """Gaps of further references at the same cache bytes: plain heads, wide ones, twice the heads in 8 bits."""
    by_model: dict[str, dict[tuple[int, int, str], float]] = {}
    for row in record["rows"]:
        by_model.setdefault(row["model"], {})[row["groups"], row["wide"], row["cache"]] = row["loss"]
    head = [
        "",
        "original, loss",
        "cache of",
        "plain",
        "wide R=2",
        "2G heads, 8-bit cache",
        "taken away by wide",
    ]
    lines = []
    for model, losses in sorted(by_model.items()):
        original = losses[0, 1, ""]
        for groups in sorted(g for g, wide, cache in losses if wide > 1):
            plain, wide = losses[groups, 1, ""] - original, losses[groups, 2, ""] - original
            rounded = losses.get((2 * groups, 1, "int8"))
            twice = "" if rounded is None else f"{rounded - original:+.4f}"
            share = f"{1 - wide / plain:.0%}"
            lines.append(
                [
                    f"`{model}`",
                    f"{original:.4f}",
                    f"GQA-{groups}",
                    f"{plain:+.4f}",
                    f"{wide:+.4f}",
                    twice,
                    share,
                ]
            )
    scored = f"{record['rows'][0]['tokens']:,} tokens, blocks of {record['window']}, one seed."
    about = f"Gap to the original after the default fits, nats per token; {scored}"
    return f"{about}\n\nMeasured on: {measured_on(record['provenance'])}.\n\n{markdown(head, lines)}"
