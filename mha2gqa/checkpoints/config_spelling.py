"""Config values that transformers 5 spells otherwise than transformers 4, written in both spellings.

A reader that knows only the older keys would take its class's defaults without a word: another rotary width,
another base of the rotary frequencies, no context extension. The newer keys stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LOCAL, GLOBAL = "sliding_attention", "full_attention"
# How the older classes of types with two kinds of layers read their keys: a base of its own for sliding layers,
# or one base and a scaling of the full layers alone.
TWO_BASES = frozenset({"gemma3_text", "gemma3n_text"})
ONE_BASE = frozenset({"olmo3"})
# Other keys that got another name, by model type: newer -> older.
RENAMED = {name: {"num_local_experts": "num_experts"} for name in ("qwen3_moe", "qwen3_vl_moe_text")}


def both_spellings(config: Mapping[str, Any]) -> dict[str, Any]:
    """A raw config with the older keys beside the newer ones, in nested configs too.

    Args:
        config: Raw `config.json`.

    Returns:
        A new config: `rope_parameters` also as `rope_theta`, `partial_rotary_factor` and `rope_scaling`, `dtype`
        also as `torch_dtype`, and keys that a model type renamed. A key that is there already keeps its value.

    Example:
        >>> both_spellings({"dtype": "float16"})
        {'dtype': 'float16', 'torch_dtype': 'float16'}
    """
    new = {
        key: both_spellings(value) if isinstance(value, Mapping) and key.endswith("_config") else value
        for key, value in config.items()
    }
    if isinstance(config.get("rope_parameters"), Mapping):
        for key, value in _older_rope(config).items():
            new.setdefault(key, value)
    for newer, older in RENAMED.get(str(config.get("model_type")), {}).items():
        if newer in config:
            new.setdefault(older, config[newer])
    if isinstance(config.get("dtype"), str):
        new.setdefault("torch_dtype", config["dtype"])
    return new


def _older_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings as transformers 4 spells them; empty where its keys cannot say it."""
    parameters: Mapping[str, Any] = config["rope_parameters"]
    if not any(isinstance(value, Mapping) for value in parameters.values()):
        return _older_keys(parameters)
    if set(parameters) != {LOCAL, GLOBAL} or not all(isinstance(p, Mapping) for p in parameters.values()):
        return {}  # some classes have positions in one kind of layer alone
    keys, local = _older_keys(parameters[GLOBAL]), _older_keys(parameters[LOCAL])
    if local["rope_scaling"] is None:
        if config.get("model_type") in TWO_BASES:
            return keys | {"rope_local_base_freq": local["rope_theta"]}
        if config.get("model_type") in ONE_BASE and local["rope_theta"] == keys["rope_theta"]:
            return keys
    return {}


def _older_keys(parameters: Mapping[str, Any]) -> dict[str, Any]:
    keys = {key: parameters[key] for key in ("rope_theta", "partial_rotary_factor") if key in parameters}
    scaling = {key: value for key, value in parameters.items() if key not in keys}
    kinds = [scaling.get(key, "default") for key in ("rope_type", "type")]
    # Stated where there is none, too: some classes take a scaling for granted.
    plain = kinds == ["default"] * 2 and not set(scaling) - {"rope_type", "type"}
    return keys | {"rope_scaling": None if plain else scaling}
