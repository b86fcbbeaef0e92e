"""Moonshine, which hears samples: calibrated, scored and uptrained on recordings, its padding left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from seq2seq_models import audio_folder, saved_moonshine

from mha2gqa.architectures import find_spec
from mha2gqa.calibration import collect
from mha2gqa.checkpoints.hf_config import load_config_json
from mha2gqa.checkpoints.loading import load_model
from mha2gqa.commands.estimate import plan
from mha2gqa.conversion.checkpoint import convert
from mha2gqa.evaluation import evaluate
from mha2gqa.kv_cache import kv_layers
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
