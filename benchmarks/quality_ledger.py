"""The quality bench on text that the original never saw, as a ledger that resumes.

    python benchmarks/quality_ledger.py --model MODEL --text SHARD.jsonl.xz --valid VALID.jsonl \\
        --work /scratch --ledger ledger.jsonl --seconds 540 --workers 2

A call measures the next rows that are missing, most wanted first, and starts none that is expected to end
after `--seconds`. One JSON line a row, keyed by configuration and version of the code; rows of another version
are measured again unless `--any-code`. Several processes (`--workers`, spread over the GPUs) share the ledger.

SHARD is cut into a calibration, a tuning and an uptraining part (`_quality_parts`); rates are chosen on the
tuning part, alike for every method; VALID is read for the rows of the table alone. `summary` prints what
the ledger holds.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers
from _common import gpu_names, hardware
from _quality_bench import Bench
from _quality_cells import CALIBRATION_TOKENS, E2E_TOKENS, Cell, planned
from _quality_ledger import Ledger
from _quality_rates import rates_pending
from _quality_schedule import Scratch, next_cell

from mha2gqa.checkpoints.loading import load_config_json
from mha2gqa.uptraining.interruption import Interrupted


def log(message: str) -> None:
    """A line on stderr, at once."""
    print(message, file=sys.stderr, flush=True)


# --- workers -------------------------------------------------------------------------------------------


def cells_of(args: argparse.Namespace) -> tuple[list[Cell], list[Cell]]:
    """The cells that are wanted, those of the first expression first, and all of the plan."""
    config = load_config_json(args.model)
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    rest = args.e2e_tokens - args.calibration_tokens
    cells = planned(heads, args.groups, tuple(args.tokens), args.seeds, tuple(args.bold), args.wide, rest)
    wanted = {cell.key: cell for word in args.only for cell in cells if re.search(word, cell.key)}
    return list(wanted.values()), cells


def work(args: argparse.Namespace) -> None:
    """Measure rows until none is left that would be done in time."""
    transformers.utils.logging.disable_progress_bar()
    ledger, (cells, plan), bench = ledger_of(args), cells_of(args), None
    scratch, plan = Scratch(args.work), [] if args.untuned else plan
    while True:
        left = args.until - time.time()
        cell, running = next_cell(cells, ledger, scratch, left, plan, args.workers, args.gpus)
        if cell is None:
            if not running:
                return
            time.sleep(args.poll)  # a row that others wait for is being measured
            continue
        if not ledger.claim(cell.key):
            continue
        bench = bench or Bench(args)
        began = time.monotonic()
        try:
            measured = bench.measure(cell, ledger.entries(), ledger.flops())
        except Interrupted:
            return
        except Exception as error:  # one broken row must not cost the others their time
            measured = {"error": f"{type(error).__name__}: {error}"[:2000]}
        seconds = round(time.monotonic() - began, 1)
        ledger.add(row_of(cell, measured, seconds, args, bench))
        log(f"{cell.key}: {measured.get('error') or format(measured['loss'], '.4f')} ({seconds} s)")


def row_of(
    cell: Cell, measured: dict[str, Any], seconds: float, args: argparse.Namespace, bench: Bench
) -> dict[str, Any]:
    """A line of the ledger."""
    numbers = {k: float(f"{v:.7g}") if isinstance(v, float) else v for k, v in measured.items()}
    return {
        **cell.to_dict(),
        **numbers,
        "wall_seconds": seconds,
        "model": Path(args.model).name,
        "window": args.window,
        "blocks": len(bench.blocks[cell.part]),
        "parts": {name: facts["tokens"] for name, facts in bench.parts.facts.items()},
        "gpu": hardware(str(bench.device)).get("gpu", "cpu"),
        "workers": args.workers,
        "date": time.strftime("%Y-%m-%d"),
    }


def ledger_of(args: argparse.Namespace) -> Ledger:
    """The ledger of a call."""
    return Ledger(args.ledger, args.work / "claims", args.resume, args.copy, args.any_code, args.tuned)


def run(args: argparse.Namespace) -> None:
    """Start the workers, each on its GPU, and wait for them."""
    args.work.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(args.work / "claims", ignore_errors=True)
    names = gpu_names() if args.device in ("auto", "cuda") else []
    if args.workers < 2:
        work(args)
        return
    words = [*sys.argv[1:], "--until", str(args.until), "--gpus", str(max(1, len(names)))]
    processes = []
    for i in range(args.workers):
        visible = {"CUDA_VISIBLE_DEVICES": names[i % len(names)]} if names else {}
        processes.append(
            subprocess.Popen([sys.executable, __file__, *words, "--worker"], env=os.environ | visible)
        )
    codes = [process.wait() for process in processes]
    if any(codes):
        log("a worker ended early; its rows are left")


# --- summary -------------------------------------------------------------------------------------------


def summary(entries: dict[str, dict[str, Any]]) -> list[str]:
    """One line a row: loss, gaps, divergence, what it cost."""
    table = [e for e in entries.values() if e["part"] == "valid"]
    plain = [e["loss"] for e in table if e["start"] == "original" and "objective" not in e]
    controls = {
        e["tokens"]: e["loss"] for e in table if (e["start"], e.get("objective")) == ("original", "ce")
    }
    lines = ["loss      gap  to control       kl   unique   visits    FLOPs      s  row"]
    for e in entries.values():
        scored = e["part"] == "valid"
        gap = f"{e['loss'] - plain[0]:+8.4f}" if plain and scored else " " * 8
        control = controls.get(e.get("tokens", 0)) if scored else None
        further = " " * 8 if control is None else f"{e['loss'] - control:+8.4f}"
        lines.append(
            f"{e['loss']:.4f} {gap} {further} {e.get('kl', 0):8.4f} {e.get('unique_tokens', 0) / 1e6:7.2f}M "
            f"{e.get('token_visits', 0) / 1e6:7.2f}M {e.get('flops', 0):8.2e} {e['wall_seconds']:6.0f}  {e['key']}"
        )
    return lines


def parse_args(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", required=True, type=Path, help="the original checkpoint")
    add("--text", nargs="+", default=[], help="text that the original has not seen: files or folders")
    add("--valid", help="text of the table")
    add("--work", type=Path, default=Path("out/quality-ledger"), help="scratch folder, reused")
    add("--ledger", type=Path, default=Path("out/quality-ledger.jsonl"), help="rows are appended to it")
    add("--copy", type=Path, help="the ledger is copied there after each row")
    add("--resume", type=Path, nargs="+", default=[], help="further ledgers whose rows count as done")
    add(
        "--tuned",
        type=Path,
        nargs="+",
        default=[],
        help="ledgers whose tuning rows count, whichever code measured them",
    )
    add("--untuned", action="store_true", help="take default rates where no rate was tried")
    add("--any-code", action="store_true", help="rows of other versions of the code count as done")
    add("--seconds", type=float, default=3600.0, help="start no row that is expected to end later")
    add("--workers", type=int, default=1, help="processes, spread over the GPUs; three to one is best")
    add("--window", type=int, default=2048)
    add("--groups", type=int, nargs="+", default=[4, 8, 2, 1])
    add("--bold", type=int, nargs=2, default=[4, 2], help="G of the bold cells: small budgets, large budget")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the bold cells")
    add("--tokens", type=int, nargs=2, default=[2_713_000, 13_565_000], help="small and large uptraining")
    add("--part-tokens", type=int, nargs=2, default=[600_000, 600_000], help="for calibration, for tuning")
    add("--calibration-tokens", type=int, default=CALIBRATION_TOKENS)
    add("--e2e-tokens", type=int, default=E2E_TOKENS)
    add("--fit-steps", type=int, help="of the regression, instead of the fit's own (a try)")
    add("--eval-blocks", type=int, help="score only the first blocks (a try)")
    add("--only", nargs="+", default=[""], help="only rows whose key one of these finds, in their order")
    add("--wide", type=int, nargs="+", default=[], help="R of wide heads to measure beside plain ones")
    add("--device", default="auto")
    add("--poll", type=float, default=2.0, help=argparse.SUPPRESS)
    add("--summary", action="store_true", help="print the ledger and measure nothing")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    add("--until", type=float, help=argparse.SUPPRESS)
    add("--gpus", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    args.until = args.until or time.time() + args.seconds
    return args


def untuned(args: argparse.Namespace) -> list[str]:
    """Keys of the rows that wait for a rate that nobody tries."""
    ledger, (cells, plan) = ledger_of(args), cells_of(args)
    entries, failed = ledger.entries(), ledger.failed()
    waiting = [c for c in cells if c.key not in entries and rates_pending(c, [], entries, failed, plan)]
    return [cell.key for cell in waiting if not args.untuned]


def main(args: argparse.Namespace) -> None:
    """What the command does."""
    if args.worker:
        work(args)
        return
    if not args.summary:
        run(args)
        if waiting := untuned(args):
            log(
                f"{len(waiting)} rows wait for rates; tune them, or give --tuned or --untuned: {waiting[0]}, …"
            )
    print("\n".join(summary(ledger_of(args).entries())))


if __name__ == "__main__":
    main(parse_args())
