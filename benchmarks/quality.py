"""The quality table: every start, every stage, every control, judged on the same held-out text.

    python benchmarks/quality.py --model MODEL --train CORPUS --valid VALID.jsonl --out quality.json
    python benchmarks/quality.py … --stages uptrain --groups 4 --only joint --budget-seconds 500

Protocol `blocks`, window 512, float32, all of VALID. The training text is split once by document hash: the
small held-out side is what stage `tune` looks at when it chooses learning rates; VALID is read only for the
rows of the table. A row that is in `--out` (or `--resume`) already is not measured again, and the file is
written after each row, so that an interrupted run loses nothing.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from _common import RESULTS, write_json
from _quality_rows import (
    OBJECTIVES,
    START,
    VARIANTS,
    Row,
    Shape,
    baseline_rows,
    convert_flops,
    convert_rows,
    fit_words,
    model_shape,
    uptrain_flops,
    uptrain_rows,
)
from _quality_table import Table

from mha2gqa.architectures.arch_conversions import differs_for_mqa
from mha2gqa.checkpoints.hf_config import load_config_json
from mha2gqa.checkpoints.loading import load_model, load_tokenizer, resolve_device
from mha2gqa.conversion.checkpoint import convert
from mha2gqa.data import held_out, read_documents, token_blocks
from mha2gqa.evaluation import block_loss
from mha2gqa.reconstruct import ReconstructConfig
from mha2gqa.uptraining import uptrain

STAGES = ("baselines", "convert", "tune", "uptrain")
HOLDOUT = 0.005  # of the training documents: never trained on, looked at to choose learning rates
TUNE_BLOCKS = 512


def log(message: str) -> None:
    """A line on stderr, at once."""
    print(message, file=sys.stderr, flush=True)


class Bench:
    """One model and one corpus, tokenised once, and the converted folders that rows share."""

    protocol_name = "blocks"

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = str(resolve_device(args.device))
        config = load_config_json(args.model)
        self.model_type = str(config.get("model_type"))
        heads = ("num_key_value_heads", "num_attention_heads", "n_head", "num_heads")
        self.num_kv_heads: int = next(config[key] for key in heads if config.get(key))
        tokenizer = load_tokenizer(args.model)
        self.train, heldout = self._split()
        valid = token_blocks(tokenizer, read_documents([args.valid]), args.window)
        limit = args.max_eval_blocks
        self.blocks = {
            "valid": valid[:limit],
            "tune": token_blocks(
                tokenizer,
                read_documents([heldout]),
                args.window,
                max_tokens=(limit or TUNE_BLOCKS) * args.window,
            ),
        }
        self.shapes: dict[str, Shape] = {}

    def _split(self) -> tuple[str, str]:
        """Training text and its held-out side as two files in the work folder, made once."""
        train, heldout = self.args.work / "train.jsonl", self.args.work / "heldout.jsonl"
        if not heldout.exists():
            self.args.work.mkdir(parents=True, exist_ok=True)
            partial = heldout.with_suffix(".partial")
            with train.open("w") as kept, partial.open("w") as held:
                for text in read_documents(self.args.train, limit_bytes=self.args.train_bytes):
                    (held if held_out(text, HOLDOUT) else kept).write(json.dumps({"text": text}) + "\n")
            partial.replace(heldout)
        return str(train), str(heldout)

    def protocol(self) -> dict[str, Any]:
        """How losses are computed; rows are comparable only where this is equal."""
        blocks = self.blocks[self.args.text]
        return {
            "name": self.protocol_name,
            "window": self.args.window,
            "dtype": "float32",
            "blocks": len(blocks),
            "tokens": blocks[:, 1:].numel(),
            "sha256": hashlib.sha256(blocks.numpy().tobytes()).hexdigest(),
        } | ({} if self.args.text == "valid" else {"text": "held-out side of the training text"})

    def loss(self, folder: str | Path, text: str = "") -> float:
        """Nats per token of a checkpoint on `text` (by default what `--text` says); remembers its shape."""
        model = load_model(
            folder, dtype="float32", device=self.device, trust_remote_code=self.args.trust_remote_code
        )
        self.shapes[str(folder)] = self.shape_of(model)
        value = self.score(model, self.blocks[text or self.args.text])
        del model
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return value

    def score(self, model: Any, blocks: torch.Tensor) -> float:
        """Nats per token of a model on blocks `[N, T + 1]`."""
        return block_loss(model, blocks, self.args.eval_batch, self.device)

    def shape_of(self, model: Any) -> Shape:
        """What a forward pass of a model costs."""
        return model_shape(model)

    def shape(self, folder: str | Path) -> Shape:
        """What a forward pass of a checkpoint costs."""
        if str(folder) not in self.shapes:
            model = load_model(folder, device="cpu", trust_remote_code=self.args.trust_remote_code)
            self.shapes[str(folder)] = self.shape_of(model)
        return self.shapes[str(folder)]

    def measure(self, row: Row, rate: float | None) -> dict[str, Any]:
        """Make what the row names (uptraining at learning rate `rate`) and score it."""
        if row.method == "original":
            return {"loss": self.loss(self.args.model), "flops": 0.0, "seconds": 0.0}
        if row.stage in ("baselines", "convert"):
            folder, cost = self.converted(row)
            return {"loss": self.loss(folder), **cost}
        return self.uptrained(row, rate)

    def converted(self, row: Row) -> tuple[Path, dict[str, Any]]:
        """The folder of a converted model and what it cost; made once for a work folder."""
        name = row.key.replace("/", "_")
        folder = self.args.work / "converted" / Path(self.args.model).name / name
        cost_file = folder.with_suffix(".json")
        if not cost_file.exists():
            calibrated = row.stage == "convert" and row.variant != "weights-only"
            refit, reconstruct = VARIANTS.get(row.variant, (False, False))
            options: dict[str, Any] = {}
            apart = "-mqa" if row.groups == 1 and differs_for_mqa(self.model_type) else ""
            if calibrated:
                options = {
                    "calibration": [self.train],
                    "calibration_tokens": self.args.calibration_tokens,
                    "calibration_window": self.args.window,
                    "statistics": str(self.args.work / f"{Path(self.args.model).name}{apart}.statistics"),
                    "refit": refit,
                    "reconstruct": reconstruct,
                    "fit": ReconstructConfig(**fit_words(row.variant)),
                    "device": self.device,
                }
            if row.variant == "neighbours":
                options["grouping"] = "neighbours"
            folder.parent.mkdir(parents=True, exist_ok=True)
            began = time.monotonic()
            result = convert(
                self.args.model,
                folder,
                row.groups,
                method=row.method,
                seed=row.seed,
                force=True,
                **options,
            )
            write_json(cost_file, self._convert_cost(row, folder, result, time.monotonic() - began))
        return folder, json.loads(cost_file.read_text())

    def _convert_cost(self, row: Row, folder: Path, result: Any, seconds: float) -> dict[str, Any]:
        """Tokens, FLOPs and seconds of a conversion, calibration included."""
        about = result.calibration
        if not about:
            return {"flops": 0.0, "seconds": round(seconds, 1), "unique_tokens": 0, "token_visits": 0}
        fit = about.get("fit", {})
        tokens = about.get("unique_tokens", about.get("statistics", {}).get("tokens", 0))
        flops = convert_flops(
            self.shape(self.args.model),
            self.shape(folder),
            self.args.window,
            tokens,
            about.get("token_visits", 0),
            fitted=bool(fit),
            whole_layer=fit.get("unit") == "layer",
        )
        ends = about.get("distilled_token_visits", 0)  # end to end, like uptraining by distillation
        flops += uptrain_flops(self.shape(folder), self.shape(self.args.model), ends, self.args.window)
        return {
            "flops": flops,
            "seconds": round(seconds, 1),
            "unique_tokens": tokens,
            "token_visits": about.get("token_visits", 0) + ends,
            "calibration_losses": about.get("losses", {}),
            "stage_seconds": about.get("seconds", {}),
        }

    def uptrained(self, row: Row, rate: float | None) -> dict[str, Any]:
        """Uptrain from the row's start, score, delete."""
        start, objective = row.method.split("+")
        before: dict[str, Any] = {"flops": 0.0, "seconds": 0.0, "token_visits": 0, "unique_tokens": 0}
        folder = Path(self.args.model)
        if start == "mean":
            folder, before = self.converted(Row("baselines", "mean", row.groups))
        elif start == "joint":
            folder, before = self.converted(Row("convert", "joint", row.groups, row.variant or START))
        out = self.args.work / "uptrained" / row.key.replace("/", "_")
        budget: dict[str, Any] = {"alpha": row.alpha, "original_tokens": self.args.original_tokens}
        if self.args.steps:
            budget = {"tokens": self.args.steps * self.args.batch_tokens}
        began = time.monotonic()
        result = uptrain(
            str(folder),
            str(out),
            [self.train],
            **budget,
            teacher="none" if objective == "ce" else self.args.model,
            ce_weight=0.5 if objective == "mix" else 0.0,
            learning_rate=rate,
            batch_tokens=self.args.batch_tokens,
            window=self.args.window,
            seed=row.seed,
            device=self.args.device,
            holdout=0.0,
            force=True,
            residual_dtype=self.args.residual_dtype,
        )
        seconds = time.monotonic() - began
        tokens = result.budget["tokens"]
        loss = self.loss(out, "tune" if row.stage == "tune" else "")
        teacher = None if objective == "ce" else self.shape(self.args.model)
        flops = uptrain_flops(self.shape(out), teacher, tokens, self.args.window)
        shutil.rmtree(out)
        narrow = self.args.residual_dtype != "float32"
        return {
            "loss": loss,
            **({"residual_dtype": self.args.residual_dtype} if narrow else {}),
            "uptrained_tokens": tokens,
            "steps": result.budget["steps"],
            "unique_tokens": max(result.budget["unique_tokens"], before["unique_tokens"]),
            "token_visits": tokens + before["token_visits"],
            "flops": flops + before["flops"],
            "seconds": round(seconds + before["seconds"], 1),
        }


