"""The same tokenizer under another model type: transformers chooses its class by both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoints.loading import load_tokenizer
from ..errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBES = (
    "Hello  world, don't 12345\n\n\tx = [1, 2]; // é 中文 🙂",
    " leading and trailing ",
    "",
    "UPPER lower 3.14e-10 <|endoftext|></s><s>",
)


def carry_tokenizer(source: Path, folder: Path, trust_remote_code: bool = False) -> tuple[bool | None, str]:
    """Make the tokenizer of `folder` read as that of `source` does, whose files it holds.

    transformers takes class and special tokens from `tokenizer_config.json`, and from the model type what
    that leaves out. Only where the result differs the files are saved anew, complete in themselves.

    Args:
        source: Folder of the original.
        folder: Folder with another model type in config.json, and the original's side files.
        trust_remote_code: Consent to a tokenizer's own code.

    Returns:
        Whether both read alike (None where that cannot be determined), and a sentence about it.
    """
    try:
        original = load_tokenizer(source, trust_remote_code)
    except CheckpointError as error:
        return None, f"not checked: {error.what}"
    if _alike(original, folder, trust_remote_code):
        return True, "reads as the source's does"
    original.save_pretrained(folder)
    _forget_model_types(folder / "tokenizer_config.json")
    if _alike(original, folder, trust_remote_code):
        return (
            True,
            "its files are saved anew: with the source's files this model type would read differently",
        )
    return False, "reads differently from the source's under the new model type"


def _alike(original: PreTrainedTokenizerBase, folder: Path, trust_remote_code: bool) -> bool:
    try:
        found = load_tokenizer(folder, trust_remote_code)
    except CheckpointError:
        return False
    return _reading(found) == _reading(original)


def _reading(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """Special tokens and what some awkward text becomes."""
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id]
    return [special, len(tokenizer), *(tokenizer(text)["input_ids"] for text in _PROBES)]


def _forget_model_types(path: Path) -> None:
    """Name the class that takes tokenizer.json as it is, whatever the model type."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
