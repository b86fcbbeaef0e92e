"""Tables of conversion, calibration, decoding and uptraining speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from _markdown import markdown, measured_on

Record = Mapping[str, Any]


def convert_speed(record: Record) -> str:
    """Seconds and memory of conversion beside a copy and the way by hand; of several sizes, what each gigabyte costs."""
    if "sizes" in record:
        return _convert_sizes(record)
    names = {
        "cp": "`cp -r`",
        "convert": "`mha2gqa convert`",
        "by_hand": "load, modify, `save_pretrained`",
        "imports": "importing the model's class, nothing else",
    }
    seconds, memory = record["median_seconds"], record["peak_anonymous_mib"]
    lines = [
        [label, f"{seconds[name]:.1f}", f"{seconds[name] / seconds['cp']:.2f}", f"{memory[name]:.0f}"]
        for name, label in names.items()
        if name in seconds
    ]
    checkpoint = record["checkpoint"]
    return (
        f"{checkpoint['bytes'] / 1e9:.1f} GB in {checkpoint['shards']} shards, median of "
        f"{len(record['rounds']['cp'])} rounds, each synced.\n\nMeasured on: {measured_on(record)}.\n\n"
        + markdown(["", "seconds", "of `cp`", "anonymous memory, MiB"], lines)
    )


def _convert_sizes(record: Record) -> str:
    rows, made = record["sizes"], record["lines"]
    lines = [
        [
            f"{row['checkpoint']['bytes'] / 1e9:.1f} GB",
            f"{row['median_seconds']['cp']:.1f}",
            f"{row['median_seconds']['convert']:.1f}",
            f"{row['convert_over_cp']:.2f}",
            f"{max(row['peak_anonymous_mib'].values()):.0f}",
        ]
        for row in rows
    ]
    cp, convert = made["cp"], made["convert"]
    return (
        f"Median of {len(rows[0]['rounds']['cp'])} rounds, each synced; load average {rows[0]['load_average'][0]} to "
        f"{rows[-1]['load_average'][0]}.\n\nMeasured on: {measured_on(record)}.\n\n"
        + markdown(["", "`cp -r`, s", "`convert`, s", "of `cp`", "anonymous memory, MiB"], lines)
        + f"\n\nThe straight line through them: `convert` takes {convert['start_seconds']:.1f} s and "
        f"{convert['seconds_per_gb']:.2f} s for each further 10^9 bytes, `cp` {cp['start_seconds']:.1f} s and "
        f"{cp['seconds_per_gb']:.2f} s: {made['convert_over_cp']['per_gb']:.2f} times as long per gigabyte."
    )


def closed_form_speed(record: Record) -> str:
    """Seconds of the closed-form stages, as many layers as the meant model has."""
    settings, seconds = record["settings"], record["extrapolated_seconds"]
    names = [name for name in seconds if name != "all"]
    about = (
        f"{record['extrapolated_to_layers']} layers of {settings['hidden']} with {settings['heads']} heads to "
        f"G={settings['groups']}, {settings['tokens']:,} tokens ({settings['layers']} layers measured).\n\n"
        f"Measured on: {measured_on(record)}."
    )
    lines = [["seconds", *(f"{seconds[name]:.0f}" for name in names), f"{seconds['all']:.0f}"]]
    return f"{about}\n\n{markdown(['', *names, 'all'], lines)}"


def _asked(row: Record) -> str:
    """The batch or the memory that a decode row was asked for."""
    return str(row["asked_batch"]) if row["kind"] == "point" else f"{row['memory_bytes'] / 1e9:g} GB"


def decode_speed(record: Record) -> str:
    """Decoding of a model and its grouped forms: batches that were asked for, then memory budgets."""

    def key(row: Record) -> tuple[Any, ...]:
        return _asked(row), row["context"], row["groups"], row["wide"]

    setup, ups = record["setup"], {key(row): row for row in record.get("summary", [])}
    lines = []
    for row in record["rows"]:
        up = ups.get(key(row), {})
        timed = row.get("tokens_per_second")
        cells = (
            [
                str(row["batch"]),
                f"{row['milliseconds_per_step']:.2f}",
                f"{timed:,.0f}",
                f"{row['share_of_bandwidth']:.0%}",
            ]
            if timed
            else ["", row.get("reason", "failed"), "", ""]
        )
        cells += [f"{up[name]:.2f}" if name in up else "" for name in ("speed_up", "predicted")]
        beside = up.get("step_over_plain" if row["kind"] == "point" else "tokens_over_plain")
        cells.append("" if beside is None else f"{beside:.2f}")
        heads = f"{row['kv_heads']} x {row['head_dim']}"
        lines.append([_asked(row), f"{row['context']:,}", heads, *cells])
    about = (
        f"A Llama of {setup['layers']} layers, width {setup['hidden']:,}, {setup['heads']} heads, {setup['dtype']}; a "
        f"copy on the device moves {setup['copy_bandwidth'] / 1e9:,.0f} GB/s. *Of plain*: a step of wide heads beside one of "
        "plain heads with the same cache, or their tokens/s in the same memory.\n\n"
        f"Measured on: {measured_on({'hardware': {'gpu': setup['device']}, 'versions': setup['versions']})}."
    )
    head = ["batch or memory", "context", "KV heads", "batch", "ms per step", "tokens/s", "of the copy"]
    table = markdown([*head, "times", "bytes predict", "of plain"], lines)
    return "\n\n".join([about, table, *_shares(record.get("summary", [])), *_ways(record)])


def _ways(record: Record) -> list[str]:
    """Milliseconds of a step by the way its layers run; nothing where one way alone was timed."""
    rows = [row for row in record["rows"] if row.get("variant_seconds")]
    ways = list(dict.fromkeys(way for row in rows for way in row["variant_seconds"]))
    lines = []
    for row in rows:
        best = min(row["variant_seconds"].values())
        cells = [_asked(row), f"{row['context']:,}", f"{row['kv_heads']} x {row['head_dim']}"]
        for way in ways:
            seconds = row["variant_seconds"].get(way)
            text = "" if seconds is None else f"{seconds * 1e3:.2f}"
            cells.append(f"**{text}**" if seconds == best else text)
        lines.append(cells)
    head = ["batch or memory", "context", "KV heads", *ways]
    return ["Milliseconds of a step by the way its layers run:", markdown(head, lines)] if rows else []


def _shares(summary: Sequence[Record]) -> list[str]:
    """How much of what bytes predict each number of heads reaches, and what wide heads cost of a step."""
    said = []
    for kind, where in (("point", "at equal batches"), ("budget", "in the same memory")):
        by_form: dict[str, list[float]] = {}
        for up in summary:
            if up["kind"] == kind and up["wide"] == 1:
                name = f"{up['groups']} KV heads"
                by_form.setdefault(name, []).append(up["speed_up"] / up["predicted"])
        ranges = {name: [f"{x:.0%}" for x in (min(found), max(found))] for name, found in by_form.items()}
        parts = [f"{name} {' to '.join(dict.fromkeys(ends))}" for name, ends in ranges.items()]
        said += [f"{where}, {', '.join(parts)}"] if parts else []
    beside = [up["step_over_plain"] for up in summary if up["kind"] == "point" and "step_over_plain" in up]
    text = [f"Of the ratio that bytes predict: {'; '.join(said)}."] if said else []
    if beside:
        text.append(
            f"At equal batches a step of wide heads takes {min(beside):.2f} to {max(beside):.2f} times one of plain heads."
        )
    return [" ".join(text)] if text else []


def calibrate_speed(record: Record) -> str:
    """Calibrated conversion of large models: time and memory of the product's own command."""
    lines = [
        [
            f"{row['name']}: {row['layers']} layer{'s' * (row['layers'] > 1)} of {row['shape']} to G={row['groups']}"
            + (f", in {row['commands']} commands" if row["commands"] > 1 else ""),
            f"{row['processes']} x {row['gpu']}",
            f"{row['calibration_tokens']:,}",
            f"{row['seconds_per_layer']:.1f}",
            f"{row['whole_model_minutes']:.0f}" + (" (extrapolated)" if row["extrapolated"] else ""),
            f"{row['gpu_gib']:.1f}",
            f"{row['host_anonymous_gib']:.1f}",
            f"{row['host_pinned_gib']:.1f}" if "host_pinned_gib" in row else "",
        ]
        for row in record["rows"]
    ]
    head = ["", "GPUs", "tokens", "seconds a layer", "minutes", "GiB of GPU", "GiB of host", "pinned"]
    about = f"mha2gqa {record['versions']['mha2gqa']}, torch {record['versions']['torch']}."
    return "\n\n".join([about, markdown(head, lines), *_scaling(record["rows"])])


