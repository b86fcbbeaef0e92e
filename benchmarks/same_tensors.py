"""Convert, uptrain and score the tiny model, and print what came out: hashes of all tensors, and all losses.

Run before and after a change that must not change results, on one machine, and compare the two files:

    python benchmarks/same_tensors.py --work build/same --out before.json
    python benchmarks/same_tensors.py --work build/same --out after.json --compare before.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any


def command(*words: str) -> dict[str, Any]:
    """Run the product's command on one thread, and parse its JSON."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "mha2gqa", *words, "--json"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: exit {done.returncode}\n{done.stderr}")
    return json.loads(done.stdout)


def kept_losses(losses: dict[str, Any]) -> dict[str, Any]:
    """Losses of a run without its speed."""
    figures = ("step", "loss", "ce_loss", "grad_norm", "learning_rate")
    steps = [{name: entry[name] for name in figures if name in entry} for entry in losses["train"]]
    return losses | {"train": steps}


def digest(folder: Path) -> str:
    """SHA-256 over the weight files of a checkpoint folder."""
    total = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        total.update(path.read_bytes())
    return total.hexdigest()


def measure(work: Path, tiny: Path) -> dict[str, Any]:
    """Every figure of the run."""
    text = str(tiny / "heldout.jsonl")
    out: dict[str, Any] = {}
    calibration = ["--calibration", text, "--calibration-tokens", "16384", "--calibration-window", "128"]
    runs = {
        "mean-g2": ["--groups", "2", "--method", "mean"],
        "joint-g2": ["--groups", "2", "--method", "joint"],
        "align-g2": ["--groups", "2", "--method", "align"],
        "fitted-g2": ["--groups", "2", *calibration, "--fit", "steps=20"],
        "distilled-g1": ["--groups", "1", *calibration, "--fit", "steps=10", "--fit", "distill_steps=5"],
    }
    for name, words in runs.items():
        command("convert", str(tiny), str(work / name), *words, "--seed", "3", "--device", "cpu")
        out[name] = digest(work / name)
    common = ["--data", text, "--window", "128", "--device", "cpu"]
    for name, words in {
        "uptrained-ce": ["--teacher", "none"],
        "uptrained-kd": ["--teacher", str(tiny)],
        "uptrained-lora": ["--teacher", "none", "--train", "lora"],
    }.items():
        settings = ["--tokens", str(20 * 1024), "--set", "batch_tokens=1024", "--seed", "3"]
        result = command("uptrain", str(work / "joint-g2"), str(work / name), *common, *settings, *words)
        out[name] = {"sha256": digest(work / name), "losses": kept_losses(result["losses"])}
    models = [str(tiny), *(str(work / name) for name in out)]
    for protocol in ("blocks", "window", "rolling"):
        scored = command("evaluate", *models, *common, "--protocol", protocol, "--max-tokens", "8192")
        out[protocol] = {Path(m["path"]).name: m["loss"] for m in scored["models"]}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the models; emptied")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--compare", type=Path, help="an earlier file that must be equal")
    arguments = parser.parse_args()
    shutil.rmtree(arguments.work, ignore_errors=True)
    arguments.work.mkdir(parents=True)
    import mha2gqa.assets

    figures = measure(arguments.work, mha2gqa.assets.tiny_model_path())
    arguments.out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if arguments.compare:
        before = json.loads(arguments.compare.read_text(encoding="utf-8"))
        differing = [name for name in before if before[name] != figures.get(name)]
        raise SystemExit(f"differ: {', '.join(differing)}" if differing else 0)


if __name__ == "__main__":
    main()
