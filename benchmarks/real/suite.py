"""Models that others trained, converted and scored by the command line: benchmarks/results/real_NAME.json.

    python benchmarks/real/suite.py WORK NAME … [--text TEXT] [--tokens N] [--limit N] [--calibration-tokens N]

Names: smollm2 (WORK/models/smollm2-135m-mha back to 3 KV heads, and 3 to 1), annalog (8 to 4), whisper-tiny.en (6 to 3 and
2), whisper-base (8 to 4). Models come from `build.py`, recordings from `speech.py`, molecules from `smiles.py`. TEXT is
what SmolLM2 is scored on. Rows that the file holds are not measured again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from _common import RESULTS, provenance, write_json


@dataclass(frozen=True)
class Row:
    """A conversion.

    Args:
        name: Of the row.
        groups: KV heads.
        words: Further options of `convert`.
        uptrain: Options of `uptrain` after it; None for none.
    """

    name: str
    groups: int
    words: tuple[str, ...] = ()
    uptrain: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Case:
    """A model with its conversions.

    Args:
        model: Folder in WORK/models.
        heads: Its KV heads.
        rows: What is made of it.
        scored: Options of `evaluate` by name of the data.
    """

    model: str
    heads: int
    rows: Sequence[Row]
    scored: dict[str, tuple[str, ...]] = field(default_factory=dict)


def case(name: str, work: Path, text: str | None, tokens: int) -> Case:
    """The case of a name."""
    if name == "smollm2":
        words = ("--data", text or "", "--protocol", "blocks", "--window", "256", "--max-tokens", str(tokens))
        return Case(
            "smollm2-135m-mha",
            9,
            [
                Row("mean", 3, ("--method", "mean")),
                Row("joint, no data", 3, ("--method", "joint")),
                Row("mean", 1, ("--method", "mean")),
                Row("joint, no data", 1, ("--method", "joint")),
            ],
            {"text": words},
        )
    if name == "annalog":
        given = ("--calibration", str(work / "smiles/calibration.jsonl"), "--targets", "generate")
        scored = ("--data", str(work / "smiles/held_out.jsonl"), "--targets", "generate")
        return Case(
            "annalog",
            8,
            _seq2seq_rows(4, given, str(work / "smiles/calibration.jsonl"), "1M"),
            {"molecules": (*scored, "--metrics", "exact_match")},
        )
    speech, language = work / "speech", () if name.endswith(".en") else ("--source-lang", "en")
    given = ("--calibration", str(speech / "calibration"), "--targets", "generate", *language)
    scored = {
        part: ("--data", str(speech / part), "--metrics", "wer,exact_match", *language)
        for part in ("synthetic", "real")
    }
    rows: list[Row] = []
    for groups in (3, 2) if name == "whisper-tiny.en" else (4,):
        rows += _seq2seq_rows(groups, given, str(speech / "uptraining"), "100k", language)
    return Case(name, 6 if name == "whisper-tiny.en" else 8, rows, scored)


def _seq2seq_rows(
    groups: int, given: tuple[str, ...], data: str, tokens: str, language: tuple[str, ...] = ()
) -> list[Row]:
    trained = ("--data", data, "--targets", "generate", "--tokens", tokens, *language)
    return [
        Row("mean", groups, ("--method", "mean")),
        Row("joint, no data", groups, ("--method", "joint")),
        Row("joint, calibrated", groups, ("--method", "joint", *given)),
        Row("joint, calibrated, uptrained", groups, ("--method", "joint", *given), trained),
    ]


def command(*words: str) -> dict[str, Any]:
    """The JSON that a command of the product prints.

    Raises:
        RuntimeError: It fails.
    """
    print("mha2gqa", *words, flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "mha2gqa", *words, "--json", "-q"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-2000:])
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def true_groups(order_seed: int, layers: int, heads: int, groups: int) -> list[set[frozenset[int]]]:
    """Which heads of `packages.repeated_heads` are copies of one, by layer."""
    generator, size = torch.Generator().manual_seed(order_seed), heads // groups
    found = []
    for _ in range(layers):
        order = torch.randperm(heads, generator=generator) // size
        found.append({frozenset((order == g).nonzero()[:, 0].tolist()) for g in range(groups)})
    return found


def _kept(found: dict[str, Any]) -> dict[str, Any]:
    """What a row keeps of a model's scores."""
    names = ("loss", "perplexity", "tokens", "kv_bytes_per_token", "kl", "top1_agreement")
    kept = {name: found.get(name) for name in names}
    generation = found.get("generation") or {}
    kept |= {key: generation.get(key) for key in ("wer", "exact_match") if key in generation}
    if paired := (generation.get("paired") or {}).get("wer"):
        kept["wer_difference"] = paired | {"against": "original"}  # not where it lies
    return kept


