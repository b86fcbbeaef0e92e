"""Every example script runs, in small."""

from __future__ import annotations

import json
import runpy
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Arguments that make an example quick; {tmp} is a fresh folder. An example that is not named runs bare.
ARGUMENTS = {
    "pretrain_tiny.py": "--out {tmp}/tiny --device cpu --limit 200000 --steps 2 --batch 2 --window 32 "
    "--vocab 300 --hidden 32 --intermediate 48 --layers 2 --eval-rows 2",
}
OWN_TEST = ["pretrain_tiny.py"]
# Sizes of the notebook, and what they are here.
SMALLER = {
    "limit_bytes=1_000_000": "limit_bytes=200_000",
    "calibration_tokens=16_384": "calibration_tokens=4_096",
    "steps=40, check_every=20": "steps=4, check_every=2",
    "max_tokens=8_192": "max_tokens=1_024",
    "max_new_tokens=24": "max_new_tokens=4",
    "eval_tokens=4_096": "eval_tokens=512",
    " tokens=8_192": " tokens=1_024",
    "batch_tokens=1_024": "batch_tokens=512",
}


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh folder to be in, where temporary ones are made too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def run(name: str, tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script as `python examples/NAME` runs it, which ends well."""
    words = ARGUMENTS.get(name, "").format(tmp=tmp).split()
    monkeypatch.setattr(sys, "argv", [name, *words])
    try:
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    except SystemExit as ended:
        assert not ended.code


@pytest.mark.parametrize("name", sorted({p.name for p in (ROOT / "examples").glob("*.py")} - set(OWN_TEST)))
def test_example_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(name, tmp_path, monkeypatch)
    assert capsys.readouterr().out.strip()


def test_pretrain_tiny_writes_a_folder_with_all_that_the_demo_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("pretrain_tiny.py", tmp_path, monkeypatch)
    assert "held-out loss" in capsys.readouterr().out
    folder = tmp_path / "tiny"
    record = json.loads((folder / "train.json").read_text())
    assert record["tokens"] == 2 * 2 * 32 and record["heldout_loss"] > 0
    held = [json.loads(line) for line in (folder / "heldout.jsonl").read_text().splitlines()]
    assert [row["source"] for row in held] == record["heldout_files"]
    config = json.loads((folder / "config.json").read_text())
    assert config["num_key_value_heads"] == config["num_attention_heads"] == 8
    assert (folder / "tokenizer.json").exists() and (folder / "model.safetensors").exists()


def test_the_notebook_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Its code cells, one after the other, on less text and with fewer steps."""
    cells = json.loads((ROOT / "examples" / "tiny.ipynb").read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    for size, smaller in SMALLER.items():
        assert code.count(size) == 1, f"the notebook no longer says {size}: make it small in another way"
        code = code.replace(size, smaller)
    exec(compile(code, "tiny.ipynb", "exec"), {"__name__": "notebook"})
    assert "8 query heads, 2 key/value heads" in capsys.readouterr().out
    assert not any(cell.get("outputs") for cell in cells), "clear the outputs before committing"
