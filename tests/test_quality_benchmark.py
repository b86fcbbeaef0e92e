"""The quality benchmark plans every row, counts FLOPs rightly, resumes, and renders its tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import pico_llama

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import _quality_rows as rows
import quality
import tables
import uptrain_throughput

from mha2gqa.assets import demo_texts, tiny_model_path
from mha2gqa.reconstruct import ReconstructConfig


def test_rows_are_unique_and_the_first_seed_of_everything_comes_first() -> None:
    plan = [
        *rows.baseline_rows(16, [4, 1]),
        *rows.convert_rows([4, 1], ["joint", "mean"], ["merged", "reconstruct"], [0, 1, 2]),
        *rows.uptrain_rows("uptrain", 16, [4, 1], [0.01, 0.05], [0], [None]),
    ]
    keys = [row.key for row in plan]
    assert len(set(keys)) == len(keys)
    assert keys[0] == "baselines/original/G16/seed0"
    # 1 + 3*2 baselines; 2 methods x 2 variants x 2 G + 2 special x 2 G + 2 seeds x 2 methods x 2 G;
    # (6 recipes x 2 G + 1 control) x 2 alphas
    assert len(keys) == 7 + (8 + 4 + 8) + 26
    converted = [row for row in plan if row.stage == "convert"]
    assert [row.seed for row in converted] == sorted(row.seed for row in converted)
    assert {row.groups for row in plan if row.method == "original+ce"} == {16}


def test_a_row_keeps_only_the_fields_that_apply() -> None:
    row = rows.Row("uptrain", "joint+kd", 4, alpha=0.05)
    assert row.to_dict() == {
        "key": "uptrain/joint+kd/G4/alpha0.05/seed0",
        "stage": "uptrain",
        "method": "joint+kd",
        "groups": 4,
        "seed": 0,
        "alpha": 0.05,
    }


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"num_key_value_heads": 2}])
def test_forward_flops_equal_what_torch_counts(changes: dict[str, Any]) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = pico_llama(attn_implementation="eager", **changes)
    window, shape = 16, rows.model_shape(model)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.zeros(3, window, dtype=torch.long))
    # Eager attention computes the whole square of scores and mixtures: twice the causal half we count.
    # The rotary table is one multiplication per dimension and position, which torch counts as a matmul.
    rotary = 2 * window * model.config.head_dim // 2
    whole = window * 3 * (shape.forward(window) + 2.0 * window * shape.scores)
    assert whole == pytest.approx(counter.get_total_flops(), abs=3 * rotary)


def test_the_parts_of_a_model_are_told_apart() -> None:
    shape = rows.model_shape(pico_llama(num_key_value_heads=2))
    attention, feed_forward, head = 2 * (32 * 32 * 2 + 2 * 8 * 32), 2 * 3 * 48 * 32, 64 * 32
    assert (shape.attention, shape.head) == (attention, head)
    assert shape.matrix == attention + feed_forward + head
    # Frozen feed-forward: forward and gradient of its input, at 2 FLOPs per parameter each.
    assert shape.fit(16, True) - shape.fit(16, False) == 4 * feed_forward


def test_conversion_counts_the_statistics_pass_and_what_fitting_adds() -> None:
    shape = rows.Shape(matrix=100, attention=40, scores=8, head=10)
    once = shape.forward(10)
    assert rows.convert_flops(shape, shape, 10, 7, 0, fitted=False, whole_layer=False) == 7 * once
    assert rows.convert_flops(shape, shape, 10, 7, 5, fitted=True, whole_layer=False) == pytest.approx(
        7 * 4 * once + 5 * 3 * (2 * 40 + 2 * 10 * 8)
    )


def test_uptraining_costs_three_forwards_and_the_teachers_one() -> None:
    shape = rows.Shape(matrix=100, attention=40, scores=8)
    forward = 2 * 100 + 2 * 10 * 8
    assert shape.forward(10) == forward
    assert rows.uptrain_flops(shape, None, 7, 10) == 7 * 3 * forward
    assert rows.uptrain_flops(shape, shape, 7, 10) == 7 * 4 * forward


def _record() -> dict[str, Any]:
    def row(loss: float, **fields: Any) -> dict[str, Any]:
        return {"loss": loss, "gap": loss - 3.31, "groups": 4, "seed": 0, "run": 1, **fields}

    return {
        "command": "benchmarks/quality.py",
        "model": "m",
        "num_kv_heads": 16,
        "runs": [{"date": "2026-11-27"}, {"date": "2026-11-28"}],
        "protocol": {"name": "blocks", "window": 512, "dtype": "float32", "tokens": 1000},
        "rows": [
            row(3.31, stage="baselines", method="original", groups=16),
            row(8.357, stage="baselines", method="mean"),
            row(9.571, stage="baselines", method="mean", groups=1),
            *(
                row(3.36 + s / 1000, stage="convert", method="joint", variant="reconstruct", seed=s)
                for s in range(3)
            ),
            row(1.0, stage="tune", method="joint+kd", alpha=0.01, lr=1e-3),
            row(3.301, stage="uptrain", method="joint+kd", alpha=0.05),
            row(3.318, stage="uptrain", method="original+ce", alpha=0.05, groups=16),
        ],
    }


def test_the_table_averages_seeds_and_leaves_tuning_out(tmp_path: Path) -> None:
    path = tmp_path / "quality.json"
    path.write_text(json.dumps(_record()))
    text = tables.render(path)
    assert "| loss, nats per token | 4:1 (G=4) | 16:1 (G=1) |" in text
    assert "| mean | 8.357 | 9.571 |" in text
    assert "| joint: regression | 3.361 ± 0.001 |  |" in text
    assert "| joint → distillation, alpha 0.05 | 3.301 |  |" in text
    assert "1.000" not in text
    assert "continued on the same tokens: alpha 0.05: 3.318" in text
    assert "loss of the original 3.310" in text and "window 512, 1,000 tokens, float32" in text


def test_rows_of_another_state_have_a_table_of_their_own(tmp_path: Path) -> None:
    record = _record()
    record["runs"] = [
        {"versions": {"mha2gqa": "1"}, "code": code} for code in ("aaaaaaaaaaaa", "bbbbbbbbbbbb")
    ]
    for row in record["rows"]:
        row["run"] = 0 if row["method"] in ("joint+kd", "original+ce") else 1
    path = tmp_path / "quality.json"
    path.write_text(json.dumps(record))
    by_state = tables.render(path).split("#### ")[1:]
    assert [part.splitlines()[0] for part in by_state] == [
        "mha2gqa 1, code bbbbbbb",
        "mha2gqa 1, code aaaaaaa",
    ]
    assert "| mean | 8.357 | 9.571 |" in by_state[0] and "joint → distillation" not in by_state[0]
    assert "| joint → distillation, alpha 0.05 | 3.301 |" in by_state[1] and "mean" not in by_state[1]
    assert "alpha 0.05: 3.318." in by_state[1]


def test_a_pooling_that_two_stages_measured_counts_once(tmp_path: Path) -> None:
    record = _record()
    record["rows"].append(record["rows"][1] | {"stage": "convert", "variant": "merged"})
    path = tmp_path / "quality.json"
    path.write_text(json.dumps(record))
    assert "| mean | 8.357 | 9.571 |" in tables.render(path)


def test_training_speed_is_rendered_with_its_ratios() -> None:
    row = {
        "contender": "ours", "objective": "ce", "parallel": "none", "gpus": 1, "tokens_per_second": 74_608.4,
        "mfu": 0.5622, "memory_gib": 40.04, "parameters": 1.1e9, "groups": 4, "window": 2048, "micro_batch": 8,
        "device": "GPU",
    }  # fmt: skip
    many = row | {"parallel": "fsdp", "gpus": 2, "tokens_per_second": 140_000.0}
    about = {"versions": {"torch": "2.11.0"}, "hardware": {"gpu": "GPU"}}
    record = {"provenance": about, "rows": [row, {"error": "x"}, many]}
    text = tables.uptrain_throughput(record | {"summary": {"scaling_fsdp_ce_2": 1.8765}})
    assert "Measured on: GPU, torch 2.11.0." in text
    assert "| `mha2gqa`, next token | 1 | 74,608 | 56.2% | 40.0 |" in text
    assert "| `mha2gqa`, next token | 2 fsdp | 140,000 |" in text
    assert text.endswith("| 2 GPUs (FSDP2) to 1, next token | 1.877 |")


def test_ratios_of_training_speed_are_taken_within_a_run() -> None:
    """The second card is 10 % faster for everyone: that must not pass for a difference of contenders."""
    one = {"objective": "ce", "parallel": "none", "gpus": 1, "residual_dtype": "float32"}
    rows: list[dict[str, Any]] = []
    for run, speed in (("0", 1.0), ("1", 1.1), ("2", 1.2)):
        ours = 100.0 * speed * (1.02 if run == "2" else 0.99)
        rows.append(one | {"contender": "ours", "tokens_per_second": ours, "run": run})
        rows.append(one | {"contender": "nanogpt", "tokens_per_second": 100.0 * speed, "run": run})
        rows.append(one | {"contender": "trainer", "tokens_per_second": 80.0 * speed, "run": run})
    narrow = {"contender": "ours", "residual_dtype": "bfloat16", "tokens_per_second": 112.2, "run": "1"}
    liger = {"contender": "liger", "tokens_per_second": 89.1, "run": "0"}
    many = {"contender": "ours", "gpus": 4, "parallel": "fsdp", "tokens_per_second": 356.4, "run": "0"}
    assert uptrain_throughput.summary([*rows, one | narrow, one | liger, one | many, {"error": "x"}]) == {
        "ours_to_best_rival_ce": 0.99,
        "ours_bf16_residual_to_best_rival_ce": 1.02,
        "liger_to_ours_ce": 0.9,
        "scaling_fsdp_ce_4": 3.6,
    }


def test_runs_on_several_gpus_are_rendered() -> None:
    runs = {
        "one": {"gpus": 1, "largest_difference": 0.0, "loss": 3.4},
        "fsdp": {"gpus": 4, "largest_difference": 0.00123, "loss": 3.40004},
        "resumed": {"gpus": [4, 2], "error": "x"},
    }
    about = {"model": "m", "groups": 4, "steps": 60, "batch_tokens": 65536, "note": "one of them failed"}
    text = tables.uptrain_scaling(about | {"provenance": {"hardware": {"gpu": "GPU"}}, "runs": runs})
    assert "| FSDP2 | 4 | 1.2e-03 | 3.40004 |" in text and "| 4, then 2 | failed |" in text
    assert text.endswith("\n\none of them failed")


def test_every_results_file_is_rendered() -> None:
    for path in tables.results():
        # These stand on the page of `benchmarks/engines/page.py`.
        if path.stem.startswith(("engines", "served_", "quantised_cache")):
            continue
        assert tables.render(path).startswith(f"### {path.stem}"), path.name


def _options(tmp: Path, *more: str) -> list[str]:
    train, valid = demo_texts(tmp, limit_bytes=300_000)
    words = f"--model {tiny_model_path()} --train {train} --valid {valid} --device cpu --window 64"
    words += f" --out {tmp}/quality.json --work {tmp}/work --groups 2 --max-eval-blocks 4"
    return [*words.split(), *more]


@pytest.mark.slow
def test_rows_are_measured_once_and_written_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality, "HOLDOUT", 0.2)  # of a few documents
    options = _options(tmp_path, "--stages", "baselines", "uptrain", "--alphas", "0.01", "--steps", "1")
    options += ["--batch-tokens", "128", "--objectives", "mean+kd", "--only", "/mean"]
    quality.run(quality.parse_args(options))
    first = json.loads((tmp_path / "quality.json").read_text())
    by_key = {row["key"]: row for row in first["rows"]}
    assert list(by_key) == [
        "baselines/original/G8/seed0",  # whatever --only says: every gap refers to it
        "baselines/mean/G2/seed0",
        "uptrain/mean+kd/G2/alpha0.01/seed0",
    ]
    pooled, trained = list(by_key.values())[1:]
    assert pooled["gap"] == pytest.approx(pooled["loss"] - first["rows"][0]["loss"], abs=1e-4)
    assert trained["uptrained_tokens"] == trained["token_visits"] == trained["unique_tokens"] == 128
    assert trained["learning_rate"] == 1e-3 and trained["flops"] > 0
    assert first["protocol"]["tokens"] == 4 * 64 and first["runs"][0]["versions"]["torch"]
    quality.run(quality.parse_args([*options, "--only", "baselines"]))
    again = json.loads((tmp_path / "quality.json").read_text())
    assert [row for row in again["rows"] if row["key"] in by_key] == first["rows"]
    assert len(again["rows"]) == 5 and again["rows"][-1]["run"] == 1
    with pytest.raises(SystemExit, match="another model or protocol"):
        quality.run(quality.parse_args([*options, "--window", "32"]))
    joined = ["--out", f"{tmp_path}/joined.json", "--resume", f"{tmp_path}/quality.json", "--only", "nothing"]
    quality.run(quality.parse_args([*options, *joined]))
    assert json.loads((tmp_path / "joined.json").read_text())["rows"] == again["rows"]


@pytest.mark.parametrize(
    ("objective", "teacher", "weight"), [("ce", "none", 0.0), ("kd", "tiny", 0.0), ("mix", "tiny", 0.5)]
)
def test_what_a_row_is_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, objective: str, teacher: str, weight: float
) -> None:
    asked: dict[str, Any] = {}

    def uptrain(*_: Any, **words: Any) -> Any:
        asked.update(words)
        raise KeyboardInterrupt

    words = ["--model", "tiny", "--train", "x", "--valid", "x", "--work", str(tmp_path)]
    bench = object.__new__(quality.Bench)
    bench.args, bench.train = quality.parse_args([*words, "--residual-dtype", "bfloat16"]), "x"
    monkeypatch.setattr(quality, "uptrain", uptrain)
    monkeypatch.setattr(quality.Bench, "converted", lambda self, row: (tmp_path, {}))
    with pytest.raises(KeyboardInterrupt):
        bench.uptrained(quality.Row("uptrain", f"mean+{objective}", 2, alpha=0.01), 1e-3)
    assert (asked["teacher"], asked["ce_weight"], asked["residual_dtype"]) == (teacher, weight, "bfloat16")


def test_a_recipe_takes_the_rate_that_was_best_nearest_to_its_budget(tmp_path: Path) -> None:
    table = object.__new__(quality.Table)
    tuned = [(0.01, 4, 1e-3, 3.5), (0.01, 4, 2e-3, 3.4), (0.05, 4, 1e-3, 3.2), (0.05, 1, 3e-3, 3.1)]
    rows = [
        {"stage": "tune", "method": "joint+kd", "alpha": a, "groups": g, "lr": lr, "loss": x}
        for a, g, lr, x in tuned
    ]
    table.rows = {str(i): row for i, row in enumerate(rows)}

    def chosen(alpha: float, groups: int, method: str = "joint+kd") -> float:
        return table.chosen_rate(quality.Row("uptrain", method, groups, alpha=alpha), 5e-4)

    assert [chosen(0.01, 4), chosen(0.01, 1), chosen(0.05, 8), chosen(0.05, 1)] == [2e-3, 2e-3, 1e-3, 3e-3]
    assert chosen(0.01, 4, "mean+ce") == 5e-4


def test_no_row_starts_that_would_end_too_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "HOLDOUT", 0.2)  # of a few documents
    quality.run(quality.parse_args(_options(tmp_path, "--stages", "baselines", "--budget-seconds", "0.001")))
    assert not (tmp_path / "quality.json").exists()


@pytest.mark.slow
def test_fits_are_compared_on_held_out_training_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variant in rows.VARIANTS:
        ReconstructConfig(**rows.fit_words(variant))
    monkeypatch.setattr(quality, "HOLDOUT", 0.2)  # of a few documents
    monkeypatch.setitem(rows.FITS, "distill", {"steps": 2, "batch_size": 4, "distill_steps": 3})
    words = ["--text", "tune", "--stages", "convert", "--methods", "joint", "--calibration-tokens", "1024"]
    words += ["--only", "convert", "--seeds", "0", "--variants", "refit", "refit+reconstruct+distill"]
    options = _options(tmp_path, *words, "--budget-seconds", "500")
    quality.run(quality.parse_args([*options, "--only", "refit"]))
    record = json.loads((tmp_path / "quality.json").read_text())
    assert "held-out" in record["protocol"]["text"]
    refit, distilled = record["rows"][1:]
    assert distilled["key"] == "convert/joint/G2/refit+reconstruct+distill/seed0"
    assert distilled["loss"] < refit["loss"] and distilled["flops"] > refit["flops"]
    assert distilled["token_visits"] == (2 + 3) * 64  # of 15 blocks, one at a time