def measure(name: str, given: argparse.Namespace) -> None:
    """Make and score what the results file of a case does not hold yet."""
    found, path = case(name, given.work, given.text, given.tokens), RESULTS / f"real_{name}.json"
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    source = given.work / "models" / found.model
    about = {
        "command": "benchmarks/real/suite.py",
        "model": name,
        "heads": found.heads,
        "rows": [],
        "runs": [],
    }
    record = about | record | {"origin": json.loads((source / "origin.json").read_text())}
    known = {(row["name"], row["groups"]) for row in record["rows"]}
    for row in [Row("original", found.heads), *found.rows]:
        left_out = row.uptrain is not None and not given.uptrain
        if left_out or (row.name, row.groups) in known or (given.only and given.only not in row.name):
            continue
        line: dict[str, Any] = {"name": row.name, "groups": row.groups, "run": len(record["runs"])}
        began = time.perf_counter()
        out = source if row.name == "original" else _made(name, source, row, given, line)
        line["seconds"] = round(time.perf_counter() - began, 1)
        if name == "smollm2" and row.groups == 3 and "joint" in row.name:
            line |= _copies_found(out, found.heads, row.groups)
        line["scores"] = _scores(source, out, found, given)
        record["rows"].append(line)
        record["runs"].append(provenance(seed=0))
        write_json(path, record)
        print(json.dumps(line["scores"]), flush=True)


def _made(name: str, source: Path, row: Row, given: argparse.Namespace, line: dict[str, Any]) -> Path:
    """The folder of a row, converted and uptrained unless it is there; what calibration used goes into `line`."""
    stem = row.name.removesuffix(", uptrained").replace(", ", "-").replace(" ", "-")
    out = given.work / "out" / f"{name}-g{row.groups}-{stem}"
    if not out.exists():
        tokens = given.calibration_tokens
        fewer = ("--calibration-tokens", str(tokens)) if tokens and "--calibration" in row.words else ()
        command("convert", str(source), str(out), "--groups", str(row.groups), *row.words, *fewer)
    used = json.loads((out / "mha2gqa.json").read_text()).get("calibration") or {}
    line["calibration"] = {key: used[key] for key in ("tokens", "losses") if key in used}
    if row.uptrain is None:
        return out
    trained = out.with_name(f"{out.name}-up")
    if not trained.exists():
        command("uptrain", str(out), str(trained), *row.uptrain)
    return trained


def _copies_found(out: Path, heads: int, groups: int) -> dict[str, int]:
    """In how many layers the groups are the heads that are copies of one."""
    layers = json.loads((out / "mha2gqa.json").read_text())["grouping"].values()
    right = true_groups(0, len(layers), heads, groups)
    found = [{frozenset(group) for group in layer} for layer in layers]
    return {"grouping_found": sum(a == b for a, b in zip(found, right, strict=True)), "layers": len(right)}


def _scores(source: Path, out: Path, case: Case, given: argparse.Namespace) -> dict[str, Any]:
    """The scores of a model beside its original, by data."""
    found = {}
    for data, words in case.scored.items():
        limit = ("--max-examples", str(given.limit)) if given.limit and data != "text" else ()
        other = () if out == source else (str(out),)
        models = ("evaluate", str(source), *other, "--against", str(source), "--device", "cpu")
        found[data] = _kept(command(*models, *words, *limit)["models"][-1])
    return found


def main() -> None:
    """Measure what is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--text", help="text for SmolLM2")
    parser.add_argument("--tokens", type=int, default=16_384, help="scored of it")
    parser.add_argument("--limit", type=int, help="pairs scored at most, where a machine is slow")
    parser.add_argument("--calibration-tokens", type=int, help="as `convert` has it; its default otherwise")
    parser.add_argument("--only", help="rows whose name holds this")
    parser.add_argument(
        "--uptrain", action="store_true", help="also the rows that are uptrained (a GPU's work)"
    )
    given = parser.parse_args()
    for name in given.names:
        measure(name, given)


if __name__ == "__main__":
    main()
