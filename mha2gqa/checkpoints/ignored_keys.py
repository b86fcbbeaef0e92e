"""Tensors that older versions of transformers saved and newer ones compute: they carry no weights."""

from __future__ import annotations

import re
from collections.abc import Iterable

# Causal masks, RoPE tables, and the sinusoids of M2M100 (learned positions are called `weight`).
_LEFTOVER = re.compile(
    r".*\.((attn|attention|self_attn)\.(bias|masked_bias|causal_mask|rotary_emb\.inv_freq)"
    r"|embed_positions\.weights)"
)


def without_ignored(names: Iterable[str]) -> list[str]:
    """The names among those that no class asked for that are really too many, sorted.

    Example:
        >>> without_leftovers(["h.0.attn.masked_bias", "h.0.attn.typo.weight"])
        ['h.0.attn.typo.weight']
    """
    return sorted(name for name in names if not _LEFTOVER.fullmatch(name))
