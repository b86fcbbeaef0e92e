"""Tables of a ledger by cache bytes: what has the same bytes, how far each is from the original."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from _markdown import markdown
from _quality_cells import OVER, PLAIN_FITS, Cell

RESULTS = Path(__file__).parent / "results"
NOT_RUN = "not run"
OBJECTIVES = {"kd": "distilled", "mix": "half distilled, half text,"}
SEED = re.compile(r"/seed\d+$")
STEPS_OF_FITS = {"", *PLAIN_FITS} - {"e2e"}
# What the other fits are called.
WAYS = {"e2e": "end to end on 4.2M tokens", "layer03": "whole layers trained"}
SHORTER = {"fits100": "100 steps of fits", "fits300": "300 steps of fits"}

Rows = Mapping[str, Sequence[Mapping[str, Any]]]  # by key without the seed


def by_configuration(entries: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The rows of the table by their keys without seeds, each with its `gap` to the original.

    Rows that were not made at the rates that tuning chose have the rate in their key (`key_at`).
    """
    table = [entry for entry in entries if entry["part"] == "valid"]
    found: dict[str, list[Mapping[str, Any]]] = {}
    for entry in table:
        found.setdefault(key_at(SEED.sub("", entry["key"]), entry.get("at_rate", "")), []).append(entry)
    (original,) = (row for row in table if is_original(row))
    return {key: [r | {"gap": r["loss"] - original["loss"]} for r in rows] for key, rows in found.items()}


def key_at(key: str, rate: str) -> str:
    """The key of a configuration at other rates than the chosen ones."""
    return f"{key} at {rate}" if rate else key


def spread(rows: Sequence[Mapping[str, Any]], name: str = "gap") -> str:
    """`+0.0466`, or the mean with half the range and the number of seeds where there are several."""
    values = [row[name] for row in rows]
    if not values:
        return NOT_RUN
    text = f"{statistics.mean(values):+.4f}"
    half = (max(values) - min(values)) / 2
    return text if len(values) < 2 else f"{text} ± {half:.4f} ({len(values)} seeds)"


# --- the same bytes ------------------------------------------------------------------------------------


def forms(groups: int, num_kv_heads: int, wide: Sequence[int], fits: Sequence[str] = ()) -> list[Cell]:
    """What holds as many bytes as GQA-`groups` in 16 bits: plain, wide, and both of twice the cache in 8 bits.

    Plain heads also after other `fits`.
    """
    plain = Cell("joint", groups, "fits")
    found = [plain, *(replace(plain, fit=fit) for fit in fits)]
    found += [replace(plain, wide=r) for r in wide if groups % r == 0]
    if 2 * groups <= num_kv_heads:
        twice = replace(plain, groups=2 * groups, cache="int8")
        if twice.groups == num_kv_heads:
            return [*found, Cell("original", num_kv_heads, cache="int8")]
        found += [twice, *(replace(twice, wide=r) for r in wide if 2 * groups % r == 0)]
    return found


def form_name(cell: Cell) -> str:
    """`GQA-4`, `2 heads 2 times as wide`, each with an 8-bit cache or without."""
    if cell.start == "original":
        return f"the original, {cell.cache} cache"
    heads = cell.groups // cell.wide
    name = f"GQA-{cell.groups}"
    if cell.wide > 1:
        name = f"wide R={cell.wide}: {heads} head{'s' * (heads > 1)}"
    name += "" if cell.fit in STEPS_OF_FITS else f", {WAYS.get(cell.fit, cell.fit)}"
    return f"{name}, {cell.cache} cache" if cell.cache else name


def key_of(cell: Cell) -> str:
    """The key without its seed."""
    return SEED.sub("", cell.key)


