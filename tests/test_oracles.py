"""Independent tools on the same text and weights: `make oracles` (they are not part of `make test`)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mha2gqa.assets import heldout_path, tiny_model_path
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
