"""Uptraining at the size of real models: a grouped student with its MHA teacher, by the product's own command.

    python benchmarks/uptrain_large.py --work DIR --name lora --train lora --out uptrain_large.json
    python benchmarks/uptrain_large.py --work DIR --shape tiny --device cpu --name try --train attention --tokens 8192

A Llama of any shape with random bf16 weights is written to disk, `mha2gqa convert` makes its grouped form, and
`mha2gqa uptrain` distils it from the original for a few steps while it is watched: tokens per second, peak memory of the
GPU as nvidia-smi shows it. It is ended after its last step, before it writes tens of gigabytes that nobody reads; with
`--whole` it is not. A run that is cut off after some steps still gives a row of those: `steps_made` says how many.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from _common import RESULTS, hardware, provenance, write_json
from calibrate_speed import SHAPES, Watch, stop, write_model, write_text

SPEED = re.compile(r"([\d.,]+)([kM]?) tokens/s")
STEP = re.compile(r"\bstep (\d+)/(\d+) ")


def prepare(args: argparse.Namespace) -> tuple[Path, Path, Path]:
    """Teacher, student and text, made where they are missing."""
    whole = SHAPES[args.shape][3]
    layers = args.layers or whole
    teacher, text = args.work / f"{args.shape}-{layers}", args.work / f"text-{args.tokens}.jsonl"
    student = args.work / f"{args.shape}-{layers}-gqa{args.groups}"
    if not (teacher / "config.json").exists():
        shutil.rmtree(teacher, ignore_errors=True)
        write_model(teacher, args.shape, layers)
    if not (student / "config.json").exists():
        words = [str(teacher), str(student), "--groups", str(args.groups), "--method", "mean", "-q"]
        subprocess.run([sys.executable, "-m", "mha2gqa", "convert", *words], check=True)
    if not text.exists():
        write_text(text, args.tokens * 2)
    return teacher, student, text


def command(
    args: argparse.Namespace, teacher: Path, student: Path, text: Path, out: Path
) -> tuple[list[str], list[str]]:
    """The command line of the uptraining, and of it the words that make the row another one."""
    own = ["--train", args.train, *args.more]
    words = [str(student), str(out), "--data", str(text), "--teacher", str(teacher), "--force"]
    words += ["--tokens", str(args.tokens), "--batch-tokens", str(args.batch_tokens)]
    words += ["--window", str(args.window), "--holdout", "0", "--device", args.device]
    words += ["--save-steps", "1000000", "--logging-steps", "2"]
    launch = [sys.executable, "-m"]
    if args.processes > 1 or args.torchrun:
        launch += ["torch.distributed.run", "--standalone", f"--nproc_per_node={args.processes}", "-m"]
    return [*launch, "mha2gqa", "-v", "uptrain", *words, *own], own


def speeds(log: Path) -> list[float]:
    """Tokens per second as the command logged them."""
    scale = {"": 1.0, "k": 1e3, "M": 1e6}
    found = SPEED.findall(log.read_text(encoding="utf-8", errors="replace"))
    return [float(number.replace(",", "")) * scale[unit] for number, unit in found]


def steps(log: Path) -> tuple[int, int]:
    """Steps that the command has logged, and how many it makes; 0 and 0 before the first."""
    found = STEP.findall(log.read_text(encoding="utf-8", errors="replace"))
    made, of = found[-1] if found else ("0", "0")
    return int(made), int(of)


def wait(process: subprocess.Popen[str], log: Path, seconds: float, whole: bool) -> None:
    """Until the process has ended, its time is up or, unless all of it is asked for, its last step is logged."""
    end = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < end:
        made, of = steps(log)
        if made and made == of and not whole:
            return
        time.sleep(0.5)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One uptraining, watched."""
    teacher, student, text = prepare(args)
    out, log = args.work / f"out-{args.name}", args.work / f"{args.name}.log"
    parts, own = command(args, teacher, student, text, out)
    began = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            parts, stdout=file, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        watch = Watch(process.pid)
        try:
            wait(process, log, args.seconds, args.whole)
        finally:
            stop(process)
            watch.close()
    seconds = time.monotonic() - began
    rates = speeds(log)
    row = {
        "name": args.name, "shape": args.shape, "layers": args.layers or SHAPES[args.shape][3],
        "groups": args.groups, "train": args.train, "options": own, "window": args.window,
        "batch_tokens": args.batch_tokens, "tokens": args.tokens, "processes": args.processes,
        "gpu": hardware(args.device).get("gpu"), "seconds": round(seconds, 1),
        "gpu_gib": round(watch.gpu, 2), "gpus_gib": [round(x, 2) for x in watch.gpus],
        "host_anonymous_gib": round(watch.host, 2), "host_shared_gib": round(watch.shared, 2),
        "tokens_per_second_log": rates,
        "finished": process.returncode == 0, "exit_code": process.returncode,
        "steps_made": steps(log)[0], "steps": steps(log)[1],
    }  # fmt: skip
    manifest = out / "mha2gqa.json"
    if process.returncode == 0 and manifest.exists():
        run = json.loads(manifest.read_text(encoding="utf-8"))["uptrain"]
        row |= {"throughput": run["throughput"], "run_seconds": round(run["seconds"], 1)}
        row |= {"losses": run["losses"]["train"]}
    elif process.returncode and row["steps_made"] < max(1, row["steps"]):
        row["last_words"] = [line.rstrip() for line in log.read_text(errors="replace").splitlines()][-5:]
    later = rates[len(rates) // 4 :]  # without the first steps, which choose kernels
    row["tokens_per_second"] = round(statistics.median(later), 1) if later else None
    shutil.rmtree(out, ignore_errors=True)
    shutil.rmtree(out.with_name(f"{out.name}.uptrain"), ignore_errors=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="7b")
    parser.add_argument("--layers", type=int, help="how many are built (default: all)")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--train", choices=("all", "attention", "lora", "qlora"), default="lora")
    parser.add_argument("--tokens", type=int, default=24 * 16_384)
    parser.add_argument("--batch-tokens", type=int, default=16_384)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--processes", type=int, default=1, help="processes under torchrun")
    parser.add_argument(
        "--torchrun", action="store_true", help="also where there is one process (fsdp needs it)"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=300, help="stop after so long")
    parser.add_argument("--name", required=True, help="of the row")
    parser.add_argument("--whole", action="store_true", help="let it write its result")
    parser.add_argument("--prepare", action="store_true", help="make the models and the text, no more")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=RESULTS / "uptrain_large.json")
    parser.add_argument("more", nargs="*", help="further options of uptrain, after --")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if args.prepare:
        prepare(args)
        return
    row = measure(args)
    known = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {"rows": []}
    rows = [r for r in known["rows"] if r["name"] != args.name] + [row]
    write_json(
        args.out,
        {"command": "benchmarks/uptrain_large.py", **provenance(args.device, 0), "rows": rows},
    )
    print(json.dumps(row))


if __name__ == "__main__":
    main()
