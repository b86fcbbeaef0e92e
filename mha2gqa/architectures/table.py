"""model_type -> how its attention is stored, or why it cannot be converted. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import UnsupportedModelError
from .spec import AttentionSpec

LLAMA = AttentionSpec()

SUPPORTED: dict[str, AttentionSpec] = {"llama": LLAMA, "mistral": LLAMA, "qwen2": LLAMA}

REFUSED: dict[str, str] = {
    "deepseek_v3": "multi-head latent attention has no KV heads to share (num_key_value_heads is ignored)",
}


def find_spec(config: Mapping[str, Any]) -> AttentionSpec:
    """The spec of a checkpoint from its raw config.

    Raises:
        UnsupportedModelError: With the reason and what would be needed.
    """
    model_type = str(config.get("model_type"))
    if model_type in SUPPORTED:
        return SUPPORTED[model_type]
    reason = REFUSED.get(model_type, "this architecture is not in the table")
    raise UnsupportedModelError(
        reason, where=f"model_type {model_type!r}", fix="`mha2gqa archs` lists what is supported"
    )
