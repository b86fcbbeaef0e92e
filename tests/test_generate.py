"""Calibration text that the original samples itself."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import pico_llama, word_tokenizer
from training import write_text

from mha2gqa import convert, uptrain
from mha2gqa.assets import tiny_model_path
from mha2gqa.calibration import sampling
from mha2gqa.calibration.sampling import generate_text, seeded
from mha2gqa.checkpoints.loading import load_config_json
from mha2gqa.commands.dry_run import rehearse
from mha2gqa.config import recipe_from_dict
from mha2gqa.errors import CheckpointError, UsageError
from mha2gqa.uptraining import run, sampled_data


def test_text_is_sampled_once_and_its_hash_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "work" / "generated.jsonl"
    torch.manual_seed(7)
    before = torch.rand(1)
    torch.manual_seed(7)
    facts = generate_text(tiny_model_path(), out, tokens=200, window=32, seed=3, device="cpu")
    assert torch.equal(torch.rand(1), before)  # the caller's random numbers are its own
    documents = [json.loads(line)["text"] for line in out.read_text().splitlines()]
    assert facts["tokens"] >= 200 and len(documents) > 3 and len(set(documents)) > 3
    first = out.read_bytes()
    monkeypatch.setattr(sampling, "load_model", lambda *_, **__: pytest.fail("sampled again"))
    assert generate_text(tiny_model_path(), out, tokens=150, window=32, seed=3, device="cpu") == facts
    monkeypatch.undo()
    record, known = sampling._record_file(out), sampling._record_file(out).read_text()
    record.write_text(json.dumps(json.loads(known) | {"seed": 4}))  # of other text: it is made anew, the same
    assert generate_text(tiny_model_path(), out, tokens=200, window=32, seed=3, device="cpu") == facts
    assert out.read_bytes() == first
    out.unlink()  # as where the run was killed before the text was there
    assert generate_text(tiny_model_path(), out, tokens=200, window=32, seed=3, device="cpu") == facts
    assert out.read_bytes() == first
    other = generate_text(tiny_model_path(), out, tokens=200, window=32, seed=4, device="cpu")
    assert other["sha256"] != facts["sha256"]


def test_a_place_that_cannot_be_written_is_refused_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "load_model", lambda *_, **__: pytest.fail("loaded"))
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be written"):
        generate_text(tiny_model_path(), tmp_path / "file" / "g.jsonl", tokens=100, window=32, device="cpu")


def test_weights_of_either_format_are_told_apart(tmp_path: Path) -> None:
    for name in ("model.safetensors", "pytorch_model.bin"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_bytes(b"1")
        before = sampling._fingerprint(folder)
        (folder / name).write_bytes(b"12")
        assert sampling._fingerprint(folder) != before


def test_text_that_was_changed_or_is_not_ours_is_never_written_over(tmp_path: Path) -> None:
    out = tmp_path / "generated.jsonl"
    words: dict[str, Any] = {"tokens": 200, "window": 32, "device": "cpu"}
    generate_text(tiny_model_path(), out, **words)
    record = sampling._record_file(out)
    for change in (
        lambda: out.write_text(out.read_text().upper()),
        lambda: record.write_text("{"),
        record.unlink,
    ):
        change()
        mine = out.read_bytes()
        with pytest.raises(
            UsageError, match=r"changed, or is not ours; use it with --calibration .*generated"
        ):
            generate_text(tiny_model_path(), out, **words)
        assert out.read_bytes() == mine


@torch.no_grad()
def test_tokens_follow_the_models_own_distribution(tmp_path: Path) -> None:
    """No truncation and temperature 1: the first token of a document is as likely as the model says."""
    model = pico_llama().eval()
    own = {
        "min_p": 0.5,
        "suppress_tokens": [5, 6],
        "num_beams": 3,
        "forced_bos_token_id": 7,
        "temperature": 0.3,
    }
    model.generation_config.update(**own)  # how the model is served is not how it was trained
    wanted = model(input_ids=torch.tensor([[1]])).logits[0, -1].softmax(-1)
    with seeded(0, torch.device("cpu")):
        rows = list(sampling._sample(model, 1, None, 20_000, 2))
    counts = torch.tensor([row[0] for row in rows]).bincount(minlength=len(wanted)) / len(rows)
    spread = (wanted * (1 - wanted) / len(rows)).sqrt()
    assert float(((counts - wanted) / spread.clamp_min(1e-9)).abs().max()) < 5
    assert model.generation_config.num_beams == 3


def test_what_cannot_be_sampled_is_refused_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "load_model", lambda *_, **__: pytest.fail("loaded"))
    out = tmp_path / "g.jsonl"
    monkeypatch.setattr(sampling, "free_memory", lambda _: 1000)
    with pytest.raises(UsageError, match="GiB free"):
        generate_text(tiny_model_path(), out, tokens=100, window=32, device="cpu")
    t5 = tmp_path / "t5"
    t5.mkdir()
    (t5 / "config.json").write_text(json.dumps({"model_type": "t5", "is_encoder_decoder": True}))
    with pytest.raises(UsageError, match="t5"):
        generate_text(t5, out, tokens=100, device="cpu")
    bare = word_tokenizer(tmp_path / "bare")
    (bare / "config.json").write_text(json.dumps(load_config_json(tiny_model_path())))
    monkeypatch.setattr(sampling, "load_tokenizer", lambda *_, **__: _NoStart())
    with pytest.raises(UsageError, match="neither a BOS"):
        generate_text(bare, out, tokens=100, window=32, device="cpu")
    assert list(tmp_path.glob("g*")) == []


class _NoStart:
    bos_token_id = eos_token_id = None


def test_a_conversion_calibrates_on_what_its_original_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    pico_llama().save_pretrained(tmp_path / "mha")
    word_tokenizer(tmp_path / "mha", bos=True)
    words = {"calibration_tokens": 600, "calibration_window": 16, "device": "cpu", "fit": {"steps": 2}}
    few = words | {"calibration_tokens": 10}  # more is sampled than a calibration needs at least
    assert convert(tmp_path / "mha", tmp_path / "few", 2, calibration="generate", **few).calibration["window"]
    first = convert(tmp_path / "mha", tmp_path / "out", 2, calibration="generate", **words)
    file = tmp_path / "out.generated.jsonl"
    assert first.method == "joint" and first.calibration["texts"] == [str(file)] and file.exists()
    monkeypatch.setattr(sampling, "load_model", lambda *_, **__: pytest.fail("sampled again"))
    again = convert(tmp_path / "mha", tmp_path / "out", 2, calibration=["generate"], force=True, **words)
    assert again.calibration["losses"] == first.calibration["losses"]


def test_nothing_is_sampled_for_what_is_refused_or_reads_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, other, out = tmp_path / "mha", tmp_path / "other", tmp_path / "out"
    for factor, folder in ((1, source), (2, other)):
        model = pico_llama()
        model.model.layers[0].self_attn.q_proj.weight.data *= factor
        model.save_pretrained(folder)
        word_tokenizer(folder, bos=True)
    text = str(write_text(tmp_path / "t.jsonl"))
    words = {"calibration_tokens": 600, "calibration_window": 16, "device": "cpu"}
    merged = {"refit": False, "reconstruct": False}
    convert(other, tmp_path / "a", 2, calibration=text, statistics=tmp_path / "st", **merged, **words)
    (tmp_path / "bad.json").write_text("[[0, 1]]")
    with (
        monkeypatch.context() as launched,
        pytest.raises(UsageError, match="cannot be shared by 3 processes"),
    ):
        launched.setenv("WORLD_SIZE", "3")
        convert(source, out, 2, calibration="generate", **words)  # type: ignore[arg-type]
    (tmp_path / "junk").write_text("junk")
    monkeypatch.setattr(sampling, "load_model", lambda *_, **__: pytest.fail("sampled"))
    for asked, message in (
        ({"method": "mean", "grouping": "search"}, "search needs a cost"),
        ({"grouping": str(tmp_path / "bad.json")}, "not 2 groups of 4"),
        ({"statistics": tmp_path / "junk" / "st"}, "cannot be written"),
        ({"statistics": tmp_path / "junk"}, "not a statistics file"),
        ({"statistics": tmp_path / "st"}, "measured on another model"),
    ):
        with pytest.raises(UsageError, match=message):
            convert(source, out, 2, calibration="generate", **words, **asked)  # type: ignore[arg-type]
    known = convert(
        other, tmp_path / "b", 2, calibration="generate", statistics=tmp_path / "st", **merged, **words
    )
    same = convert(source, tmp_path / "c", 8, calibration="generate", **words)
    assert any("text is not read" in warning for warning in known.warnings)
    assert any("text is not used" in warning for warning in same.warnings)
    assert not list(tmp_path.glob("*generated*")) and not list(tmp_path.glob("*.convert"))


def test_text_of_a_model_that_is_written_as_another_belongs_to_its_source_wherever_that_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    neox = GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, num_attention_heads=4, max_position_embeddings=64))
    neox.save_pretrained(tmp_path / "mha")
    word_tokenizer(tmp_path / "mha", bos=True)
    words = {"calibration_tokens": 300, "calibration_window": 16, "device": "cpu", "fit": {"steps": 1}}
    convert(tmp_path / "mha", tmp_path / "gqa", 2, calibration="generate", **words)
    shutil.copytree(tmp_path / "mha", tmp_path / "copy", copy_function=shutil.copyfile)  # of another date
    monkeypatch.setattr(sampling, "load_model", lambda *_, **__: pytest.fail("sampled again"))
    convert(tmp_path / "copy", tmp_path / "gqa", 2, calibration="generate", force=True, **words)
    made = uptrain(
        tmp_path / "gqa", tmp_path / "up", "generate", **TRAINED | {"tokens": 128, "batch_tokens": 64}
    )
    assert made.budget["steps"] == 2


def test_generate_stands_alone_and_a_file_of_that_name_is_a_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="generate cannot be combined"):
        convert(tmp_path, tmp_path / "out", 2, calibration=["a.jsonl", "generate"])
    with pytest.raises(UsageError, match="generate cannot be combined"):
        convert(tmp_path, tmp_path / "out", 2, calibration=["generate", "a.jsonl"])


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """An original and its conversion, calibrated on 600 tokens that the original wrote."""
    torch.manual_seed(0)
    mha, gqa = tmp_path / "mha", tmp_path / "gqa"
    pico_llama().save_pretrained(mha)
    word_tokenizer(mha, bos=True)
    words = {"calibration_tokens": 600, "calibration_window": 16, "device": "cpu", "fit": {"steps": 2}}
    convert(mha, gqa, 2, calibration="generate", **words)
    return mha, gqa


TRAINED: dict[str, Any] = {
    "tokens": 1024,
    "window": 16,
    "batch_tokens": 256,
    "device": "cpu",
    "holdout": 0.1,
    "learning_rate": 1e-3,
}


def test_uptraining_takes_what_convert_sampled_and_samples_the_rest(
    tmp_path: Path, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    mha, gqa = pair
    asked: list[dict[str, Any]] = []

    def sampled(model: str, out: Path, **words: Any) -> dict[str, Any]:
        asked.append(words | {"model": model, "out": out})
        return generate_text(model, out, **words)

    monkeypatch.setattr(sampled_data, "generate_text", sampled)
    made = uptrain(gqa, tmp_path / "up", "generate", **TRAINED)
    first = json.loads((tmp_path / "gqa.generated.jsonl.json").read_text())
    (rest,) = asked
    assert Path(rest["model"]) == mha and rest["seed"] == 1 and first["seed"] == 0
    assert rest["tokens"] == math.ceil((1024 + 16) / 0.9) - first["tokens"]
    assert rest["out"] == tmp_path / "up.generated.jsonl" and rest["out"].exists()
    assert made.budget["unique_tokens"] > first["tokens"] and made.losses["held_out_end"] > 0
    asked.clear()
    record = tmp_path / "gqa.generated.jsonl.json"  # of a conversion with another --seed
    record.write_text(json.dumps(first | {"seed": 1}))
    uptrain(gqa, tmp_path / "other", "generate", **TRAINED)
    assert asked.pop()["seed"] == 2
    record.write_text(json.dumps(first))
    uptrain(gqa, tmp_path / "less", "generate", **TRAINED | {"tokens": 256})
    assert not asked  # what convert sampled is enough
    (tmp_path / "gqa.generated.jsonl").write_text('{"text": "changed"}\n')
    uptrain(gqa, tmp_path / "all", "generate", **TRAINED)
    assert asked[0]["tokens"] == math.ceil((1024 + 16) / 0.9)


def test_an_uptraining_that_broke_off_does_not_sample_again(
    tmp_path: Path, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, gqa = pair
    with monkeypatch.context() as broken:
        broken.setattr(run, "load_corpus", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            uptrain(gqa, tmp_path / "up", "generate", **TRAINED)
    assert (tmp_path / "up.generated.jsonl").exists()
    monkeypatch.setattr(sampling, "load_model", lambda *_, **__: pytest.fail("sampled again"))
    assert uptrain(gqa, tmp_path / "up", "generate", **TRAINED).losses["held_out_end"] > 0


def test_an_uptraining_whose_original_cannot_write_is_refused_before_the_work(
    tmp_path: Path, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    mha, gqa = pair
    out = tmp_path / "up"
    with pytest.raises(UsageError, match=r"generate cannot be combined.*\./generate"):
        uptrain(gqa, out, ["generate", "a.jsonl"], **TRAINED)
    with pytest.raises(UsageError, match=r"generate requires the original"):
        uptrain(gqa, out, "generate", teacher="none", **TRAINED)
    with pytest.raises(UsageError, match=r"data_weights.*excludes"):
        uptrain(gqa, out, "generate", data_weights=(1.0,), **TRAINED)
    with pytest.raises(UsageError, match=r'data="generate": the model.s manifest names no original.*teacher'):
        uptrain(mha, out, "generate", **TRAINED)
    t5 = tmp_path / "t5"
    t5.mkdir()
    (t5 / "config.json").write_text(json.dumps({"model_type": "t5", "is_encoder_decoder": True}))
    with pytest.raises(UsageError, match=r'data="generate": a t5 model cannot generate.*data=FILE'):
        uptrain(t5, out, "generate", **TRAINED)
    monkeypatch.setattr(sampling, "free_memory", lambda _: 1000)
    with pytest.raises(UsageError, match=r'data="generate": .*GiB free.*data=FILE'):
        uptrain(gqa, out, "generate", **TRAINED)
    assert not out.exists() and not out.with_name("up.uptrain").exists()


def test_a_dry_run_refuses_generated_text_of_an_encoder_decoder(tmp_path: Path) -> None:
    t5 = {
        "model_type": "t5",
        "is_encoder_decoder": True,
        "num_heads": 4,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(t5 | {"num_layers": 2, "vocab_size": 64}))
    (tmp_path / "v.jsonl").write_text('{"text": "words"}\n')
    sections = {"source": str(tmp_path), "output": str(tmp_path / "o"), "convert": {"groups": 2}}
    sections |= {"evaluate": {"data": str(tmp_path / "v.jsonl")}}
    asked = {"uptrain": {"data": "generate", "tokens": 1_000_000}}
    with pytest.raises(UsageError, match="--data generate: a t5 model"):
        rehearse(recipe_from_dict(sections | asked))
    asked = {"convert": {"groups": 2, "calibration": "generate"}}
    with pytest.raises(UsageError, match="--calibration generate: a t5 model"):
        rehearse(recipe_from_dict(sections | asked))
