"""Pico encoder-decoders in folders as people download them: weights, tokenizer, feature extractor, generation config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pico_models import pico_config

WORDS = [f"w{i}" for i in range(60)]
WHISPER_TOKENS = [
    "<|startoftranscript|>",
    "<|en|>",
    "<|de|>",
    "<|transcribe|>",
    "<|translate|>",
    "<|notimestamps|>",
]
RATE = 16_000


def word_level(path: Path, extra: list[str]) -> Any:
    """A tokenizer over `w0 … w59`, ending each text with `</s>`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate(["<pad>", "</s>", "<unk>", *extra, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=extra,
    )
    fast.save_pretrained(path)
    return fast


def saved(path: Path, model_type: str, extra: list[str] | None = None, **changes: Any) -> Path:
    """A pico model of a type with a word-level tokenizer."""
    from transformers import AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

    torch.manual_seed(0)
    config = pico_config(
        model_type, pad_token_id=0, eos_token_id=1, bos_token_id=None, decoder_start_token_id=0,
        forced_bos_token_id=None, forced_eos_token_id=None, **changes,
    )  # fmt: skip
    kind = AutoModelForSpeechSeq2Seq if model_type in ("whisper", "moonshine") else AutoModelForSeq2SeqLM
    model = kind.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(path)
    word_level(path, extra or [])
    return path


def saved_whisper(path: Path, multilingual: bool = False) -> Path:
    """A pico Whisper that hears two seconds."""
    from transformers import WhisperFeatureExtractor

    saved(path, "whisper", WHISPER_TOKENS, max_source_positions=100, max_target_positions=40)
    WhisperFeatureExtractor(feature_size=16, chunk_length=2).save_pretrained(path)
    settings = {
        "decoder_start_token_id": 3,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "is_multilingual": multilingual,
    }
    (path / "generation_config.json").write_text(json.dumps(settings))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"decoder_start_token_id": 3}))
    return path


def saved_moonshine(path: Path) -> Path:
    """A pico Moonshine, which hears samples."""
    from transformers import Wav2Vec2FeatureExtractor

    saved(path, "moonshine", hidden_size=96, intermediate_size=48, max_position_embeddings=64)
    Wav2Vec2FeatureExtractor(return_attention_mask=True, do_normalize=False).save_pretrained(path)
    return path


def saved_nllb(path: Path) -> Path:
    """A pico M2M100 with NLLB's tokenizer, which reads characters and has two languages."""
    from transformers import AutoModelForSeq2SeqLM, NllbTokenizer

    pieces = ["<s>", "<pad>", "</s>", "<unk>", "▁", *"w0123456789"]
    tokenizer = NllbTokenizer(
        {piece: i for i, piece in enumerate(pieces)}, additional_special_tokens=["deu_Latn", "eng_Latn"]
    )
    torch.manual_seed(0)
    ids = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    AutoModelForSeq2SeqLM.from_config(pico_config("m2m_100", **ids)).eval().save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def tone(seconds: float, pitch: float = 440.0, rate: int = RATE) -> np.ndarray:
    """float32 samples of a sine."""
    t = np.arange(int(seconds * rate)) / rate
    return (0.3 * np.sin(2 * np.pi * pitch * t)).astype(np.float32)


def audio_folder(
    path: Path, texts: list[str], column: str = "text", rate: int = RATE, pitch: int = 200
) -> Path:
    """Recordings with `metadata.csv`, as `datasets` calls an AudioFolder."""
    import soundfile

    path.mkdir(parents=True, exist_ok=True)
    rows = [f"file_name,{column}"]
    for i, text in enumerate(texts):
        soundfile.write(path / f"a{i}.wav", tone(0.3 + 0.2 * i, pitch + 90 * i, rate), rate)
        rows.append(f"a{i}.wav,{text}")
    (path / "metadata.csv").write_text("\n".join(rows) + "\n")
    return path
