"""The quality benchmark of encoder-decoders scores as `evaluate` does and resumes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from test_seq2seq import WINDOW, saved_t5, texts

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import quality
import quality_t5
import tables

from mha2gqa.checkpoints.loading import load_model
from mha2gqa.evaluation import evaluate
from mha2gqa.uptraining.throughput import forward_flops


@pytest.mark.slow
def test_rows_of_a_pico_t5(tmp_path: Path) -> None:
    model = saved_t5(tmp_path / "t5")
    data = tmp_path / "text.jsonl"
    data.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts() * 20))
    valid = tmp_path / "valid.jsonl"
    valid.write_text("".join(json.dumps({"text": t[:-3]}) + "\n" for t in texts()))
    split = {"heldout.jsonl": texts()[:5], "train.jsonl": texts()}
    (tmp_path / "work").mkdir()
    for name, rows in split.items():
        (tmp_path / "work" / name).write_text("".join(json.dumps({"text": t}) + "\n" for t in rows))
    words = ["--model", str(model), "--train", str(data), "--valid", str(valid), "--work", f"{tmp_path}/work"]
    words += ["--out", f"{tmp_path}/q.json", "--stages", "baselines", "uptrain", "--device", "cpu"]
    words += ["--groups", "2", "--objectives", "mean+kd", "original+ce", "--steps", "2"]
    args = quality.parse_args(
        words, window=WINDOW, batch_tokens=8 * WINDOW, seeds=[0], alphas=[0.05], eval_batch=7
    )
    quality.run(args, quality_t5.SpanBench)
    record = json.loads((tmp_path / "q.json").read_text())
    rows = {row["method"]: row for row in record["rows"]}
    assert set(rows) == {"original", "mean", "first", "random", "mean+kd", "original+ce"}
    assert record["num_kv_heads"] == 8 and record["protocol"]["name"] == "span-corruption"
    right = evaluate(model, str(valid), window=WINDOW, device="cpu").models[0]
    assert rows["original"]["loss"] == pytest.approx(right.loss, rel=1e-5)
    assert record["protocol"]["tokens"] == right.tokens
    assert rows["mean+kd"]["steps"] == 2 and rows["mean+kd"]["loss"] != rows["mean"]["loss"]
    assert "G=2" in tables.quality(record)
    before = (tmp_path / "q.json").read_text()
    quality.run(args, quality_t5.SpanBench)
    assert json.loads((tmp_path / "q.json").read_text())["rows"] == json.loads(before)["rows"]
    bench = quality_t5.SpanBench(args)
    loaded = load_model(model, device="cpu")
    assert bench.shape_of(loaded).forward(WINDOW) == pytest.approx(forward_flops(loaded, WINDOW), rel=0.02)
