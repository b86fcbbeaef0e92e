"""Encoder-decoders calibrated on pairs and recordings: padding never counts, and whole conversions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from seq2seq_models import audio_folder, saved, saved_whisper
from transformers import AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

from mha2gqa import convert
from mha2gqa.architectures import find_spec
from mha2gqa.calibration import collect
from mha2gqa.checkpoints.hf_config import load_config_json
from mha2gqa.checkpoints.loading import load_tokenizer
from mha2gqa.conversion.calibration_options import CalibrationOptions
from mha2gqa.conversion.inputs import Inputs, calibration_inputs, held_out_loss
from mha2gqa.data import PairOptions
from mha2gqa.errors import DataError, UsageError
from mha2gqa.evaluation import evaluate
from mha2gqa.reconstruct import ReconstructConfig, distill, reconstruct

RNG = np.random.default_rng(1)
ROWS = [
    {name: " ".join(f"w{i}" for i in RNG.integers(0, 60, n)) for name, n in zip(("source", "target"), lengths, strict=True)}
    for lengths in RNG.integers(1, 14, (24, 2))
]  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("calibrated")
    for kind in ("marian", "t5"):
        saved(root / kind, kind)
    saved_whisper(root / "whisper")
    texts = [" ".join(f"w{i}" for i in RNG.integers(0, 60, n)) for n in (3, 1, 6, 2, 9, 4)]
    audio_folder(root / "audio", texts)
    (root / "pairs.jsonl").write_text("".join(json.dumps(r) + "\n" for r in ROWS))
    (root / "text.jsonl").write_text("".join(json.dumps({"text": r["source"]}) + "\n" for r in ROWS))
    return root


def data_for(root: Path, kind: str) -> str:
    return str(root / ("audio" if kind == "whisper" else "pairs.jsonl"))


def load(folder: Path) -> Any:
    kind = AutoModelForSpeechSeq2Seq if "whisper" in folder.name else AutoModelForSeq2SeqLM
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


def inputs_for(root: Path, kind: str, **options: Any) -> Inputs:
    folder = root / kind
    chosen = CalibrationOptions((data_for(root, kind),), **options)
    return calibration_inputs(load_tokenizer(folder), load_config_json(folder), chosen, folder)


def cropped(rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One row without its padding."""
    lengths = {"input_ids": "attention_mask", "decoder_input_ids": "decoder_attention_mask"}
    out = dict(rows)
    for ids, mask in lengths.items():
        if mask in rows:
            n = int(rows[mask].sum())
            out |= {name: x[:, :n] for name, x in rows.items() if name in (ids, mask)}
    return out


@pytest.mark.parametrize("kind", ["marian", "t5", "whisper"])
@pytest.mark.parametrize("size", [1, 5])
def test_moments_of_a_padded_batch_are_those_of_each_example_alone(root: Path, kind: str, size: int) -> None:
    inputs, model = inputs_for(root, kind), load(root / kind)
    spec, rows = find_spec(load_config_json(root / kind)), inputs.read
    assert isinstance(rows, dict)
    assert not bool(rows["decoder_attention_mask"].all()) and ("attention_mask" in rows) == (
        kind != "whisper"
    )
    together = collect(model, spec, rows, batch_size=size)
    alone = [
        collect(model, spec, cropped({k: x[i : i + 1] for k, x in rows.items()})) for i in range(len(inputs))
    ]
    for key, found in together.modules.items():
        each = [s.modules[key] for s in alone]
        assert found.tokens == sum(m.tokens for m in each)
        read = int(rows["decoder_attention_mask"].sum())
        queries = rows["decoder_attention_mask"].sum(1).tolist()
        expected = sum(m.inputs * m.tokens for m in each) / found.tokens
        torch.testing.assert_close(found.inputs, expected, rtol=1e-4, atol=1e-4)
        for name in ("mixed", "queries"):
            expected = sum(getattr(m, name) * n for m, n in zip(each, queries, strict=True)) / read
            torch.testing.assert_close(getattr(found, name), expected, rtol=1e-4, atol=1e-4)
        if found.cross:
            keys = rows["attention_mask"].sum() if "attention_mask" in rows else 100 * len(inputs)
            assert found.tokens == int(keys)
        else:
            assert found.tokens == read


def padded_further(rows: dict[str, torch.Tensor], more: int) -> dict[str, torch.Tensor]:
    """The same examples with more padding behind the decoder's ids."""
    ids, mask = rows["decoder_input_ids"], rows["decoder_attention_mask"]
    wider = {"decoder_input_ids": torch.nn.functional.pad(ids, (0, more), value=7)}
    return rows | wider | {"decoder_attention_mask": torch.nn.functional.pad(mask, (0, more))}


