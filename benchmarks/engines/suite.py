"""Convert trained references through the command line and run every result in every engine.

    python benchmarks/engines/suite.py --references DIR [--engines transformers transformers4 ...]

DIR (or MHA2GQA_REFERENCES) holds folders such as `ref-llama-30m`. Engines live in environments under build/engines
(`make engines` makes them). Rows are kept: what has been run is not run again until `--fresh`. The result goes to
benchmarks/results/engines.json, from which docs/serving.md is generated (page.py).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENGINES = ("transformers", "transformers4", "ctranslate2", "onnxruntime", "llama.cpp", "vllm")
DEFAULT = ENGINES[:-1]
LIMIT = 1800  # seconds for one engine and one model, on a busy machine


@dataclass(frozen=True)
class Model:
    """One result: the reference it is made of, and how.

    Args:
        reference: Folder name of the source.
        options: Of `mha2gqa convert`.
        pre_tokenizer: How llama.cpp is to split text.
        tolerance: Of llama.cpp's logits (its GELU reads a table of half precision).
        inside: `llava`: the reference is put into a LLaVA first.
    """

    reference: str
    options: tuple[str, ...]
    pre_tokenizer: str = "gpt-2"
    tolerance: float = 1e-4
    inside: str = ""


MODELS = {
    "llama-g4": Model("ref-llama-30m", ("--groups", "4")),
    "llama-g1": Model("ref-llama-30m", ("--groups", "1")),
    "llama-w2g4": Model("ref-llama-30m", ("--groups", "4", "--wide", "2")),
    "qwen2-g2": Model("ref-qwen2-5m", ("--groups", "2"), pre_tokenizer="qwen2"),
    "olmo2-g2": Model("ref-olmo2-5m", ("--groups", "2")),
    "olmo2-g2-untied": Model("ref-olmo2-5m", ("--groups", "2", "--untie")),
    "phi-g2": Model("ref-gpt-neox-5m", ("--groups", "2")),
    "bigcode-g1": Model("ref-gpt2-6m", ("--groups", "1"), tolerance=5e-3),
    "gpt2-g2": Model("ref-gpt2-6m", ("--groups", "2")),
    "t5-g2": Model("ref-t5-6m", ("--groups", "2")),
    "llava-g4": Model("ref-llama-30m", ("--groups", "4"), inside="llava"),
}
WITH_ORIGINAL = ("llama-g4",)  # assisted decoding and the negative controls need it
EIGHT_BIT = ("llama-g4",)
FORMAT = {"ctranslate2": "ct2", "onnxruntime": "onnx", "llama.cpp": "gguf"}
SCRIPT = {"ctranslate2": "in_ctranslate2.py", "onnxruntime": "in_onnxruntime.py"}


class Suite:
    """Paths, environments and results of one run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.work = args.work.resolve()
        self.results = self.work / "results.jsonl"
        self.results.parent.mkdir(parents=True, exist_ok=True)
        if args.fresh:
            self.results.unlink(missing_ok=True)
        shutil.copyfile(
            args.text or ROOT / "mha2gqa/assets/tiny-llama/heldout.jsonl", self.work / "prompts.jsonl"
        )
        self.environment = {
            **os.environ, "ENGINES_WORK": str(self.work), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HOME": str(self.work / "home"),
        }  # fmt: skip
        self.python = self.work / "venv" / "bin" / "python"

    def rows(self) -> list[dict[str, Any]]:
        """Everything recorded so far."""
        return (
            [json.loads(line) for line in self.results.read_text().splitlines()]
            if self.results.exists()
            else []
        )

    def done(self, engine: str, name: str) -> bool:
        """Whether that engine has been run on that model."""
        return any(row["model"] == name and row.get("of") == engine for row in self.rows())

    def run(self, *command: Any, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command; its end is shown where it fails."""
        done = subprocess.run(
            [str(part) for part in command],
            env=self.environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        if done.returncode and check:
            raise SystemExit(f"{' '.join(map(str, command))}\n{done.stderr[-3000:]}")
        return done

    def convert(self, name: str) -> None:
        """One result, by the command line."""
        model, folder = MODELS[name], self.work / "models" / name
        source = self.args.references / model.reference
        if model.inside:
            inside = self.work / "models" / f"{model.reference}-inside-{model.inside}"
            if not inside.exists():
                self.run(sys.executable, HERE / "make_llava.py", source, inside)
            source = inside
        if not folder.exists():
            say(f"{name}: convert {model.reference}")
            self.run(
                sys.executable,
                "-m",
                "mha2gqa",
                "convert",
                source,
                folder,
                "--method",
                "joint",
                *model.options,
            )
        original = folder.with_name(f"{name}.original")
        if name in WITH_ORIGINAL and not original.exists():
            original.symlink_to(source.resolve())

    def engine(self, engine: str, name: str) -> None:
        """Run one engine on one model, unless that is done; mark its rows with the engine."""
        if self.done(engine, name):
            return
        began, before = time.perf_counter(), len(self.rows())
        try:
            self._engine(engine, name)
        except subprocess.TimeoutExpired:
            self.add(engine, name, {"verdict": "fails", "reason": f"not done after {LIMIT} s"})
        rows = self.rows()
        if len(rows) == before:
            rows.append(
                {"engine": engine, "model": name, "way": "run", "verdict": "fails", "reason": "no result"}
            )
        for row in rows[before:]:
            row["of"] = engine
        self.results.write_text("".join(json.dumps(row) + "\n" for row in rows))
        say(
            f"{engine} {name}: {[row['verdict'] for row in rows[before:]]} [{time.perf_counter() - began:.0f} s]"
        )

    def add(self, engine: str, name: str, row: dict[str, Any]) -> None:
        """A row that no script wrote."""
        with self.results.open("a") as file:
            file.write(json.dumps({"engine": engine, "model": name, **row}) + "\n")

    def _engine(self, engine: str, name: str) -> None:
        if engine == "transformers":
            self.script(sys.executable, "in_transformers.py", self.results, name)
        elif engine == "transformers4":
            older = self.work / "transformers4"
            self.script(self.python, "in_transformers.py", "--older", older, self.results, name)
        elif engine == "vllm":
            self.script(self.work / "vllm" / "bin" / "python", "in_vllm.py", self.results, name)
        elif engine == "llama.cpp":
            for precision in ("f32", "q8_0") if name in EIGHT_BIT else ("f32",):
                if self.export(engine, name, precision):
                    self.script(
                        self.python, "in_llama_cpp.py", self.results, name, precision, MODELS[name].tolerance
                    )
        elif self.export(engine, name):
            self.script(self.python, SCRIPT[engine], self.results, name)

    def script(self, python: Any, script: str, *arguments: Any) -> None:
        """One of the scripts beside this one; a crash is a row, too."""
        before = len(self.rows())
        done = self.run(python, HERE / script, *arguments, check=False)
        if done.returncode and len(self.rows()) == before:
            last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            self.add(script, str(arguments[-1]), {"way": "run", "verdict": "fails", "reason": last[:300]})

    def export(self, engine: str, name: str, precision: str = "") -> bool:
        """The model in the engine's format, by `mha2gqa export`; a refusal is a row."""
        to, model = FORMAT[engine], MODELS[name]
        out = self.work / "exports" / "-".join(filter(None, (name, to, precision)))
        if out.exists():
            return True
        command = [self.python, "-m", "mha2gqa", "export", self.work / "models" / name, out, "--to", to]
        if to == "gguf":
            command += ["--llama-cpp", self.work / "llama.cpp", "--pre-tokenizer", model.pre_tokenizer]
            command += ["--precision", precision]
        done = self.run(*command, check=False)
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.startswith("error:")] or [
                done.stderr[-200:]
            ]
            kind = "lacks" if done.returncode == 2 else "fails"
            self.add(
                engine, name, {"way": "export", "verdict": kind, "reason": said[-1].removeprefix("error: ")}
            )
        return not done.returncode

    def write(self) -> None:
        """All rows with what they depend on."""
        self.args.out.parent.mkdir(parents=True, exist_ok=True)
        data = {
            "command": "python benchmarks/engines/suite.py",
            "seed": 0,
            "hardware": hardware(),
            "versions": versions(),
            "models": {name: [MODELS[name].reference, *MODELS[name].options] for name in self.args.models},
            "rows": self.rows(),
        }
        self.args.out.write_text(json.dumps(data, indent=1) + "\n")


