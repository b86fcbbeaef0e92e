"""Moonshine goes the whole way on recordings; MusicGen, which writes codes of sound, is converted and no more.

So is Moonshine Streaming, whose encoder wants frames.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import stock_model
from pico_models import pico_config
from seq2seq_models import audio_folder, saved_moonshine

from mha2gqa.architectures import find_spec
from mha2gqa.calibration import collect
from mha2gqa.checkpoints.hf_config import load_config_json
from mha2gqa.checkpoints.loading import load_model
from mha2gqa.commands.estimate import plan
from mha2gqa.conversion.checkpoint import convert, convert_model
from mha2gqa.errors import UnsupportedModelError
from mha2gqa.evaluation import evaluate
from mha2gqa.kv_cache import kv_bytes, kv_layers
from mha2gqa.report.terminal import render
from mha2gqa.uptraining import uptrain
from mha2gqa.verification.checks import verify

TEXTS = [f"w{i} w{i + 7} w{(3 * i) % 50}" + " w5" * (i % 4) for i in range(12)]


@pytest.fixture(scope="module")
def moonshine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_moonshine(tmp_path_factory.mktemp("moonshine") / "in")


def test_moonshine_goes_the_whole_way_on_recordings(moonshine: Path, tmp_path: Path) -> None:
    audio = audio_folder(tmp_path / "audio", TEXTS)
    said = plan(moonshine, groups=2)
    assert said.recommended.endswith("--calibration RECORDINGS --targets generate")
    made = convert(moonshine, tmp_path / "gqa", 2, calibration=[str(audio)], reconstruct=False, device="cpu")
    assert {row["kind"] for row in made.layers} == {"self", "cross"}
    assert all(row["error_refitted"] <= row["error_merged"] for row in made.layers)
    assert made.calibration["examples"] == len(TEXTS)
    assert [layer.heads for layer in kv_layers(load_config_json(tmp_path / "gqa"))] == [2] * 4
    assert verify(tmp_path / "gqa", against=moonshine, full=True).ok
    up = uptrain(
        str(tmp_path / "gqa"),
        str(tmp_path / "up"),
        [str(audio)],
        teacher=str(moonshine),
        tokens=200,
        device="cpu",
    )
    assert up.budget["steps"] >= 1
    scored = evaluate(
        [str(moonshine), str(tmp_path / "gqa"), str(tmp_path / "up")],
        str(audio),
        metrics=("wer",),
        device="cpu",
    )
    assert [row.generation is not None and row.generation.wer is not None for row in scored.models] == [
        True
    ] * 3


def test_silence_behind_samples_is_not_counted(moonshine: Path) -> None:
    """A batch whose samples are padded counts about as many encoder states as one cut to the recording."""
    model, generator = load_model(moonshine, device="cpu"), torch.Generator().manual_seed(1)
    spec = find_spec(load_config_json(moonshine))
    samples = torch.randn(1, 4608, generator=generator)
    padded = torch.cat([samples, torch.zeros(1, 9216)], 1)
    mask = torch.zeros(1, padded.shape[1], dtype=torch.long)
    mask[:, : samples.shape[1]] = 1
    ids = torch.randint(3, 60, (1, 5), generator=generator)

    def counted(**inputs: Any) -> int:
        return collect(model, spec, {**inputs, "decoder_input_ids": ids}).modules["cross.0"].tokens

    whole, cut = counted(input_values=padded), counted(input_values=samples)
    assert abs(counted(input_values=padded, attention_mask=mask) - cut) <= 2 < whole - cut


# --- converted only -----------------------------------------------------------------------------------------------


UNREAD = {
    "musicgen": "writes the codes of a sound codec",
    "musicgen_melody": "writes the codes of a sound codec",
    "moonshine_streaming": "takes sound in whole frames of 5 ms",
}


@pytest.fixture(scope="module", params=UNREAD)
def unread(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("unread") / request.param
    stock_model(request.param).save_pretrained(folder)
    return folder


def test_they_are_converted_in_their_decoder_alone(unread: Path, tmp_path: Path) -> None:
    made = convert(unread, tmp_path / "out", 2)
    assert [check.name for check in made.verification if check.ok] == [
        "files", "tensor names", "shapes", "modelling code", "loads", "twin oracles",
    ]  # fmt: skip
    before, after = (load_config_json(folder) for folder in (unread, tmp_path / "out"))
    melody = unread.name == "musicgen_melody"  # whose decoder has no cross-attention
    counts = {"num_key_value_heads": 2} | ({} if melody else {"num_cross_key_value_heads": 2})
    if unread.name == "moonshine_streaming":
        assert counts.items() <= after.items() and after["encoder_config"] == before["encoder_config"]
    else:
        assert after["decoder"] == before["decoder"] | counts and "num_key_value_heads" not in after
        assert all(after[part] == before[part] for part in ("text_encoder", "audio_encoder"))
    assert [layer.heads for layer in kv_layers(after)] == [2] * (2 if melody else 4)
    assert [layer.heads for layer in kv_layers(before)] == [8] * (2 if melody else 4)
    assert verify(tmp_path / "out", against=unread, full=True).ok
    assert made.recommended == f"mha2gqa verify {tmp_path / 'out'} --against {unread} --full"
    assert any("converted without data, and not measured" in warning for warning in made.warnings)
    card = (tmp_path / "out" / "README.md").read_text()
    assert (
        "Nothing of it was scored" in card
        and "see mha2gqa evaluate" not in card
        and "uptraining was" not in card
    )
    assert 'processor = AutoProcessor.from_pretrained("PATH_OR_NAME", trust_remote_code=True)' in card
    since = "5.17" if unread.name == "moonshine_streaming" else "4.57"
    assert any(f"transformers alone ({since} or later)" in warning for warning in made.warnings)
    small = load_model(tmp_path / "out", device="cpu")
    assert type(small).__name__ == f"Gqa{type(stock_model(unread.name)).__name__}"


def test_nothing_is_read_for_them_and_plan_says_so(unread: Path, tmp_path: Path) -> None:
    reason = UNREAD[unread.name]
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"source": "w1", "target": "w2"}\n')
    found = plan(unread, groups=2)
    assert any(reason in warning for warning in found.warnings) and "--calibration" not in found.recommended
    assert found.calibration == {} and found.memory["sets"] == {}
    assert ("self + cross" in render(found.to_dict())) is (unread.name != "musicgen_melody")
    assert "Uptraining" not in render(found.to_dict())
    for refused in (
        lambda: convert(unread, tmp_path / "out", 2, calibration=[str(pairs)]),
        lambda: convert_model(stock_model(unread.name), 2, calibration=torch.zeros(4, 8, dtype=torch.long)),
        lambda: evaluate([str(unread)], str(pairs)),
        lambda: uptrain(str(unread), str(tmp_path / "up"), [str(pairs)], tokens=100),
    ):
        with pytest.raises(UnsupportedModelError, match=reason):
            refused()
    assert not (tmp_path / "out").exists() and not (tmp_path / "up").exists()


@pytest.mark.parametrize("model_type", ["t5gemma", "canary", "cohere_asr", "dia"])
def test_the_cache_of_a_decoder_with_a_config_of_its_own_is_counted(model_type: str) -> None:
    """By hand: 2 layers x (k, v) x 8 heads x 8 dims x 4 bytes, for the decoder and for the encoder's states."""
    raw = json.loads(pico_config(model_type).to_json_string(use_diff=False)) | {"model_type": model_type}
    assert kv_bytes(raw, context=10, source_context=30, dtype_bytes=4) == 2 * 2 * 8 * 8 * 4 * (10 + 30)
