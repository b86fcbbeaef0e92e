"""Bad input to `mha2gqa uptrain`, as typed: the exit code and one line that says what, where, what to do."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from conftest import pico_llama, word_tokenizer
from training import family, write_text

from mha2gqa.cli import commands
from mha2gqa.cli.exit_codes import run_command
from mha2gqa.errors import UsageError
from mha2gqa.uptraining.run_dir import RunDirectory

WORDS = ["--window=16", "--batch-tokens=64", "--device=cpu", "--holdout=0.1"]
ZERO3 = Path(__file__).parents[1] / "examples" / "deepspeed_zero3.json"
Call = Callable[..., str]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    return family(tmp_path_factory.mktemp("family"))


@pytest.fixture
def error(models, tmp_path, capsys, monkeypatch) -> Call:
    """Run `uptrain` with some words and give its one line of error; nothing else may remain."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)

    def call(*words: str, code: int, model: Path = models[1], text: Path = models[2]) -> str:
        args = ["uptrain", str(model), str(tmp_path / "up"), f"--data={text}", *WORDS, *words]
        capsys.readouterr()
        logging.getLogger("mha2gqa").handlers.clear()  # it holds the stderr of another test
        with pytest.raises(SystemExit) as caught:
            run_command(commands.cli, [*args, "-q"])
        out, err = capsys.readouterr()
        assert caught.value.code == code, err
        assert err.startswith("error: ") and err.count("\n") == 1 and "Traceback" not in err and not out
        return err

    return call


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--alpha=0"], "--alpha: must be > 0 and <= 1, not 0; give a fraction such as 0.05"),
        (["--alpha=-1"], "--alpha: must be > 0 and <= 1, not -1"),
        (["--alpha=5"], "--alpha: must be > 0 and <= 1, not 5; it is a fraction: did you mean 0.05 (5 %)?"),
        (["--alpha=1.5"], "not 1.5"),
        (["--alpha=0.1", "--tokens=64"], "--alpha: excludes --tokens; give one of the two, not both"),
        ([], "budget: one of alpha and tokens is required"),
        (["--tokens=10"], "--tokens: gives 10 tokens, which round to 0 steps of 64"),
        (["--tokens=64", "--set", "window=8"], "--set window: is given as --window too"),
        (["--tokens=64", "--teacher-cache=x"], "--teacher-cache: requires --teacher-top-k"),
    ],
)
def test_budget(error, words, message, tmp_path):
    assert message in error("--original-tokens=1M", *words, code=2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("learning_rate=-1", "--set learning_rate=-1: must be > 0"),
        ("learning_rate=0", "--set learning_rate=0: must be > 0"),
        ("learning_rate=.nan", "--set learning_rate=.nan: must be > 0"),
        ("window=0", "--set window=0: must be >= 1"),
        ("eval_steps=0", "eval_steps=0: must be >= 1"),
        ("eval_steps=-3", "eval_steps=-3: must be >= 1"),
        ("save_steps=0", "save_steps=0: must be > 0"),
        ("save_steps=2.5", "save_steps=2.5: must be a whole number of steps, or a fraction < 1"),
        ("warmup_steps=-3", "warmup_steps=-3: must be >= 0"),
        ("temperature=.inf", "temperature=.inf: must be a finite number"),
        ("lora_dropout=2", "lora_dropout=2: must be >= 0 and < 1"),
        ("lora_alpha=0", "lora_alpha=0: must be > 0"),
        ("data_weights=[.nan]", "data_weights=[.nan]: must be > 0"),
        ("data_weights=[.inf]", "data_weights=[.inf]: must be a finite number"),
        ("seed=-1", "seed=-1: must be >= 0 and <= 4294967295"),
        ("max_grad_norm=foo", "max_grad_norm=foo: must be a number, not 'foo'"),
        ("max_grad_norm=" + "1" * 400, "must be at most 1e18"),
        ("bf16=maybe", "bf16=maybe: must be true or false, not 'maybe'"),
        ("push_to_hub=true", "push_to_hub=true: is decided elsewhere; use mha2gqa push"),
        ("save_only_model=true", "save_only_model=true: is decided elsewhere"),
        ("enable_jit_checkpoint=true", "enable_jit_checkpoint=true: is decided elsewhere"),
        ("alhpa=1", "alhpa: unknown key; did you mean alpha?"),
        ("max_gradnorm=1", "max_gradnorm: unknown key; did you mean max_grad_norm?"),
        ("x", "--set x: is not KEY=VALUE"),
        ("hub_token=hf_ABCDEFGHIJKLMNOPQRSTU", "--set hub_token=…: must hold no password or access token"),
    ],
)
def test_values_of_set_are_refused_as_they_were_typed(error, tmp_path, word, message):
    line = error("--tokens=256", "--set", word, code=2)
    assert message in line and "ABCDEF" not in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 129}, "window 129: longer than the context of"),
        ({"device": "gpu"}, "device gpu: cannot be trained on; use auto, cpu or cuda"),
        ({"device": "cuda:1"}, "CUDA_VISIBLE_DEVICES chooses the GPU"),
        ({"optim": "foo"}, "training arguments: foo is not a valid OptimizerNames"),
        ({"report_to": "foo"}, "training arguments: foo is not supported"),
        ({"seed": -1}, "seed: must be >= 0"),
        ({"fsdp": True, "fsdp_config": "{cpu_offload}"}, "fsdp_config '{cpu_offload}': is not JSON"),
        ({"training_args": {"seed": 5}}, "seed: is an option of uptrain itself"),
    ],
)
def test_values_that_cannot_be_used_in_python(models, tmp_path, monkeypatch, options, message):
    """Refused by name, where they were taken for the default, did nothing, or failed later with a traceback."""
    from mha2gqa.uptraining import uptrain

    if "fsdp" in options:
        monkeypatch.setenv("RANK", "0")
    words = {"tokens": 256, "window": 16, "batch_tokens": 64, "device": "cpu"} | options
    with pytest.raises(UsageError) as caught:
        uptrain(models[1], tmp_path / "up", models[2], **words)
    assert message in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_words_that_exclude_each_other(error, tmp_path):
    line = error("--tokens=256", "--set", "streaming=true", "--set", "dataloader_num_workers=2", code=2)
    assert "dataloader_num_workers: each of them would read the whole stream" in line
    line = error("--tokens=256", "--teacher=none", "--teacher-top-k=8", code=2)
    assert "--teacher-top-k: requires a teacher; leave out --teacher none" in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("package", ["wandb", "bitsandbytes"])
