"""The same start uptrained four ways on the same tokens: all parameters, attention only, LoRA, QLoRA.

    python benchmarks/uptrain_adapters.py --model MODEL --train CORPUS --valid VALID.jsonl --groups 4 --steps 300
    python benchmarks/uptrain_adapters.py … --sets all attention lora --device cpu --steps 4     # a try

Every run distils from MODEL by the product's own command. Without `--start` the start is merged from weights alone
(`joint`, no calibration). The peak learning rate is the product's default, which is the same for every set: pooled
keys and values train in full under LoRA too. `--rates lora=2e-3 qlora=2e-3` gives others. Results are scored on
VALID (protocol `blocks`, float32). A run that fails leaves its last words in its row.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

from _common import RESULTS, provenance, write_json
from torch import Tensor

from mha2gqa import convert
from mha2gqa.checkpoints.hf_config import load_config_json, text_config
from mha2gqa.checkpoints.loading import load_model, load_tokenizer, resolve_device
from mha2gqa.config.uptrain import Train
from mha2gqa.data import read_documents, token_blocks
from mha2gqa.evaluation import block_loss
from mha2gqa.uptraining.adapters import add_adapter, train_attention_only
from mha2gqa.uptraining.budget import UptrainConfig, default_learning_rate

TRAINED = get_args(Train)
EVAL_BATCH = 32


def command(args: argparse.Namespace, start: Path, out: Path, train: str, rate: float) -> list[str]:
    """The command line of one uptraining."""
    words: dict[str, Any] = {
        "--train": train,
        "--tokens": args.steps * args.batch_tokens,
        "--batch-tokens": args.batch_tokens,
        "--window": args.window,
        "--teacher": args.model,
        "--learning-rate": rate,
        "--holdout": 0.0,
        "--device": args.device,
    }
    parts = [sys.executable, "-m", "mha2gqa", "uptrain", str(start), str(out), "--force"]
    parts += [word for path in args.train for word in ("--data", path)]
    parts += [str(word) for pair in words.items() for word in pair]
    return [*parts, "--set", f"logging_steps={max(1, args.steps // 20)}"]


def trained_parameters(start: Path, train: str) -> int:
    """How many numbers move (QLoRA: as many as LoRA)."""
    model, config = load_model(start, device="cpu"), load_config_json(start)
    if train == "attention":
        train_attention_only(model, config)
    elif train != "all":
        model = add_adapter(model, config, UptrainConfig(str(start), "", (), train="lora"))
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def score(folder: Path | str, blocks: Tensor, device: str) -> float:
    """Nats per token of a checkpoint in float32."""
    return block_loss(load_model(folder, dtype="float32", device=device), blocks, EVAL_BATCH, device)


def measure(args: argparse.Namespace, start: Path, train: str, rate: float, blocks: Tensor) -> dict[str, Any]:
    """Uptrain one set and score it; its last words where it failed."""
    out, row = args.work / train, {"train": train, "learning_rate": rate}
    with (args.work / f"{train}.log").open("w+", encoding="utf-8", errors="replace") as log:
        code = subprocess.run(
            command(args, start, out, train, rate), stdout=log, stderr=subprocess.STDOUT
        ).returncode
        if code:
            log.seek(0)
            return row | {"error": "\n".join([line.rstrip() for line in log if line.strip()][-8:])}
    run = json.loads((out / "mha2gqa.json").read_text(encoding="utf-8"))["uptrain"]
    return row | {
        "loss": score(out, blocks, str(resolve_device(args.device))),
        "trained_parameters": trained_parameters(start, train),
        "tokens_per_second": run["throughput"].get("tokens_per_second"),
        "memory_gib": run["throughput"].get("memory_gib") or None,
        "merge": run["merge"],  # adapter model against merged checkpoint
        "seconds": round(run["seconds"], 1),
        "curve": [[entry["step"], entry["loss"]] for entry in run["losses"]["train"]],
    }


def measure_all(args: argparse.Namespace) -> dict[str, Any]:
    """Original, start and every set, written as they come."""
    args.work.mkdir(parents=True, exist_ok=True)
    device = str(resolve_device(args.device))
    start = args.work / "start" if args.start is None else args.start
    if args.start is None:
        convert(args.model, start, args.groups, method="joint", force=True)
    config = load_config_json(start)
    default = default_learning_rate(int(text_config(config)["hidden_size"]), args.batch_tokens)
    blocks = token_blocks(load_tokenizer(args.model), read_documents([args.valid]), args.window)
    blocks = blocks[: args.max_eval_blocks]
    record = {"command": "benchmarks/uptrain_adapters.py", "provenance": provenance(device, 0)}
    names = ("groups", "steps", "batch_tokens", "window")
    record |= {"model": Path(args.model).name} | {name: getattr(args, name) for name in names}
    record |= {"groups": text_config(config).get("num_key_value_heads", args.groups)}
    protocol = {"name": "blocks", "window": args.window, "dtype": "float32", "tokens": blocks[:, 1:].numel()}
    losses = {"original": score(args.model, blocks, device), "start": score(start, blocks, device)}
    rows: list[dict[str, Any]] = []
    record |= {"protocol": protocol, "losses": losses, "rows": rows}
    for train in args.sets:
        row = measure(args, start, train, args.rates.get(train, default), blocks)
        rows.append(row)
        write_json(args.out, record)
        print(f"{train}: " + (row.get("error") or f"loss {row['loss']:.5f}"), flush=True)
    return record


def rate_of_set(text: str) -> tuple[str, float]:
    """`lora=2e-3`."""
    name, _, rate = text.partition("=")
    if name not in TRAINED:
        raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(TRAINED)}")
    return name, float(rate)


def parse_args(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="the MHA original")
    parser.add_argument("--start", type=Path, help="its conversion; by default one is made")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--train", nargs="+", required=True)
    parser.add_argument("--valid", required=True)
    parser.add_argument("--sets", nargs="+", choices=TRAINED, default=list(TRAINED))
    parser.add_argument("--rates", nargs="+", type=rate_of_set, default=[], metavar="SET=RATE")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-tokens", type=int, default=65536)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--max-eval-blocks", type=int)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--work", type=Path, default=Path("out/adapters"))
    parser.add_argument("--out", type=Path, default=RESULTS / "uptrain_adapters.json")
    args = parser.parse_args(words)
    args.rates = dict(args.rates)
    return args


if __name__ == "__main__":
    measure_all(parse_args())
