"""An output head stored as a tensor of its own where the source shares it with the embedding.

Some engines cannot load the shared form of some classes (llama.cpp: OLMo 2). The function stays the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..checkpoints.reader import edit_config
from ..errors import UnsupportedModelError
from ..kv_cache import known_config
from .plan import Plan

HEAD = "lm_head.weight"
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")


def untied(plan: Plan, shapes: Mapping[str, Sequence[int]]) -> Plan:
    """The same conversion, with the output head stored apart.

    Args:
        plan: The conversion.
        shapes: Shape by tensor name of the source.

    Raises:
        UnsupportedModelError: The model is not a decoder of text alone in a stock class, or its embedding is not found.
    """
    if not getattr(known_config(plan.config), "tie_word_embeddings", False):
        return replace(
            plan, warnings=(*plan.warnings, "--untie changes nothing: the output head is not tied")
        )
    embeddings = [name for name in shapes if name.endswith(EMBEDDINGS)]
    if plan.export is not None or plan.spec.config_path or len(embeddings) != 1:
        raise UnsupportedModelError(
            "only decoders of text in a class of transformers can be untied",
            where="--untie",
            fix="leave it out",
        )
    tied: dict[tuple[str, ...], Any] = {("tie_word_embeddings",): False}
    return replace(
        plan,
        config=edit_config(plan.config, tied),
        source=edit_config(plan.source, tied),  # what the result is held against is untied alike
        untied=(HEAD, embeddings[0]),
    )
