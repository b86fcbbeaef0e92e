"""Tables of a ledger by cache bytes, and its bars: what has the same bytes, how far each is from the original."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import _ledger
from _markdown import markdown, measured_on
from _quality_cells import Cell

RESULTS = Path(__file__).parent / "results"
NOT_RUN = "not run"
OBJECTIVES = {"kd": "distilled", "mix": "half distilled, half text,"}
SEED = re.compile(r"/seed\d+$")

Rows = Mapping[str, Sequence[Mapping[str, Any]]]  # by key without the seed


def by_configuration(entries: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The rows of the table by their keys without seeds, each with its `gap` to the original."""
    table = [entry for entry in entries if entry["part"] == "valid"]
    found: dict[str, list[Mapping[str, Any]]] = {}
    for entry in table:
        found.setdefault(SEED.sub("", entry["key"]), []).append(entry)
    (original,) = (row for row in table if _is_original(row))
    return {key: [r | {"gap": r["loss"] - original["loss"]} for r in rows] for key, rows in found.items()}


def spread(rows: Sequence[Mapping[str, Any]], name: str = "gap") -> str:
    """`+0.0466`, or the mean with half the range and the number of seeds where there are several."""
    values = [row[name] for row in rows]
    if not values:
        return NOT_RUN
    text = f"{statistics.mean(values):+.4f}"
    half = (max(values) - min(values)) / 2
    return text if len(values) < 2 else f"{text} ± {half:.4f} ({len(values)} seeds)"


# --- the same bytes ------------------------------------------------------------------------------------


def forms(groups: int, num_kv_heads: int, wide: Sequence[int]) -> list[Cell]:
    """What holds as many bytes as GQA-`groups` in 16 bits: plain, wide, and both of twice the cache in 8 bits."""
    plain = Cell("joint", groups, "fits")
    found = [plain, *(replace(plain, wide=r) for r in wide if groups % r == 0)]
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
    return f"{name}, {cell.cache} cache" if cell.cache else name


def key_of(cell: Cell) -> str:
    """The key without its seed."""
    return SEED.sub("", cell.key)


def same_bytes(record: Mapping[str, Any]) -> str:
    """Gaps to the original by cache bytes: what GQA-G, wide heads and an 8-bit cache make of the same bytes."""
    rows, heads = by_configuration(record["entries"]), record["num_kv_heads"]
    cells = [Cell.of(found[0]) for found in rows.values()]
    wide = sorted({c.wide for c in cells} - {1})
    budgets = sorted({(c.tokens, c.objective) for c in cells if c.objective in OBJECTIVES and c.tokens})
    head = ["cache bytes of", "", "after fits"]
    head += [f"{OBJECTIVES[how]} on {tokens / 1e6:.3g}M tokens" for tokens, how in budgets]
    as_wide = any("/wide" in c.equal_to and c.start == "joint" for c in cells)
    head += ["for the FLOPs of wide R=2"] if as_wide else []
    lines = []
    for groups in sorted({c.groups for c in cells if c.start == "joint"}, reverse=True):
        for form in forms(groups, heads, wide):
            taught = [
                replace(form, objective=how, tokens=t) for t, how in budgets if form.start != "original"
            ]
            found = [rows.get(key_of(c), []) for c in (form, *taught)]
            if as_wide and form.start != "original":
                found.append(_as_wide(rows, form, groups, budgets[0][0]))
            if any(found) or form.wide == 1:
                cells_of_line = [*map(spread, found), *[""] * (len(head) - 2 - len(found))]
                lines.append([f"GQA-{groups}", form_name(form), *cells_of_line])
    seen: set[str] = set()
    for line in lines:  # each size is named once
        line[0], _ = (
            ("" if line[0] in seen else f"{line[0]} ({heads // int(line[0][4:])}:1)"),
            seen.add(line[0]),
        )
    return (
        "Gap to the original in nats per token, by the bytes of the KV cache; the rate of each row is the best of its "
        f"kind on the tuning part.\n\n{markdown(head, lines)}"
    )


def _as_wide(rows: Rows, form: Cell, groups: int, tokens: int) -> Sequence[Mapping[str, Any]]:
    """The row that was distilled for the FLOPs of the wide one at the same bytes; the wide one itself."""
    taught = Cell("joint", groups, "fits", objective="kd", tokens=tokens, wide=2)
    if form.wide > 1:
        return rows.get(key_of(taught), []) if (form.groups, form.wide, form.cache) == (groups, 2, "") else []
    return rows.get(key_of(replace(form, objective="kd", equal_to=taught.key)), [])


# --- bars ----------------------------------------------------------------------------------------------


def mean_gap(rows: Rows, key: str) -> float | None:
    """Over seeds; None where nothing was run."""
    found = [row["gap"] for row in rows.get(key, [])]
    return statistics.mean(found) if found else None


def _gap(rows: Rows, bar: Mapping[str, Any]) -> tuple[str, bool | None]:
    gap = mean_gap(rows, bar["row"])
    return spread(rows.get(bar["row"], [])), None if gap is None else gap <= bar["at_most"]


