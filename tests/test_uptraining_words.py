"""TrainingArguments that a run would ignore, contradict or trip over are refused by name, in one line."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from training import TINY, family

from mha2gqa.config import TrainerOptions, UptrainConfig, declared
from mha2gqa.errors import UsageError
from mha2gqa.uptraining import uptrain
from mha2gqa.uptraining.arguments import offloads
from mha2gqa.uptraining.run import make_config

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"fp16": True}, "fp16: must be false: its scaled gradients overflow, .*; use bf16"),
    ({"bf16_full_eval": True}, "bf16_full_eval: would have no effect; leave it out"),
    ({"lr_scheduler_kwargs": {"a": 1}}, "lr_scheduler_kwargs: .*; use lr_scheduler_type and warmup_steps"),
    ({"logging_strategy": "no"}, "logging_strategy: is decided elsewhere; use logging_steps"),
    ({"max_steps": 3}, "max_steps: is decided elsewhere; use alpha or tokens"),
    ({"hub_model_id": "a/b"}, "hub_model_id: .*; use mha2gqa push OUT"),
    ({"accelerator_config": {"split_batches": True}}, "accelerator_config: split_batches is decided by"),
    ({"accelerator_config": "a.json"}, "accelerator_config: must hold keys, not 'a.json'"),
    ({"parallelism_config": {"tp_size": 2}}, "parallelism_config: is decided elsewhere; use fsdp"),
    ({"fsdp_config": {"version": 2}}, "fsdp_config: has no effect without fsdp"),
    ({"gradient_checkpointing_kwargs": {"use_reentrant": False}}, "has no effect without gradient_ch"),
    ({"dataloader_multiprocessing_context": "spawn"}, "has no effect without dataloader_num_workers"),
    ({"optim_target_modules": "all-linear"}, "optim_target_modules: is read by the optimisers galore"),
    ({"adam_beta1": 2}, "adam_beta1: must be >= 0 and < 1, not 2"),
    ({"adam_beta2": "nan"}, "adam_beta2: must be >= 0 and < 1, not 'nan'"),
    ({"weight_decay": -1}, "weight_decay: must be >= 0, not -1"),
    ({"per_device_eval_batch_size": 0}, "per_device_eval_batch_size: must be >= 1, not 0"),
    ({"dataloader_drop_last": True}, "dataloader_drop_last: is decided elsewhere"),
    ({"max_gradnorm": 1}, "max_gradnorm: is neither an option of uptrain nor .*; did you mean max_grad_norm"),
    (
        {"training_args": {"seed": 5}},
        "seed: is an option of uptrain itself; give seed outside of training_args",
    ),
    ({"training_args": {"learning_rate": 5}}, "learning_rate: is an option of uptrain itself"),
]


def config(**options: Any) -> UptrainConfig:
    return make_config("m", "o", "d", {"tokens": 64} | options)


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_a_run_would_not_honour_is_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        config(**words)
    assert "\n" not in str(caught.value)


def test_saying_what_happens_anyway_is_accepted() -> None:
    said = {"fp16": False, "disable_tqdm": True, "bf16_full_eval": False, "max_grad_norm": 0}
    assert config(**said).training_args == said


def test_the_allow_list_holds_fields_of_transformers_and_none_of_ours() -> None:
    from transformers import TrainingArguments

    known = {field.name for field in fields(TrainingArguments) if field.init}
    allowed = set(declared(TrainerOptions))
    renamed = {f"{kind}_checkpointing{end}" for kind in ("gradient", "activation") for end in ("", "_kwargs")}
    assert allowed - renamed <= known
    assert not allowed & set(declared(UptrainConfig))
    refused = known - allowed - set(declared(UptrainConfig))
    for name in refused:
        with pytest.raises(UsageError, match=name):
            config(**{name: "something else"})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    _, student, text = family(tmp_path_factory.mktemp("family"))
    return student, text


def test_words_that_the_optimiser_does_not_read(models: tuple[Path, Path], tmp_path: Path) -> None:
    student, text = models
    with pytest.raises(UsageError, match="optim_args betas=1: is not read by optim adamw_torch_fused"):
        uptrain(student, tmp_path / "up", text, tokens=64, optim_args="betas=1", **TINY)
    found = uptrain(student, tmp_path / "up", text, tokens=64, optim="sgd", optim_args="momentum=0.9", **TINY)
    assert found.losses["train"]


def test_settings_of_accelerate_join_ours(models: tuple[Path, Path], tmp_path: Path) -> None:
    student, text = models
    config = {"non_blocking": True}
    given = uptrain(student, tmp_path / "a", text, tokens=128, accelerator_config=config, **TINY)
    plain = uptrain(student, tmp_path / "b", text, tokens=128, **TINY)
    assert [e["loss"] for e in given.losses["train"]] == [e["loss"] for e in plain.losses["train"]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"temperature": 2.0}, "temperature 2: requires a teacher; give teacher"),
        ({"ce_weight": 0.5}, "ce_weight 0.5: requires a teacher"),
    ],
)
def test_words_of_distillation_without_a_teacher(
    models: tuple[Path, Path], tmp_path: Path, words: dict[str, Any], message: str
) -> None:
    student, text = models
    with pytest.raises(UsageError, match=message):
        uptrain(student, tmp_path / "up", text, tokens=64, teacher="none", **words, **TINY)
    assert not (tmp_path / "up.uptrain").exists()


def test_words_of_distillation_where_the_original_is_not_here(tmp_path: Path) -> None:
    original, student, text = family(tmp_path)
    original.rename(tmp_path / "elsewhere")
    with pytest.raises(
        UsageError, match=r"the original that the model was converted from cannot be opened: .* is not here"
    ):
        uptrain(student, tmp_path / "up", text, tokens=64, teacher_top_k=8, **TINY)


def test_a_teacher_without_a_share_is_told(models: tuple[Path, Path], tmp_path: Path) -> None:
    student, text = models
    alone = uptrain(student, tmp_path / "a", text, tokens=64, teacher="none", ce_weight=1, **TINY)
    beside = uptrain(student, tmp_path / "b", text, tokens=64, ce_weight=1, **TINY)
    assert [e["loss"] for e in beside.losses["train"]] == [e["loss"] for e in alone.losses["train"]]
    assert "ce_weight 1 gives the teacher no weight" in " ".join(beside.warnings) and not alone.warnings


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('{"a":' * 3000 + "1" + "}" * 3000, "nested too deeply"),
        ('{"cpu_offload": true', "is not JSON"),
        ('{"cpu_offload": 3}', "must be true or false, not 3"),
        ("[1]", "must hold settings"),
        (3, "must hold settings"),
    ],
)
def test_settings_of_fsdp_that_are_none(config: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        offloads({"fsdp": "true", "fsdp_config": config})
    assert len(str(caught.value)) < 400


def test_offload_is_read_in_every_spelling(tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text('{"fsdp_cpu_offload": true}')
    for config in ({"cpu_offload": True}, ' {"cpu_offload": true}', str(tmp_path / "f.json")):
        assert offloads({"fsdp": "true", "fsdp_config": config}) and not offloads({"fsdp_config": config})
    assert not offloads({"fsdp": "true"}) and offloads({"fsdp": "full_shard offload"})
