"""plan, run, sweep, demo, push, bench: from a recipe to a report, resumable, and honest about what they check."""

from __future__ import annotations

import functools
import inspect
import json
import math
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mha2gqa
from mha2gqa.calibration import sampling
from mha2gqa.calibration.sampling import generate_text
from mha2gqa.checkpoints.fingerprints import source_fingerprint
from mha2gqa.checkpoints.reader import open_checkpoint
from mha2gqa.cli import commands
from mha2gqa.cli.exit_codes import run_command
from mha2gqa.commands import demo as demo_module
from mha2gqa.commands.builtin import resolve_data, resolve_model
from mha2gqa.commands.describe import describe
from mha2gqa.commands.estimate import plan, suggested
from mha2gqa.commands.estimate_warnings import parallel_warnings
from mha2gqa.commands.push import push
from mha2gqa.commands.run_recipe import run
from mha2gqa.commands.stages import StageRecords
from mha2gqa.commands.sweep import Cell, grid, sweep
from mha2gqa.config import (
    Recipe,
    load_recipe,
    recipe_from_dict,
)
from mha2gqa.conversion.checkpoint import convert
from mha2gqa.errors import CheckpointError, GateError, Mha2gqaError, UnsupportedModelError, UsageError
from mha2gqa.report.terminal import render
from tests.conftest import pico_llama, word_tokenizer
from tests.families import stock_model

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "tests" / "configs"
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
OWN_FLAGS = {"refit", "regress", "seed", "betas"}  # set elsewhere, or not worth a key
BUNDLED = {
    "olmo-3-7b-gqa8": "olmo-3-7b",
    "llama-2-7b-gqa8": "llama-2-7b",
    "qwen1.5-7b-gqa8": "qwen1.5-7b",
    "olmo-7b-gqa8": "olmo-7b",
    "t5-xl-gqa8": "t5-xl",
    "olmo-2-7b-gqa8": "olmo-2-7b",
    "qwen1.5-72b-gqa8": "qwen1.5-72b",
    "command-r-35b-gqa8": "command-r-35b",
    "codellama-7b-gqa8": "codellama-7b",
    "deepseek-7b-gqa8": "deepseek-llm-7b",
    "phi-3-mini-gqa8": "phi-3-mini-4k",
    "gemma-7b-gqa4": "gemma-7b",
    "whisper-large-v3-gqa5": "whisper-large-v3",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pico Llama with a tokenizer."""
    folder = tmp_path_factory.mktemp("model") / "pico"
    pico_llama().save_pretrained(folder)
    word_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty documents of random words."""
    file = tmp_path_factory.mktemp("text") / "text.jsonl"
    chance = random.Random(0)
    lines = [" ".join(f"w{chance.randrange(57)}" for _ in range(80)) for _ in range(60)]
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines), encoding="utf-8")
    return file


def recipe_for(model: Path, text: Path, out: Path, **sections: Any) -> dict[str, Any]:
    """A recipe of seconds."""
    base: dict[str, Any] = {
        "source": str(model),
        "output": str(out),
        "convert": {"groups": 2, "method": "mean"},
        "evaluate": {"data": str(text), "protocol": "blocks", "window": 32, "max_tokens": 640},
        "uptrain": {
            "data": str(text), "tokens": 512, "original_tokens": 51200, "window": 32, "batch_tokens": 128,
            "eval_tokens": 128, "eval_steps": 2, "logging_steps": 1, "learning_rate": 1e-3,
        },
        "report": {"batch": 4, "context": 64},
    }  # fmt: skip
    return base | sections


# --- plan ------------------------------------------------------------------------------------------------