def test_what_is_not_installed(error, tmp_path, package):
    if find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    word = {"wandb": "report_to=wandb", "bitsandbytes": "optim=adamw_bnb_8bit"}[package]
    line = error("--tokens=256", "--set", word, code=2)
    assert "pip install" in line and package in line
    assert not list(tmp_path.iterdir())


def test_numbers_as_yaml_reads_them():
    from mha2gqa.uptraining.run import make_config

    given = {"weight_decay": "1e-3", "neftune_noise_alpha": 5, "report_to": ["tensorboard"]}
    found = make_config("m", "o", "d", {"tokens": 1, "tf32": None} | given).training_args  # null: unset
    assert found == given | {"weight_decay": 1e-3, "neftune_noise_alpha": 5.0, "report_to": ("tensorboard",)}


def test_a_teacher_that_is_not_there_or_the_student_itself(models, error, tmp_path):
    line = error("--tokens=256", f"--teacher={tmp_path / 'absent'}", code=1)
    assert "no such folder" in line and str(tmp_path / "absent") in line
    assert "no config.json" in error("--tokens=256", f"--teacher={models[2]}", code=1)
    line = error("--tokens=256", f"--teacher={models[1]}", code=2)
    assert "is the model being trained, which would learn nothing from itself" in line
    assert not list(tmp_path.iterdir())


def test_all_documents_held_out(models, error, tmp_path):
    line = error("--tokens=256", f"--eval-data={models[2]}", code=1)
    assert f"{models[2]}: all its 120 documents are held out; give other eval_data" in line
    line = error("--tokens=256", f"--eval-data={models[2]}", "--set", "streaming=true", code=1)
    assert "documents are held out" in line
    assert "'--data': must not be empty" in error("--tokens=256", "--data=", code=2)
    assert not list(tmp_path.iterdir())


def test_original_tokens_unknown(error):
    assert (
        "--alpha: needs the pretraining tokens of the original, which are not known; give --original-tokens"
        in error("--alpha=0.05", code=2)
    )


