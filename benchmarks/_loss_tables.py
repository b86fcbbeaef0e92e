"""Tables of losses: the quality table, the ablations of the GQA paper, shares of the next-token loss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from _markdown import markdown, mean_and_spread, measured_on, state

FITS = {
    "refit": "refit",
    "reconstruct": "regression",
    "distill": "end-to-end distillation",
    "generate": "on generated text",
    "long": "2,000 steps",
}
OBJECTIVES = {"ce": "next token", "kd": "distillation", "mix": "half of each"}


def label(row: Mapping[str, Any]) -> str:
    """What a row is called in tables: the merging method and what came after it."""
    method, _, objective = row["method"].partition("+")
    variant = {"merged": ""}.get(row.get("variant", ""), row.get("variant", ""))
    fits = [FITS.get(part, part) for part in variant.split("+") if part]
    name = f"{method}: {' + '.join(fits)}" if fits else method
    if objective:
        name += f" → {OBJECTIVES.get(objective, objective)}"
    if "tokens" in row:
        name += f", {row['tokens'] / 1e6:.3g}M tokens"
    if "over" in row:
        name += f" {row['over']}"
    if "step_tokens" in row:
        name += f" in steps of {row['step_tokens']:,}"
    if "as_much_as" in row:
        name += f", as many FLOPs as *{row['as_much_as']}*"
    if "at_rate" in row:
        name += f", {row['at_rate']}"
    return name + (f", alpha {row['alpha']:g}" if "alpha" in row else "")


def first_of_each(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows without tuning; what two stages measured alike (a pooling) counts once for each seed."""
    first: dict[tuple[str, int, int], Mapping[str, Any]] = {}
    for row in rows:
        if row["stage"] != "tune":
            first.setdefault((label(row), row["groups"], row.get("seed", 0)), row)
    return list(first.values())


def _batches(rows: Iterable[Mapping[str, Any]]) -> str:
    """The tokens per step of uptrained rows, as a sentence."""
    found = sorted({row["uptrained_tokens"] // row["steps"] for row in rows if row.get("steps")})
    return f" Uptrained in steps of {' or '.join(f'{n:,}' for n in found)} tokens." if found else ""


def _losses(rows: Iterable[Mapping[str, Any]], kv_heads: int) -> str:
    """A table of loss by row and number of KV heads; seeds are averaged. The control has no KV-head column."""
    cells: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        cells.setdefault(label(row), {}).setdefault(row["groups"], []).append(row["loss"])
    groups = sorted({g for by in cells.values() for g in by} - {kv_heads}, reverse=True)
    head = ["loss, nats per token", *(f"{kv_heads // g}:1 (G={g})" for g in groups)]
    return markdown(
        head,
        [
            [name, *(mean_and_spread(by.get(g, by.get(kv_heads, []))) for g in groups)]
            for name, by in cells.items()
        ],
    )


def quality(record: Mapping[str, Any]) -> str:
    """Losses by method and number of KV heads, one table for each state of the code that measured."""
    rows = first_of_each(record["rows"])
    original = next(row for row in rows if row["method"] == "original")
    kv_heads, protocol, runs = record["num_kv_heads"], record["protocol"], record["runs"]
    by_state: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row is not original:
            by_state.setdefault(state(runs[row["run"]]), []).append(row)
    lines = dict.fromkeys(measured_on(runs[row["run"]]) for row in rows)
    text = protocol.get("text", "")
    parts = [
        f"`{record['model']}` ({kv_heads} KV heads), loss of the original {original['loss']:.3f}. Protocol "
        f"`{protocol['name']}`, window {protocol['window']}, {protocol['tokens']:,} tokens{text and f' ({text})'}, "
        f"{protocol['dtype']}.{_batches(rows)}",
        f"Measured on: {'; '.join(lines)}.",
    ]
    for name, members in by_state.items():
        controls = [row for row in members if row["groups"] == kv_heads]
        shared = [row for row in members if row["groups"] != kv_heads]
        if len(by_state) > 1:
            parts.append(f"#### {name}")
        if shared:
            parts.append(_losses(shared, kv_heads))
        if controls:
            done = ", ".join(
                f"{label(row).rpartition(', ')[2]}: {row['loss']:.3f}"
                for row in controls
                if "+" in row["method"]
            )
            parts.append(f"Control, the MHA original continued on the same tokens: {done}.")
    return "\n\n".join(parts)


def cost(record: Mapping[str, Any]) -> str:
    """What each row cost: unique tokens, token visits, FLOPs with calibration included, seconds."""
    head = ["what a row cost", "G", "gap", "unique tokens", "token visits", "FLOPs", "seconds"]
    lines = [
        [
            label(row),
            str(row["groups"]),
            f"{row['gap']:+.3f}",
            f"{row.get('unique_tokens', 0):,}",
            f"{row.get('token_visits', 0):,}",
            f"{row.get('flops', 0):.1e}",
            f"{row.get('seconds', 0):.0f}",
        ]
        for row in record["rows"]
        if row["stage"] != "tune" and row.get("seed", 0) == 0 and row.get("unique_tokens")
    ]
    return markdown(head, lines) if lines else ""


def _perplexity(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def sweep(record: Mapping[str, Any]) -> str:
    """A sweep of the GQA paper's ablations: one row a cell, with decoding times where they were taken."""
    models = record["models"]
    timed = any("decode_milliseconds_per_step" in row for row in models)
    head = ["", "KV heads", "loss", "perplexity", *(["ms per step", "tokens/s"] if timed else [])]
    lines = []
    for row in models:
        alpha = f", alpha {row['alpha']:g}" if row.get("alpha") else ""
        figures = [f"{row['loss']:.3f}", _perplexity(row["perplexity"])]
        if timed:
            figures += [
                f"{row['decode_milliseconds_per_step']:.1f}",
                f"{row['decode_tokens_per_second']:,.0f}",
            ]
        lines.append([f"{row.get('method', row['role'])}{alpha}", str(row.get("groups", "all")), *figures])
    swept = record.get("sweep", record)
    on = swept["hardware"] if isinstance(swept["hardware"], str) else swept["hardware"]["gpu"]
    about = f"Measured on: {measured_on(dict(swept, hardware={'gpu': on}))}."
    if bench := record.get("bench"):
        about += (
            f" Decoding: {bench['hardware']}, {bench['batch']} sequences, {bench['context']:,} tokens cached, "
            f"{bench['dtype']}."
        )
    return "\n\n".join(
        filter(None, [about, f"`{swept['command']}`", markdown(head, lines), record.get("note")])
    )


def ce_weight(record: Mapping[str, Any]) -> str:
    """Loss by share of the next-token loss, peak rate and tokens a step."""
    lines = [
        [
            f"{row['ce_weight']:g}",
            f"{row['learning_rate']:.1e}",
            f"{row['batch_tokens']:,}",
            str(row["steps"]),
            f"{row['loss']:.3f}",
        ]
        for row in sorted(
            record["rows"], key=lambda row: (row["batch_tokens"], row["ce_weight"], row["learning_rate"])
        )
    ]
    head = ["ce_weight", "rate", "tokens a step", "steps", "loss"]
    about = f"`{record['model']}`, G={record['groups']}, alpha {record['alpha']:g}. Measured on: {measured_on(record)}."
    return f"{about}\n\n{markdown(head, lines)}\n\n{record['note']}"