def cudnn_in_passes_with_gradients(model: torch.nn.Module) -> list[bool]:
    """Filled with whether torch might take cuDNN's attention, whose gradients behind masks are NaN at times."""
    seen: list[bool] = []

    def look(*_: object) -> None:
        if torch.is_grad_enabled():
            seen.append(torch.backends.cuda.cudnn_sdp_enabled())

    for name, module in model.named_modules():
        if name.endswith("k_proj"):
            module.register_forward_hook(look)
    return seen


@pytest.mark.parametrize("kind", ["marian", "whisper"])
@pytest.mark.parametrize("unit", ["layer", "attention"])
def test_padding_does_not_count_where_modules_are_fitted(root: Path, kind: str, unit: Any) -> None:
    """Oracle: more padding changes neither the errors nor what is learned."""
    spec, model = find_spec(load_config_json(root / kind)), load(root / kind)
    options = {} if kind == "marian" else {"tokens": 10**6}
    rows = inputs_for(root, kind, **options).read
    assert isinstance(rows, dict)
    config = ReconstructConfig(steps=6, batch_size=2, check_every=3, unit=unit, distill_steps=4)
    found = []
    for more in (0, 9):
        student = load(root / kind)
        with torch.no_grad():
            for name, p in student.named_parameters():
                if "decoder" in name and name.endswith("v_proj.weight"):
                    p.mul_(0.7)
        given, seen = padded_further(rows, more), cudnn_in_passes_with_gradients(student)
        fits = reconstruct(model, student, spec, given, config)
        made = distill(model, student, spec, given, config)
        assert set(seen) == {False}
        weights = torch.cat([p.detach().flatten() for p in student.parameters()])
        found.append(([(f.before, f.refitted, f.after) for f in fits], made.before, made.after, weights))
    (errors, *divergence, weights), (wider, *wide_divergence, wide_weights) = found
    np.testing.assert_allclose(np.array(errors, float), np.array(wider, float), rtol=2e-3)
    np.testing.assert_allclose(divergence, wide_divergence, rtol=2e-2)
    torch.testing.assert_close(weights, wide_weights, rtol=1e-2, atol=1e-3)


def test_inputs_keep_their_promises(root: Path) -> None:
    inputs = inputs_for(root, "marian")
    assert isinstance(inputs.rows, dict) and len(inputs) == len(ROWS)
    labels, mask = inputs.rows["labels"], inputs.rows["decoder_attention_mask"]
    assert torch.equal(labels != -100, mask == 1)  # the prompt is one token: each position says the next
    assert "labels" not in inputs.read and inputs[2:4].rows["labels"].shape[0] == 2  # type: ignore[index]
    model = load(root / "marian")
    right = evaluate(root / "marian", root / "pairs.jsonl", device="cpu").models[0]
    assert held_out_loss(model, inputs) == pytest.approx(right.loss, rel=1e-4)
    assert inputs.targets == {"examples": len(ROWS), "target_tokens": int((labels != -100).sum())}
    counts = (labels != -100).sum(1).cumsum(0)
    for most in (40, int(counts[4])):  # target tokens, however long the sources are
        fewer = inputs_for(root, "marian", tokens=most)
        assert len(fewer) == int((counts <= most).sum()) > 0
    heard = inputs_for(root, "whisper")
    assert heard.window == 100 and heard.tokens == 600


