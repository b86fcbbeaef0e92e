"""One uptraining by the product's own command on one GPU, on several, and killed on several and resumed on half.

    python benchmarks/uptrain_scaling.py --model MODEL --train CORPUS --valid VALID.jsonl --gpus 4
    python benchmarks/uptrain_scaling.py … --gpus 2 --modes ddp fsdp zero3 --out benchmarks/results/uptrain_scaling_2.json
    python benchmarks/uptrain_scaling.py … --gpus 2 --device cpu --steps 4     # a try

The original is mean-pooled and uptrained by distillation (teacher and student sharded alike), always with the
same global batch; every step's loss is kept. The run that is killed is of the last mode that shards, or of
`--resume-mode`; ZeRO-3 (which needs deepspeed) resumes on as many GPUs as it began with, the others on half. The consolidated results are loaded with the stock class in a
process that knows nothing of how they were made, and scored on VALID (protocol `blocks`, float32).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil  # accelerate needs it
import transformers
from _common import RESULTS, provenance, write_json

from mha2gqa import convert
from mha2gqa.checkpoints.loading import load_tokenizer, resolve_device
from mha2gqa.data import read_documents, token_blocks
from mha2gqa.evaluation import block_loss

MODES = ("ddp", "fsdp", "zero3")
ZERO3 = Path(__file__).parents[1] / "examples" / "deepspeed_zero3.json"


def launch(args: argparse.Namespace, start: Path, out: Path, parallel: str, gpus: int) -> subprocess.Popen:
    """Start `mha2gqa uptrain`."""
    launcher = [sys.executable]
    if parallel:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}"]
    words: dict[str, Any] = {
        "--tokens": args.steps * args.batch_tokens,
        "--batch-tokens": args.batch_tokens,
        "--window": args.window,
        "--teacher": args.model,
        "--learning-rate": args.learning_rate,
        "--holdout": 0.0,
        "--device": args.device,
    }
    command = [*launcher, "-m", "mha2gqa", "uptrain", str(start), str(out)]
    command += [word for path in args.train for word in ("--data", path)]
    command += [str(word) for pair in words.items() for word in pair]
    settings = {"logging_steps": 1, "save_steps": args.steps // 2}
    settings |= {"fsdp": {"fsdp": "true"}, "zero3": {"deepspeed": str(ZERO3)}}.get(parallel, {})
    settings |= {"ddp_backend": "gloo"} if args.device == "cpu" and parallel else {}
    command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    log = out.with_suffix(".log").open("ab")
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def finish(process: subprocess.Popen, out: Path) -> dict[str, Any]:
    """Wait for a run and read what it recorded; its last words where it failed."""
    if process.wait():
        lines = out.with_suffix(".log").read_text(errors="replace").splitlines()
        return {"error": "\n".join([line for line in lines if line.strip()][-8:])}
    run = json.loads((out / "mha2gqa.json").read_text())["uptrain"]
    return {
        "losses": [[entry["step"], entry["loss"]] for entry in run["losses"]["train"]],
        "resumed_from": run["resumed_from"],
        "seconds": round(run["seconds"], 1),
    }


def kill_at_checkpoint(process: subprocess.Popen, out: Path, step: int) -> None:
    """Kill -9 a run and all its processes as soon as the checkpoint of a step is complete."""
    done = out.with_name(out.name + ".uptrain") / f"checkpoint-{step}" / "complete.json"
    while process.poll() is None and not done.exists():
        time.sleep(0.02)
    if process.poll() is None:
        for one in [parent := psutil.Process(process.pid), *parent.children(recursive=True)]:
            one.kill()
    process.wait()


def killed_mode(modes: Sequence[str]) -> str | None:
    """The mode of the run that is killed unless told: the last that shards, else the last of all."""
    sharded = [mode for mode in modes if mode != "ddp"]
    return (sharded or list(modes) or [None])[-1]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All runs, one after the other, and how far each is from the run on one GPU."""
    args.work.mkdir(parents=True, exist_ok=True)
    start = args.work / "start"
    convert(args.model, start, args.groups, method="mean", force=True)
    many = args.gpus
    runs: dict[str, Any] = {}
    for name, parallel, gpus in (("one", "", 1), *((mode, mode, many) for mode in args.modes)):
        out = args.work / name
        runs[name] = {"gpus": gpus} | finish(launch(args, start, out, parallel, gpus), out)
    if mode := args.resume_mode or killed_mode(args.modes):
        out, fewer = args.work / "resumed", many if mode == "zero3" else many // 2
        kill_at_checkpoint(launch(args, start, out, mode, many), out, args.steps // 2)
        again = finish(launch(args, start, out, mode, fewer), out)
        runs["resumed"] = {"gpus": [many, fewer], "mode": mode} | again
    blocks = token_blocks(load_tokenizer(args.model), read_documents([args.valid]), args.window)
    device = str(resolve_device(args.device))
    for name, run in runs.items():
        if "error" in run:
            continue  # the others are worth having
        model = transformers.AutoModelForCausalLM.from_pretrained(args.work / name, dtype="float32")
        run["class"] = type(model).__name__
        run["loss"] = block_loss(model.to(device).eval(), blocks[: args.max_eval_blocks], 32, device)
        if "losses" in runs["one"]:
            pairs = list(zip(run["losses"], runs["one"]["losses"], strict=True))
            run["largest_difference"] = max(abs(a[1] - b[1]) for a, b in pairs)
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--train", nargs="+", required=True)
    parser.add_argument("--valid", required=True)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["ddp", "fsdp"])
    parser.add_argument("--resume-mode", choices=MODES, help="of the run that is killed and resumed")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-tokens", type=int, default=65536)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--max-eval-blocks", type=int)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--work", type=Path, default=Path("out/scaling"))
    parser.add_argument("--out", type=Path, default=RESULTS / "uptrain_scaling.json")
    args = parser.parse_args()
    device = str(resolve_device(args.device))
    record = {"command": "benchmarks/uptrain_scaling.py", "provenance": provenance(device, 0)}
    names = ("groups", "steps", "batch_tokens", "window", "learning_rate")
    record |= {"model": Path(args.model).name} | {name: getattr(args, name) for name in names}
    record["runs"] = measure(args)
    write_json(args.out, record)
    for name, run in record["runs"].items():
        found = (
            run.get("error")
            or f"loss {run['loss']:.5f}, curve within {run.get('largest_difference', float('nan')):.2g} of one"
        )
        print(f"{name}: {found}")


if __name__ == "__main__":
    main()