def test_plan_counts_what_convert_writes(model: Path, tmp_path: Path) -> None:
    found = plan(model, groups=2, batch=3, context=100)
    convert(model, tmp_path / "out", 2)
    written = open_checkpoint(tmp_path / "out")
    assert found.bytes == {"before": open_checkpoint(model).nbytes, "after": written.nbytes}
    assert found.parameters["after"] == sum(math.prod(shape) for shape in written.shapes.values())
    assert found.exact and found.layers == 2 and found.valid_groups == [1, 2, 4, 8]
    cache = 2 * 2 * 2 * 4 * 4  # layers, k and v, heads, head_dim, bytes
    assert found.kv_bytes_per_token["after"] == cache
    assert found.decode["kv_bytes"]["after"] == cache * 3 * 100
    embedding = written.tensors["model.embed_tokens.weight"].nbytes
    assert found.decode["step_bytes"]["after"] == written.nbytes - embedding + cache * 300
    assert "--groups 2" in found.recommended


def test_plan_says_what_loss_does_not_show_where_the_cache_shrinks(model: Path) -> None:
    said = (
        "fewer KV heads cost a small reference model more of its recall of earlier text than its loss showed"
    )
    assert said in render(plan(model, groups=2).to_dict())
    assert said not in render(plan(model, groups=8).to_dict())


def test_plan_names_the_better_start_of_a_distillation(model: Path) -> None:
    said = "distilled on 9M tokens or more, --effort quick is the better start"
    assert said in render(plan(model, groups=2).to_dict())
    assert said not in render(plan(model, groups=2, effort="quick").to_dict())


def test_plan_needs_only_a_config(model: Path, tmp_path: Path) -> None:
    shutil.copy(model / "config.json", tmp_path / "config.json")
    for source in (tmp_path, tmp_path / "config.json"):
        found, exact = plan(source, groups=4), plan(model, groups=4)
        assert not found.exact
        assert (found.bytes, found.parameters, found.options) == (
            exact.bytes,
            exact.parameters,
            exact.options,
        )


@pytest.mark.parametrize(
    ("name", "gigabytes"), [("llama-2-7b", 13.48), ("qwen1.5-7b", 15.44), ("olmo-7b", 27.55)]
)
def test_plan_of_public_configs(name: str, gigabytes: float) -> None:
    """Sizes are the published ones; a full-parameter AdamW run of 7B does not fit one 80 GB device."""
    found = plan(CONFIGS / f"{name}.json", groups=8, batch=16, context=2048)
    assert found.bytes["before"] / 1e9 == pytest.approx(gigabytes, rel=2e-3)
    itemsize = 4 if name == "olmo-7b" else 2
    assert found.kv_bytes_per_token == {"before": 2 * 32 * 4096 * itemsize, "after": 2 * 32 * 1024 * itemsize}
    sets = found.memory["sets"]
    assert sets["all"]["bytes"] > 80e9 > sets["lora"]["bytes"] and sets["lora"]["gpus"] == 1
    assert sets["all"]["trained_parameters"] == found.parameters["after"]
    # Frozen in 4 bits: q and o of width 4096 and three MLP matrices; tables stay, k and v are trained.
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    narrow = 32 * (2 * 4096 * 4096 + 3 * 4096 * config["intermediate_size"])
    assert sets["lora"]["bytes"] - sets["qlora"]["bytes"] == pytest.approx(narrow * (2 - 0.5159), rel=1e-4)
    ceiling = found.decode["tokens_per_second_ceiling"]
    assert ceiling["after"] == pytest.approx(16 * 3.35e12 / found.decode["step_bytes"]["after"], rel=1e-3)


def test_plan_says_where_the_context_ends_and_refuses_nothing_as_a_size() -> None:
    config = CONFIGS / "llama-2-7b.json"
    assert plan(config, context=4096).warnings == []
    (warning,) = plan(config, context=5000).warnings
    assert warning == "--context 5,000 is longer than the 4,096 tokens the model was built for"
    for name in ("context", "gpu_memory", "bandwidth"):
        with pytest.raises(UsageError, match=rf"^{name}: must be > 0, not 0"):
            plan(config, **{name: 0})


def test_plan_of_a_mixture_moves_the_experts_that_are_asked(tmp_path: Path) -> None:
    config = {"model_type": "mixtral", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 8,
              "num_experts_per_tok": 2, "vocab_size": 64, "dtype": "bfloat16"}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = plan(tmp_path, groups=4, context=10)
    experts = 2 * 2 * 8 * 3 * 32 * 64  # bytes, layers, experts, matrices
    cache = 2 * 2 * 2 * 4 * 8 * 10  # bytes, layers, k and v, heads, width, tokens
    read = found.bytes["after"] - experts * 6 // 8 - 2 * 64 * 32  # the input embedding is not
    assert found.decode["step_bytes"]["after"] == read + cache


