"""`evaluate` against a bare batched forward loop over the same tokens, and its memory over longer text.

    python benchmarks/evaluate_speed.py --model MODEL --data VALID.jsonl --device cuda --dtype bfloat16
    python benchmarks/evaluate_speed.py … --shape 1b     # random weights, the tokenizer of MODEL

The bare loop gets its token blocks ready-made on the device and does nothing but forward and cross-entropy;
`evaluate` gets the documents as text and tokenises them meanwhile. Each runs once to warm up; then they take
turns, and the median of each counts. Both start with an idle device and end with their result on the CPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from _common import RESULTS, provenance, write_json
from _throughput_worker import build
from torch.nn import functional as F

from mha2gqa.checkpoints.loading import load_model, load_tokenizer, resolve_device
from mha2gqa.data import Document, read_documents, token_blocks
from mha2gqa.data.encoding import encode_threads
from mha2gqa.evaluation import LoadedModel, evaluate


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def threads(tokenizer: Any) -> dict[str, Any]:
    """How many threads tokenise and compute, and the settings that say so."""
    names = ("TOKENIZERS_PARALLELISM", "RAYON_NUM_THREADS", "OMP_NUM_THREADS")
    return {
        "tokenising": encode_threads(tokenizer),
        "torch": torch.get_num_threads(),
        "environment": {name: os.environ.get(name) for name in names},
    }


@torch.inference_mode()
def bare_loop(model: Any, blocks: torch.Tensor, batch_size: int) -> tuple[float, float]:
    """Seconds and loss of forward and cross-entropy, nothing else."""
    blocks = blocks.to(model.device)
    synchronise(model.device)
    began = time.perf_counter()
    total = torch.zeros((), dtype=torch.float64, device=model.device)
    for batch in blocks.split(batch_size):
        logits = model(batch[:, :-1], use_cache=False).logits
        total += F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
    loss = float(total) / (len(blocks) * (blocks.shape[1] - 1))
    return time.perf_counter() - began, loss


def resident_mib() -> float:
    """Memory of this process now (0 where there is no /proc)."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:")), 0.0)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Both loops, `--repeats` times in turn; then `evaluate` over the text several times in a row."""
    if args.shape:
        model = build(args.shape, 4, torch.bfloat16, resolve_device(args.device), 0, "sdpa").eval()
    else:
        model = load_model(args.model, dtype=args.dtype, device=args.device)
    tokenizer = load_tokenizer(args.model)
    texts = list(read_documents(args.data, limit_bytes=args.limit_bytes))
    blocks = token_blocks(tokenizer, texts, args.window)
    options = {"protocol": "blocks", "window": args.window, "batch_size": args.batch_size}
    subject = LoadedModel(args.shape or Path(args.model).name, model, tokenizer)
    documents = [Document(text, f"text:{i}") for i, text in enumerate(texts)]
    bare_loop(model, blocks, args.batch_size)  # warm up: kernels, memory, the tokenizer's cache
    evaluate(subject, documents, **options)
    seconds: dict[str, list[float]] = {"bare": [], "evaluate": []}
    losses: dict[str, float] = {}
    for _ in range(args.repeats):
        taken, losses["bare"] = bare_loop(model, blocks, args.batch_size)
        seconds["bare"].append(taken)
        synchronise(model.device)
        began = time.perf_counter()
        result = evaluate(subject, documents, **options)
        seconds["evaluate"].append(time.perf_counter() - began)
        losses["evaluate"] = result.models[0].loss or 0.0
    tokens = len(blocks) * args.window
    bare, ours = (statistics.median(seconds[name]) for name in ("bare", "evaluate"))
    memory = []
    for times in (1, args.lengthen):
        evaluate(subject, documents * times, **options)
        memory.append({"tokens": tokens * times, "resident_mib": round(resident_mib(), 1)})
    return {
        "model": subject.name,
        "tokens": tokens,
        "window": args.window,
        "batch_size": args.batch_size,
        "dtype": str(model.dtype).removeprefix("torch."),
        "threads": threads(tokenizer),
        "seconds": seconds,
        "losses": losses,
        "tokens_per_second": {"bare": tokens / bare, "evaluate": tokens / ours},
        "speed_relative_to_bare_loop": bare / ours,
        "memory": memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--shape", choices=["1b"], help="instead of the weights of MODEL: random ones, bf16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--lengthen", type=int, default=4, help="text of the memory measurement, times as long"
    )
    parser.add_argument("--limit-bytes", type=int, default=None)
    parser.add_argument("--out", type=Path, default=RESULTS / "evaluate_speed.json")
    args = parser.parse_args()
    found = measure(args)
    about = {"command": "benchmarks/evaluate_speed.py"}
    about |= provenance("cpu" if args.device == "auto" else args.device)
    write_json(args.out, {**about, **found})
    speed = found["speed_relative_to_bare_loop"]
    print(f"evaluate runs at {speed:.3f} of a bare loop over {found['tokens']:,} tokens")


if __name__ == "__main__":
    main()
