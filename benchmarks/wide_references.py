"""Wide heads on further references: conversions of the same cache bytes after the default fits.

    python benchmarks/wide_references.py --models MODEL … --train CORPUS --valid VALID.jsonl --work SCRATCH

For each model and G: G heads, G/2 heads of twice the width, and 2G heads whose cache is rounded to 8 bits when it is
scored. What is compared are rows of one model: these may have been trained on CORPUS. A row that is there is not
measured again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
import transformers
from _common import RESULTS, provenance, write_json
from _quality_cache import round_cache

from mha2gqa import convert
from mha2gqa.checkpoints.loading import load_model, load_tokenizer, resolve_device
from mha2gqa.data import read_documents, token_blocks
from mha2gqa.evaluation import block_loss

WIDE = 2  # R


def measure(model: Path, args: argparse.Namespace, done: set[tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """The rows of one model that are not `done`: the original, then each G plain, wide and with an 8-bit cache."""
    transformers.utils.logging.disable_progress_bar()
    device = resolve_device(args.device)
    blocks = token_blocks(load_tokenizer(model), read_documents([args.valid]), args.window)[: args.blocks]

    def row(groups: int, wide: int, cache: str, folder: Path, seconds: float) -> dict[str, Any]:
        loaded = load_model(folder, dtype="float32", device=device).requires_grad_(False)
        if cache:
            round_cache(loaded)
        loss = round(block_loss(loaded, blocks, 8, device), 6)
        about = {"model": model.name, "groups": groups, "wide": wide, "cache": cache, "loss": loss}
        return about | {"seconds": round(seconds, 1), "tokens": blocks[:, 1:].numel()}

    if (model.name, 0, 1, "") not in done:
        yield row(0, 1, "", model, 0.0)
    for groups in args.groups:
        for g, wide, cache in ((groups, 1, ""), (groups, WIDE, ""), (2 * groups, 1, "int8")):
            if (model.name, g, wide, cache) in done:
                continue
            out = args.work / f"{model.name}-G{g}-wide{wide}"
            began = time.monotonic()
            if not (out / "mha2gqa.json").exists():
                convert(
                    model, out, g, wide=wide, calibration=[args.train], calibration_window=args.window,
                    calibration_tokens=args.calibration_tokens, device=str(device), force=True,
                    fit={"steps": args.steps} if args.steps else None,
                )  # fmt: skip
            yield row(g, wide, cache, out, time.monotonic() - began)


def rows_of(model: Path, args: argparse.Namespace, done: set[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """`measure` in a process of its own."""
    return list(measure(model, args, done))


def parse_args(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--models", required=True, nargs="+", type=Path)
    add("--train", required=True, help="text that calibrates")
    add("--valid", required=True, help="text that is scored")
    add("--work", required=True, type=Path)
    add("--groups", type=int, nargs="+", default=[2], help="G whose cache is held")
    add("--window", type=int, default=512)
    add("--calibration-tokens", type=int, default=524_288)
    add("--steps", type=int, help="of the regression, instead of the fit's own (a try)")
    add("--blocks", type=int, help="score only the first blocks (a try)")
    add("--jobs", type=int, default=3, help="models at once")
    add("--device", default="auto")
    add("--out", type=Path, default=RESULTS / "wide_references.json")
    return parser.parse_args(words)


def main(args: argparse.Namespace) -> None:
    """Measure what is missing, a process for each model."""
    rows = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    done = {(r["model"], r["groups"], r["wide"], r["cache"]) for r in rows}
    args.work.mkdir(parents=True, exist_ok=True)
    device = "cuda" if args.device in ("auto", "cuda") and torch.cuda.is_available() else "cpu"
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        for future in as_completed(pool.submit(rows_of, model, args, done) for model in args.models):
            rows += future.result()
            record = {"command": "benchmarks/wide_references.py", "window": args.window, "rows": rows}
            write_json(args.out, record | {"provenance": provenance(device, 0)})


if __name__ == "__main__":
    main(parse_args())