@pytest.mark.parametrize("changes", [{"model_type": "frob"}, {"num_attention_heads": 33}])
def test_a_config_that_cannot_be_built_is_refused_in_one_short_line(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    config = json.loads((CONFIGS / "llama-2-7b.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=r"frob|33") as caught:
        plan(tmp_path)
    assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)


def test_suggested_groups_respect_tensor_parallelism() -> None:
    assert suggested([1, 2, 4, 8, 16, 32], 32, 1) == 8
    assert suggested([1, 2, 4, 8, 16, 32], 32, 16) == 16
    assert suggested([1, 2, 4, 5, 10, 20, 40], 40, 1) == 10
    assert suggested([1, 71], 71, 1) == 71  # a quarter of 71 is nearer to 71 than to 1, as a ratio
    powers = [1, 2, 4, 8, 16, 32]
    assert not any(parallel_warnings(*case, powers) for case in ((8, 32, 8), (8, 32, 4), (4, 32, 1)))
    assert parallel_warnings(2, 32, 8, powers) == [
        "--tp 8 stores each of 2 KV heads 4 times: G = 8 costs the same cache per rank"
    ]
    assert parallel_warnings(5, 40, 4, [1, 2, 4, 5, 8, 10, 20, 40]) == [
        "5 KV heads cannot be split evenly over --tp 4 ranks: choose G = 4, 8, 20, 40"
    ]
    assert parallel_warnings(4, 8, 3, [1, 2, 4, 8]) == [
        "8 query heads cannot be split over --tp 3 ranks; 2, 4, 8 can"
    ]


def test_plan_refuses_as_convert_does(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="1, 2, 4, 8"):
        plan(model, groups=3)
    config = json.loads((model / "config.json").read_text()) | {"model_type": "deepseek_v3"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(model / "model.safetensors", tmp_path)
    with pytest.raises(UsageError, match="model_type 'deepseek_v3'"):
        plan(tmp_path)


def test_describe_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        describe(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no model_type"):
        describe(tmp_path)


# --- recipes match what they call ------------------------------------------------------------------------


def test_public_names_are_importable_and_lazy() -> None:
    assert set(mha2gqa.__all__) == set(mha2gqa._EXPORTS) | {"__version__"}
    for name in mha2gqa.__all__:
        assert getattr(mha2gqa, name) is not None
    for name in ("convert", "evaluate", "uptrain", "run", "plan", "sweep", "verify", "convert_model"):
        assert inspect.isfunction(getattr(mha2gqa, name)) and getattr(mha2gqa, name).__doc__
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = mha2gqa.nonsense


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_every_shipped_recipe_passes_a_dry_run(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(path)
    bundled = BUNDLED.get(path.stem)
    assert recipe.source.startswith("builtin:") or bundled, f"{path.stem} needs a config in tests/configs"
    overrides = [f"source={CONFIGS / bundled}.json"] if bundled else []
    job = load_recipe(path, overrides)
    monkeypatch.chdir(tmp_path)
    done = (run if recipe.sweep is None else sweep)(job, dry_run=True)
    assert done.dry_run and [s["status"] for s in done.stages] == ["planned"] * len(done.stages)
    assert {"convert", "evaluate", "report"} <= {stage["name"] for stage in done.stages}
    assert not list(tmp_path.iterdir()), "a dry run writes nothing"


# --- run -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(
    model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[dict[str, Any], Any]]:
    """A recipe and its first run."""
    recipe = recipe_for(model, text, tmp_path_factory.mktemp("run") / "out")
    yield recipe, run(recipe)


def test_run_does_the_whole_job(finished: tuple[dict[str, Any], Any]) -> None:
    recipe, result = finished
    out = Path(recipe["output"])
    assert [s["name"] for s in result.stages] == ["convert", "evaluate", "uptrain", "evaluate-uptrained"]
    assert {s["status"] for s in result.stages} == {"done"}
    assert [row["role"] for row in result.models] == ["original", "converted", "uptrained"]
    assert len({row["sha256"] for row in result.models}) == 1, "all on the same tokens"
    before, after = (row["kv_bytes_per_token"] for row in result.models[:2])
    assert before == 4 * after and result.models[2]["kv_bytes_per_token"] == after
    assert load_recipe(out / "recipe.yaml") == recipe_from_dict(recipe)
    report = json.loads((out / "report.json").read_text())
    assert report["curves"]["training"][-1][0] == 512 and report["budget"]["alpha"] == pytest.approx(0.01)
    table = {row["role"]: row["loss"] for row in report["models"]}
    assert report["curves"]["evaluation"] == [[0.0, table["converted"]], [512.0, table["uptrained"]]]
    assert {row["role"]: row["loss"] for row in result.models} == table
    assert report["num_kv_heads"] == [8, 2] and len(report["layers"]) == 2
    page = (out / "report.html").read_text()
    assert (
        "uptraining tokens" in page
        and all(f">{table[role]:.4f}<" in page for role in ("converted", "uptrained"))
        and f">original {table['original']:.4f}<" in page
        and "Which heads share" in page
        and "KV cache at batch 4, context 64" in page
    )
    card = (out / "uptrained" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers")
    written = [*out.glob("*.md"), *out.glob("*.html"), *out.glob("*/README.md")]
    assert len(written) == 4  # page, Markdown, and a card for either checkpoint
    for file in written:
        assert str(out.parent) not in file.read_text(), f"{file} holds a path of this machine"
    assert 'AutoModelForCausalLM.from_pretrained("PATH_OR_NAME", dtype="auto")' in card
    assert json.loads((out / "result.json").read_text())["models"] == json.loads(json.dumps(result.models))
    assert "after uptraining" in result.headline


def test_run_again_skips_what_is_finished(finished: tuple[dict[str, Any], Any]) -> None:
    recipe, first = finished
    again = run(recipe)
    assert {s["status"] for s in again.stages} == {"skipped"} and again.models == first.models


def test_a_changed_evaluation_is_done_again_and_checkpoints_are_kept(
    finished: tuple[dict[str, Any], Any],
) -> None:
    recipe, first = finished
    again = run(recipe | {"evaluate": recipe["evaluate"] | {"max_tokens": 320}})
    assert [s["status"] for s in again.stages] == ["skipped", "done", "skipped", "done"]
    assert again.models[0]["tokens"] == 320 and first.models[0]["tokens"] == 640
    run(recipe)


def test_a_changed_conversion_is_refused_by_name(finished: tuple[dict[str, Any], Any]) -> None:
    recipe, _ = finished
    with pytest.raises(
        UsageError, match=r"stage convert of another recipe \(changed: convert.groups: 2 -> 4\)"
    ):
        run(recipe | {"convert": {"groups": 4, "method": "mean"}})
    with pytest.raises(
        UsageError, match=r"stage uptrain of another recipe \(changed: uptrain.tokens: 512 -> 640\)"
    ):
        run(recipe | {"uptrain": recipe["uptrain"] | {"tokens": 640}})


def test_a_tampered_checkpoint_is_noticed(finished: tuple[dict[str, Any], Any], tmp_path: Path) -> None:
    recipe, _ = finished
    out = tmp_path / "out"
    shutil.copytree(recipe["output"], out)
    (out / "converted" / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"changed: its files"):
        run(recipe | {"output": str(out)})


def test_force_does_changed_stages_again(model: Path, text: Path, tmp_path: Path) -> None:
    recipe = recipe_for(model, text, tmp_path / "out")
    del recipe["uptrain"]
    run(recipe)
    again = run(recipe | {"convert": {"groups": 4, "method": "first"}}, force=True)
    assert [s["status"] for s in again.stages] == ["done", "done"]
    assert open_checkpoint(tmp_path / "out" / "converted").config["num_key_value_heads"] == 4
    assert "conversion, without any training" in again.headline


def test_gate_fails_after_everything_is_written(model: Path, text: Path, tmp_path: Path) -> None:
    recipe = recipe_for(model, text, tmp_path / "out", report={"max_ppl_ratio": 0.5})
    del recipe["uptrain"]
    with pytest.raises(GateError, match="max_ppl_ratio"):
        run(recipe)
    assert (tmp_path / "out" / "report.html").exists() and (tmp_path / "out" / "result.json").exists()


def test_a_model_that_says_nan_is_evaluated_reported_and_fails_the_gate(
    model: Path,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    broken = pico_llama()
    with torch.no_grad():
        broken.lm_head.weight[3] = math.nan
    broken.save_pretrained(word_tokenizer(tmp_path / "broken"))
    argv = ["evaluate", str(model), str(tmp_path / "broken"), "--data", str(text), "--window", "32"]
    argv += ["--against", str(model), "--fail-if-worse", "--output", str(tmp_path / "figures.json")]
    with pytest.raises(SystemExit) as ended:
        run_command(commands.cli, argv)
    printed = capsys.readouterr()
    assert ended.value.code == 3, printed.err
    assert "nan" in printed.out and "fail_if_worse" in printed.err
    figures = json.loads((tmp_path / "figures.json").read_text())["models"]
    assert figures[1]["loss"] == "nan" and isinstance(figures[0]["loss"], float)


def test_a_run_with_nan_ends_with_its_report_and_the_gate(model: Path, text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(model, folder)
    broken = pico_llama()
    with torch.no_grad():
        broken.model.layers[0].mlp.down_proj.weight[0] = math.inf
    broken.save_pretrained(folder)
    recipe = recipe_for(folder, text, tmp_path / "out", report={"max_ppl_ratio": 1.5})
    del recipe["uptrain"]
    recipe["evaluate"]["agreement"] = True
    with pytest.raises(GateError, match="max_ppl_ratio"):
        run(recipe)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "nan" in page and str(tmp_path) not in page
    assert json.loads((tmp_path / "out" / "result.json").read_text())["models"][1]["loss"] == "nan"


def test_dry_run_names_what_is_wrong_and_writes_nothing(model: Path, text: Path, tmp_path: Path) -> None:
    good = recipe_for(model, text, tmp_path / "out")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"convert": {"groups": 3}}, "1, 2, 4, 8"),
        ({"convert": {}}, "convert.groups"),
        ({"evaluate": {}}, "evaluate.data"),
        ({"evaluate": good["evaluate"] | {"window": 4096}}, "128"),
        ({"evaluate": good["evaluate"] | {"data": "nowhere.jsonl"}}, "nowhere.jsonl"),
        ({"uptrain": good["uptrain"] | {"max_grad_nrom": 1}}, "did you mean max_grad_norm"),
        ({"uptrain": good["uptrain"] | {"tokens": 1}}, "0 steps"),
        ({"report": {"formats": ["pdf"]}}, "choose from|json, markdown"),
        ({"report": {"max_ppl_ratio": -1.0}}, "max_ppl_ratio: must be > 0"),
        ({"source": ""}, "recipe: source"),
        ({"convert": {"groups": 2, "max_shard_size": "big"}}, "convert.max_shard_size"),
    ]
    for change, words in wrong:
        with pytest.raises(Mha2gqaError, match=words):
            run(good | change, dry_run=True)
    assert run(good, dry_run=True).stages and not (tmp_path / "out").exists()


# --- the ledger ------------------------------------------------------------------------------------------


def test_a_stage_that_died_may_replace_its_own_leavings(tmp_path: Path) -> None:
    records = StageRecords(tmp_path)
    told: list[bool] = []

    def work(replace: bool) -> dict[str, Any]:
        told.append(replace)
        if len(told) == 1:
            raise KeyboardInterrupt
        return {"n": len(told)}

    with pytest.raises(KeyboardInterrupt):
        records.stage("s", {"a": 1}, work, str)
    assert records.stage("s", {"a": 1}, work, str) == {"n": 2}
    assert records.stage("s", {"a": 1}, work, str) == {"n": 2}
    records.stage("s", {"a": 2}, work, str)
    assert told == [False, True, False]


def test_other_processes_wait_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    StageRecords(tmp_path).stage("s", {"a": 1}, lambda replace: {"n": 1}, str)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("mha2gqa.commands.stages.POLL_SECONDS", 0.0)

    def never(replace: bool) -> dict[str, Any]:
        raise AssertionError("only the first process works")

    assert StageRecords(tmp_path).stage("s", {"a": 1}, never, str) == {"n": 1}


def test_stamps_follow_contents(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one")
    first = source_fingerprint(str(file))
    file.write_text("two")
    assert (
        source_fingerprint(str(file)) != first
        and source_fingerprint("org/name:en:train") == "org/name:en:train"
    )


# --- sweep -----------------------------------------------------------------------------------------------


def test_grid_is_every_combination() -> None:
    recipe = recipe_from_dict(
        {
            "convert": {"groups": 4},
            "uptrain": {"data": "x"},
            "sweep": {"methods": ["mean", "first"], "alphas": [0.1, 0]},
        }
    )
    assert grid(recipe) == [Cell(4, m, None, a) for m in ("mean", "first") for a in (0.0, 0.1)]  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no uptrain section"):
        grid(recipe_from_dict({"sweep": {"groups": [2], "alphas": [0.05]}}))
    with pytest.raises(UsageError, match=r"sweep.alphas: must be >= 0 and <= 1"):
        grid(recipe_from_dict({"sweep": {"groups": [2], "alphas": [5]}, "uptrain": {}}))
    with pytest.raises(UsageError, match=r"sweep.groups: missing"):
        grid(recipe_from_dict({}))


def test_sweep_makes_one_table_and_resumes(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    axes = {"groups": [4], "methods": ["mean"], "alphas": [0.01, 0], "bench": True}
    recipe = recipe_for(model, text, tmp_path / "out", convert={}, sweep=axes)
    del recipe["uptrain"]["tokens"]
    recipe["report"] = {"batch": 1, "context": 8}
    monkeypatch.setattr("mha2gqa.commands.bench.copy_bandwidth", lambda device: 1e9)
    result = sweep(recipe)
    assert [row["label"] for row in result.models[1:]] == ["G=4 mean", "G=4 mean alpha 0.01"]
    assert all(row["sha256"] == result.models[0]["sha256"] for row in result.models)
    assert all(row["decode_milliseconds_per_step"] > 0 for row in result.models)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Loss against KV-cache bytes" in page and "G=4 mean alpha 0.01" in page
    recipe["report"] |= {"formats": ["json"]}
    again = sweep(recipe)
    assert {s["status"] for s in again.stages} == {"skipped"} and again.models == result.models
    wider = sweep(recipe | {"sweep": {"groups": [4, 1], "methods": ["mean"], "bench": True}})
    new = {s["name"].split(":")[0] for s in wider.stages if s["status"] == "done"}
    assert new == {"G=1 mean"}


def test_the_page_of_a_sweep_tells_no_tales(model: Path, text: Path, tmp_path: Path) -> None:
    axes = {"groups": [4, 2], "methods": ["mean", "first"], "alphas": [0, 0.01]}
    recipe = recipe_for(model, text, tmp_path / "out", convert={}, sweep=axes)
    del recipe["uptrain"]["tokens"], recipe["report"]
    planned = sweep(recipe, dry_run=True)
    assert not any("context" in line for line in planned.warnings), "nobody asked for a context"
    asked = sweep(recipe | {"report": {"context": 512}}, dry_run=True)
    assert (
        "report.context 512: the model was built for 128 tokens; sizes are quoted for those" in asked.warnings
    )
    judged = sweep(recipe | {"report": {"max_wer_delta": 1}}, dry_run=True)  # of no figure that is measured
    assert any("report.max_wer_delta: a sweep judges none of its models" in line for line in judged.warnings)
    result = sweep(recipe)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<h1>pico: G = 4, 2; mean, first; alpha 0 to 0.01</h1>" in page
    assert "No uptraining was done" not in page
    assert "a context of 128 tokens" in page and "4,096" not in page
    assert f"<dt>teacher</dt><dd>{model.name}</dd>" in page and str(tmp_path) not in page
    bars = page[page.index("<h3>Merging methods") : page.index("<h3>Loss by length")]
    frontier = page[page.index("<h3>Quality against cache") : page.index("<h3>Merging methods")]
    for row in result.models[1:]:
        assert f">{row['loss']:.4f}<" in bars and f'<td class="num optional">{row["loss"]:.4f}</td>' in page
    for g in (4, 2):
        losses = [row["loss"] for row in result.models[1:] if row["groups"] == g]
        assert f">G = {g}<" in bars and f">{min(losses):.4f}<" in frontier


def test_a_sweep_shares_moments_among_cells_of_one_class(text: Path, tmp_path: Path) -> None:
    """GPT-2 with one KV head is measured as the class that it becomes, apart from those that stay GPT-2."""
    folder = word_tokenizer(tmp_path / "gpt2")
    stock_model("gpt2").save_pretrained(folder)
    calibration = {"calibration": str(text), "calibration_tokens": 640, "calibration_window": 32}
    convert = calibration | {"refit": False, "reconstruct": False}
    recipe = recipe_for(folder, text, tmp_path / "out", convert=convert)
    del recipe["uptrain"]
    result = sweep(recipe | {"sweep": {"groups": [2, 1], "methods": ["joint", "align"], "alphas": [0]}})
    assert len(result.models) == 5
    kept = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert kept == ["statistics-mqa.safetensors", "statistics.safetensors"]


def test_the_original_writes_the_text_of_all_cells_once(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, sampled = word_tokenizer(tmp_path / "llama", bos=True), []
    pico_llama().save_pretrained(folder)
    sample = sampling._sample
    monkeypatch.setattr(sampling, "_sample", lambda *a: sampled.append(a) or sample(*a))
    convert = {
        "calibration": "generate",
        "calibration_tokens": 300,
        "calibration_window": 16,
        "fit": {"steps": 1},
    }
    recipe = recipe_for(folder, text, tmp_path / "out", convert=convert)
    del recipe["uptrain"]
    result = sweep(recipe | {"sweep": {"groups": [4, 2], "methods": ["joint", "mean"], "alphas": [0]}})
    files = sorted((tmp_path / "out" / "cells").glob("*/converted.generated.jsonl"))
    assert len(result.models) == 5 and [file.parent.name for file in files] == ["g2-joint", "g4-joint"]
    assert len({file.read_bytes() for file in files}) == 1
    rounds = len(sampled)
    assert rounds and not any("other text" in warning for warning in result.warnings)
    generate_text(folder, tmp_path / "alone.jsonl", tokens=300, window=128, device="cpu")
    assert len(sampled) == 2 * rounds  # of one text each


# --- the rest --------------------------------------------------------------------------------------------


def test_builtin_names(tmp_path: Path) -> None:
    assert (Path(resolve_model("builtin:tiny")) / "config.json").exists() and resolve_model("a/b") == "a/b"
    heldout, other = resolve_data(["builtin:heldout", "x.txt"], tmp_path)
    assert Path(heldout).exists() and other == "x.txt" and not list(tmp_path.iterdir())
    for call in (resolve_model, lambda name: resolve_data([name], tmp_path)):
        with pytest.raises(UsageError, match="builtin:huge: no such built-in"):
            call("builtin:huge")


def test_push_verifies_first_and_uploads_only_when_asked(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    convert(model, out, 2)
    (out / ".cache").mkdir(exist_ok=True)
    (out / ".cache" / "x").write_text("private")
    calls: list[tuple[str, dict[str, Any]]] = []

    class FakeApi:
        def create_repo(self, repo: str, **words: Any) -> None:
            calls.append(("create", {"repo": repo, **words}))

        def upload_folder(self, **words: Any) -> Any:
            calls.append(("upload", words))
            return type("Commit", (), {"commit_url": "https://hub.example/commit/1"})

    monkeypatch.setattr("huggingface_hub.HfApi", FakeApi)
    for name in ("me/has space", "me/a..b", "nobody"):
        with pytest.raises(UsageError, match=r"ORG/NAME|not a valid name on the Hub"):
            push(out, name, dry_run=True)
    dry = push(out, "me/model", dry_run=True)
    assert not calls and dry.url is None and "model.safetensors" in dry.files and ".cache/x" not in dry.files
    done = push(out, "me/model", private=True)
    assert done.url == "https://hub.example/commit/1" and [name for name, _ in calls] == ["create", "upload"]
    assert calls[0][1] == {"repo": "me/model", "private": True, "exist_ok": True}
    assert calls[1][1]["repo_id"] == "me/model" and calls[1][1]["allow_patterns"] == done.files
    (out / "model.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="nothing was uploaded"):
        push(out, "me/model")
    with pytest.raises(UsageError, match="ORG/NAME"):
        push(out, "model")
    with pytest.raises(UsageError, match="made by convert or uptrain"):
        push(model, "me/model")


@pytest.mark.parametrize("answer", [None, 401, 500])
def test_push_to_an_endpoint_that_fails_is_one_line(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: int | None
) -> None:
    """Nobody listens, or the answer is an error: over real HTTP, as the Hub's own client meets it."""
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from threading import Thread

    import huggingface_hub

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(answer or 200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    convert(model, tmp_path / "out", 2)
    server = HTTPServer(("127.0.0.1", 0), Handler)
    if answer is None:
        server.server_close()
    else:
        Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    api = functools.partial(
        huggingface_hub.HfApi, endpoint=f"http://127.0.0.1:{server.server_port}", token="hf_none"
    )
    monkeypatch.setattr("huggingface_hub.HfApi", api)
    with pytest.raises(CheckpointError, match="me/model: the upload failed") as caught:
        push(tmp_path / "out", "me/model")
    assert "\n" not in str(caught.value)
    if answer is not None:
        server.shutdown()
        server.server_close()


def test_the_demo_shows_the_rows_that_its_stages_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The whole demo on less text: the same losses in log, JSON, table and pictures; a second call does nothing."""
    full = demo_module.demo_recipe

    def small(folder: Path, groups: int, method: str) -> Recipe:
        recipe = full(folder, groups, method).to_dict()
        recipe["evaluate"] |= {"max_tokens": 2048, "window": 128}
        recipe["uptrain"] |= {"alpha": 2e-5, "window": 64, "batch_tokens": 512, "eval_tokens": 512}
        if method == "joint":
            recipe["convert"] |= {"calibration_tokens": 2048, "calibration_window": 64}
            recipe["convert"]["fit"] = {"steps": 4, "batch_size": 4, "check_every": 2}
        return recipe_from_dict(recipe)

    monkeypatch.setattr(demo_module, "demo_recipe", small)
    with caplog.at_level("INFO", logger="mha2gqa"):
        shown = demo_module.demo(tmp_path / "demo")
    scored = [
        json.loads((tmp_path / "demo" / "g4-joint" / "stages" / f"{name}.json").read_text())
        for name in ("evaluate", "evaluate-uptrained")
    ]
    losses = {row["role"]: row["loss"] for found in scored for row in found["result"]["models"]}
    assert {row["role"]: row["loss"] for row in shown.models} == losses
    assert list(losses) == ["original", "mean", "converted", "uptrained"]
    assert losses["original"] < losses["converted"] < losses["mean"]
    page = (tmp_path / "demo" / "report.html").read_text(encoding="utf-8")
    assert all(f"{loss:.4f}" in page for loss in losses.values())
    assert all(f"{role} {loss:.4f}" in caplog.text for role, loss in losses.items())
    curve = page[page.index("Loss over uptraining") : page.index("Validation split")]
    drawn = [losses[role] for role in ("original", "converted", "uptrained")]
    assert all(f"{loss:.4f}" in curve for loss in drawn), "the picture's numbers are the table's"
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "demo").rglob("*.safetensors")}
    assert demo_module.demo(tmp_path / "demo").models == shown.models
    assert stamps == {path: path.stat().st_mtime_ns for path in (tmp_path / "demo").rglob("*.safetensors")}