def test_recordings_have_a_limit_of_their_own(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = inputs_for(root, "whisper")
    assert len(every) == 6 and not any("which is the most" in text for text in every.warnings)
    monkeypatch.setattr("mha2gqa.conversion.inputs.MOST_RECORDINGS", 4)
    fewer = inputs_for(root, "whisper")
    assert len(fewer) == 4
    count = fewer.targets["target_tokens"]
    assert f"calibrated on 4 recordings, which is the most, with {count} target tokens" in fewer.warnings


@pytest.mark.parametrize("kind", ["marian", "whisper"])
def test_a_conversion_calibrated_on_pairs(root: Path, tmp_path: Path, kind: str) -> None:
    result = convert(
        root / kind,
        tmp_path / "out",
        4,
        calibration=data_for(root, kind),
        refit=True,
        reconstruct=False,
        device="cpu",
    )
    assert result.method == "joint" and all(check.ok for check in result.verification if check.ok is not None)
    assert result.calibration["texts"] == [data_for(root, kind)]
    manifest = json.loads((tmp_path / "out" / "mha2gqa.json").read_text())
    known = inputs_for(root, kind).targets
    assert {key: manifest["calibration"][key] for key in known} == known
    against = [root / kind, tmp_path / "out"]
    found = evaluate(against, data_for(root, kind), against=root / kind, device="cpu").models[1]
    convert(root / kind, tmp_path / "bare", 4, method="joint")
    bare = evaluate(
        [root / kind, tmp_path / "bare"], data_for(root, kind), against=root / kind, device="cpu"
    ).models[1]
    assert found.kl is not None and bare.kl is not None and found.kl < bare.kl


def test_the_original_writes_what_it_is_calibrated_on(root: Path) -> None:
    folder = root / "marian"
    options = CalibrationOptions(
        (str(root / "text.jsonl"),), tokens=200, device="cpu", pairs=PairOptions(targets="generate")
    )
    inputs = calibration_inputs(load_tokenizer(folder), load_config_json(folder), options, folder)
    assert isinstance(inputs.rows, dict)
    assert inputs.targets["generated"] == {"beams": 1, "retry_temperatures": []}
    labels = inputs.rows["labels"]
    logits = load(folder)(**inputs.read).logits  # type: ignore[arg-type]
    real = labels != -100
    right = logits[real].argmax(-1) == labels[real]
    assert float(right.float().mean()) > 0.95  # greedy: its own likeliest tokens, but for suppressed ones


@pytest.mark.parametrize(
    ("kind", "data", "message"),
    [
        ("marian", "text.jsonl", "an encoder-decoder needs the columns source and target"),
        ("whisper", "text.jsonl", "no column 'audio'; the columns are text"),
        ("whisper", "nowhere", "neither a local file"),
    ],
)
def test_data_that_cannot_calibrate(root: Path, tmp_path: Path, kind: str, data: str, message: str) -> None:
    data = data if data == "nowhere" else str(root / data)
    with pytest.raises(DataError, match=message):
        convert(root / kind, tmp_path / "out", 4, calibration=data, device="cpu")
    assert not (tmp_path / "out").exists()


def test_options_about_text_have_no_effect_on_pairs_and_that_is_said(root: Path) -> None:
    plain = inputs_for(root, "marian")
    found = inputs_for(root, "marian", window=8, text_column="x")
    assert set(found.warnings) - set(plain.warnings) == {
        "pairs are read, no text: --calibration-window, --text-column have no effect"
    }


def test_transcripts_that_are_empty_say_who_can_write_them(root: Path, tmp_path: Path) -> None:
    audio_folder(tmp_path / "mute", ["", "", "", ""])
    with pytest.raises(
        DataError, match=r'all its 4 rows lack a source or a target; fill .*targets="generate"'
    ):
        convert(root / "whisper", tmp_path / "out", 4, calibration=tmp_path / "mute", device="cpu")
    with pytest.raises(UsageError, match=r'cannot generate text without a source; .* targets="generate"'):
        convert(root / "whisper", tmp_path / "out", 4, calibration="generate", device="cpu")


def test_a_model_that_writes_nothing_cannot_calibrate(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mha2gqa.data.generation.decode", lambda encoder, ids: " ")
    audio = audio_folder(tmp_path / "audio", ["w1", "w2"])
    with pytest.raises(DataError, match="the model writes nothing for any of it; give other sources"):
        convert(root / "whisper", tmp_path / "out", 4, calibration=audio, targets="generate", device="cpu")


def test_few_examples_are_told_as_such(root: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(ROWS[0] | {"target": "w1 w2 w3 w4 w5 w6 w7 w8"}) + "\n")
    found = convert(root / "marian", tmp_path / "out", 4, calibration=tmp_path / "a.jsonl", device="cpu")
    assert any(w.startswith("1 examples are too few to fit modules") for w in found.warnings), found.warnings


def test_few_targets_are_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(ROWS[0] | {"target": "w1"}))
    with pytest.raises(
        DataError, match="2 tokens of targets are too few to calibrate on; give some hundreds"
    ):
        convert(root / "marian", tmp_path / "out", 4, calibration=tmp_path / "a.jsonl", device="cpu")


def test_positions_that_the_class_computes_are_read_as_transformers_makes_them(root: Path) -> None:
    from mha2gqa.checkpoints.reader import open_checkpoint
    from mha2gqa.checkpoints.streaming import CheckpointLayers

    layers = CheckpointLayers(open_checkpoint(root / "marian"), torch.float32, "cpu")
    own = load(root / "marian").model
    for part in ("encoder", "decoder"):
        layers.load(f"model.{part}")
        name = f"model.{part}.embed_positions.weight"
        found = layers.model.get_parameter(name)
        torch.testing.assert_close(found, own.get_parameter(name.removeprefix("model.")), rtol=0, atol=0)
