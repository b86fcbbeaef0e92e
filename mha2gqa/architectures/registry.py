"""Find the spec of a checkpoint, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError, UnsupportedModelError
from .refusals import REFUSED
from .spec import AttentionSpec
from .table import SUPPORTED


def find_spec(config: Mapping[str, Any]) -> AttentionSpec:
    """The spec of a checkpoint, from its raw config alone: names of tensors are never guessed from.

    Args:
        config: The whole raw config.json.

    Returns:
        The entry of the table.

    Raises:
        UnsupportedModelError: With the reason and what would be needed.
        CheckpointError: The config names no `model_type`.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError("no model_type", where="config.json", fix="it must be a transformers config")
    if model_type in SUPPORTED:
        return SUPPORTED[model_type]
    where = f"model_type {model_type!r}"
    if model_type in REFUSED:
        raise UnsupportedModelError(REFUSED[model_type], where=where, fix="`mha2gqa archs` lists all")
    remote = " (its code comes with the checkpoint)" if "auto_map" in config else ""
    raise UnsupportedModelError(
        f"this architecture is not in the table{remote}",
        where=where,
        fix="describe its attention with your own AttentionSpec and convert_state_dict",
    )
