"""Training speed: our uptraining step, a plain Trainer script and a nanoGPT-style loop on one model shape.

    python benchmarks/uptrain_throughput.py --gpus 1
    python benchmarks/uptrain_throughput.py --gpus 1 2 4 --parallel fsdp ddp --contenders ours
    python benchmarks/uptrain_throughput.py --tiny            # a try on a CPU

Every measurement is a process (or a torchrun) of its own, on the same machine, one after the other. Rows
are written as they come; `--budget-seconds` starts none that would end later.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _common import RESULTS, provenance, write_json

WORKER = Path(__file__).with_name("_throughput_worker.py")


def jobs(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What to measure, in order: one GPU first, for each objective ours beside its rivals."""
    for gpus in sorted(args.gpus):
        for parallel in ["none"] if gpus == 1 else args.parallel:
            for objective in args.objectives:
                for contender in args.contenders:
                    if not (contender == "nanogpt" and gpus > 1):
                        yield {
                            "contender": contender,
                            "objective": objective,
                            "parallel": parallel,
                            "gpus": gpus,
                        }


def measure(
    job: dict[str, Any], args: argparse.Namespace, timeout: float | None = None, **more: Any
) -> dict[str, Any]:
    """Run one worker and return its record, or what went wrong."""
    job, batch = dict(job), more.pop("batch_tokens", None)
    gpus = job.pop("gpus")
    batch = batch or args.micro * args.window * args.accumulate * gpus  # equal work per GPU
    if job["parallel"] == "none" and gpus == 1:
        launcher = [sys.executable]
    else:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "record.json"
        options = job | {
            "shape": args.shape,
            "groups": args.groups,
            "window": args.window,
            "micro": args.micro,
            "batch_tokens": batch,
            "steps": args.steps,
            "log_every": args.log_every,
            "compile": int(args.compile),
            "residual_dtype": args.residual_dtype,
            "out": out,
        }
        flags = [w for k, v in (options | more).items() for w in (f"--{k.replace('_', '-')}", str(v))]
        began = time.monotonic()
        try:
            done = subprocess.run(
                [*launcher, str(WORKER), *flags], capture_output=True, text=True, timeout=timeout
            )
        except subprocess.TimeoutExpired:
            return job | {"gpus": gpus, "error": f"no result within {timeout:.0f} s"}
        if not out.exists():
            tail = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()][-15:]
            return job | {"gpus": gpus, "error": "\n".join(tail)}
        return json.loads(out.read_text()) | {"wall_seconds": round(time.monotonic() - began, 1)}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The ratios that are claimed: ours to the best rival, distillation to CE, many GPUs to one.

    Cards of one host differ by 1 to 2 %: ratios are taken within one run of this script, and where several
    runs (on several cards, say) hold both sides, the median of their ratios counts.
    """

    def rate(run: Any, **wanted: Any) -> float | None:
        wanted = {"residual_dtype": "float32"} | wanted
        found = [
            r["tokens_per_second"]
            for r in rows
            if r.get("tokens_per_second")
            and r.get("run") == run
            and all(r.get(k) == v for k, v in wanted.items())
        ]
        return max(found) if found else None

    def ratio(above: dict[str, Any], *below: dict[str, Any]) -> float | None:
        """Of one measurement to the best of others."""
        found = []
        for run in {r.get("run") for r in rows}:
            over, best = rate(run, **above), [r for r in (rate(run, **b) for b in below) if r]
            found += [over / max(best)] if over and best else []
        return round(statistics.median(found), 4) if found else None

    one = {"contender": "ours", "parallel": "none", "gpus": 1}
    out: dict[str, float | None] = {}
    for objective in ("ce", "kd"):
        own = one | {"objective": objective}
        rivals = [own | {"contender": c, "residual_dtype": "float32"} for c in ("trainer", "nanogpt")]
        out[f"ours_to_best_rival_{objective}"] = ratio(own, *rivals)
        narrow = own | {"residual_dtype": "bfloat16"}
        out[f"ours_bf16_residual_to_best_rival_{objective}"] = ratio(narrow, *rivals)
        out[f"liger_to_ours_{objective}"] = ratio(own | {"contender": "liger"}, own)
    out["kd_to_ce"] = ratio(one | {"objective": "kd"}, one | {"objective": "ce"})
    for row in rows:
        if row.get("contender") == "ours" and row.get("gpus", 1) > 1 and row.get("tokens_per_second"):
            many = {key: row[key] for key in ("contender", "objective", "parallel", "gpus")}
            key = f"scaling_{row['parallel']}_{row['objective']}_{row['gpus']}"
            out[key] = ratio(many, one | {"objective": row["objective"]})
    return {k: v for k, v in out.items() if v is not None}


def curves(args: argparse.Namespace) -> dict[str, Any]:
    """The loss curve of many GPUs against one at the same global batch."""
    many = max(args.gpus)
    batch = args.micro * args.window * max(args.accumulate, many)
    job = {"contender": "ours", "objective": "ce"}
    one = measure(job | {"parallel": "none", "gpus": 1}, args, batch_tokens=batch)
    all_of_them = measure(job | {"parallel": "fsdp", "gpus": many}, args, batch_tokens=batch)
    found: dict[str, Any] = {"one": one, "many": all_of_them}
    if "losses" in one and "losses" in all_of_them:
        pairs = zip(one["losses"], all_of_them["losses"], strict=True)
        found["largest_difference"] = max(abs(a[1] - b[1]) for a, b in pairs)
    return found


def main() -> None:
    """Measure everything that was asked for and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1])
    parser.add_argument("--parallel", nargs="+", default=["fsdp"], choices=("fsdp", "ddp"))
    parser.add_argument("--objectives", nargs="+", default=["ce", "kd"], choices=("ce", "kd"))
    parser.add_argument(
        "--contenders",
        nargs="+",
        default=["ours", "trainer", "nanogpt"],
        choices=("ours", "liger", "trainer", "nanogpt"),
        help="liger: ours with Liger's kernels, where liger-kernel is installed",
    )
    parser.add_argument("--shape", default="1b")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--micro", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--log-every", type=int, default=4)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--residual-dtype", default="float32", help="of ours; the rivals' is float32")
    parser.add_argument("--curves", action="store_true", help="also compare loss curves across GPU counts")
    parser.add_argument("--tiny", action="store_true", help="a model that a CPU can train, to try the script")
    parser.add_argument("--budget-seconds", type=float, default=float("inf"))
    parser.add_argument(
        "--resume",
        type=Path,
        nargs="+",
        default=[],
        help="files of the same machine whose rows are taken over, the main one first",
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "uptrain_throughput.json")
    args = parser.parse_args()
    if args.tiny:
        args.shape, args.window, args.micro, args.groups = "tiny", 64, 4, 2
        args.steps, args.log_every, args.compile = 12, 2, False
    began, longest = time.monotonic(), 0.0
    others = [json.loads(path.read_text()) for path in args.resume]
    rows: list[dict[str, Any]] = []
    for place, other in enumerate(others):
        rows += [row | {"run": f"{row.get('run', '')}{place}"} for row in other["rows"] if "error" not in row]
    known = [{key: row.get(key) for key in ("contender", "objective", "parallel", "gpus")} for row in rows]
    record: dict[str, Any] = {"command": "benchmarks/uptrain_throughput.py"}
    if all(job in known for job in jobs(args)):  # only taken over
        record["provenance"] = others[0]["provenance"]
    else:
        record["provenance"] = provenance("cpu" if args.tiny else "cuda", 0)
    record["rows"] = rows
    record |= {key: other[key] for other in others for key in ("curves",) if key in other}
    for job in jobs(args):
        if job in known:
            continue
        left = args.budget_seconds - (time.monotonic() - began)
        if left < longest:
            record["left_out"] = "the time allowed was over"
            break
        rows.append(measure(job, args, None if left == float("inf") else left))
        longest = max(longest, rows[-1].get("wall_seconds", 0.0))
        record["summary"] = summary(rows)
        write_json(args.out, record)
        shown = (
            rows[-1].get("error") or f"{rows[-1]['tokens_per_second']:,.0f} tokens/s, MFU {rows[-1]['mfu']}"
        )
        print(" ".join(str(v) for v in job.values()), shown, file=sys.stderr, flush=True)
    if args.curves and "curves" not in record:
        record["curves"] = curves(args)
    record["summary"] = summary(rows)
    write_json(args.out, record)
    print(json.dumps(record["summary"], indent=1))


if __name__ == "__main__":
    main()