def planned(args: argparse.Namespace, num_kv_heads: int) -> Iterator[Row]:
    """All rows of the chosen stages, in a sensible order; the original always comes first."""
    wanted = re.compile(args.only or "")
    groups = [g for g in args.groups if g < num_kv_heads and num_kv_heads % g == 0]
    rows: list[Row] = list(baseline_rows(num_kv_heads, groups))
    yield rows.pop(0)
    if "baselines" not in args.stages:
        rows = []
    if "convert" in args.stages:
        rows += convert_rows(groups, args.methods, args.variants, args.seeds)
    if "tune" in args.stages:
        alphas, seeds = args.tune_alphas or args.alphas[:1], args.seeds[:1]
        rows += uptrain_rows(
            "tune",
            num_kv_heads,
            args.tune_groups or groups[:1],
            alphas,
            seeds,
            args.lrs,
            args.objectives,
            args.start,
        )
    if "uptrain" in args.stages:
        seeds = args.seeds[: args.uptrain_seeds]
        rows += uptrain_rows(
            "uptrain", num_kv_heads, groups, args.alphas, seeds, [None], args.objectives, args.start
        )
    yield from (row for row in rows if wanted.search(row.key))


def run(args: argparse.Namespace, bench_class: type[Bench] = Bench) -> None:
    """Measure the rows that are missing while the time lasts."""
    began = time.monotonic()
    transformers.utils.logging.disable_progress_bar()
    args.work.mkdir(parents=True, exist_ok=True)
    bench = bench_class(args)
    table = Table(args, bench.protocol(), bench.num_kv_heads, bench.device)
    left = 0
    for row in planned(args, bench.num_kv_heads):
        if row.key in table.rows:
            continue
        elapsed = time.monotonic() - began
        if args.budget_seconds and elapsed + table.estimate(row) > args.budget_seconds:
            left += 1
            continue
        untuned = row.alpha is not None and row.lr is None
        rate = table.chosen_rate(row, args.lrs[0]) if untuned else row.lr
        started = time.monotonic()
        measured = bench.measure(row, rate)
        measured |= {"learning_rate": rate} if rate is not None else {}
        entry = table.add(row, measured | {"wall_seconds": round(time.monotonic() - started, 1)})
        gap = f", gap {entry['gap']:+.4f}" if "gap" in entry else ""
        log(f"{entry['key']}: loss {entry['loss']:.4f}{gap}, {entry['wall_seconds']} s")
    if table.rows:
        table.write()  # also where all rows were taken over
    log(f"{len(table.rows)} rows in {table.path}; {left} left for want of time")


