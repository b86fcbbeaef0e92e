"""How one row of the ledger is measured: text, conversion, uptraining, scores, and what they cost."""

from __future__ import annotations

import argparse
import fcntl
import gc
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from _common import write_json
from _quality_cache import round_cache
from _quality_cells import CE_WEIGHT, FITS, OVER, Cell, start_name, trained_name
from _quality_parts import Parts, split_parts
from _quality_rates import rates_of
from _quality_rows import Shape, convert_flops, model_shape, uptrain_flops
from _quality_schedule import Scratch
from _quality_scores import scores

from mha2gqa.calibration.sampling import generate_text
from mha2gqa.checkpoints.loading import load_model, load_tokenizer, resolve_device
from mha2gqa.conversion.checkpoint import convert
from mha2gqa.data import read_documents, token_blocks
from mha2gqa.reconstruct import ReconstructConfig
from mha2gqa.uptraining import uptrain


class Bench:
    """What all rows of one process share: the parts, the original, the blocks that are scored."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = resolve_device(args.device)
        self.tokenizer = load_tokenizer(args.model)
        with locked(args.work / "parts.lock"):
            self.parts: Parts = split_parts(
                args.text, self.tokenizer, args.work / "parts", tuple(args.part_tokens)
            )
        self.blocks = {
            "valid": token_blocks(self.tokenizer, read_documents([args.valid]), args.window),
            "tuning": token_blocks(self.tokenizer, read_documents([self.parts.path("tuning")]), args.window),
        }
        if args.eval_blocks:
            self.blocks = {name: blocks[: args.eval_blocks] for name, blocks in self.blocks.items()}
        self.scratch = Scratch(args.work)
        self.start_seconds = 0.0  # that the row at hand spent on its conversion
        self.original = self.load(args.model)
        self.shapes: dict[str, Shape] = {str(args.model): model_shape(self.original)}

    def load(self, folder: str | Path) -> Any:
        """A model in float32."""
        return load_model(folder, dtype="float32", device=self.device).requires_grad_(False)

    def shape(self, folder: str | Path) -> Shape:
        """What a forward pass of a checkpoint costs."""
        if str(folder) not in self.shapes:
            self.shapes[str(folder)] = model_shape(load_model(folder, device="cpu"))
        return self.shapes[str(folder)]

    def score(self, folder: str | Path, part: str, cache: str = "") -> dict[str, Any]:
        """Scores of a checkpoint, with a cache of 8 bits where `cache` is `int8`."""
        model = self.original if str(folder) == str(self.args.model) else self.load(folder)
        self.shapes[str(folder)] = model_shape(model)
        if cache:
            round_cache(model)
        made = scores(model, self.original, self.blocks[part])
        del model
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return made

    # --- text ---------------------------------------------------------------------------------------

    def generated(self) -> tuple[str, dict[str, Any]]:
        """Text that the original wrote itself, once for a work folder, and what it cost."""
        path = self.scratch.generated
        with locked(path.with_suffix(".lock")):
            facts = generate_text(
                self.args.model,
                path,
                tokens=self.args.calibration_tokens + self.args.window,
                window=self.args.window,
                seed=0,
                device=str(self.device),
            )
        return str(path), facts

    def uptraining_text(self, cell: Cell) -> str:
        """What a cell's uptraining reads: the part for it, or the tokens that it passes over several times."""
        if not cell.over:
            return self.parts.path("uptraining")
        tokens = self.args.calibration_tokens
        if cell.over != "calibration":
            tokens = self.args.e2e_tokens - tokens
        with locked(self.args.work / "parts.lock"):
            return self.parts.first(OVER[cell.over][0], tokens, self.tokenizer)

    # --- conversion ---------------------------------------------------------------------------------

    def converted(self, cell: Cell, rates: dict[str, float]) -> tuple[Path, dict[str, Any]]:
        """The folder of the converted start and what it cost; made once for a work folder."""
        used = {kind: rate for kind, rate in rates.items() if kind in ("fit", "e2e")}
        name = start_name(cell, used)
        folder, cost_file = self.scratch.start(name)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(f"{name}.lock")):
            if not cost_file.exists():
                began = time.monotonic()
                write_json(cost_file, self._convert(cell, used, folder))
                self.start_seconds = round(time.monotonic() - began, 1)
        return folder, json.loads(cost_file.read_text())

    def _convert(self, cell: Cell, rates: dict[str, float], folder: Path) -> dict[str, Any]:
        refit, reconstruct, words = FITS[cell.fit]
        began, options, before = time.monotonic(), dict[str, Any](), 0.0
        if cell.start != "mean" or refit:
            text = [self.parts.path("calibration")]
            if cell.text == "generate":
                path, facts = self.generated()
                text, before = [path], facts["tokens"] * self.shape(self.args.model).forward(self.args.window)
            tokens = self.args.calibration_tokens
            if cell.fit == "e2e":
                tokens, text = self.args.e2e_tokens, [*text, self.parts.path("uptraining")]
                step = ReconstructConfig().for_window(self.args.window).batch_size * self.args.window
                words = words | {"distill_steps": tokens // step, "distill_rate": rates["e2e"]}
            words = words | ({"learning_rate": rates["fit"]} if reconstruct else {})
            if self.args.fit_steps is not None:
                words |= {"steps": self.args.fit_steps}
            options = {
                "calibration": text,
                "calibration_tokens": tokens,
                "calibration_window": self.args.window,
                "refit": refit,
                "reconstruct": reconstruct,
                "fit": ReconstructConfig(**words),
                "device": str(self.device),
            }
        made = convert(
            self.args.model,
            folder,
            cell.groups,
            method=cell.start,
            seed=cell.seed,
            wide=cell.wide,
            force=True,
            **options,
        )
        return self._convert_cost(folder, made.calibration, before) | {
            "seconds": round(time.monotonic() - began, 1)
        }

    def _convert_cost(self, folder: Path, facts: dict[str, Any], before: float) -> dict[str, Any]:
        """Unique tokens, token visits and FLOPs of a conversion, calibration included."""
        if not facts:
            return {"unique_tokens": 0, "token_visits": 0, "flops": 0.0}
        fit, window = facts.get("fit") or {}, self.args.window
        source, student = self.shape(self.args.model), self.shape(folder)
        unique, visits = facts.get("unique_tokens", 0), facts.get("token_visits", 0)
        whole = fit.get("unit") == "layer"
        trained = fit.get("train") == "layer"
        flops = before + convert_flops(source, student, window, unique, visits, bool(fit), whole, trained)
        ends = facts.get("distilled_token_visits", 0)  # end to end, like uptraining by distillation
        flops += uptrain_flops(student, source, ends, window)
        return {
            "unique_tokens": unique,
            "token_visits": visits + ends,
            "flops": flops,
            "held_out": facts.get("losses", {}),
            "stage_seconds": facts.get("seconds", {}),
            **({"distilled": facts["distilled"]} if "distilled" in facts else {}),
        }

    # --- rows ---------------------------------------------------------------------------------------

    def measure(
        self, cell: Cell, entries: dict[str, dict[str, Any]], flops: dict[str, float]
    ) -> dict[str, Any]:
        """Make what a cell names and score it.

        Args:
            cell: The row.
            entries: Finished rows; those that tuned choose the rates.
            flops: Of the rows that others are to equal.
        """
        self.start_seconds = 0.0
        rates = rates_of(cell, entries)
        folder: Path = self.args.model
        cost: dict[str, Any] = {"unique_tokens": 0, "token_visits": 0, "flops": 0.0, "seconds": 0.0}
        if cell.start != "original":
            folder, cost = self.converted(cell, rates)
        if not cell.objective:
            measured = cost | self.score(folder, cell.part, cell.cache)
        else:
            measured = self._uptrained(cell, folder, cost, rates, flops)
        return measured | {"rates": rates, "start_seconds": self.start_seconds}

    def _uptrained(
        self,
        cell: Cell,
        folder: Path,
        cost: dict[str, Any],
        rates: dict[str, float],
        flops: dict[str, float],
    ) -> dict[str, Any]:
        student, window = self.shape(folder), self.args.window
        teacher = None if cell.objective == "ce" else self.shape(self.args.model)
        tokens = cell.tokens
        if cell.equal_to:
            left = flops[cell.equal_to] - cost["flops"]
            tokens = max(0, int(left / uptrain_flops(student, teacher, 1, window)))
            if tokens < 4 * window:
                return cost | self.score(folder, cell.part, cell.cache) | {"uptrained_tokens": 0}
        out, cost_file = self.scratch.trained(trained_name(cell, rates))
        with locked(out.with_name(f"{out.name}.lock")):
            if not cost_file.exists():
                write_json(cost_file, self._uptrain(cell, folder, out, tokens, rates[cell.objective]))
        budget = json.loads(cost_file.read_text())
        read = (cost["unique_tokens"], budget["unique_tokens"])
        return {
            **cost,
            **self.score(out, cell.part, cell.cache),
            "uptrained_tokens": budget["tokens"],
            "steps": budget["steps"],
            "unique_tokens": max(read) if cell.over == "calibration" else sum(read),
            "token_visits": cost["token_visits"] + budget["tokens"],
            "flops": cost["flops"] + uptrain_flops(student, teacher, budget["tokens"], window),
            "seconds": round(cost["seconds"] + budget["seconds"], 1),
        }

    def _uptrain(self, cell: Cell, folder: Path, out: Path, tokens: int, rate: float) -> dict[str, Any]:
        """Uptrain a conversion; returns the budget and the seconds."""
        began = time.monotonic()
        made = uptrain(
            str(folder),
            str(out),
            [self.uptraining_text(cell)],
            tokens=tokens,
            teacher="none" if cell.objective == "ce" else str(self.args.model),
            ce_weight=CE_WEIGHT if cell.objective == "mix" else 0.0,
            learning_rate=rate,
            batch_tokens=cell.batch or None,
            window=self.args.window,
            seed=cell.seed,
            device=str(self.device),
            holdout=0.0,
            save_steps=1_000_000,
            force=True,
        )
        named = {name: made.budget[name] for name in ("tokens", "steps", "unique_tokens")}
        return named | {"seconds": round(time.monotonic() - began, 1)}


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
