"""Models that others trained, converted and scored by the command line: benchmarks/results/real_NAME.json.

    python benchmarks/real/suite.py WORK NAME … [--text TEXT] [--train-text TEXT] [--uptrain] [--jobs N] [--seconds S]

Names: smollm2 (WORK/models/smollm2-135m-mha back to 3 KV heads, to one that is thrice as wide, and to 1), smollm2-gqa (3 to
1), annalog (8 to 4), whisper-tiny.en (6 to 3 and 2), whisper-base (8 to 4), and both Whispers with `-recorded` (half their heads,
calibrated and uptrained on recorded voices, too). Models come from `build.py`, recordings from `speech.py`, molecules from
`smiles.py`. Rows that the file holds are not measured again: one that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from _common import RESULTS, provenance, write_json


@dataclass(frozen=True)
class Row:
    """A conversion.

    Args:
        name: Of the row.
        groups: KV heads, of wide ones those whose cache they have.
        words: Further options of `convert`.
        uptrain: Options of `uptrain` after it; None for none.
        turn: Rows of a lower one are measured first: what takes longest and carries a claim, then the rest, variants last.
    """

    name: str
    groups: int
    words: tuple[str, ...] = ()
    uptrain: tuple[str, ...] | None = None
    turn: int = 2


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


def case(name: str, given: argparse.Namespace) -> Case:
    """The case of a name."""
    if name.startswith("smollm2"):
        return _smollm2(name, given)
    if name == "annalog":
        smiles = given.work / "smiles"
        read = ("--calibration", str(smiles / "calibration.jsonl"), "--targets", "generate")
        scored = (
            "--data",
            str(smiles / "held_out.jsonl"),
            "--targets",
            "generate",
            "--metrics",
            "exact_match",
        )
        tokens = given.pair_tokens or "1M"
        rows = _seq2seq_rows(4, read, str(smiles / "calibration.jsonl"), tokens, RATES | OTHER_WAYS)
        return Case("annalog", 8, rows, {"molecules": scored})
    return _whisper(name, given)


RETRIED = ("--retry-temperatures", "0.2,0.4,0.6,0.8,1.0")


def _whisper(name: str, given: argparse.Namespace) -> Case:
    """Whisper, calibrated and uptrained on espeak-ng's voices, or on recorded ones too."""
    model, recorded = name.removesuffix("-recorded"), name.endswith("-recorded")
    speech, language = given.work / "speech", () if model.endswith(".en") else ("--source-lang", "en")
    calibration, trained, words = "calibration", "uptraining", language
    if recorded:
        calibration, trained = f"{calibration}-recorded", f"{trained}-recorded"
        words = (*language, *RETRIED)
    read = ("--calibration", str(speech / calibration), "--targets", "generate", *words)
    data = {
        part: ("--data", str(speech / part), "--metrics", "wer,exact_match", *language)
        for part in ("synthetic", "real")
    }
    data["retried"] = (*data["synthetic"], *RETRIED)
    rows = []
    others = {way: words for way, words in OTHER_WAYS.items() if words}  # their default rate is 3e-5
    ways = (RECORDED_RATES if recorded else RATES) | others
    for groups in {"whisper-tiny.en": (3, 2), "whisper-tiny.en-recorded": (3,)}.get(name, (4,)):
        data_of_run, tokens = str(speech / trained), given.pair_tokens or "300k"
        rows += _seq2seq_rows(groups, read, data_of_run, tokens, ways, words)
    if recorded:
        rows = [row for row in rows if "calibrated" in row.name]  # without data all is as in the other file
    return Case(model, 6 if model == "whisper-tiny.en" else 8, rows, data)


