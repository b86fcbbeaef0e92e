"""Conversion against copying: seconds and memory, on a synthetic Llama-shaped bf16 checkpoint.

    python benchmarks/convert_speed.py --gigabytes 3.4 --work SCRATCH
    python benchmarks/convert_speed.py --gigabytes 1 4 13.5 --ways cp convert --work SCRATCH --out convert_speed_sizes.json

Three ways to get a folder of the converted size class onto the disk, alternating, from a source that is in
the page cache for all of them, each timed to the end of a `sync`: `cp -r`, `mha2gqa convert --method mean`,
and what people do by hand (load the model, change it, `save_pretrained`). Beside them what nothing that
checks its result with the model's class can go below: importing that class. Of several sizes, the straight line through
the medians of each way tells what it costs at the start and for every further gigabyte.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from _common import RESULTS, provenance, watch, write_json

BY_HAND = """
import sys, torch
from transformers import AutoModelForCausalLM
source, out, groups, shard = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
config = model.config
for layer in model.model.layers:
    for name in ("k_proj", "v_proj"):
        old = getattr(layer.self_attn, name)
        heads = old.weight.data.view(groups, -1, config.head_dim, config.hidden_size)
        new = torch.nn.Linear(config.hidden_size, groups * config.head_dim, bias=False)
        new.weight.data = heads.float().mean(1).to(old.weight.dtype).flatten(0, 1)
        setattr(layer.self_attn, name, new)