def same_bytes(record: Mapping[str, Any]) -> str:
    """Gaps to the original by cache bytes: what GQA-G, wide heads and an 8-bit cache make of the same bytes."""
    rows, heads = by_configuration(record["entries"]), record["num_kv_heads"]
    cells = [Cell.of(found[0]) for found in rows.values()]
    wide = sorted({c.wide for c in cells} - {1})
    fits = sorted({c.fit for c in cells if c.start == "joint"} - STEPS_OF_FITS)
    budgets = sorted({(f[0]["tokens"], f[0]["objective"]) for f in rows.values() if _taught(f[0])})
    head = ["cache bytes of", "", "after fits"]
    head += [f"{OBJECTIVES[how]} on {tokens / 1e6:.3g}M tokens" for tokens, how in budgets]
    from_scratch = any(c.start == "scratch" for c in cells)
    head += ["G heads from scratch"] if from_scratch else []
    lines = []
    for groups in sorted({c.groups for c in cells if c.start == "joint"}, reverse=True):
        for form in forms(groups, heads, wide, fits):
            found = [at_any_rate(rows, key_of(form))]
            if form.start != "original":
                made = (replace(form, objective=how, tokens=tokens) for tokens, how in budgets)
                found += [at_any_rate(rows, key_of(cell)) for cell in made]
                if from_scratch and form == Cell("joint", groups, "fits"):
                    found.append(at_any_rate(rows, f"scratch/G{groups}"))
            if set(found) - {NOT_RUN} or (form.wide == 1 and form.fit in STEPS_OF_FITS):
                cells_of_line = [*found, *[""] * (len(head) - 2 - len(found))]
                lines.append([f"GQA-{groups}", form_name(form), *cells_of_line])
    seen: set[str] = set()
    for line in lines:  # each size is named once
        line[0], _ = (
            ("" if line[0] in seen else f"{line[0]} ({heads // int(line[0][4:])}:1)"),
            seen.add(line[0]),
        )
    return (
        "Gap to the original in nats per token, by the bytes of the KV cache; of several seeds the mean ± half the range. "
        f"{_rates(record)}\n\n{markdown(head, lines)}"
        + listed(
            [
                *_wide_or_8_bits(rows, heads, wide),
                *_text_beside_teacher(rows, record["entries"]),
                *_over_seeds(rows),
            ]
        )
    )


def listed(sentences: Sequence[str]) -> str:
    """Sentences as a list below a table."""
    return "\n\n" + "\n".join(f"- {x[0].upper()}{x[1:]}." for x in sentences) if sentences else ""


def _rates(record: Mapping[str, Any]) -> str:
    """Where the rates of a ledger come from."""
    if record["tuning"]:
        return "The rate of a row is the best of its kind on the tuning part, where it names no other."
    used = sorted({(kind, rate) for e in record["entries"] for kind, rate in e.get("rates", {}).items()})
    names = {"fit": "fits", "kd": "distillation", "mix": "half of each"}
    listed = ", ".join(f"{names.get(kind, kind)} {rate:g}" for kind, rate in used)
    return f"No rate was tuned on this model: {listed}."


def at_any_rate(rows: Rows, key: str) -> str:
    """The gap of a configuration at the chosen rate, or at another one, which is named, where that alone was run."""
    keys, said = alike(rows, key)
    return spread(rows[keys[0]]) + said if keys else NOT_RUN


def _wide_or_8_bits(rows: Rows, num_kv_heads: int, wide: Sequence[int]) -> list[str]:
    """What wide heads and an 8-bit cache each take away of the plain gap at the same bytes, and both together."""
    sentences = list[str]()
    for groups in (g for g in (8, 4, 2) if 2 * g < num_kv_heads):
        for stage, words in (
            ("after fits", {}),
            ("after 2.71M tokens", {"objective": "kd", "tokens": 2_713_000}),
        ):
            plain = replace(Cell("joint", groups, "fits"), **words)  # type: ignore[arg-type]
            twice = replace(plain, groups=2 * groups, cache="int8")
            cells = [plain, replace(plain, wide=2), twice, replace(twice, wide=2)]
            keys, said = alike(rows, *map(key_of, cells[:3]))
            if not keys:
                continue
            both = key_at(key_of(cells[3]), said.removeprefix(" at "))
            keys += [both] * (both in rows)
            flops = [rows[key][0]["flops"] for key in keys]
            shares = [_taken_away(rows, keys[0], key) for key in keys[1:]]
            sentences.append(
                f"{stage}{said}, at the bytes of GQA-{groups}, of the plain gap wide heads R=2 take away {shares[0]} for "
                f"{flops[1] / flops[0]:.2f} times the FLOPs, GQA-{2 * groups} with an 8-bit cache {shares[1]} for "
                f"{flops[2] / flops[0]:.2f} times"
                + (f", and both together {shares[2]}" if len(shares) > 2 else "")
            )
            for r in (r for r in wide if r > 2 and key_of(replace(plain, wide=r)) in rows):
                key = key_of(replace(plain, wide=r))
                wider = rows[key]
                share = f"take away {_taken_away(rows, keys[0], key)} of the plain gap"
                taken = share if gap_of(wider) > 0 else "are ahead of the original"
                sentences.append(
                    f"{stage}, at the bytes of GQA-{groups}, wide heads R={r} {taken} for "
                    f"{wider[0]['flops'] / flops[0]:.2f} times the FLOPs of plain ones"
                )
        sentences += [text for r in wide for text in _as_many_flops(rows, groups, r)]
    return sentences