def _scaling(rows: Sequence[Record]) -> list[str]:
    """What several GPUs gained over one in the same work."""
    said = []
    for row in rows:
        same = ("shape", "layers", "groups", "calibration_tokens", "options", "gpu")
        one = [r for r in rows if r["processes"] == 1 and all(r[key] == row[key] for key in same)]
        if row["processes"] == 1 or not one:
            continue
        fits = [sum(r["stage_seconds"][s] for s in ("statistics", "fit")) for r in (one[0], row)]
        search = [r["stage_seconds"]["grouping"] for r in (one[0], row)]
        gain = one[0]["seconds_per_layer"] / row["seconds_per_layer"]
        said.append(
            f"`{row['name']}` beside `{one[0]['name']}`: a layer {gain:.2f} times as fast on {row['processes']} GPUs; second moments and fits {fits[0] / fits[1]:.2f} times, "
            f"the search of groupings {search[0] / search[1]:.2f} times. {_more_cards(gain, row['processes'])}"
        )
    return said


def _more_cards(gain: float, processes: int, cards: int = 8) -> str:
    """What `cards` would gain by Amdahl's law, from what `processes` gained."""
    alone = (processes / gain - 1) / (processes - 1)
    more = 1 / (alone + (1 - alone) / cards)
    return (
        f"By Amdahl's law {alone:.0%} of a layer's time is shared by none, and {cards} GPUs would take 1/{more:.1f} of one's "
        f"minutes: not measured."
    )