def test_teacher_of_another_vocabulary(error, tmp_path):
    teacher = tmp_path / "other"
    pico_llama().save_pretrained(teacher)
    word_tokenizer(teacher)
    path = teacher / "tokenizer.json"
    path.write_text(path.read_text().replace('"w7"', '"v7"'))
    line = error("--tokens=256", f"--teacher={teacher}", code=2)
    assert f"teacher {teacher}: its tokenizer differs in 2 tokens" in line
    assert "distil from the checkpoint that was converted, or use teacher none" in line


def test_deepspeed_that_is_not_installed(error, monkeypatch):
    from mha2gqa.uptraining import deepspeed_config

    monkeypatch.setattr(deepspeed_config, "find_spec", lambda name: None)
    assert "deepspeed: needs the package deepspeed; pip install deepspeed" in error(
        "--tokens=256", "--set", f"deepspeed={ZERO3}", code=2
    )


@pytest.mark.parametrize(
    ("settings", "words", "message"),
    [
        (
            {"offload_optimizer": {"device": "cpu"}},
            [],
            "deepspeed offload_optimizer: not possible: offload is proven",
        ),
        ({"stage": 3, "offload_param": {"device": "nvme"}}, [], "deepspeed offload_param: not possible"),
        (
            {"stage": 2, "cpu_offload": True},
            [],
            "use --set fsdp=true --set 'fsdp_config={\"cpu_offload\": true}'",
        ),
        (
            {"offload_param": {"device": "none"}},
            ["--teacher-dtype=int8"],
            "int8: not possible with deepspeed",
        ),
        ([3], [], "deepspeed zero_optimization: must hold settings, not [3]"),
    ],
)
def test_what_nobody_has_proven_of_deepspeed(error, tmp_path, settings, words, message):
    text = json.dumps({"zero_optimization": settings})
    assert message in error("--tokens=256", *words, "--set", f"deepspeed={text}", code=2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "option"), [("DeepSpeed", "deepspeed=FILE"), ("FSDP", "fsdp=true")])
def test_what_a_launcher_asks_for_goes_past_no_check(error, monkeypatch, name, option):
    variable = f"ACCELERATE_USE_{name.upper()}"
    monkeypatch.setenv(variable, "true")
    said = f"{variable}: asks for {name} with settings that are not checked; launch without --use_{name.lower()}, and give "
    assert f"{said}--set {option}" in error("--tokens=256", code=2)


def test_a_config_of_deepspeed_that_is_not_there(error):
    assert "nowhere.json: no such file; give its config as a JSON file" in error(
        "--tokens=256", "--set", "deepspeed=nowhere.json", code=1
    )


@pytest.mark.parametrize(
    ("value", "code", "message"),
    [
        ('{"cpu_offload": tru}', 2, "fsdp_config cpu_offload: must be true or false, not 'tru'"),
        ("nowhere.json", 1, "nowhere.json: no such file; give a JSON file"),
    ],
)
def test_settings_of_fsdp_that_cannot_be_read(error, monkeypatch, tmp_path, value, code, message):
    monkeypatch.setenv("RANK", "0")
    line = error("--tokens=256", "--set", "fsdp=true", "--set", f"fsdp_config={value}", code=code)
    assert message in line
    assert not list(tmp_path.iterdir())


def test_fsdp_in_one_process(error, tmp_path):
    line = error("--tokens=256", "--set", "fsdp=true", code=2)
    assert "fsdp: shards over several processes, and this is one; start with torchrun" in line
    assert not list(tmp_path.iterdir())


def test_data_without_the_text_column(error, tmp_path):
    line = error("--tokens=256", "--text-column=body", code=1)
    assert "body" in line and "text" in line
    assert not list(tmp_path.iterdir())


def test_data_that_is_not_there_or_too_short(error, tmp_path):
    assert "absent.jsonl" in error("--tokens=256", code=1, text=tmp_path / "absent.jsonl")
    (tmp_path / "short.txt").write_text("w1 w2 w3")
    assert "one block needs 17" in error("--tokens=256", code=1, text=tmp_path / "short.txt")