def parse_args(
    words: Sequence[str] | None = None, description: str | None = __doc__, **defaults: Any
) -> argparse.Namespace:
    """Options, of the command line by default; another benchmark may have other defaults."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", required=True, help="the original checkpoint")
    add("--train", nargs="+", required=True, help="training text: files or folders")
    add("--valid", required=True, help="held-out text, read for the table only")
    add("--out", type=Path, default=RESULTS / "quality.json")
    add("--resume", type=Path, nargs="+", default=[], help="files whose rows are taken over into --out")
    add("--work", type=Path, default=Path("out/quality"), help="scratch folder, reused by the next call")
    add(
        "--text",
        choices=("valid", "tune"),
        default="valid",
        help="tune: choose a configuration, read no VALID",
    )
    add("--stages", nargs="+", choices=STAGES, default=["baselines", "convert", "uptrain"])
    add("--groups", nargs="+", type=int, default=[4, 8, 2, 1])
    add("--methods", nargs="+", default=["joint", "mean", "align"])
    add("--variants", nargs="+", choices=list(VARIANTS), default=["merged", "refit", "refit+reconstruct"])
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add("--uptrain-seeds", type=int, default=1, help="how many of the seeds are uptrained")
    add(
        "--objectives",
        nargs="+",
        choices=OBJECTIVES,
        default=[name for name in OBJECTIVES if not name.endswith("mix")],
        help="ce: next-token loss, kd: distillation, mix: half of each",
    )
    add("--start", choices=list(VARIANTS), default=START, help="where joint+… uptraining starts")
    add("--alphas", nargs="+", type=float, default=[0.01, 0.05])
    add("--original-tokens", type=int, default=6000 * 65536)
    add("--lrs", nargs="+", type=float, default=[1e-3, 5e-4, 2e-3], help="tried by tune; else the first")
    add("--tune-groups", nargs="+", type=int, help="where rates are tried; default the first of --groups")
    add("--tune-alphas", nargs="+", type=float, help="default the first of --alphas")
    add("--batch-tokens", type=int, default=65536)
    add("--residual-dtype", default="float32", help="of uptraining; rows with another go into another --out")
    add("--steps", type=int, help="uptraining steps instead of alpha (a try)")
    add("--calibration-tokens", type=int, default=524288)
    add("--train-bytes", type=int, help="read only so much training text")
    add("--window", type=int, default=512)
    add("--max-eval-blocks", type=int, help="score only the first blocks (a try)")
    add("--eval-batch", type=int, default=32)
    add("--device", default="auto")
    add("--trust-remote-code", action="store_true")
    add("--only", help="regular expression that the key of a row must match")
    add("--budget-seconds", type=float, help="start no row that is expected to end later")
    parser.set_defaults(**defaults)
    return parser.parse_args(words)


if __name__ == "__main__":
    run(parse_args())
