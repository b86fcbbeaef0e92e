"""How many tokens of text a block has where nobody says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..checkpoints.hf_config import is_encoder_decoder, longest_context
from .spans import ENCODER_TOKENS, block_tokens

LONGEST_WINDOW = 2048  # tokens of a decoder's block, where its positions allow
LEAST_BLOCKS = 32  # of calibration text: with fewer, blocks are made shorter
SHORTEST_WINDOW = 512  # which they are not made shorter than


def default_window(config: Mapping[str, Any]) -> int:
    """Tokens of a block to train on: a decoder's positions, at most 2,048, or the text of a full encoder of T5's.

    Args:
        config: The raw config.
    """
    if is_encoder_decoder(config):
        return block_tokens(ENCODER_TOKENS)
    return min(LONGEST_WINDOW, longest_context(config) or LONGEST_WINDOW)


def calibration_window(config: Mapping[str, Any], tokens: int, asked: int | None = None) -> int:
    """Tokens of a block to calibrate on: what is asked for, at most the model's positions.

    By default as to train on; while the text has fewer than 32 blocks, half of that and half again, down to 512 tokens.

    Args:
        config: The raw config.
        tokens: Of the text, as far as it is used.
        asked: Tokens of a block, None for the default.

    Example:
        >>> [calibration_window({"model_type": "llama", "max_position_embeddings": 4096}, n) for n in (524_288, 40_000, 999)]
        [2048, 1024, 512]
    """
    if asked is not None:
        return min(asked, longest_context(config) or asked)
    window = default_window(config)
    while tokens < LEAST_BLOCKS * window and window > SHORTEST_WINDOW:
        window = max(SHORTEST_WINDOW, window // 2)
    return window
