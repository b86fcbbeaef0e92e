"""Find the spec of a checkpoint, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..errors import CheckpointError, UnsupportedModelError
from . import exported, table, wrappers
from .arch_conversions import ARCH_CONVERSIONS
from .exported import EXPORTED
from .flags import falcon, gpt_bigcode
from .refusals import REFUSED
from .spec import AttentionSpec
from .table import DECODERS
from .wrappers import ENCODER_DECODERS, FLAT, TEXT_PARTS, TEXT_PREFIXES, WRAPPERS

BY_FLAGS = {"falcon": falcon, "gpt_bigcode": gpt_bigcode}
RULES = {**table.RULES, **exported.RULES, **wrappers.RULES}
SUPPORTED: dict[str, AttentionSpec] = {**EXPORTED, **DECODERS, **TEXT_PARTS, **ENCODER_DECODERS, **FLAT}

SUPPORTED_TYPES = SUPPORTED.keys() | BY_FLAGS.keys() | WRAPPERS.keys()


def find_spec(config: Mapping[str, Any]) -> AttentionSpec:
    """The spec of a checkpoint, from its raw config alone: nothing is guessed from tensor names.

    Args:
        config: The whole raw config.json.

    Returns:
        The entry of the table, with what the config's own flags change.

    Raises:
        UnsupportedModelError: With the reason and what would be needed.
        CheckpointError: The config names no `model_type`.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError("no model_type", where="config.json", fix="it must be a transformers config")
    where = f"model_type {model_type!r}"
    if model_type in BY_FLAGS:
        return replace(BY_FLAGS[model_type](config), text_type=model_type)
    if model_type in WRAPPERS:
        return _nested(config, model_type, where)
    if model_type not in SUPPORTED:
        raise _unsupported(config, model_type, where)
    return _apply_rules(SUPPORTED[model_type], config, model_type, where)


def unread(config: Mapping[str, Any]) -> str:
    """Why no data can be read for a model; empty where it can.

    Args:
        config: The whole raw config.
    """
    spec = SUPPORTED.get(str(config.get("model_type")))
    return "" if spec is None else spec.unread


def check_read(config: Mapping[str, Any], where: str) -> None:
    """Refuse a model for which no data can be read, where data is to be read.

    Args:
        config: The whole raw config.
        where: The option or command that reads it.

    Raises:
        UnsupportedModelError: There is none, with the reason.
    """
    if reason := unread(config):
        raise UnsupportedModelError(
            f"{config['model_type']}: {reason}",
            where=where,
            fix="convert it without calibration, and compare its outputs with the original's",
        )


def _nested(config: Mapping[str, Any], model_type: str, where: str) -> AttentionSpec:
    wrapper = WRAPPERS[model_type]
    text: Any = config
    for key in wrapper.path:
        text = text.get(key) if isinstance(text, Mapping) else None
    stated = text.get("model_type") if isinstance(text, Mapping) else None
    text_type = stated if isinstance(stated, str) else wrapper.text_type
    where = f"{where}, text model {text_type!r}"
    if text_type not in SUPPORTED:
        raise _unsupported(config, text_type, where)
    inside = SUPPORTED[text_type]
    memory = inside if inside.memory is None else inside.memory
    around = (*TEXT_PREFIXES, *wrapper.prefixes)
    memory = replace(memory, prefixes=tuple(dict.fromkeys((*around, *memory.prefixes))))
    base = inside if wrapper.disk is None else wrapper.disk
    nested = replace(
        base,
        config_path=wrapper.path,
        prefixes=tuple(dict.fromkeys((*around, *base.prefixes))),
        memory=memory,
    )
    return _apply_rules(nested, config, text_type, where)


def _apply_rules(spec: AttentionSpec, config: Mapping[str, Any], text_type: str, where: str) -> AttentionSpec:
    text = spec.text_config(config)
    for rule in RULES.get(text_type, ()):
        if rule.holds(text):
            if rule.refusal:
                raise UnsupportedModelError(f"{rule.key}: {rule.refusal}", where=where)
            spec = replace(spec, **rule.change)
    return replace(spec, text_type=text_type)


def _only_as_another(model_type: str, where: str) -> UnsupportedModelError:
    """Which `--as` a type needs that cannot stay what it is."""
    routes = ARCH_CONVERSIONS[model_type]
    targets = " or ".join(dict.fromkeys(route.target for route in routes))
    if not any(route.auto for route in routes):
        what, fix = "its own code cannot hold fewer KV heads", f"--as {targets} writes it as that stock class"
    else:
        what = "its transformers class ignores num_key_value_heads"
        few = "--groups 1 and " if all(route.only_mqa for route in routes) else ""
        fix = f"convert with {few}--as auto writes it as {targets}, which computes the same"
    return UnsupportedModelError(what, where=where, fix=fix)


def _unsupported(config: Mapping[str, Any], model_type: str, where: str) -> UnsupportedModelError:
    if model_type in REFUSED:
        return UnsupportedModelError(REFUSED[model_type], where=where, fix="`mha2gqa archs` lists all")
    if model_type in ARCH_CONVERSIONS:
        return _only_as_another(model_type, where)
    remote = " (its code comes with the checkpoint)" if "auto_map" in config else ""
    return UnsupportedModelError(
        f"this architecture is not in the table{remote}",
        where=where,
        fix="describe its attention with your own AttentionSpec and use convert_state_dict",
    )