def versions() -> dict[str, str]:
    """Of the product's own environment; each engine's stands in its rows."""
    import torch
    import transformers

    import mha2gqa

    return {
        "python": platform.python_version(),
        "mha2gqa": mha2gqa.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def hardware() -> str:
    """The processor and its cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


def say(text: str) -> None:
    """One line of progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    folder = os.environ.get("MHA2GQA_REFERENCES")
    parser.add_argument("--references", type=Path, default=Path(folder) if folder else None)
    parser.add_argument("--work", type=Path, default=ROOT / "build/engines")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(DEFAULT))
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--text", type=Path, help="JSONL whose documents give the prompts")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/engines.json")
    parser.add_argument("--fresh", action="store_true", help="forget what was run before")
    args = parser.parse_args()
    if args.references is None or not args.references.is_dir():
        parser.error("say where the trained references are: --references DIR, or MHA2GQA_REFERENCES")
    return args


def main() -> None:
    args = arguments()
    sys.path.insert(0, str(ROOT))
    suite = Suite(args)
    for name in args.models:
        suite.convert(name)
        if "transformers" in args.engines or not (suite.work / "references" / f"{name}.npz").exists():
            suite.engine("transformers", name)  # the reference of all others
    for engine in args.engines:
        for name in args.models:
            suite.engine(engine, name)
    suite.write()
    bad = [row for row in suite.rows() if row["verdict"] in ("differs", "not seen", "fails")]
    for row in bad:
        say(f"{row['engine']} {row['model']} {row.get('way')}: {row['verdict']} {row.get('reason', '')}")
    sys.exit(1 if any(row["verdict"] in ("differs", "not seen") for row in bad) else 0)


if __name__ == "__main__":
    main()
