"""Tokens per second on a CPU in llama.cpp: fewer KV heads beside caches of fewer bits, by the product's bench.

    python benchmarks/engines/served_speed.py --llama-cpp SOURCES --llama-cpp-bin FOLDER --work SCRATCH \\
        --threads 16 --out benchmarks/results/served_speed.json

A Llama of random weights and its form with a quarter of the KV heads are written once as GGUF in every precision; then all
are measured in turn, several times over: what a row says of another was measured within the same minutes. Speed does
not depend on what the weights are. A round that is there is not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from _common import RESULTS, provenance, write_json
from decode_speed import llama, random_model

from mha2gqa.assets import tiny_model_path
from mha2gqa.commands.bench import bench
from mha2gqa.commands.engine_converters import llama_cpp_sources, to_gguf
from mha2gqa.kv_cache import kv_bytes_per_token

CACHES = {"f16": 16.0, "q8_0": 8.5, "q4_0": 4.5}  # bits of a cached number, scales included
TINY = {"layers": 2, "hidden": 256, "intermediate": 512, "heads": 8, "batch": 2, "context": 256, "steps": 8}
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=5632)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument(
        "--share", type=int, default=4, help="query heads that share a KV head in the other form"
    )
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--weights", nargs="+", default=["f16", "q8_0"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--llama-cpp", type=Path, required=True, help="sources, for the converter")
    parser.add_argument("--llama-cpp-bin", type=Path, required=True, help="folder of llama-batched-bench")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=RESULTS / "served_speed.json")
    parser.add_argument("--tiny", action="store_true", help="a model for a test")
    args = parser.parse_args()
    if args.tiny:
        vars(args).update(TINY)
    return args


def config_of(args: argparse.Namespace, kv_heads: int) -> dict[str, Any]:
    """The raw config of a form."""
    return llama(args, kv_heads, args.context, "float16")


def gguf(args: argparse.Namespace, kv_heads: int, weights: str) -> Path:
    """A form in a precision, as GGUF; made where it is not there."""
    file = args.work / f"{kv_heads}-{weights}.gguf"
    if not file.exists():
        folder, raw = args.work / str(kv_heads), config_of(args, kv_heads)
        if not (folder / "config.json").exists():
            random_model(raw, "cpu").save_pretrained(folder)
            for name in TOKENIZER:
                shutil.copyfile(tiny_model_path() / name, folder / name)
            (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
        partial = file.with_suffix(".partial.gguf")
        # Random ids are decoded: how text would be split is of no account.
        to_gguf(folder, raw, partial, llama_cpp_sources(args.llama_cpp), weights, "gpt-2")
        partial.replace(file)
    return file


def measure(args: argparse.Namespace, row: dict[str, Any]) -> dict[str, Any]:
    """One round of one row, by `bench`; with the version of the engine."""
    result = bench(
        gguf(args, row["kv_heads"], row["weights"]), engine="llama.cpp", batch=args.batch, context=args.context,
        new_tokens=args.steps, cache_type=row["cache"], threads=args.threads, engine_path=args.llama_cpp_bin, device="cpu",
    )  # fmt: skip
    [timed] = result.models
    kept = ("tokens_per_second", "first_token_milliseconds", "kv_bytes", "weight_bytes", "step_bytes")
    return {key: timed[key] for key in kept} | {
        "engine": result.engine,
        "copy_bandwidth": result.copy_bandwidth,
    }


def rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every row, without figures."""
    made = []
    for weights in args.weights:
        for kv_heads in (args.heads, args.heads // args.share):
            size = kv_bytes_per_token(config_of(args, kv_heads), 1)
            for cache, bits in CACHES.items():
                row = {"kv_heads": kv_heads, "weights": weights, "cache": cache}
                made.append(row | {"cache_bytes_per_token": size * bits / 8, "rounds": []})
    return made


def summarise(row: dict[str, Any]) -> None:
    """Medians of the rounds, into the row."""
    for key in ("tokens_per_second", "first_token_milliseconds"):
        row[key] = statistics.median(r[key] for r in row["rounds"])
    row |= {key: row["rounds"][0][key] for key in ("kv_bytes", "weight_bytes", "step_bytes")}


def main() -> None:
    args = arguments()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    args.work.mkdir(parents=True, exist_ok=True)
    keys = (
        "layers",
        "hidden",
        "intermediate",
        "heads",
        "share",
        "vocab",
        "batch",
        "context",
        "steps",
        "threads",
    )
    setup = {key: getattr(args, key) for key in keys}
    record: dict[str, Any] = {
        "command": "benchmarks/engines/served_speed.py",
        **provenance(seed=0),
        "setup": setup,
    }
    record["rows"] = rows(args)
    known = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    if known.get("setup") == setup:
        record = known
    for number in range(args.rounds):
        for row in record["rows"]:
            if len(row["rounds"]) > number:
                continue
            found = measure(args, row)
            record["engine"], record["copy_bandwidth"] = found.pop("engine"), found.pop("copy_bandwidth")
            row["rounds"].append(found)
            summarise(row)
            write_json(args.out, record)
            name = f"{row['kv_heads']} KV heads, weights {row['weights']}, cache {row['cache']}"
            print(f"round {number + 1}, {name}: {found['tokens_per_second']:.1f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
