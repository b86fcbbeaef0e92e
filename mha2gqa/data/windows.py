"""How many tokens of text a block has where nobody says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..checkpoints.hf_config import is_encoder_decoder, longest_context
from .spans import ENCODER_TOKENS, block_tokens

LONGEST = 2048  # of a decoder's blocks, where its positions allow
SHORTEST, BLOCKS = (
    512,
    32,
)  # of calibration: little text is cut shorter than this many blocks need, but not below


def default_window(config: Mapping[str, Any]) -> int:
    """Tokens of a block to train on: a decoder's positions, at most 2,048, or the text of a full encoder of T5's.

    Args:
        config: The raw config.
    """
    if is_encoder_decoder(config):
        return block_tokens(ENCODER_TOKENS)
    return min(LONGEST, longest_context(config) or LONGEST)


def calibration_window(config: Mapping[str, Any], tokens: int, asked: int | None = None) -> int:
    """Tokens of a block to calibrate on: what is asked for, at most the model's positions.

    By default as to train on; half of it and half again, while the text has fewer than 32 blocks, down to 512 tokens.

    Args:
        config: The raw config.
        tokens: Of the text.
        asked: Tokens of a block, None for the default.

    Example:
        >>> [calibration_window({"model_type": "llama", "max_position_embeddings": 4096}, n) for n in (524_288, 40_000, 999)]
        [2048, 1024, 512]
    """
    if asked is not None:
        return min(asked, longest_context(config) or asked)
    window = default_window(config)
    while tokens < BLOCKS * window and window > SHORTEST:
        window = max(SHORTEST, window // 2)
    return window