config.num_key_value_heads = groups
model.save_pretrained(out, max_shard_size=shard)
"""

WAYS = ("cp", "convert", "by_hand", "imports")
IMPORTS = "from transformers import LlamaForCausalLM"


def shape(gigabytes: float) -> dict[str, int]:
    """A Llama config of about that many 10^9 bytes in bf16: wide enough to be real, layers to fill."""
    for hidden, inter, vocab in ((2048, 5504, 32000), (512, 1408, 8192), (128, 352, 1024)):
        head = 2 * 2 * vocab * hidden
        layer = 2 * (4 * hidden * hidden + 3 * hidden * inter + 2 * hidden)
        layers = round((gigabytes * 1e9 - head) / layer)
        if layers >= 4 or hidden == 128:
            break
    return {
        "hidden_size": hidden,
        "intermediate_size": inter,
        "vocab_size": vocab,
        "num_hidden_layers": max(2, layers),
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": hidden // 16,
        "max_position_embeddings": 4096,
    }


def tensors(config: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor, in the order they are stored."""
    hidden, inter = config["hidden_size"], config["intermediate_size"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        found |= {f"{prefix}self_attn.{p}_proj.weight": (hidden, hidden) for p in "qkvo"}
        found |= {f"{prefix}mlp.{p}_proj.weight": (inter, hidden) for p in ("gate", "up")}
        found |= {f"{prefix}mlp.down_proj.weight": (hidden, inter)}
        found |= {f"{prefix}{p}_layernorm.weight": (hidden,) for p in ("input", "post_attention")}
    return found | {"model.norm.weight": (hidden,), "lm_head.weight": (config["vocab_size"], hidden)}


def write_checkpoint(folder: Path, gigabytes: float, shards: int, seed: int) -> dict[str, Any]:
    """Write the checkpoint shard by shard, holding one pool of normal numbers; returns its description."""
    config = shape(gigabytes)
    sizes = {name: 2 * int(np.prod(dims)) for name, dims in tensors(config).items()}
    total, before, parts = sum(sizes.values()), 0, [[] for _ in range(shards)]
    for name, size in sizes.items():
        parts[min(shards - 1, before * shards // total)].append(name)
        before += size
    rng = np.random.default_rng(seed)
    pool = (rng.standard_normal(1 << 24, dtype=np.float32) * 0.02).view(np.uint32)
    pool = (pool >> 16).astype(np.uint16)  # bf16, truncated
    folder.mkdir(parents=True)
    weight_map = {}
    for number, names in enumerate(parts, 1):
        file = f"model-{number:05d}-of-{shards:05d}.safetensors"
        write_shard(folder / file, {name: tensors(config)[name] for name in names}, pool, rng)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    head = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(head | config | {"tie_word_embeddings": False}, indent=2))
    return {"bytes": total, "shards": shards, **config}


def write_shard(
    path: Path, shapes: dict[str, tuple[int, ...]], pool: np.ndarray, rng: np.random.Generator
) -> None:
    """One safetensors file: length of the header, header, then each tensor's bytes in order."""
    header, offset = {}, 0
    for name, dims in shapes.items():
        size = 2 * int(np.prod(dims))
        header[name] = {"dtype": "BF16", "shape": list(dims), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for dims in shapes.values():
            left = int(np.prod(dims))
            while left:
                start = int(rng.integers(len(pool) // 2))
                chunk = pool[start : start + left]
                out.write(chunk.tobytes())
                left -= len(chunk)


def measure(source: Path, work: Path, args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Alternate the ways for `--rounds` rounds; every output is deleted before the next one."""
    shard_bytes = max(path.stat().st_size for path in source.glob("*.safetensors"))
    python, out = sys.executable, work / "out"
    groups = str(args.groups)
    ways = {
        "cp": ["cp", "-r", str(source), str(out)],
        "convert": [
            *(python, "-m", "mha2gqa", "convert", str(source), str(out)),
            *("--groups", groups, "--method", "mean"),
        ],
        "by_hand": [python, "-c", BY_HAND, str(source), str(out), groups, f"{shard_bytes // 10**6 + 1}MB"],
        "imports": [python, "-c", IMPORTS],
    }
    ways = {name: ways[name] for name in args.ways}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for number in range(args.rounds):
        for name, command in ways.items():
            for path in source.glob("*.safetensors"):  # the same page cache for everybody
                with path.open("rb") as data:
                    while data.read(1 << 24):
                        pass
            rounds[name].append(watch(command))
            print(f"round {number + 1} {name}: {rounds[name][-1]}", file=sys.stderr, flush=True)
            shutil.rmtree(out, ignore_errors=True)
            os.sync()  # what deleting costs the disk is not the next one's to pay
    return rounds


def size_row(gigabytes: float, args: argparse.Namespace) -> dict[str, Any]:
    """Everything measured on a checkpoint of one size."""
    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        source = Path(folder) / "source"
        checkpoint = write_checkpoint(source, gigabytes, args.shards, args.seed)
        rounds = measure(source, Path(folder), args)
    median = {name: statistics.median(run["seconds"] for run in runs) for name, runs in rounds.items()}
    row = {
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "checkpoint": checkpoint,
        "groups": args.groups,
        "median_seconds": median,
        "convert_over_cp": round(median["convert"] / median["cp"], 3),
    }
    if "by_hand" in median:
        row["by_hand_over_convert"] = round(median["by_hand"] / median["convert"], 3)
    return row | {
        "peak_anonymous_mib": {
            name: max(run["peak_anonymous_mib"] for run in runs) for name, runs in rounds.items()
        },
        "rounds": rounds,
    }


def lines(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Straight lines through the medians: seconds at the start, and for each further 10^9 bytes."""
    found: dict[str, dict[str, float]] = {}
    sizes = np.array([row["checkpoint"]["bytes"] / 1e9 for row in rows])
    for name in ("cp", "convert"):
        slope, start = np.polyfit(sizes, [row["median_seconds"][name] for row in rows], 1)
        found[name] = {"start_seconds": round(float(start), 3), "seconds_per_gb": round(float(slope), 4)}
    ratio = found["convert"]["seconds_per_gb"] / found["cp"]["seconds_per_gb"]
    return found | {"convert_over_cp": {"per_gb": round(ratio, 3)}}


def main() -> None:
    """Write each checkpoint, measure, summarise."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gigabytes", type=float, nargs="+", default=[3.4], help="sizes of the source, 10^9 bytes"
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--shards", type=int, default=3)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="scratch folder (default: a temporary one)")
    parser.add_argument("--out", type=Path, default=RESULTS / "convert_speed.json")
    args = parser.parse_args()
    if args.work:
        args.work.mkdir(parents=True, exist_ok=True)
    head = {"schema_version": 1, "command": "benchmarks/convert_speed.py", **provenance(seed=args.seed)}
    head["load_average_before"] = [round(value, 2) for value in os.getloadavg()]  # that of others
    rows: list[dict[str, Any]] = []
    for gigabytes in args.gigabytes:
        rows.append(size_row(gigabytes, args))
        record = head | (
            rows[0]
            if len(args.gigabytes) == 1
            else {"sizes": rows, "lines": lines(rows) if len(rows) > 1 else {}}
        )
        write_json(args.out, record)
    record = {k: v for k, v in record.items() if k not in ("rounds", "sizes")}
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