def uptrain_large(record: Record) -> str:
    """Uptraining of large models: speed and memory of the product's own command."""
    lines = [
        [
            f"`--train {row['train']}`" + "".join(_beside(row["options"])),
            _optimiser(row["options"]),
            f"{row['processes']} x {row['gpu']}",
            f"{row['batch_tokens']:,}",
            "" if row["tokens_per_second"] is None else f"{row['tokens_per_second']:,.0f}",
            f"{row['gpu_gib']:.1f}",
        ]
        for row in record["rows"]
    ]
    row = record["rows"][0]
    about = (
        f"{row['layers']} layers of {row['shape']}, GQA-{row['groups']} with the original as teacher (bfloat16 unless the row says so), "
        f"random weights, windows of {row['window']:,}.\n\nMeasured on: {measured_on(record)}."
    )
    head = ["", "optimiser", "GPUs", "tokens a step", "tokens/s", "GiB of each GPU"]
    return f"{about}\n\n{markdown(head, lines)}"


def _beside(options: Sequence[str]) -> list[str]:
    """What a row of uptraining has beside its parameter set."""
    marks = {"--torch-compile": "compiled", "int8": "teacher in 8 bits", "cpu_offload": "offload"}
    marks["fsdp=true"] = "FSDP2"
    return [f", {said}" for mark, said in marks.items() if any(mark in option for option in options)]


def _optimiser(options: Sequence[str]) -> str:
    return next((x.removeprefix("optim=") for x in options if x.startswith("optim=")), "adamw_torch_fused")
