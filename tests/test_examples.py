"""Every example script runs, in small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Arguments that make an example quick; {tmp} is a fresh folder. An example that is not named runs bare.
ARGUMENTS = {
    "pretrain_tiny.py": "--out {tmp}/tiny --device cpu --limit 200000 --steps 2 --batch 2 --window 32 "
    "--vocab 300 --hidden 32 --intermediate 48 --layers 2 --eval-rows 2",
}
OWN_TEST = ["pretrain_tiny.py"]


def run(name: str, tmp: Path) -> str:
    words = ARGUMENTS.get(name, "").format(tmp=tmp).split()
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *words],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
        cwd=tmp,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", sorted({p.name for p in (ROOT / "examples").glob("*.py")} - set(OWN_TEST)))
def test_example_runs(name: str, tmp_path: Path) -> None:
    assert run(name, tmp_path).strip()


def test_pretrain_tiny_writes_a_folder_with_all_that_the_demo_needs(tmp_path: Path) -> None:
    assert "held-out loss" in run("pretrain_tiny.py", tmp_path)
    folder = tmp_path / "tiny"
    record = json.loads((folder / "train.json").read_text())
    assert record["tokens"] == 2 * 2 * 32 and record["heldout_loss"] > 0
    held = [json.loads(line) for line in (folder / "heldout.jsonl").read_text().splitlines()]
    assert [row["source"] for row in held] == record["heldout_files"]
    config = json.loads((folder / "config.json").read_text())
    assert config["num_key_value_heads"] == config["num_attention_heads"] == 8
    assert (folder / "tokenizer.json").exists() and (folder / "model.safetensors").exists()


def test_the_notebook_runs(tmp_path: Path) -> None:
    """Its code cells, one after the other, in a process of their own."""
    cells = json.loads((ROOT / "examples" / "tiny.ipynb").read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    (tmp_path / "notebook.py").write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "notebook.py"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "8 query heads, 2 key/value heads" in done.stdout
    assert not any(cell.get("outputs") for cell in cells), "clear the outputs before committing"
