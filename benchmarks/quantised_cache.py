"""Decode speed of quantised KV caches in transformers, on the original and with fewer heads, in one run on one device.

    python benchmarks/quantised_cache.py --out quantised_cache.json       # Llama-2-7B, on the GPU; needs hqq
    python benchmarks/quantised_cache.py --tiny --device cpu --caches plain fp8 --out build/quantised_cache.json

transformers' quantised caches run in its own loop only: a step turns the whole cache back into the model's dtype, attends,
and every 128 tokens the rest is quantised. The plain cache is timed in the same loop, as random weights of the same shape.
Rows are written one by one; a run that was cut off goes on where it stopped.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import torch
import transformers
from decode_speed import Rows, config_of, points, random_model
from transformers import QuantizedCache

import mha2gqa
from mha2gqa.commands.growing_cache import growing_cache
from mha2gqa.kv_cache import kv_bytes

BITS = {"plain": None, "fp8": 8.0, "hqq-8": 8.0, "hqq-4": 4.0, "quanto-4": 4.0}
GROUP = 64  # numbers that share a scale and a zero in transformers' integer caches: 32 bits for both
TINY = {
    "layers": 2, "hidden": 128, "intermediate": 256, "heads": 8, "kv_heads": [8, 2], "vocab": 512,
    "points": ["2x70"], "steps": 3, "dtype": "float32",
}  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=11008)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[32, 8], help="the first is the original")
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--points", nargs="+", default=["16x4096"], help="BATCHxCONTEXT")
    parser.add_argument("--caches", nargs="+", choices=BITS, default=["plain", "hqq-8", "hqq-4"])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a model for a laptop")
    args = parser.parse_args()
    args.budget_context = 1
    if args.tiny:
        vars(args).update(TINY)
    return args


def make_cache(kind: str, config: Any) -> QuantizedCache | None:
    """An empty cache; None for transformers' usual one."""
    backend, _, bits = kind.partition("-")
    if backend == "plain":
        return None
    axes = {"axis_key": 1, "axis_value": 1} if backend == "hqq" else {}  # what each backend recommends
    return QuantizedCache(backend, config, **({"nbits": int(bits), **axes} if bits else {}))


def cache_bytes(raw: dict[str, Any], kind: str, batch: int, context: int) -> float:
    """Bytes that the cache keeps between steps, once all of it is quantised."""
    numbers = kv_bytes(raw, context=context, batch=batch, dtype_bytes=1)
    bits = BITS[kind]
    if bits is None:
        return float(numbers * torch.finfo(getattr(torch, raw["dtype"])).bits / 8)
    return numbers * (bits + (0 if kind == "fp8" else 32 / GROUP)) / 8


def measure(
    model: Any, raw: dict[str, Any], kind: str, batch: int, context: int, steps: int
) -> dict[str, Any]:
    """One row; what does not run is a row with a reason."""
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    row: dict[str, Any] = {"cache_bytes": cache_bytes(raw, kind, batch, context)}
    try:
        times = growing_cache(model, batch, context, steps, cache=partial(make_cache, kind, model.config))
    except (ImportError, RuntimeError, ValueError) as error:
        return row | {
            "reason": (str(error).strip() or type(error).__name__).splitlines()[0],
            "tokens_per_second": None,
        }
    row |= {"tokens_per_second": batch / times.seconds, "milliseconds_per_step": times.seconds * 1e3}
    row |= {"first_token_milliseconds": times.first_token_seconds * 1e3, "attention": times.attention}
    if model.device.type == "cuda":
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
    return row


def setup_of(args: argparse.Namespace) -> dict[str, Any]:
    """What the rows depend on."""
    keys = ("layers", "hidden", "intermediate", "heads", "vocab", "dtype", "steps")
    versions = {
        "mha2gqa": mha2gqa.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    cuda = torch.device(args.device).type == "cuda"
    return {
        **{key: getattr(args, key) for key in keys},
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "versions": versions,
        "command": "benchmarks/quantised_cache.py",
    }


def main() -> None:
    args, began = arguments(), time.perf_counter()
    rows = Rows(args.out, setup_of(args))
    for kv_heads in args.kv_heads:
        keys = [
            {"kv_heads": kv_heads, "cache": kind, "batch": batch, "context": context}
            for batch, context in points(args)
            for kind in args.caches
        ]
        left = [key for key in keys if not rows.done(**key)]
        if not left:
            continue
        raw = config_of(args, (kv_heads, 1))
        model = random_model(raw, args.device)
        for key in left:
            row = measure(model, raw, key["cache"], key["batch"], key["context"], args.steps)
            rows.data["rows"].append(key | row)
            rows.save()
            speed = row.get("reason") or f"{row['tokens_per_second']:.0f} tokens/s"
            rows.say(f"{kv_heads} KV heads, {key['cache']}: {speed} ({time.perf_counter() - began:.0f} s)")
            gc.collect()
            if model.device.type == "cuda":
                torch.cuda.empty_cache()
        del model
        gc.collect()


if __name__ == "__main__":
    main()