def _smollm2(name: str, given: argparse.Namespace) -> Case:
    """The multi-head copy of SmolLM2, from which the grouped model can come back without loss; or the model itself."""
    words = ("--data", given.text or "", "--protocol", "blocks", "--window", "256", "--max-tokens")
    scored = {"text": (*words, str(given.tokens))}
    twin = name == "smollm2"
    rows = []
    for groups in (3, 1) if twin else (1,):
        rows += [
            Row("mean", groups, ("--method", "mean"), turn=3),
            Row("joint, no data", groups, ("--method", "joint"), turn=2 if groups == 3 else 3),
        ]
    if twin:  # one head of 192 dims for the cache of three
        rows.append(Row("joint, wide 3, no data", 3, ("--method", "joint", "--wide", "3")))
    if given.train_text:
        read = ("--method", "joint", "--calibration", given.train_text)
        trained = ("--data", given.train_text, "--tokens", given.text_tokens)
        if twin:  # what was exact already, and what fits make of it
            rows.append(Row("joint, calibrated, without fits", 3, (*read, "--no-reconstruct")))
            rows.append(Row("joint, calibrated", 3, read))
        rows.append(Row("joint, calibrated", 1, read))
        rows.append(Row("joint, calibrated, uptrained", 1, read, trained, turn=0))
    return Case("smollm2-135m-mha" if twin else "smollm2-135m", 9 if twin else 3, rows, scored)


RATES = {" (rate 3e-5)": ("--learning-rate", "3e-5"), " (rate 1e-4)": ("--learning-rate", "1e-4")}
RECORDED_RATES = {" (rate 3e-5)": ("--learning-rate", "3e-5"), " (rate 1e-5)": ("--learning-rate", "1e-5")}
TURNS = {" (rate 3e-5)": 0, " (rate 1e-4)": 1}  # one of a conversion, which the other waits for
OTHER_WAYS: dict[str, tuple[str, ...]] = {"": (), " (attention)": ("--train", "attention")}


def _seq2seq_rows(
    groups: int,
    given: tuple[str, ...],
    data: str,
    tokens: str,
    ways: Mapping[str, tuple[str, ...]],
    language: tuple[str, ...] = (),
) -> list[Row]:
    """The rows of an encoder-decoder at a number of KV heads; `ways` of uptraining, those with a rate first."""
    trained = ("--data", data, "--targets", "generate", "--tokens", tokens, "--no-torch-compile", *language)
    joint = ("--method", "joint", *given)
    return [
        Row("mean", groups, ("--method", "mean"), turn=3),
        Row("joint, no data", groups, ("--method", "joint"), turn=3),
        Row("joint, calibrated", groups, joint),
        *(
            Row(f"joint, calibrated, uptrained{way}", groups, joint, (*trained, *words), TURNS.get(way, 4))
            for way, words in ways.items()
        ),
    ]


class OutOfTime(Exception):
    """The seconds that were given are over."""


