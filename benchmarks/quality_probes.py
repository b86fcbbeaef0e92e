"""Probes that loss hides: copying, key-value recall and a needle, original against results.

    python benchmarks/quality_probes.py --model MODEL --valid VALID.jsonl --results NAME=CHECKPOINT … --out probes.json

Every question is a choice among 16 tokens that stand in the same text (the needle: 16 words), at each of `--lengths`. A
probe counts only where the original is three standard errors above chance; results answer the others only with `--all`.
All models answer the same questions. Beside checkpoints, `--rows` names rows of a ledger (keys of `quality_ledger.py`)
whose checkpoints its work folder holds:

    python benchmarks/quality_probes.py … --ledger ledger.jsonl --work /scratch --rows joint/G4/fits/seed0 …

`--resume` takes over what results of an earlier file answered to the same questions.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from _common import provenance, write_json
from _probes import CHOICES, PROBES, Questions, Source, answered, counts, standard_error
from _quality_cells import Cell
from _quality_frontier import row_name
from _quality_ledger import read_lines
from _quality_schedule import Scratch

from mha2gqa.checkpoints.loading import load_model, load_tokenizer, resolve_device
from mha2gqa.data import encode_documents, read_documents

# Results by name, of each probe and length.
Earlier = Mapping[tuple[str, int], Mapping[str, Any]]


def source_of(args: argparse.Namespace) -> Source:
    """Tokenizer, words and held-out text."""
    tokenizer = load_tokenizer(args.model)
    text = np.concatenate(list(encode_documents(tokenizer, read_documents([args.valid]))))
    return Source.of(tokenizer, text)


def checkpoints(args: argparse.Namespace) -> dict[str, str]:
    """Folders of the results by name; rows whose checkpoints are not there are said and left out."""
    found, scratch = dict(word.split("=", 1) for word in args.results), Scratch(args.work)
    entries = {entry["key"]: entry for entry in read_lines(args.ledger) if "error" not in entry}
    for key in args.rows:
        entry = entries.get(key, {})
        folder = scratch.result(Cell.of(entry), entry["rates"]) if "rates" in entry else None
        if folder is None or not folder.exists():
            log(f"{key}: no checkpoint in {args.work}; left out")
        else:
            found[row_name(Cell.of(entry))] = str(folder)
    return found


def log(message: str) -> None:
    """A line on stderr, at once."""
    print(message, file=sys.stderr, flush=True)


def answers(
    name: str, folder: str, asked: dict[tuple[str, int], Questions], device: torch.device
) -> dict[tuple[str, int], np.ndarray]:
    """Each text's share of right answers of one model."""
    model = load_model(folder, dtype="float32", device=device).requires_grad_(False)
    found = {key: answered(model, questions) for key, questions in asked.items()}
    log(f"{name} { {f'{k[0]} {k[1]}': round(float(v.mean()), 3) for k, v in found.items()} }")
    return found


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each probe and length: the original's share of right answers, and each result's.

    Written after each model, so that a call that is ended early leaves what it has.
    """
    device, source = resolve_device(args.device), source_of(args)
    torch.set_float32_matmul_precision("high")  # a share of right answers needs no more
    asked = {
        (name, length): make(source, length, args.count, args.seed)
        for name, make in PROBES.items()
        for length in args.lengths
    }
    earlier = earlier_results(args)
    shares = {"original": answers("original", str(args.model), asked, device)}
    counted = {key: x for key, x in asked.items() if args.all or counts(shares["original"][key])}
    rows: list[dict[str, Any]] = []
    for name, folder in ({} if not counted else checkpoints(args)).items():
        shares[name] = answers(name, folder, counted, device)
        rows = [row_of(key, {n: x[key] for n, x in shares.items() if key in x}, earlier) for key in asked]
        write(args, rows)
    return rows or [row_of(key, {"original": x}, earlier) for key, x in shares["original"].items()]


def earlier_results(args: argparse.Namespace) -> Earlier:
    """What results answered to the same questions in the file of `--resume`, by probe and length; empty without one."""
    if args.resume is None:
        return {}
    record = json.loads(args.resume.read_text(encoding="utf-8"))
    asked = {"model": args.model.name, "seed": args.seed, "choices": CHOICES}
    if {name: record.get(name) for name in asked} != asked or record["rows"][0]["texts"] != args.count:
        raise SystemExit(
            f"{args.resume}: answers to other questions; resume with its model, --seed and --count"
        )
    return {(row["probe"], row["length"]): row["results"] for row in record["rows"]}


def row_of(key: tuple[str, int], shares: dict[str, np.ndarray], earlier: Earlier) -> dict[str, Any]:
    """Shares with their standard errors, and how much each result is below the original, question by question."""
    original = shares["original"]
    row = {
        "probe": key[0],
        "length": key[1],
        "texts": len(original),
        "counts": counts(original),
        "results": dict(earlier.get(key, {})),
    }
    row |= {
        "original": round(float(original.mean()), 4),
        "standard_error": round(standard_error(original), 4),
    }
    for name, found in shares.items():
        if name != "original":
            lost = original - found
            error = float(lost.std(ddof=1)) / len(lost) ** 0.5
            row["results"][name] = {
                "share": round(float(found.mean()), 4),
                "lost": round(float(lost.mean()), 4),
                "standard_error": round(error, 4),
            }
    return row


def parse_args(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", required=True, type=Path, help="the original")
    add("--valid", required=True, help="text that needles are hidden in")
    add("--results", nargs="+", default=[], metavar="NAME=CHECKPOINT")
    add(
        "--rows",
        nargs="+",
        default=[],
        metavar="KEY",
        help="rows of the ledger whose checkpoints are in --work",
    )
    add("--ledger", type=Path, default=Path("out/quality-ledger.jsonl"))
    add("--work", type=Path, default=Path("out/quality-ledger"), help="scratch folder of the ledger")
    add("--all", action="store_true", help="let results answer probes that do not count, too")
    add("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048], help="tokens of a text")
    add("--count", type=int, default=200, help="texts of each probe and length")
    add("--seed", type=int, default=0)
    add("--resume", type=Path, help="an earlier file whose results answered the same questions")
    add("--device", default="auto")
    add("--out", type=Path, default=Path("benchmarks/results/quality_probes.json"))
    args = parser.parse_args(words)
    limit = load_positions(args.model)
    if limit and max(args.lengths) > limit:
        parser.error(
            f"--lengths {max(args.lengths)}: longer than the model's {limit} positions; give at most {limit}"
        )
    return args


def load_positions(model: Path) -> int | None:
    """The positions that the original was built for."""
    from mha2gqa.checkpoints.hf_config import load_config_json, longest_context

    return longest_context(load_config_json(model))


def write(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """The results file."""
    record = {"command": "benchmarks/quality_probes.py", "model": args.model.name, "choices": CHOICES}
    record |= {"seed": args.seed, "rows": rows, "provenance": provenance(str(resolve_device(args.device)))}
    write_json(args.out, record)


def main(args: argparse.Namespace) -> None:
    """Measure and write."""
    transformers.utils.logging.disable_progress_bar()
    write(args, measure(args))


if __name__ == "__main__":
    main(parse_args())