@pytest.mark.parametrize("streaming", ["true", "false"])
@pytest.mark.parametrize("text", ["w1 w2 w3", "", "\n\n"])
def test_evaluation_text_that_is_empty_or_too_short(error, tmp_path, text, streaming):
    path = tmp_path / "short.txt"
    path.write_text(text)
    line = error("--tokens=256", f"--eval-data={path}", "--set", f"streaming={streaming}", code=1)
    assert line.startswith(("error: --eval-data: the text has 4 tokens", f"error: {path}: "))
    assert [entry.name for entry in tmp_path.iterdir()] == ["short.txt"]


def test_output_of_another_run(models, error, tmp_path):
    shutil.copytree(models[1], tmp_path / "up")
    assert f"{tmp_path / 'up'}: " in error("--tokens=256", code=2)


@pytest.fixture
def full_at(monkeypatch) -> Callable[[int], None]:
    """Let the device's memory be full at a step from 1."""
    from transformers import Trainer

    step = Trainer.training_step

    def set_up(which: int) -> None:
        calls: list[None] = []

        def full(self, *args, **kwargs):
            calls.append(None)
            if len(calls) == which:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return step(self, *args, **kwargs)

        monkeypatch.setattr(Trainer, "training_step", full)

    return set_up


def test_too_little_memory_at_the_first_step(models, error, tmp_path, full_at):
    """What is to be lowered may then be lowered: there is nothing that would be lost."""
    full_at(1)
    line = error("--tokens=256", code=1)
    assert "out of memory with 4 blocks of 16 tokens at a time; lower per_device_train_batch_size" in line
    assert "gradient_checkpointing" in line and "train lora" in line
    assert not list(tmp_path.iterdir())


def test_begun_without_a_checkpoint_is_no_other_run(models, error, tmp_path):
    """As when a process was killed before its first checkpoint: another recipe may take the place."""
    run_dir = RunDirectory(tmp_path / "up")
    assert not run_dir.open({"window": 16})
    run_dir.close()
    assert not run_dir.open({"window": 8}) and json.loads(run_dir.recipe.read_text()) == {"window": 8}
    run_dir.close()
    (run_dir.root / "teacher" / "train-0").mkdir(parents=True)
    (run_dir.root / "teacher" / "train-0" / "manifest.json").touch()
    with pytest.raises(UsageError, match="another recipe"):
        run_dir.open({"window": 16})
    run_dir.close()


def test_resuming_with_a_changed_recipe(models, error, tmp_path, full_at):
    full_at(3)
    error("--tokens=256", code=1)
    line = error("--tokens=256", "--seed=7", "--set", "temperature=2", code=2)
    assert "another recipe (seed: 0 -> 7; temperature: 1.0 -> 2.0); repeat the old values" in line


def test_a_run_that_another_process_is_at(models, error, tmp_path):
    """As when a launcher was killed and its workers were not: nothing of theirs is touched."""
    run_dir = RunDirectory(tmp_path / "up")
    run_dir.open({"some": "recipe"})
    before = sorted(run_dir.root.iterdir())
    line = error("--tokens=256", "--force", code=2)
    assert f"up.uptrain: in use by process {os.getpid()}; wait for it, or stop it" in line
    assert sorted(run_dir.root.iterdir()) == before and not (tmp_path / "up").exists()
    run_dir.close()
    assert run_dir.open({"some": "recipe"})
    run_dir.close()


@pytest.mark.parametrize(
    "place", ["mha2gqa.uptraining.teacher.load_model", "mha2gqa.uptraining.train.UptrainTrainer"]
)
def test_too_little_memory_before_the_first_step(error, monkeypatch, place):
    """The original, or the student's way to the device."""

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(place, full)
    assert "lower per_device_train_batch_size or window" in error("--tokens=256", code=1)


def test_a_stream_that_ends_early_is_repeated_and_said(models, tmp_path, capsys):
    text = write_text(tmp_path / "few.jsonl", documents=8)
    words = ["--tokens=640", "--set", "streaming=true", "--set", "holdout=0", "--json"]
    args = ["uptrain", str(models[1]), str(tmp_path / "up"), f"--data={text}", *WORDS[:3], *words]
    logging.getLogger("mha2gqa").handlers.clear()
    with pytest.raises(SystemExit) as caught:
        run_command(commands.cli, args)
    out, err = capsys.readouterr()
    assert not caught.value.code, err
    assert any("the data ended early" in warning for warning in json.loads(out)["warnings"])
    assert "the data ended early" in err
