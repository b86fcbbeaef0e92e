"""Public fault cases of training (U, L, D) and bad input: one line that says what, where and what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import pico_llama, word_tokenizer
from safetensors.torch import load_file, save_file
from training import TINY, family, write_text

from mha2gqa.checkpoints.reader import open_checkpoint
from mha2gqa.errors import CheckpointError, DataError, TrainingError, UnsupportedModelError, UsageError
from mha2gqa.uptraining import train_model, uptrain
from mha2gqa.uptraining.model_prep import masks_documents, require_document_masking
from mha2gqa.uptraining.publish import named_as_stored
from mha2gqa.uptraining.run_dir import RunDirectory

RUN = {**TINY, "tokens": 64 * 4}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    return family(tmp_path_factory.mktemp("family"))


def test_u02_packed_documents_are_kept_apart_only_where_that_is_proven():
    from transformers import BloomConfig, BloomForCausalLM, OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    opt = OPTConfig(
        vocab_size=64,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=8,
        max_position_embeddings=128,
        pad_token_id=None,
        word_embed_proj_dim=32,
    )
    assert masks_documents(pico_llama())
    for model in (
        OPTForCausalLM(opt),
        BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=8)),
    ):
        assert not masks_documents(model)
        with pytest.raises(UnsupportedModelError, match="packed documents cannot be kept apart"):
            require_document_masking(model)


@pytest.mark.parametrize("streaming", [False, True])
def test_u04_alpha_alone_names_what_is_missing(models, tmp_path, streaming):
    with pytest.raises(UsageError, match=r"alpha: .*original_tokens"):
        uptrain(models[1], tmp_path / "up", models[2], alpha=0.05, streaming=streaming, **TINY)
    assert not list(tmp_path.iterdir())


def test_u08_a_shard_saved_for_the_whole_is_refused(models):
    source = open_checkpoint(models[1])
    state = load_file(models[1] / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    with pytest.raises(CheckpointError, match=rf"{name} is \(0,\), expected \(8, 32\)"):
        named_as_stored(pico_llama(num_key_value_heads=2), state | {name: torch.empty(0)}, source)


def test_u10_divergence_keeps_the_last_good_checkpoint(models, tmp_path):
    out = tmp_path / "up"
    with pytest.raises(TrainingError, match=r"at step \d+; lower learning_rate"):
        uptrain(
            models[1],
            out,
            models[2],
            teacher="none",
            learning_rate=1e3,
            max_grad_norm=0.0,
            save_steps=1,
            warmup_steps=2,
            **{**RUN, "tokens": 64 * 20},
        )
    assert not out.exists()
    for checkpoint in RunDirectory(out).checkpoints():
        for tensor in load_file(checkpoint / "model.safetensors").values():
            assert torch.isfinite(tensor).all()


@pytest.mark.parametrize("broken", ["model", "teacher"])
def test_u10_broken_weights_are_not_blamed_on_the_rate(models, tmp_path, broken):
    folders = {"teacher": models[0], "model": models[1]}
    bad = shutil.copytree(folders[broken], tmp_path / "broken")
    state = load_file(bad / "model.safetensors")
    state["model.layers.0.self_attn.q_proj.weight"][0, 0] = float("nan")
    save_file(state, bad / "model.safetensors", metadata={"format": "pt"})
    folders[broken] = bad
    options = {**RUN, "teacher": str(folders["teacher"])}
    with pytest.raises(TrainingError, match=r"at step 1; no weight has moved yet: look for values"):
        uptrain(folders["model"], tmp_path / "up", models[2], **options)
    if broken == "teacher":
        cache = tmp_path / "cache"
        with pytest.raises(CheckpointError, match="teacher: predicts values that are not finite"):
            uptrain(
                models[1], tmp_path / "up", models[2], teacher_top_k=8, teacher_cache=str(cache), **options
            )
        assert not (cache / "train-0" / "manifest.json").exists()
    assert not list(tmp_path.glob("up*"))


def test_u10_a_step_without_labels_is_skipped_and_counted():
    from mha2gqa.uptraining.batches import Collator

    blocks = torch.randint(0, 64, (8, 17))
    model = pico_llama()
    before = [p.clone() for p in model.parameters()]
    hidden = -blocks - 1
    collate = Collator(counts_labels=True)
    result = train_model(model, hidden, collate=collate, tokens=64 * 3, batch_tokens=64, device="cpu")
    assert result.unlabelled_steps == [1, 2, 3]
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


# --- distillation -------------------------------------------------------------------------------------


def test_d02_padded_vocabulary_is_renormalised_with_a_note(models, tmp_path):
    teacher = tmp_path / "wide"
    pico_llama(vocab_size=72).save_pretrained(teacher)
    word_tokenizer(teacher)
    result = uptrain(models[1], tmp_path / "up", models[2], teacher=str(teacher), **RUN)
    assert any("64 output columns and the teacher 72" in warning for warning in result.warnings)
    assert result.teacher == str(teacher)


def test_d02_another_tokenizer_is_refused(models, tmp_path):
    teacher = tmp_path / "other"
    pico_llama().save_pretrained(teacher)
    word_tokenizer(teacher)
    path = teacher / "tokenizer.json"
    path.write_text(path.read_text().replace('"w7"', '"v7"'))
    with pytest.raises(
        UsageError, match=r"differs in 2 tokens, such as 'v7' \(None / 10\), 'w7' \(10 / None\)"
    ):
        uptrain(models[1], tmp_path / "up", models[2], teacher=str(teacher), **RUN)


def test_a_teacher_that_is_too_narrow_is_refused(models, tmp_path):
    teacher = tmp_path / "narrow"
    pico_llama(vocab_size=50).save_pretrained(teacher)
    word_tokenizer(teacher)
    with pytest.raises(UsageError, match="do not cover the tokenizer's 60 tokens"):
        uptrain(models[1], tmp_path / "up", models[2], teacher=str(teacher), **RUN)


def test_an_original_that_is_gone_is_asked_for(models, tmp_path):
    """Never next-token loss in place of a distillation that was meant."""
    import shutil

    student = tmp_path / "gqa"
    shutil.copytree(models[1], student)
    manifest = json.loads((student / "mha2gqa.json").read_text())
    shutil.rmtree(student / ".cache")  # what is known on this machine alone
    manifest |= {"source": "org/gone", "source_path": str(tmp_path / "gone")}
    (student / "mha2gqa.json").write_text(json.dumps(manifest))
    with pytest.raises(
        UsageError,
        match=r'^teacher: the original .* is not here; give teacher=PATH .* or teacher="none"',
    ):
        uptrain(student, tmp_path / "up", models[2], **RUN)
    assert not list(tmp_path.glob("up*"))
    assert uptrain(student, tmp_path / "up", models[2], teacher="none", **RUN).teacher is None


def test_a_model_that_names_no_original_learns_from_text_and_says_so(models, tmp_path):
    import shutil

    student = tmp_path / "gqa"
    shutil.copytree(models[1], student)
    (student / "mha2gqa.json").unlink()
    result = uptrain(student, tmp_path / "up", models[2], **RUN)
    assert result.teacher is None
    assert any("no original is recorded" in warning for warning in result.warnings)


def test_d03_worse_is_called_worse(models, tmp_path):
    """Trained on X, then on text that contradicts X, scored on X."""
    good = {**RUN, "teacher": "none", "learning_rate": 3e-3, "eval_data": str(models[2])}
    text = write_text(tmp_path / "x.jsonl", seed=1)
    first = uptrain(models[1], tmp_path / "good", text, **{**good, "tokens": 64 * 40})
    assert first.worse is False
    backwards = tmp_path / "backwards.jsonl"
    with backwards.open("w") as file:
        for line in text.read_text().splitlines():
            words = json.loads(line)["text"].split()
            file.write(json.dumps({"text": " ".join(reversed(words))}) + "\n")
    result = uptrain(tmp_path / "good", tmp_path / "up", backwards, **{**good, "tokens": 64 * 10})
    assert result.losses["held_out_end"] > result.losses["held_out_start"]
    assert result.worse and result.to_dict()["worse"] is True
    manifest = json.loads((tmp_path / "up" / "mha2gqa.json").read_text())
    assert manifest["uptrain"]["previous"]["budget"]["steps"] == 40


# --- data ---------------------------------------------------------------------------------------------


def test_missing_column(models, tmp_path):
    with pytest.raises(DataError, match="text"):
        uptrain(models[1], tmp_path / "up", models[2], text_column="body", **RUN)
    assert not (tmp_path / "up").exists()


def test_no_data_at_all(models, tmp_path):
    with pytest.raises(DataError):
        uptrain(models[1], tmp_path / "up", tmp_path / "absent.jsonl", **RUN)


def test_less_than_a_block(models, tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("w1 w2 w3")
    with pytest.raises(DataError, match="one block needs 17"):
        uptrain(models[1], tmp_path / "up", text, **RUN)


def test_data_that_ends_early_is_repeated_and_said(models, tmp_path):
    text = write_text(tmp_path / "few.jsonl", documents=8)
    result = uptrain(models[1], tmp_path / "up", text, **{**RUN, "tokens": 64 * 10, "holdout": 0.0})
    assert any("passes over it" in warning for warning in result.warnings)
    assert result.budget["unique_tokens"] < result.budget["tokens"]
    assert result.losses["held_out_end"] is None and result.worse is None


def test_held_out_documents_are_never_trained_on(models, tmp_path):
    """By hash, and by content where separate held-out text repeats training documents."""
    from mha2gqa.uptraining.budget import UptrainConfig
    from mha2gqa.uptraining.corpus import SplitDocuments

    lines = models[2].read_text().splitlines()
    again = tmp_path / "again.jsonl"
    again.write_text("\n".join(lines[:20]) + "\n")
    for options in ({"holdout": 0.2}, {"eval_data": (str(again),)}):
        texts = SplitDocuments(UptrainConfig("m", "o", (str(models[2]),), tokens=1, **options))
        train, kept = ({d.text for d in side} for side in (texts.train(), texts.held_out()))
        assert train and kept and not train & kept
        assert train | kept == {json.loads(line)["text"] for line in lines}


# --- output and memory ----------------------------------------------------------------------------------


def test_output_inside_the_model_is_refused(models):
    with pytest.raises(UsageError, match="lies inside SOURCE"):
        uptrain(models[1], models[1] / "up", models[2], **RUN)


def test_a_foreign_folder_in_the_way(models, tmp_path):
    (tmp_path / "up.uptrain").mkdir()
    (tmp_path / "up.uptrain" / "thesis.tex").write_text("mine")
    with pytest.raises(UsageError, match="is not an uptraining run"):
        uptrain(models[1], tmp_path / "up", models[2], force=True, **RUN)
    assert (tmp_path / "up.uptrain" / "thesis.tex").read_text() == "mine"


def test_too_little_memory_says_what_to_lower(models, tmp_path, monkeypatch):
    from transformers import Trainer

    def full(self, *args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Trainer, "training_step", full)
    with pytest.raises(
        TrainingError, match=r"out of memory with 4 blocks of 16 tokens.*per_device_train_batch_size"
    ):
        uptrain(models[1], tmp_path / "up", models[2], **RUN)


def test_disk_full_at_the_end_keeps_the_run(models, tmp_path, monkeypatch):
    from mha2gqa.uptraining import publish

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(publish, "write_shards", full)
        with pytest.raises(CheckpointError, match="No space left on device"):
            uptrain(models[1], tmp_path / "up", models[2], **RUN)
    assert not (tmp_path / "up").exists()
    result = uptrain(models[1], tmp_path / "up", models[2], **RUN)
    assert result.resumed_from == 4  # nothing was trained again


def test_use_cache_is_on_in_the_result(models, tmp_path):
    import shutil

    student = tmp_path / "gqa"
    shutil.copytree(models[1], student)
    config = json.loads((student / "config.json").read_text()) | {"use_cache": False, "unknown": {"kept": 1}}
    (student / "config.json").write_text(json.dumps(config))
    uptrain(student, tmp_path / "up", models[2], **RUN)
    written = json.loads((tmp_path / "up" / "config.json").read_text())
    assert written == config | {"use_cache": True}
