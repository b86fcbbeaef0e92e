"""Word timestamps of Whisper on a recording: those of the original, though a conversion moves the heads that tell them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from seq2seq_models import RATE, saved_whisper, tone
from transformers import AutoModelForSpeechSeq2Seq, WhisperFeatureExtractor

from mha2gqa.conversion.checkpoint import convert

HEADS = [[0, 1], [1, 3], [1, 6]]
ORDERS = {0: ((0, 7, 6, 2), (1, 3, 4, 5)), 1: ((5, 3, 0, 1), (2, 4, 6, 7))}


def timed(folder: Path, sound: torch.Tensor) -> dict[str, Any]:
    """Tokens that a folder's model writes, and when they are spoken."""
    model = AutoModelForSpeechSeq2Seq.from_pretrained(folder, trust_remote_code=True).eval()
    return model.generate(sound, return_token_timestamps=True, max_new_tokens=12)


def test_words_are_spoken_when_the_original_says(tmp_path: Path) -> None:
    source = saved_whisper(tmp_path / "in")
    model = AutoModelForSpeechSeq2Seq.from_pretrained(source).eval()
    for key, value in {
        "alignment_heads": HEADS,
        "no_timestamps_token_id": 8,
        "return_timestamps": False,
    }.items():
        setattr(model.generation_config, key, value)  # `update` leaves out what the config does not have
    dim = model.config.d_model // model.config.decoder_attention_heads
    with torch.no_grad():  # heads that differ in queries only, so that any may share without loss
        for layer in model.model.decoder.layers:
            for projection in (layer.encoder_attn.k_proj, layer.encoder_attn.v_proj):
                for tensor in projection.parameters():
                    tensor.copy_(tensor[:dim].repeat(8, *[1] * (tensor.dim() - 1)))
    model.save_pretrained(source)
    crossing = {f"model.decoder.layers.{layer}.encoder_attn": order for layer, order in ORDERS.items()}
    alone = {f"model.decoder.layers.{layer}.self_attn": tuple((h,) for h in range(8)) for layer in ORDERS}
    convert(source, tmp_path / "out", 2, groupings=crossing | alone, attention=("cross",))
    extractor = WhisperFeatureExtractor.from_pretrained(source)
    sound = extractor(tone(1.6), sampling_rate=RATE, return_tensors="pt").input_features
    right, ours = timed(source, sound), timed(tmp_path / "out", sound)
    assert torch.equal(ours["sequences"], right["sequences"])
    assert torch.equal(ours["token_timestamps"], right["token_timestamps"])
    assert len(right["token_timestamps"].unique()) > 3  # they tell something
