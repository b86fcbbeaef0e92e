"""Uptraining end to end on pico checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training import TINY, family

from mha2gqa.errors import UsageError
from mha2gqa.uptraining import uptrain


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    return family(tmp_path_factory.mktemp("family"))


def test_uptrained_checkpoint_is_plain_and_better(models, tmp_path):
    original, student, text = models
    out = tmp_path / "up"
    result = uptrain(student, out, text, tokens=64 * 30, learning_rate=3e-3, **TINY)
    assert result.teacher == str(original.resolve())
    assert result.budget["steps"] == 30
    assert 1.3 < result.budget["tokens_at_equal_flops"] / result.budget["tokens"] < 1.4  # 8N against 6N
    assert result.losses["held_out_end"] < result.losses["held_out_start"]
    assert result.losses["train"][-1]["loss"] < result.losses["train"][0]["loss"]
    assert not result.worse
    assert [e["step"] for e in result.losses["train"]] == list(range(1, 31))
    # the same files, names, shapes and dtypes; config byte for byte
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (student / name).read_bytes()
    before, after = load_file(student / "model.safetensors"), load_file(out / "model.safetensors")
    assert {n: (x.shape, x.dtype) for n, x in before.items()} == {
        n: (x.shape, x.dtype) for n, x in after.items()
    }
    assert all(not torch.equal(before[n], after[n]) for n in before)
    manifest = json.loads((out / "mha2gqa.json").read_text())
    assert manifest["uptrain"]["budget"]["tokens"] == 64 * 30
    assert manifest["method"] == "mean"
    assert not out.with_name("up.uptrain").exists()
    json.dumps(result.to_dict())


def test_published_weights_are_the_trained_ones(models, tmp_path):
    """The loss of the published folder is the run's last held-out loss."""
    from mha2gqa.checkpoints.loading import load_model
    from mha2gqa.uptraining import corpus

    _, student, text = models
    seen = {}
    whole = corpus._held_out_blocks

    def spy(*args):
        seen["blocks"] = whole(*args)
        return seen["blocks"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "_held_out_blocks", spy)
        result = uptrain(
            student, tmp_path / "up", text, tokens=64 * 5, teacher="none", keep_checkpoints=True, **TINY
        )
    ids = torch.from_numpy(seen["blocks"].astype("int64"))
    with torch.no_grad():
        logits = load_model(tmp_path / "up", device="cpu")(ids[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    assert result.losses["held_out_end"] == pytest.approx(loss.item(), abs=1e-5)


def test_rerun_of_a_finished_run_returns_its_result(models, tmp_path):
    _, student, text = models
    options = {"tokens": 128, "teacher": "none", **TINY}
    first = uptrain(student, tmp_path / "up", text, **options)
    again = uptrain(student, tmp_path / "up", text, **options)
    assert again.finished_before
    assert again.losses == json.loads(json.dumps(first.losses))


def test_attention_only_moves_nothing_else(models, tmp_path):
    _, student, text = models
    uptrain(student, tmp_path / "up", text, tokens=640, train="attention", learning_rate=1e-2, **TINY)
    before = load_file(student / "model.safetensors")
    after = load_file(tmp_path / "up" / "model.safetensors")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if "self_attn" in name}


def test_sources_are_mixed_by_weight(models, tmp_path):
    from training import write_text

    _, student, text = models
    few = write_text(tmp_path / "few.jsonl", documents=6, seed=9)
    options = {**TINY, "tokens": 64 * 10, "teacher": "none", "data_weights": (3.0, 1.0)}
    result = uptrain(student, tmp_path / "up", [text, few], **options)
    assert any("few.jsonl has" in warning and "passes over it" in warning for warning in result.warnings)
    assert result.budget["unique_tokens"] < result.budget["tokens"]
    with pytest.raises(UsageError, match="must be one weight for each"):
        uptrain(student, tmp_path / "no", [text], **options)


def test_one_document_is_streamed_again_and_again(models, tmp_path):
    """A run longer than its only document reads it once more from the beginning."""
    _, student, _ = models
    text = tmp_path / "one.txt"
    text.write_text(" ".join(f"w{i % 57}" for i in range(150)))
    options = {"tokens": 64 * 10, "teacher": "none", **TINY, "holdout": 0.0, "save_steps": 2}
    result = uptrain(student, tmp_path / "up", text, streaming=True, **options)
    assert len(result.losses["train"]) == 10
    assert "the data ended early: 4 whole passes" in " ".join(result.warnings)  # of 151 tokens, 641 are read


def test_isolated_documents_are_trained(models, tmp_path):
    _, student, text = models
    result = uptrain(student, tmp_path / "up", text, tokens=640, isolate_documents=True, **TINY)
    assert result.losses["held_out_end"] != result.losses["held_out_start"]


def test_trackers_get_what_is_logged(models, tmp_path):
    """`report_to` passes through: TensorBoard holds loss, speed and time left, also when the run is over."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, student, text = models
    result = uptrain(student, tmp_path / "up", text, tokens=320, report_to="tensorboard", **TINY)
    assert not (tmp_path / "up.uptrain").exists()
    (folder,) = (tmp_path / "up.runs").iterdir()
    events = EventAccumulator(str(folder)).Reload()
    names = {"loss", "ce_loss", "learning_rate", "grad_norm", "tokens", "tokens_per_second", "eta_seconds"}
    assert {f"train/{name}" for name in names} <= set(events.Tags()["scalars"])
    losses = [event.value for event in events.Scalars("train/loss")]
    assert losses == pytest.approx([e["loss"] for e in result.losses["train"]], rel=1e-6)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_the_schedule_is_the_one_asked_for(models, tmp_path, schedule):
    from mha2gqa.uptraining.budget import default_learning_rate, learning_rate_factor

    _, student, text = models
    options = {"tokens": 64 * 10, "teacher": "none", "lr_scheduler_type": schedule, "warmup_steps": 2}
    result = uptrain(student, tmp_path / "up", text, **options, **TINY)
    rates = [e["learning_rate"] for e in result.losses["train"]]
    peak = default_learning_rate(32, TINY["batch_tokens"])
    assert rates == pytest.approx([peak * learning_rate_factor(s, 10, 2, schedule) for s in range(10)])


def test_callbacks_of_the_caller_see_the_training(models, tmp_path):
    """They are called beside our own, and change nothing."""
    from transformers import TrainerCallback

    seen: list[int] = []

    class Counts(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(state.global_step)

    _, student, text = models
    options = TINY | {"tokens": 64 * 5, "teacher": "none"}
    result = uptrain(student, tmp_path / "up", text, callbacks=[Counts()], **options)
    assert seen == list(range(1, result.budget["steps"] + 1))
    quiet = uptrain(student, tmp_path / "plain", text, **options)
    assert quiet.losses["train"][-1]["loss"] == result.losses["train"][-1]["loss"]
