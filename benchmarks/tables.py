"""Render the tables of `docs/results/` from `benchmarks/results/*.json`, and from nowhere else.

python benchmarks/tables.py            # every table, as Markdown
python benchmarks/tables.py quality    # one of them
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import _ledger
from _loss_tables import OBJECTIVES, ce_weight, cost, quality, sweep
from _markdown import markdown, measured_on
from _quality_bars import bars
from _quality_flops import larger_budget, rates_tried, windows
from _quality_frontier import positions, same_bytes
from _quality_probe_tables import probes
from _quality_sizes import sizes, wide_references
from _real import decoding, masked_gradients, real, real_bars, recipe
from _speed_tables import (
    calibrate_speed,
    closed_form_speed,
    convert_speed,
    decode_speed,
    uptrain_large,
)
from _suites import fuzz, kills

RESULTS = Path(__file__).parent / "results"


# What `uptrain_throughput.summary` calls its ratios, for readers.
RATIOS = {
    "ours_to_best_rival_ce": "`mha2gqa` to the fastest other loop, next token, 1 GPU",
    "ours_bf16_residual_to_best_rival_ce": "the same with `residual_dtype=bfloat16`",
    "liger_to_ours_ce": "with Liger's kernels to without, next token, 1 GPU",
    "kd_to_ce": "distillation to next token, 1 GPU",
    "scaling_fsdp_ce_2": "2 GPUs (FSDP2) to 1, next token",
    "scaling_fsdp_kd_2": "2 GPUs (FSDP2) to 1, distillation",
    "scaling_fsdp_ce_4": "4 GPUs (FSDP2) to 1, next token",
    "scaling_fsdp_kd_4": "4 GPUs (FSDP2) to 1, distillation",
    "scaling_ddp_ce_4": "4 GPUs (DDP) to 1, next token",
    "scaling_ddp_kd_4": "4 GPUs (DDP) to 1, distillation",
}


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
        name = f"{names[row['contender']]}{narrow}, {OBJECTIVES[row['objective']]}"
        kinds.setdefault((name, f"{row['gpus']}{parallel}"), []).append(row)

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
        f"{first['micro_batch']} at a time on each GPU.{several}\n\nMeasured on: {measured_on(record['provenance'])}."
    )
    ratios = [[RATIOS.get(name, name), f"{value:.3f}"] for name, value in record["summary"].items()]
    head = ["", "GPUs", "tokens/s", "MFU", "GiB per GPU"]
    text = f"{about}\n\n{markdown(head, lines)}"
    if ratios:
        text += f"\n\n{markdown(['ratio of tokens/s', ''], ratios)}"
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
        f"{record['batch_tokens']:,} tokens; the same global batch everywhere. Results are loaded with the stock "
        f"class.\n\nMeasured on: {measured_on(record['provenance'])}."
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
        f"{record['batch_tokens']:,} tokens; original {record['losses']['original']:.4f}, start "
        f"{record['losses']['start']:.4f}. The last columns are the merged checkpoint's largest logit difference, "
        "relative to the logits' spread: to the adapter on full-precision weights, the same once stored, and to the "
        f"4-bit model that was trained.\n\nMeasured on: {measured_on(record['provenance'])}."
    )
    head = ["", "rate", "loss", "trained", *timed, "GiB", "merged", "stored", "4-bit"]
    return "\n\n".join(filter(None, [about, markdown(head, lines), record.get("note", "").capitalize()]))


def evaluate_speed(record: Mapping[str, Any]) -> str:
    """Evaluation beside a bare forward loop, and its memory over longer text."""
    rate, memory = record["tokens_per_second"], record["memory"]
    lines = [
        ["bare forward loop", f"{rate['bare']:,.0f}", "1.00"],
        ["`evaluate`", f"{rate['evaluate']:,.0f}", f"{record['speed_relative_to_bare_loop']:.2f}"],
    ]
    grown = ", ".join(f"{m['resident_mib']:,.0f} MiB after {m['tokens']:,} tokens" for m in memory)
    about = (
        f"`{record['model']}`, {record['dtype']}, {record['tokens']:,} tokens, tokenising included.\n\n"
        f"Measured on: {measured_on(record)}."
    )
    table = markdown(["", "tokens/s", "of the bare loop"], lines)
    return f"{about}\n\n{table}\n\nResident memory: {grown}."


def walk_quality(record: Mapping[str, Any]) -> str:
    """Losses before and after conversion became a walk over layers."""
    lines = [
        [
            f"{row['what']}, G={row['groups']}, seed {row['seed']}",
            *(f"{row['losses'][k]:.4f}" for k in ("original", "merged", "fitted")),
            f"{sum(row['seconds'].values()):.0f}",
        ]
        for row in record["rows"]
    ]
    head = ["validation rows of the calibration text", "original", "merged", "fitted", "seconds"]
    scored = [[row["model"], f"{row['loss']:.4f}"] for row in record["valid"]]
    return (
        f"Measured on: {record['hardware']['gpu']}.\n\n{markdown(head, lines)}\n\n"
        f"{markdown(['validation set, blocks of 512', 'loss'], scored)}"
    )


def demo(record: Mapping[str, Any]) -> str:
    """What `mha2gqa demo` shows, and how long it took."""
    rows, first = record["rows"], record["rows"][0]["perplexity"]
    body = [
        [
            row["label"],
            f"{row['loss']:.4f}",
            f"{row['perplexity']:.1f}",
            "" if row is rows[0] else f"{100 * (row['perplexity'] / first - 1):+.1f} %",
            f"{row['kv_bytes_per_token']:,} B",
        ]
        for row in rows
    ]
    head = ["model", "loss", "perplexity", "against the original", "KV cache per token"]
    setup = record["setup"]
    took = f"{record['seconds']:.0f} s on {setup['cores_used']} cores ({setup['hardware']['cpu']})"
    return f"{markdown(head, body)}\n\n{took}, downloads and installation left out."


def first_line(record: Mapping[str, Any]) -> str:
    """Seconds until a command has said something."""
    body = [[f"`{row['command']}`", f"{row['terminal']:.2f}", f"{row['file']:.2f}"] for row in record["rows"]]
    setup = record["setup"]
    about = f"`--help`: {record['help']:.2f} s. {setup['hardware']['cpu']}, {setup['hardware']['cores']} cores, load "
    about += f"{setup['load_average_before']:.1f} before."
    return f"{markdown(['seconds to the first line', 'on a terminal', 'into a file'], body)}\n\n{about}"


# What a results file's command begins with -> its tables.
RENDERERS: dict[str, Sequence[Callable[[Mapping[str, Any]], str]]] = {
    "benchmarks/quality.py": (quality, cost),
    "benchmarks/quality_ledger.py": (same_bytes, quality, cost, positions, rates_tried),
    "benchmarks/quality_at_rate.py": (larger_budget,),
    "benchmarks/quality_probes.py": (probes,),
    "windows of mha2gqa convert": (windows,),
    "benchmarks/wide_references.py": (wide_references,),
    "bars of benchmarks/quality_ledger.py": (bars,),
    "sizes of benchmarks/quality_ledger.py": (sizes,),
    "benchmarks/quality_t5.py --stages tune": (ce_weight,),
    "benchmarks/convert_speed.py": (convert_speed,),
    "benchmarks/uptrain_throughput.py": (uptrain_throughput,),
    "benchmarks/uptrain_scaling.py": (uptrain_scaling,),
    "benchmarks/uptrain_adapters.py": (uptrain_adapters,),
    "benchmarks/closed_form_speed.py": (closed_form_speed,),
    "benchmarks/calibrate_speed.py": (calibrate_speed,),
    "benchmarks/decode_speed.py": (decode_speed,),
    "benchmarks/uptrain_large.py": (uptrain_large,),
    "benchmarks/evaluate_speed.py": (evaluate_speed,),
    "benchmarks/paper_groups.py": (sweep,),
    "benchmarks/real/suite.py": (real,),
    "benchmarks/real/decode.py": (decoding,),
    "bars of benchmarks/real/suite.py": (real_bars,),
    "recipe of benchmarks/real/suite.py": (recipe,),
    "benchmarks/masked_gradients.py": (masked_gradients,),
    "tests/fuzz/run.py": (fuzz,),
    "tests/kills/run.py": (kills,),
    "benchmarks/first_line.py": (first_line,),
    "mha2gqa demo": (demo,),
    "mha2gqa sweep": (sweep,),
    "mha2gqa convert": (walk_quality,),
}


def results() -> list[Path]:
    """Every results file."""
    return sorted([*RESULTS.glob("*.json"), *RESULTS.glob("*.jsonl")])


def read_record(path: Path) -> dict[str, Any]:
    """A results file; a ledger (`.jsonl`) in the form of a file of `quality.py`."""
    if path.suffix == ".jsonl":
        return {**_ledger.record(path), "command": "benchmarks/quality_ledger.py"}
    return json.loads(path.read_text(encoding="utf-8"))


def tables(path: Path) -> list[str]:
    """The tables of one results file, in order; none where its command is not in `RENDERERS`."""
    record = read_record(path)
    command = (
        record.get("command") or record.get("command_line") or record.get("setup", {}).get("command", "")
    )
    command = command.removeprefix("python ")
    known = next((made for start, made in RENDERERS.items() if command.startswith(start)), ())
    return [table for table in (renderer(record) for renderer in known) if table]


def render(path: Path) -> str:
    """All tables of one results file under its name; empty where no table is known for it."""
    made = tables(path)
    return "\n\n".join([f"### {path.stem}", *made]) if made else ""


def main() -> None:
    """Print the tables whose file names begin with a word of the command line, or all."""
    words = tuple(sys.argv[1:]) or ("",)
    files = [path for path in results() if path.stem.startswith(words)]
    print("\n\n".join(filter(None, map(render, files))))


if __name__ == "__main__":
    main()