def command(deadline: float, *words: str) -> dict[str, Any]:
    """The JSON that a command of the product prints.

    Args:
        deadline: Of `time.monotonic`, when it is stopped.
        words: Of the command.

    Raises:
        RuntimeError: It fails.
        OutOfTime: It was not done in time.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise OutOfTime
    began = time.perf_counter()
    line = [sys.executable, "-m", "mha2gqa", *words, "--json", "-q"]
    try:
        done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=left)
    except subprocess.TimeoutExpired as error:
        raise OutOfTime from error
    print(f"{time.perf_counter() - began:.1f} s: mha2gqa", *words, flush=True)
    if done.returncode:
        raise RuntimeError(f"{done.stderr.strip()[-2000:]} {done.stdout.strip()[-2000:]}")
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
    kept |= {key: generation.get(key) for key in ("wer", "exact_match", "looped") if key in generation}
    if tasks := found.get("tasks"):
        kept["tasks"] = {name: scores["acc"] for name, scores in tasks.items()}
    for name, test in (generation.get("paired") or {}).items():
        kept[f"{name}_difference"] = test | {"against": "original"}  # not where it lies
    return kept


class Measured:
    """A case that is being measured, by several rows at once.

    Args:
        name: Of the case.
        given: The options.
    """

    def __init__(self, name: str, given: argparse.Namespace) -> None:
        self.name, self.given, self.case = name, given, case(name, given)
        self.path: Path = given.results / f"real_{name}.json"
        self.source: Path = given.work / "models" / self.case.model
        self.rows = [Row("original", self.case.heads), *self.case.rows]
        known: dict[str, Any] = json.loads(self.path.read_text()) if self.path.exists() else {}
        origin = json.loads((self.source / "origin.json").read_text())
        about = {"command": "benchmarks/real/suite.py", "model": name, "heads": self.case.heads}
        self.record = about | {"rows": [], "runs": []} | known | {"origin": origin}
        self.writing, self.making = Lock(), defaultdict[Path, Lock](Lock)

    def missing(self) -> list[Row]:
        """The rows that the file does not hold and the options ask for."""
        known, given = {(row["name"], row["groups"]) for row in self.record["rows"]}, self.given
        return [
            row
            for row in self.rows
            if (row.name, row.groups) not in known
            and (row.uptrain is None or given.uptrain)
            and (given.only is None or given.only in row.name)
            and not any(text in row.name for text in given.without)
            and (given.groups is None or row.groups in (given.groups, self.case.heads))
        ]

    def measure(self, row: Row) -> bool:
        """Make and score a row, and write it; whether that was done in time and without an error."""
        line: dict[str, Any] = {"name": row.name, "groups": row.groups}
        began = time.perf_counter()
        try:
            out = self.source if row.name == "original" else self._made(row, line)
            line["seconds"] = round(time.perf_counter() - began, 1)
            if (
                self.name == "smollm2"
                and row.groups == 3
                and row.name.startswith("joint, ")
                and "wide" not in row.name
            ):
                line |= _copies_found(out, self.case.heads, row.groups)
            line["scores"] = self._scores(out)
        except (OutOfTime, RuntimeError) as error:
            print(f"{self.name}, {row.name}, G={row.groups}: {str(error) or 'out of time'}", flush=True)
            return False
        with self.writing:
            self._write(line)
        print(f"{self.name}, {row.name}, G={row.groups}: {json.dumps(line['scores'])}", flush=True)
        return True

    def _write(self, line: dict[str, Any]) -> None:
        run, runs = provenance(self.device, seed=0), self.record["runs"]
        if run not in runs:
            runs.append(run)
        order = [(row.name, row.groups) for row in self.rows]
        rows = [*self.record["rows"], line | {"run": runs.index(run)}]
        rows.sort(key=lambda row: order.index((row["name"], row["groups"])))
        self.record["rows"] = rows
        write_json(self.path, self.record)

    @property
    def device(self) -> str:
        """`cuda` where commands run there."""
        return "cuda" if self.given.device != "cpu" and torch.cuda.is_available() else "cpu"

    def _made(self, row: Row, line: dict[str, Any]) -> Path:
        """The folder of a row, converted and uptrained unless it is there; what calibration used goes into `line`."""
        given = self.given
        stem, _, how = row.name.partition(", uptrained")
        stem = stem.replace(", ", "-").replace(" ", "-")
        out = given.work / "out" / f"{self.name}-g{row.groups}-{stem}"
        calibrated = "--calibration" in row.words
        fewer: tuple[str, ...] = ("--device", given.device)
        if calibrated and given.calibration_tokens:
            fewer += ("--calibration-tokens", str(given.calibration_tokens))
        if calibrated and given.fit and "--no-reconstruct" not in row.words:
            fewer += ("--fit", given.fit)
        with self.making[out]:
            if not out.exists():
                words = ("--groups", str(row.groups), *row.words, *fewer)
                command(given.deadline, "convert", str(self.source), str(out), *words)
        used = json.loads((out / "mha2gqa.json").read_text()).get("calibration") or {}
        line["calibration"] = {key: used[key] for key in KEPT_OF_CALIBRATION if key in used}
        if row.uptrain is None:
            return out
        trained = out.with_name(f"{out.name}-up{how.replace(' ', '-').replace('(', '').replace(')', '')}")
        if not trained.exists():
            workers = f"dataloader_num_workers={given.workers}"
            made = command(
                given.deadline,
                *("uptrain", str(out), str(trained), *row.uptrain, "--device", given.device),
                *("--set", workers),
            )
            line["uptraining"] = {key: made.get(key) for key in KEPT_OF_UPTRAINING if key in made}
            said = [text.replace(f"{given.work}/", "") for text in made.get("warnings", ())]
            line["uptraining"] |= {"warnings": said}
        return Path(trained)

    def _scores(self, out: Path) -> dict[str, Any]:
        """The scores of a model beside its original, by data."""
        found, given = {}, self.given
        for data, words in self.case.scored.items():
            limit = ("--max-examples", str(given.limit)) if given.limit and data != "text" else ()
            other = () if out == self.source else (str(out),)
            models = ("evaluate", str(self.source), *other, "--against", str(self.source))
            how = ("--device", given.device, "--dtype", "float32")
            if data == "text" and given.tasks:
                how += ("--tasks", ",".join(map(str, sorted(given.tasks.glob("*.yaml")))))
            found[data] = _kept(command(given.deadline, *models, *how, *words, *limit)["models"][-1])
        return found


KEPT_OF_CALIBRATION = ("examples", "target_tokens", "unique_tokens", "losses")
KEPT_OF_UPTRAINING = ("train", "budget", "seconds")


def _copies_found(out: Path, heads: int, groups: int) -> dict[str, int]:
    """In how many layers the groups are the heads that are copies of one."""
    layers = json.loads((out / "mha2gqa.json").read_text())["grouping"].values()
    right = true_groups(0, len(layers), heads, groups)
    found = [{frozenset(group) for group in layer} for layer in layers]
    return {"grouping_found": sum(a == b for a, b in zip(found, right, strict=True)), "layers": len(right)}


def main() -> int:
    """Measure what is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--text", help="text that SmolLM2 is scored on")
    parser.add_argument("--train-text", help="text that SmolLM2 is calibrated and uptrained on")
    parser.add_argument("--tokens", type=int, default=16_384, help="scored of the text")
    parser.add_argument("--text-tokens", default="10M", help="uptraining of SmolLM2")
    parser.add_argument("--pair-tokens", help="uptraining of encoder-decoders, in target tokens")
    parser.add_argument("--tasks", type=Path, help="folder of tasks/make.py, which SmolLM2 is asked, too")
    parser.add_argument("--limit", type=int, help="pairs scored at most, where a machine is slow")
    parser.add_argument("--calibration-tokens", type=int, help="as `convert` has it; its default otherwise")
    parser.add_argument("--fit", help="as `convert` has it")
    parser.add_argument("--only", help="rows whose name holds this")
    parser.add_argument("--without", action="append", default=[], help="no rows whose name holds this")
    parser.add_argument("--groups", type=int, help="rows of so many KV heads")
    parser.add_argument("--uptrain", action="store_true", help="also the rows that are uptrained")
    parser.add_argument("--device", default="cpu", help="of every command")
    parser.add_argument("--workers", type=int, default=0, help="processes that read data in uptraining")
    parser.add_argument("--jobs", type=int, default=1, help="rows at once")
    parser.add_argument("--seconds", type=float, default=1e6, help="stop after so many")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    given = parser.parse_args()
    given.deadline = time.monotonic() + given.seconds
    with ThreadPoolExecutor(given.jobs) as pool:
        cases = [Measured(name, given) for name in given.names]
        missing = sorted(((case, row) for case in cases for row in case.missing()), key=lambda x: x[1].turn)
        done = [pool.submit(case.measure, row) for case, row in missing]
    return 0 if all(task.result() for task in done) else 1


if __name__ == "__main__":
    sys.exit(main())
