"""What the uptraining tests share: a pico GQA checkpoint with its MHA original, a tokenizer and text."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from conftest import pico_llama, word_tokenizer

TINY = {"window": 16, "batch_tokens": 64, "device": "cpu", "holdout": 0.1, "logging_steps": 1}


def write_text(path: Path, documents: int = 120, seed: int = 0) -> Path:
    """JSONL documents over the words of `word_tokenizer`, with something to learn: w(i+1) follows w(i)."""
    rng = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(documents):
            start, length = rng.randrange(57), rng.randrange(5, 40)
            words = " ".join(f"w{(start + i) % 57}" for i in range(length))
            file.write(json.dumps({"text": words}) + "\n")
    return path


def family(folder: Path, groups: int = 2, **changes: Any) -> tuple[Path, Path, Path]:
    """Save an MHA pico model, its mean-pooled conversion and training text.

    Returns:
        The folders of original and conversion, and the text file.
    """
    from mha2gqa.conversion.checkpoint import convert

    original = folder / "mha"
    pico_llama(**changes).save_pretrained(original)
    word_tokenizer(original)
    convert(original, folder / "gqa", groups=groups, method="mean")
    return original, folder / "gqa", write_text(folder / "text.jsonl")
