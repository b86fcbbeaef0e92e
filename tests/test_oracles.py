"""Independent tools on the same text and weights: `make oracles` (they are not part of `make test`)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mha2gqa.assets import heldout_path, tiny_model_path
from mha2gqa.errors import UsageError
from mha2gqa.evaluation import evaluate

pytestmark = pytest.mark.slow


def long_texts(count: int) -> list[str]:
    """Held-out documents, some longer than the window of the embedded model."""
    lines = Path(os.environ.get("ORACLE_TEXT", heldout_path())).read_text(encoding="utf-8").splitlines()
    texts = sorted((json.loads(line)["text"] for line in lines), key=len, reverse=True)
    return texts[:count] + texts[-count:]


@pytest.mark.parametrize("max_length", [64, 256])
def test_rolling_equals_lm_eval(tmp_path: Path, max_length: int) -> None:
    """Word and byte perplexity and bits per byte of lm-eval's `loglikelihood_rolling`, to 1e-4 relative."""
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = os.environ.get("ORACLE_MODEL", str(tiny_model_path()))
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in long_texts(4)), encoding="utf-8")
    task = {
        "task": "local_rolling",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "output_type": "loglikelihood_rolling",
        "test_split": "test",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
    }
    lm = HFLM(
        pretrained=AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
        tokenizer=AutoTokenizer.from_pretrained(model),
        max_length=max_length,
        batch_size=2,
        device="cpu",
    )
    found = lm_eval.simple_evaluate(lm, tasks=[task], task_manager=TaskManager(), bootstrap_iters=0)
    theirs = found["results"]["local_rolling"]
    ours = evaluate(model, file, protocol="rolling", window=max_length, device="cpu", dtype="float32").models[
        0
    ]
    for name in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        print(name, max_length, theirs[f"{name},none"], getattr(ours, name))
        assert getattr(ours, name) == pytest.approx(theirs[f"{name},none"], rel=1e-4)


def test_local_tasks_of_both_models_in_one_result(tmp_path: Path) -> None:
    """`tasks` equals lm-eval called by hand, from a task file, offline."""
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM, AutoTokenizer

    texts = [text.split() for text in long_texts(6)]
    rows = [{"text": " ".join(t[:9]), "choices": [f" {t[9]}", " zebra", " 17"]} for t in texts if len(t) > 9]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    file = tmp_path / "next_word.yaml"
    file.write_text(
        f"""task: next_word
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{text}}}}"
doc_to_choice: choices
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
    )
    model = str(tiny_model_path())
    text = tmp_path / "text.txt"
    text.write_text(" ".join(texts[0]), encoding="utf-8")
    result = evaluate([model, model], text, device="cpu", dtype="float32", tasks=[str(file)])
    lm = HFLM(
        pretrained=AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
        tokenizer=AutoTokenizer.from_pretrained(model),
        device="cpu",
    )
    manager = TaskManager(include_path=str(tmp_path))
    expected = lm_eval.simple_evaluate(lm, tasks=["next_word"], task_manager=manager)["results"]["next_word"]
    for row in result.models:
        assert row.tasks["next_word"]["acc"] == expected["acc,none"] > 1 / 3
    with pytest.raises(UsageError, match="knows no task nonsense"):
        evaluate(model, text, device="cpu", tasks=["nonsense"])
