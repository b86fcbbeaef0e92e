"""Probes that loss hides: copying, key-value recall and a needle, original against results.

    python benchmarks/quality_probes.py --model MODEL --valid VALID.jsonl --results NAME=CHECKPOINT … --out probes.json

Every question is a choice among 16 tokens that stand in the same text (the needle: 16 words), at each of `--lengths`. A
probe counts only where the original is three standard errors above chance. All models answer the same questions.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from _common import provenance, write_json
from _probes import CHOICES, PROBES, Source, answered, counts, standard_error

from mha2gqa.checkpoints.loading import load_model, load_tokenizer, resolve_device
from mha2gqa.data import encode_documents, read_documents


def source_of(args: argparse.Namespace) -> Source:
    """Tokenizer, words and held-out text."""
    tokenizer = load_tokenizer(args.model)
    text = np.concatenate(list(encode_documents(tokenizer, read_documents([args.valid]))))
    return Source.of(tokenizer, text)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each probe and length: the original's share of right answers, and each result's."""
    device, source = resolve_device(args.device), source_of(args)
    asked = {
        (name, length): make(source, length, args.count, args.seed)
        for name, make in PROBES.items()
        for length in args.lengths
    }
    found: dict[str, dict[tuple[str, int], np.ndarray]] = {}
    for name, folder in {"original": str(args.model), **dict(x.split("=", 1) for x in args.results)}.items():
        model = load_model(folder, dtype="float32", device=device).requires_grad_(False)
        found[name] = {key: answered(model, questions) for key, questions in asked.items()}
        print(
            name,
            {f"{k[0]} {k[1]}": round(float(v.mean()), 3) for k, v in found[name].items()},
            file=sys.stderr,
            flush=True,
        )
    return [row_of(key, {name: shares[key] for name, shares in found.items()}) for key in asked]


def row_of(key: tuple[str, int], shares: dict[str, np.ndarray]) -> dict[str, Any]:
    """Shares with their standard errors, and how much each result is below the original, question by question."""
    original = shares["original"]
    row = {
        "probe": key[0],
        "length": key[1],
        "texts": len(original),
        "counts": counts(original),
        "results": {},
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
    add("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048], help="tokens of a text")
    add("--count", type=int, default=200, help="texts of each probe and length")
    add("--seed", type=int, default=0)
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


def main(args: argparse.Namespace) -> None:
    """Measure and write."""
    transformers.utils.logging.disable_progress_bar()
    rows = measure(args)
    record = {"command": "benchmarks/quality_probes.py", "model": args.model.name, "choices": CHOICES}
    record |= {"seed": args.seed, "rows": rows, "provenance": provenance(str(resolve_device(args.device)))}
    write_json(args.out, record)


if __name__ == "__main__":
    main(parse_args())
