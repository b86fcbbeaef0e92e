"""Local tasks of lm-eval over files of text: every question has one right answer, where it is said to be."""

from __future__ import annotations

import importlib.util
import random
import sys
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
NAMES = ("Arthur", "Berta", "Clemens", "Dorothea", "Emil", "Frieda")
SENTENCES = [
    f"In the year {1800 + i} the old {thing} was shown to {NAMES[i % 6]} and again to {NAMES[(i * 5 + 1) % 6]} near the {place}."
    for i, (thing, place) in enumerate(
        zip(("bridge", "castle", "engine", "garden", "harbour") * 8, ("river", "forest", "meadow", "tower") * 10, strict=True)
    )
]  # fmt: skip
DOCUMENTS = [" ".join(SENTENCES[start : start + 20]) for start in range(0, 20, 4)]


@pytest.fixture(scope="module")
def make() -> ModuleType:
    path = ROOT / "benchmarks" / "real" / "tasks" / "make.py"
    spec = importlib.util.spec_from_file_location("make_tasks", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_tasks"] = module
    spec.loader.exec_module(module)
    return module


def rows(make: ModuleType, name: str, count: int = 12) -> list[dict]:
    return list(islice(make.TASKS[name](DOCUMENTS, random.Random(0)), count))


@pytest.mark.parametrize("name", ["cloze", "order", "entity", "copy", "sum"])
def test_questions_are_the_same_each_time_and_have_different_choices(make: ModuleType, name: str) -> None:
    found = rows(make, name)
    assert found and found == rows(make, name)
    for row in found:
        assert len(set(row["choices"])) == 4 and all(choice.startswith(" ") for choice in row["choices"])
        assert not row["prompt"].endswith(" ")
    assert len({row["answer"] for row in found}) > 1 or len(found) < 4  # not always at one place


def right(row: dict) -> str:
    return row["choices"][row["answer"]]


def test_the_right_answer_is_right(make: ModuleType) -> None:
    for row in rows(make, "sum"):
        a, _, b, _ = row["prompt"].splitlines()[-1].split()
        assert int(right(row)) == int(a) + int(b)
    for row in rows(make, "copy"):
        first, again = row["prompt"].split("\n")
        words = first.removeprefix("List: ").rstrip(".").split(", ")
        said = again.partition(": ")[2].rstrip(",").split(", ")
        assert words[: len(said)] == said and words[len(said)] == right(row)[1:]
    for name in ("cloze", "order", "entity"):
        for row in rows(make, name):
            assert any(row["prompt"] + right(row) in text for text in DOCUMENTS), name
    for row in rows(make, "entity"):
        assert right(row) in row["prompt"]  # it has been named before
        assert all(choice in " ".join(DOCUMENTS) for choice in row["choices"])


def test_they_run_as_tasks(make: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval")
    import json

    from mha2gqa import evaluate

    text = tmp_path / "t.jsonl"
    text.write_text("".join(json.dumps({"text": t}) + "\n" for t in DOCUMENTS))
    monkeypatch.setattr(
        sys, "argv", ["make.py", str(tmp_path / "tasks"), "--text", str(text), "--count", "4"]
    )
    make.main()
    files = tuple(str(tmp_path / "tasks" / f"{name}.yaml") for name in make.TASKS)
    found = evaluate(ROOT / "mha2gqa/assets/tiny-llama", text, max_tokens=64, tasks=files, device="cpu")
    tasks = found.models[0].tasks
    assert tasks is not None and set(tasks) == {f"local_{name}" for name in make.TASKS}
    assert all(0 <= scores["acc"] <= 1 for scores in tasks.values())