def _not_behind(rows: Rows, bar: Mapping[str, Any]) -> tuple[str, bool | None]:
    ours, theirs = mean_gap(rows, bar["row"]), mean_gap(rows, bar["other"])
    if ours is None or theirs is None:
        return NOT_RUN, None
    return f"{ours:+.4f} against {theirs:+.4f}", ours <= theirs


def _share(rows: Rows, bar: Mapping[str, Any]) -> tuple[str, bool | None]:
    ours, plain = mean_gap(rows, bar["row"]), mean_gap(rows, bar["other"])
    if ours is None or plain is None:
        return NOT_RUN, None
    share = (plain - ours) / plain
    return f"{share:.0%} of {plain:+.4f}", share >= bar["at_least"]


MEASURES: dict[str, Callable[[Rows, Mapping[str, Any]], tuple[str, bool | None]]] = {
    "gap": _gap,
    "not behind": _not_behind,
    "share taken": _share,
}


def wanted(bar: Mapping[str, Any]) -> str:
    """What a bar asks for."""
    if bar["measure"] == "gap":
        return f"≤ {bar['at_most']:+.3f}" if bar["at_most"] else "≤ 0"
    return f"≥ {bar['at_least']:.0%}" if bar["measure"] == "share taken" else "not behind"


def verdict(rows: Rows, bar: Mapping[str, Any]) -> tuple[str, str]:
    """What was measured, and `met`, `missed` or `not run`."""
    measured, met = MEASURES[bar["measure"]](rows, bar)
    return measured, NOT_RUN if met is None else "met" if met else "**missed**"


def bars(record: Mapping[str, Any]) -> str:
    """The bars of a file with what its ledger measured."""
    ledger = _ledger.record(RESULTS / record["ledger"])
    rows = by_configuration(ledger["entries"])
    lines = [
        [bar["name"], f"{ledger['num_kv_heads'] // bar['groups']}:1", wanted(bar), *verdict(rows, bar)]
        for bar in record["bars"]
    ]
    count = {word: sum(line[-1] == word for line in lines) for word in ("met", "**missed**", NOT_RUN)}
    return f"{count['met']} met, {count['**missed**']} missed, {count[NOT_RUN]} not run.\n\n" + markdown(
        ["what was to be reached", "", "bar", "measured", ""], lines
    )


# --- what loss hides -----------------------------------------------------------------------------------


def positions(record: Mapping[str, Any]) -> str:
    """Gap to the original by position in the text, of the rows that the bars and the bytes are about."""
    rows = by_configuration(record["entries"])
    edges = list(next(iter(rows.values()))[0]["loss_by_position"])
    (original,) = (found[0] for found in rows.values() if _is_original(found[0]))
    chosen = [
        found for found in rows.values() if found[0].get("fit") == "fits" and not found[0].get("equal_to")
    ]
    lines = []
    for found in sorted(
        chosen, key=lambda f: (-f[0]["groups"] // f[0].get("wide", 1), f[0].get("tokens", 0))
    ):
        cell = Cell.of(found[0])
        means = [statistics.mean(row["loss_by_position"][e] for row in found) for e in edges]
        what = (
            f", {OBJECTIVES.get(cell.objective, 'text')} {cell.tokens / 1e6:.3g}M tokens"
            if cell.tokens
            else ", fits"
        )
        text = ", generated text" if cell.text == "generate" else ""
        gaps = (
            f"{mean - original['loss_by_position'][e]:+.4f}" for mean, e in zip(means, edges, strict=True)
        )
        lines.append([f"{_full_name(cell)}{text}{what}", *gaps])
    return (
        f"Gap to the original by position in the text.\n\n{markdown(['positions', *edges], lines)}"
        if lines
        else ""
    )


def _is_original(row: Mapping[str, Any]) -> bool:
    return row["start"] == "original" and not row.get("objective") and not row.get("cache")


def _full_name(cell: Cell) -> str:
    """`wide R=2: 2 heads (cache of GQA-4)`."""
    return form_name(cell) + (f" (cache of GQA-{cell.groups})" if cell.wide > 1 else "")


def probes(record: Mapping[str, Any]) -> str:
    """Shares of right answers, original against results; what does not count is marked."""
    names = list(record["rows"][0]["results"])
    lines = [
        [
            f"{row['probe']}, {row['length']:,} tokens",
            f"{row['original']:.1%} ± {row['standard_error']:.1%}",
            "yes" if row["counts"] else "no",
            *(_lost(row["results"][name]) for name in names),
        ]
        for row in record["rows"]
    ]
    counted = sum(row["counts"] for row in record["rows"])
    texts = record["rows"][0]["texts"]
    return (
        f"`{record['model']}`, {texts} texts of each kind and length, every question a choice among {record['choices']} "
        f"tokens (chance {1 / record['choices']:.1%}). {counted} of {len(lines)} probes count: the original is at least three "
        "standard errors above chance. Results: share of right answers, and how far it is below the original's.\n\n"
        f"Measured on: {measured_on(record['provenance'])}.\n\n"
        + markdown(["probe", "original", "counts", *names], lines)
    )


def _lost(result: Mapping[str, float]) -> str:
    return f"{result['share']:.1%} ({-result['lost']:+.1%} ± {result['standard_error']:.1%})"
