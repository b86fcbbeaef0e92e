"""Render the tables that the README quotes from `benchmarks/results/*.json`, and from nowhere else.

python benchmarks/tables.py            # every table, as Markdown
python benchmarks/tables.py quality    # one of them
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others figures."""
    rule = ["---"] + ["--:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *rows))


def mean_and_spread(values: Sequence[float]) -> str:
    """`3.365`, or `3.365 ± 0.002` (standard deviation) where there are several seeds."""
    if not values:
        return ""
    text = f"{statistics.mean(values):.3f}"
    return text if len(values) < 2 else f"{text} ± {statistics.stdev(values):.3f}"


def _label(row: Mapping[str, Any]) -> str:
    variant = row.get("variant", "")
    extra = {"": "", "merged": ""}.get(variant, f", {variant}")
    alpha = f", alpha {row['alpha']:g}" if "alpha" in row else ""
    return f"{row['method']}{extra}{alpha}"


def _run(run: Mapping[str, Any]) -> str:
    """What tells runs apart that should not share a table unmarked."""
    card = run.get("hardware", {}).get("gpu", "CPU")
    return ", ".join([card, run["date"], *([f"code {run['code']}"] if "code" in run else [])])


def _batches(rows: Iterable[Mapping[str, Any]]) -> str:
    """The tokens per step of uptrained rows, as a sentence."""
    found = sorted({row["uptrained_tokens"] // row["steps"] for row in rows if row.get("steps")})
    return f" Uptrained in steps of {' or '.join(f'{n:,}' for n in found)} tokens." if found else ""


def quality(record: Mapping[str, Any]) -> str:
    """Losses by method and number of KV heads; seeds are averaged."""
    # A pooling appears among baselines and conversions: each seed counts once.
    first: dict[tuple[str, int, int], Mapping[str, Any]] = {}
    for row in record["rows"]:
        if row["stage"] != "tune":
            first.setdefault((_label(row), row["groups"], row.get("seed", 0)), row)
    rows = list(first.values())
    original = next(row for row in rows if row["method"] == "original")
    kv_heads = record["num_kv_heads"]
    groups = sorted({row["groups"] for row in rows} - {kv_heads}, reverse=True)
    controls = [row for row in rows if row["groups"] == kv_heads and row is not original]
    runs = [_run(run) for run in record["runs"]]
    usual = Counter(runs[row["run"]] for row in rows).most_common(1)[0][0]
    others = {(_label(row), row["groups"]): runs[row["run"]] for row in rows if runs[row["run"]] != usual}
    cells: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        if row["groups"] != kv_heads:
            cells.setdefault(_label(row), {}).setdefault(row["groups"], []).append(row["loss"])

    def mark(name: str, groups: int) -> str:
        return "†" if (name, groups) in others else ""

    head = ["loss, nats per token", *(f"{kv_heads // g}:1 (G={g})" for g in groups)]
    lines = [
        [name, *(mean_and_spread(by.get(g, [])) + mark(name, g) for g in groups)]
        for name, by in cells.items()
    ]
    protocol = record["protocol"]
    text = (
        f"`{record['model']}`, original {original['loss']:.3f}; protocol {protocol['name']}, window "
        f"{protocol['window']}, {protocol['tokens']:,} tokens, {protocol['dtype']}.{_batches(rows)}\n\n"
        + markdown(head, lines)
    )
    if controls:
        done = ", ".join(
            f"alpha {row['alpha']:g}: {row['loss']:.3f}{mark(_label(row), kv_heads)}" for row in controls
        )
        text += f"\n\nControl, the MHA original continued on the same tokens: {done}."
    if others:
        found = " and ".join(sorted(set(others.values())))
        text += f"\n\n† not measured with the rest ({usual}) but by another state of the code: {found}."
    return text


def cost(record: Mapping[str, Any]) -> str:
    """What each row cost: unique tokens, token visits, FLOPs with calibration included, seconds."""
    head = ["row", "G", "loss", "gap", "unique tokens", "token visits", "FLOPs", "seconds"]
    lines = [
        [
            _label(row),
            str(row["groups"]),
            f"{row['loss']:.3f}",
            f"{row['gap']:+.3f}",
            f"{row.get('unique_tokens', 0):,}",
            f"{row.get('token_visits', 0):,}",
            f"{row.get('flops', 0):.1e}",
            f"{row.get('seconds', 0):.0f}",
        ]
        for row in record["rows"]
        if row["stage"] != "tune" and row.get("seed", 0) == 0
    ]
    return markdown(head, lines)


def convert_speed(record: Mapping[str, Any]) -> str:
    """Seconds and memory of conversion beside a copy and the way by hand."""
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
        f"{len(record['rounds']['cp'])} rounds, each synced.\n\n"
        + markdown(["", "seconds", "of `cp`", "anonymous memory, MiB"], lines)
    )


def uptrain_throughput(record: Mapping[str, Any]) -> str:
    """Tokens per second, MFU and memory of every measurement, then the ratios that are claimed."""
    names = {
        "ours": "`mha2gqa`",
        "liger": "`mha2gqa`, Liger",
        "trainer": "plain `Trainer`",
        "nanogpt": "nanoGPT-style loop",
    }
    measured = [row for row in record["rows"] if row.get("tokens_per_second")]
    kinds: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in measured:
        narrow = ", bf16 residual" if row.get("residual_dtype") == "bfloat16" else ""
        parallel = "" if row["parallel"] == "none" else f" {row['parallel']}"
        label = f"{names[row['contender']]}{narrow}, {row['objective']}"
        kinds.setdefault((label, f"{row['gpus']}{parallel}"), []).append(row)

    def middle(found: Sequence[Mapping[str, Any]], key: str, form: str) -> str:
        values = [row[key] for row in found if row.get(key)]
        return f"{statistics.median(values):{form}}" if values else ""

    lines = [
        [
            *kind,
            middle(found, "tokens_per_second", ",.0f"),
            middle(found, "mfu", ".1%"),
            middle(found, "memory_gib", ".1f"),
        ]
        for kind, found in kinds.items()
    ]
    first = measured[0]
    several = " Medians where several cards measured." if len(lines) < len(measured) else ""
    about = (
        f"{first['parameters'] / 1e9:.1f}B Llama, G={first['groups']}, blocks of {first['window']:,} tokens, "
        f"{first['micro_batch']} at a time on each GPU; {first['device']}, torch "
        f"{record['provenance']['versions']['torch']}.{several}"
    )
    ratios = ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in record["summary"].items())
    head = ["", "GPUs", "tokens/s", "MFU", "GiB per GPU"]
    text = f"{about}\n\n{markdown(head, lines)}" + (f"\n\nRatios: {ratios}." if ratios else "")
    if difference := record.get("curves", {}).get("largest_difference"):
        pairs = zip(record["curves"]["one"]["losses"], record["curves"]["many"]["losses"], strict=True)
        last = list(pairs)[-1]
        text += (
            f"\n\nLoss of {record['curves']['many']['gpus']} GPUs (FSDP2) against one at the same global batch: at most "
            f"{difference:.4f} apart, {abs(last[0][1] - last[1][1]):.4f} at the end."
        )
    return text


def uptrain_scaling(record: Mapping[str, Any]) -> str:
    """The same uptraining on one GPU and on several: largest difference of a step's loss, held-out loss."""
    lines = []
    names = {"one": "one process", "ddp": "DDP", "fsdp": "FSDP2", "zero3": "DeepSpeed ZeRO-3"}
    for name, run in record["runs"].items():
        gpus = run["gpus"] if isinstance(run["gpus"], int) else f"{run['gpus'][0]}, then {run['gpus'][1]}"
        label = names[run.get("mode", "fsdp")] + ", killed, resumed" if name == "resumed" else names[name]
        apart = f"{run['largest_difference']:.1e}" if "largest_difference" in run else ""
        figures = ["failed", ""] if "error" in run else [apart, f"{run['loss']:.5f}"]
        lines.append([label, str(gpus), *figures])
    about = (
        f"`{record['model']}`, G={record['groups']}, distillation, {record['steps']} steps of "
        f"{record['batch_tokens']:,} tokens on {record['provenance']['hardware'].get('gpu', 'a CPU')}; the same "
        "global batch everywhere. Results are loaded with the stock class."
    )
    head = ["", "GPUs", "largest difference of a step's loss to one GPU", "held-out loss"]
    return "\n\n".join(filter(None, [about, markdown(head, lines), record.get("note")]))


def uptrain_adapters(record: Mapping[str, Any]) -> str:
    """The same start uptrained with different parameters moving: loss, size, speed, what merging changed."""

    def middle(row: Mapping[str, Any], key: str, form: str) -> str:
        return f"{row[key]:{form}}" if row.get(key) else ""

    lines = []
    timed = ["tokens/s"] if any(row.get("tokens_per_second") for row in record["rows"]) else []
    for row in record["rows"]:
        merge = row.get("merge") or {}
        apart = [f"{merge[name]:.1e}" if name in merge else "" for name in ("exact", "stored", "quantised")]
        figures = [
            f"{row['learning_rate']:.1e}",
            middle(row, "loss", ".4f") or "failed",
            middle(row, "trained_parameters", ",d"),
            *(middle(row, "tokens_per_second", ",.0f") for _ in timed),
            middle(row, "memory_gib", ".2f"),
        ]
        lines.append([f"`{row['train']}`", *figures, *apart])
    about = (
        f"`{record['model']}`, G={record['groups']}, distillation, {record['steps']} steps of "
        f"{record['batch_tokens']:,} tokens on {record['provenance']['hardware'].get('gpu', 'a CPU')}; original "
        f"{record['losses']['original']:.4f}, start {record['losses']['start']:.4f}. The last columns are the merged "
        "checkpoint's largest logit difference, relative to the logits' spread: to the adapter on full-precision "
        "weights, the same once stored, and to the 4-bit model that was trained."
    )
    head = ["", "rate", "loss", "trained", *timed, "GiB", "merged", "stored", "4-bit"]
    return f"{about}\n\n{markdown(head, lines)}"


def closed_form_speed(record: Mapping[str, Any]) -> str:
    """Seconds of the closed-form stages, as many layers as the meant model has."""
    settings, seconds = record["settings"], record["extrapolated_seconds"]
    names = [name for name in seconds if name != "all"]
    about = (
        f"{record['extrapolated_to_layers']} layers of {settings['hidden']} with {settings['heads']} heads to "
        f"G={settings['groups']}, {settings['tokens']:,} tokens ({settings['layers']} layers measured, on "
        f"{record['hardware'].get('gpu', 'a CPU')})."
    )
    lines = [["seconds", *(f"{seconds[name]:.0f}" for name in names), f"{seconds['all']:.0f}"]]
    return f"{about}\n\n{markdown(['', *names, 'all'], lines)}"


def evaluate_speed(record: Mapping[str, Any]) -> str:
    """Evaluation beside a bare forward loop, and its memory over longer text."""
    rate, memory = record["tokens_per_second"], record["memory"]
    where = record["hardware"].get("gpu", "a CPU")
    lines = [
        ["bare forward loop", f"{rate['bare']:,.0f}", "1.00"],
        ["`evaluate`", f"{rate['evaluate']:,.0f}", f"{record['speed_relative_to_bare_loop']:.2f}"],
    ]
    grown = ", ".join(f"{m['resident_mib']:,.0f} MiB after {m['tokens']:,} tokens" for m in memory)
    about = (
        f"`{record['model']}`, {record['dtype']}, {where}, {record['tokens']:,} tokens, tokenising included."
    )
    table = markdown(["", "tokens/s", "of the bare loop"], lines)
    return f"{about}\n\n{table}\n\nResident memory: {grown}."


RENDERERS: dict[str, Sequence[Callable[[Mapping[str, Any]], str]]] = {
    "benchmarks/quality.py": (quality, cost),
    "benchmarks/convert_speed.py": (convert_speed,),
    "benchmarks/uptrain_throughput.py": (uptrain_throughput,),
    "benchmarks/uptrain_scaling.py": (uptrain_scaling,),
    "benchmarks/uptrain_adapters.py": (uptrain_adapters,),
    "benchmarks/closed_form_speed.py": (closed_form_speed,),
    "benchmarks/evaluate_speed.py": (evaluate_speed,),
}


def render(path: Path) -> str:
    """All tables of one results file; empty where no table is known for it."""
    record = json.loads(path.read_text(encoding="utf-8"))
    tables = [renderer(record) for renderer in RENDERERS.get(record.get("command", ""), ())]
    return "\n\n".join([f"### {path.stem}", *tables]) if tables else ""


def main() -> None:
    """Print the tables whose file names begin with a word of the command line, or all."""
    words = tuple(sys.argv[1:]) or ("",)
    files = [path for path in sorted(RESULTS.glob("*.json")) if path.stem.startswith(words)]
    print("\n\n".join(filter(None, map(render, files))))


if __name__ == "__main__":
    main()
