"""The command to type next: how a result is held against its original."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from ..config import ConvertConfig
from ..config.option import declared
from ..config.pair_options import PairConfig
from ..data.pairs import trained_on

HELD_OUT = {"text": "HELDOUT.jsonl", "pairs": "HELDOUT_PAIRS.jsonl", "audio": "HELDOUT_RECORDINGS"}


def next_command(options: ConvertConfig, source: Mapping[str, Any], scored: bool = True) -> str:
    """`evaluate` of original and result, on data of the kind that the model is scored on.

    Args:
        options: Of the conversion: those that say how pairs are read are repeated.
        source: Raw config of the source.
        scored: Whether there is data that such a model is scored on; without, `verify` is all there is.

    Example:
        >>> next_command(ConvertConfig("whisper", "small", 4), {"model_type": "whisper", "is_encoder_decoder": True})
        'mha2gqa evaluate whisper small --data HELDOUT_RECORDINGS'
    """
    if not scored:
        return shlex.join(["mha2gqa", "verify", options.out, "--against", options.source, "--full"])
    words = ["mha2gqa", "evaluate", options.source, options.out, "--data", HELD_OUT[trained_on(source)]]
    changed = options.changed()
    for name, item in declared(PairConfig).items():
        if name in changed:
            words += [item.flags[0], str(changed[name])]
    return shlex.join(words)