def _taken_away(rows: Rows, plain: str, other: str) -> str:
    """`82% (3 seeds)`: the share of the gap of one row that another takes away, on the seeds that both have."""
    wide, narrow = on_the_same_seeds(rows, other, plain)
    share = f"{1 - gap_of(wide) / gap_of(narrow):.0%}"
    return share if len(wide) < 2 else f"{share} ({len(wide)} seeds)"


def _text_beside_teacher(rows: Rows, entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """What half of the loss from the text changes beside distillation alone, and what the control gains on that text."""
    lower, further = [], []
    for key in (key for key in rows if "/mix-" in key and " at " not in key):
        if (alone := key.replace("/mix-", "/kd-")) in rows:
            taught, mixed = on_the_same_seeds(rows, alone, key)
            lower.append(gap_of(taught) - gap_of(mixed))
            further.append(statistics.mean(r["kl"] for r in mixed) / statistics.mean(r["kl"] for r in taught))
    if not lower:
        return []
    text = (
        f"half of the loss from the text ends {min(lower):.3f} to {max(lower):.3f} below distillation alone on the same "
        f"tokens ({len(lower)} pairs of rows), with {min(further):.2f} to {max(further):.2f} times its KL from the original"
    )
    controls = [row for row in entries if row["start"] == "original" and row.get("objective") == "ce"]
    for row in controls:
        gap = row["loss"] - next(r["loss"] for r in entries if is_original(r))
        text += f". The control on {row['tokens'] / 1e6:.3g}M tokens: {gap:+.4f}"
    return [text]


def _over_seeds(rows: Rows) -> list[str]:
    """How far seeds of one configuration lie apart, after fits and after distillation; nothing without three of them."""
    found = {
        name: [
            (max(gaps) - min(gaps)) / 2
            for key, those in rows.items()
            if len(gaps := [row["gap"] for row in those]) >= 3 and key.endswith(stage)
        ]
        for stage, name in (("/fits", "after fits"), ("/kd-2.71M", "after distillation on 2.71M tokens"))
    }
    said = [f"{name} within ±{max(half):.4f}" for name, half in found.items() if half]
    return [f"over three seeds gaps lie {' and '.join(said)}"] if said else []


def _taught(row: Mapping[str, Any]) -> bool:
    """Whether a row has a column of the first table: distilled or mixed in the product's own steps, on fresh text."""
    plain = row.get("objective") in OBJECTIVES and row["start"] == "joint" and bool(row.get("tokens"))
    return plain and not (row.get("batch") or row.get("over"))


def _as_many_flops(rows: Rows, groups: int, r: int) -> list[str]:
    """Plain heads, and twice as many in 8 bits, that were distilled for the FLOPs of wide ones; nothing of those not run."""
    plain = Cell("joint", groups, "fits", objective="kd")
    wide, sentences = replace(plain, tokens=2_713_000, wide=r), []
    as_much = replace(plain, equal_to=wide.key)
    for other in (as_much, replace(as_much, groups=2 * groups, cache="int8")):
        keys = [key_of(other), key_of(wide)]
        if not set(keys) <= rows.keys():
            continue
        more, same = on_the_same_seeds(rows, *keys)
        gap, ours = gap_of(more), gap_of(same)
        ends = (
            f"take away {1 - ours / gap:.0%} of it"
            if 0 < ours < gap
            else "are " + ("ahead" if ours < gap else "behind")
        )
        sentences.append(
            f"after as many FLOPs as wide heads R={r} at the bytes of GQA-{groups} took for 2.71M tokens, "
            f"{more[0]['unique_tokens'] / same[0]['unique_tokens']:.1f} times their unique tokens, {form_name(other)} is at "
            f"{gap:+.4f}; wide heads ({ours:+.4f}) {ends}"
        )
    return sentences


def mean_gap(rows: Rows, key: str) -> float | None:
    """Over seeds; None where nothing was run."""
    found = [row["gap"] for row in rows.get(key, [])]
    return statistics.mean(found) if found else None


def on_the_same_seeds(rows: Rows, *keys: str) -> list[list[Mapping[str, Any]]]:
    """The rows of each key on the seeds that all have; all of them where they share none."""
    shared = set.intersection(*({row["seed"] for row in rows[key]} for key in keys))
    return [[row for row in rows[key] if row["seed"] in shared or not shared] for key in keys]


def gap_of(rows: Sequence[Mapping[str, Any]]) -> float:
    return statistics.mean(row["gap"] for row in rows)


def alike(rows: Rows, *keys: str) -> tuple[list[str], str]:
    """The keys at the chosen rates, or, where these were not run, at one other rate that they share, or each at its own.

    Returns:
        Keys of `rows`, and what to say of the rates; no keys where one was not run at all.
    """
    rates = ["", *sorted({found[0]["at_rate"] for found in rows.values() if found[0].get("at_rate")})]
    for rate in rates:
        if all(key_at(key, rate) in rows for key in keys):
            return [key_at(key, rate) for key in keys], f" at {rate}" if rate else ""
    own = [next((key_at(key, rate) for rate in rates if key_at(key, rate) in rows), "") for key in keys]
    if not all(own):
        return [], ""
    return own, "".join(
        sorted({f" at {rows[key][0]['at_rate']}" for key in own if rows[key][0].get("at_rate")})
    )


# --- what loss hides -----------------------------------------------------------------------------------


def positions(record: Mapping[str, Any]) -> str:
    """Gap to the original by position in the text, of the rows that the bars and the bytes are about."""
    rows = by_configuration(record["entries"])
    edges = list(next(iter(rows.values()))[0]["loss_by_position"])
    (original,) = (found[0] for found in rows.values() if is_original(found[0]))
    chosen = [
        found for found in rows.values() if found[0].get("fit") == "fits" and not found[0].get("equal_to")
    ]
    lines = []
    for found in sorted(
        chosen, key=lambda f: (-f[0]["groups"] // f[0].get("wide", 1), f[0].get("tokens", 0))
    ):
        cell = Cell.of(found[0])
        means = [statistics.mean(row["loss_by_position"][e] for row in found) for e in edges]
        gaps = (
            f"{mean - original['loss_by_position'][e]:+.4f}" for mean, e in zip(means, edges, strict=True)
        )
        rate = f", {found[0]['at_rate']}" if found[0].get("at_rate") else ""
        lines.append([f"{row_name(cell)}{rate}", *gaps])
    return (
        f"Gap to the original by position in the text.\n\n{markdown(['positions', *edges], lines)}"
        if lines
        else ""
    )


def is_original(row: Mapping[str, Any]) -> bool:
    return row["start"] == "original" and not row.get("objective") and not row.get("cache")


def row_name(cell: Cell) -> str:
    """`wide R=2: 2 heads (cache of GQA-4), distilled 2.71M tokens`."""
    name = form_name(cell) + (f" (cache of GQA-{cell.groups})" if cell.wide > 1 else "")
    name += ", generated text" if cell.text == "generate" else ""
    if cell.fit in STEPS_OF_FITS and not (cell.tokens and cell.fit == "fits"):
        name += f", {SHORTER.get(cell.fit, cell.fit)}"
    if cell.tokens:
        name += f", {OBJECTIVES.get(cell.objective, 'text')} {cell.tokens / 1e6:.3g}M tokens"
        name += f" {OVER[cell.over][1]}" if cell.over else ""
    return f"{name} in steps of {cell.batch:,}" if cell.batch else name
