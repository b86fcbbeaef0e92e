"""What a ledger and its bars say in short: bars by way, floors, text that the original wrote, few unique tokens, R = 4."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from _markdown import markdown
from _quality_bars import verdict
from _quality_cells import OVER, PASSES, REST_TOKENS, STEP_TOKENS, Cell
from _quality_frontier import (
    NOT_RUN,
    RESULTS,
    Rows,
    at_any_rate,
    by_configuration,
    key_of,
    on_the_same_seeds,
)

SMALL, LARGE = 2_713_000, 13_565_000  # tokens of uptraining
SIZES = (8, 4, 2, 1)  # KV heads


def bars_in_short(record: Mapping[str, Any]) -> str:
    """For each bar and way, at which sizes of the cache it is met, missed or not run."""
    rows, heads = by_configuration(record["entries"]), record["num_kv_heads"]
    said: dict[str, dict[str, dict[str, list[str]]]] = {}
    for bar in json.loads((RESULTS / "quality_bars.json").read_text(encoding="utf-8"))["bars"]:
        _, word = verdict(rows, bar)
        ways = said.setdefault(bar["name"], {}).setdefault(bar.get("way", ""), {})
        ways.setdefault(word.strip("*"), []).append(f"{heads // bar['groups']}:1")
    return "\n".join(
        f"- *{name[0].upper()}{name[1:]}*: {'; '.join(_way(way, words) for way, words in ways.items())}."
        for name, ways in said.items()
    )


def _way(way: str, words: Mapping[str, Sequence[str]]) -> str:
    verdicts = ", ".join(
        f"{word} at {_and(words[word])}" for word in ("met", "missed", NOT_RUN) if word in words
    )
    return f"{way} {verdicts}" if way else verdicts


def _and(words: Sequence[str]) -> str:
    return " and ".join([*filter(None, [", ".join(words[:-1])]), words[-1]])


def floors(record: Mapping[str, Any]) -> str:
    """Models with G heads from scratch, by the recipe of the original, beside the conversions."""
    rows, heads = by_configuration(record["entries"]), record["num_kv_heads"]
    stages = {
        "G heads from scratch": "scratch/G{}",
        "after fits": "joint/G{}/fits",
        "distilled on 2.71M tokens": "joint/G{}/fits/kd-2.71M",
        "distilled on 13.6M tokens": "joint/G{}/fits/kd-13.6M",
        "half distilled, half text, on 13.6M tokens": "joint/G{}/fits/mix-13.6M",
    }
    found = [g for g in SIZES if f"scratch/G{g}" in rows]
    if not found:
        return "No model with G heads was trained from scratch: how much of a gap is that of fewer heads is not known."
    lines = [
        [f"{heads // g}:1", *(at_any_rate(rows, key.format(g)) for key in stages.values())] for g in found
    ]
    text = f"Gap to the original.\n\n{markdown(['', *stages], lines)}"
    missing = [f"{heads // g}:1" for g in SIZES if g not in found]
    return text + (f"\n\nNot trained from scratch: {_and(missing)}." if missing else "")


def no_user_data(record: Mapping[str, Any]) -> str:
    """Fits on text that the original wrote beside fits on text that it has not seen, on the seeds that both have."""
    rows, heads = by_configuration(record["entries"]), record["num_kv_heads"]
    pairs = {}
    for g in SIZES:
        cell = Cell("joint", g, "fits")
        keys = key_of(cell), key_of(replace(cell, text="generate"))
        if set(keys) <= rows.keys():
            pairs[g] = [_mean(found) for found in on_the_same_seeds(rows, *keys)]
    lines = [
        [f"{heads // g}:1", f"{ours:+.4f}", f"{own:+.4f}", f"{own / ours:.2f}"]
        for g, (ours, own) in pairs.items()
    ]
    missing = [f"{heads // g}:1" for g in SIZES if g not in pairs]
    head = ["gap after fits", "unseen text", "text that the original wrote", "times the gap"]
    return markdown(head, lines) + (f"\n\nNot run: {_and(missing)}." if missing else "")


def _few(groups: int) -> dict[str, Cell]:
    """Ways to spend few unique tokens, by name."""
    fits = Cell("joint", groups, "fits")
    taught = replace(fits, objective="kd")
    once = replace(taught, tokens=REST_TOKENS, batch=STEP_TOKENS)
    again = OVER["4.2M"][1].removeprefix("in ")
    return {
        "fits alone": fits,
        "fits, then distilled on their text": replace(taught, tokens=SMALL, over="calibration"),
        "fits, then distilled on the rest": once,
        "fits, then half distilled, half text, on the rest": replace(once, objective="mix"),
        f"fits, then distilled on the rest, {again}": replace(
            taught, tokens=PASSES * REST_TOKENS, over="4.2M"
        ),
        "at conversion (`distill_steps`)": Cell("joint", groups, "e2e"),
    }


def few_tokens(record: Mapping[str, Any]) -> str:
    """What can be made of 0.5M and of 4.2M unique tokens: gaps, and what each way costs at 4:1."""
    rows, heads = by_configuration(record["entries"]), record["num_kv_heads"]
    ways = {g: _few(g) for g in SIZES}
    lines = []
    for name in ways[SIZES[0]]:
        keys = {g: key_of(ways[g][name]) for g in SIZES}
        run = next((rows[key][0] for key in keys.values() if key in rows), None)
        cost = [f"{run[what] / 1e6:.2f}M" for what in ("unique_tokens", "token_visits")] if run else ["", ""]
        lines.append([name, *cost, *(at_any_rate(rows, key) for key in keys.values())])
    head = ["", "unique tokens", "token visits", *(f"{heads // g}:1" for g in SIZES)]
    said = [_ends(rows, *names) for names in _COMPARED]
    listed = "\n".join(f"- {x}." for x in said if x)
    return f"Gap to the original.\n\n{markdown(head, lines)}" + (f"\n\n{listed}" if listed else "")


_COMPARED = (
    ("fits, then distilled on their text", "fits alone"),
    (
        f"fits, then distilled on the rest, {OVER['4.2M'][1].removeprefix('in ')}",
        "fits, then distilled on the rest",
    ),
    ("at conversion (`distill_steps`)", "fits alone"),
    ("fits, then distilled on the rest", "at conversion (`distill_steps`)"),
)


def _ends(rows: Rows, ours: str, theirs: str) -> str:
    """How much lower one way to spend few tokens ends than another, on the sizes that both have; empty for none."""
    lower, times = [], []
    for g in SIZES:
        keys = [key_of(_few(g)[name]) for name in (ours, theirs)]
        if set(keys) <= rows.keys():
            one, other = on_the_same_seeds(rows, *keys)
            lower.append(_mean(other) - _mean(one))
            times.append(_mean(one, "flops") / _mean(other, "flops"))
    if not lower:
        return ""
    return (
        f"*{ours[0].upper()}{ours[1:]}* ends {_span(lower, '+.4f')} below *{theirs}* for {_span(times, '.2f')} times the FLOPs "
        f"({len(lower)} size{'s' * (len(lower) > 1)})"
    )


def wider(record: Mapping[str, Any]) -> str:
    """R = 4 beside R = 2, plain heads and twice the heads in 8 bits: gaps at the bytes of GQA-4, and FLOPs."""
    rows = by_configuration(record["entries"])
    plain = Cell("joint", 4, "fits")
    forms = {
        "plain": plain,
        "wide R=2": replace(plain, wide=2),
        "wide R=4": replace(plain, wide=4),
        "GQA-8, int8 cache": replace(plain, groups=8, cache="int8"),
    }
    stages: dict[str, dict[str, Any]] = {
        "after fits": {},
        "distilled on 2.71M tokens": {"objective": "kd", "tokens": SMALL},
        "half distilled, half text, on 2.71M tokens": {"objective": "mix", "tokens": SMALL},
        "half distilled, half text, on 13.6M tokens": {"objective": "mix", "tokens": LARGE},
    }
    lines = [
        [
            name,
            *(_with_flops(rows, key_of(replace(form, **words))) for words in stages.values()),
        ]
        for name, form in forms.items()
    ]
    as_much = replace(
        plain, objective="kd", equal_to=replace(plain, wide=4, objective="kd", tokens=SMALL).key
    )
    for name, form in (("plain", as_much), ("GQA-8, int8 cache", replace(as_much, groups=8, cache="int8"))):
        lines.append([f"{name}, for the FLOPs of R=4", "", _with_flops(rows, key_of(form)), "", ""])
    return f"Gap at the bytes of GQA-4, and FLOPs.\n\n{markdown(['', *stages], lines)}"


def _with_flops(rows: Rows, key: str) -> str:
    """`+0.0071, 6.4e15`."""
    gap = at_any_rate(rows, key)
    return f"{gap}, {rows[key][0]['flops']:.1e}".replace("e+", "e") if key in rows else gap


def _mean(found: Iterable[Mapping[str, Any]], name: str = "gap") -> float:
    return statistics.mean(row[name] for row in found)


def _span(values: Sequence[float], form: str) -> str:
    """One value, or the least and the largest."""
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"
