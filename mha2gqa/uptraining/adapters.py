"""Which parameters move: all, attention only, or LoRA with the pooled keys and values in full."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..architectures import AttentionSite, find_sites, find_spec
from ..errors import UnsupportedModelError


def attention_sites(model: Any, config: Mapping[str, Any]) -> list[AttentionSite]:
    """The attention modules among a model's own parameter names.

    Args:
        model: A model of transformers.
        config: The raw config it was loaded from.

    Raises:
        UnsupportedModelError: None is found.
    """
    sites = find_sites(find_spec(config), model.state_dict())
    if not sites:
        raise UnsupportedModelError(
            "no attention projections found by name", where=type(model).__name__, fix="train all"
        )
    return sites


def train_attention_only(model: Any, config: Mapping[str, Any]) -> list[str]:
    """Freeze everything but the attention projections and what belongs to their heads.

    Returns:
        Names of the parameters that will move.
    """
    names = {name for site in attention_sites(model, config) for name in site.names.values()}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)
    return sorted(names)
