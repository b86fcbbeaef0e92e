"""Wide heads: G / R KV heads of head_dim R d in place of G of d. Which models take them, and their config keys.

The cache holds as many numbers. The class turns rotary pair i of the wide head with the frequency of pair i mod
P of the source (P rotary pairs), which `rope_type: longrope` states as one factor for each pair.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..checkpoints.hf_config import known_config
from ..errors import CheckpointError, UnsupportedModelError, UsageError
from .spec import AttentionSpec, Geometry, rotary_dim, stated_rotary_dim

WIDEST = 256  # head_dim of FlashAttention 2 and 3 and of the kernels of most engines
STATIC = ("linear", "llama3", "yarn")  # scalings whose frequencies do not depend on the text
WHERE = "--wide"


def check_wide(
    spec: AttentionSpec, config: Mapping[str, Any], geometries: Sequence[Geometry], groups: int, wide: int
) -> None:
    """Refuse what has no wide form.

    Args:
        spec: The architecture.
        config: The whole raw config.
        geometries: Of every attention module.
        groups: G, whose cache the result has.
        wide: R, above 1.

    Raises:
        UsageError: R, G and head_dim do not go together.
        UnsupportedModelError: The architecture or its config has no wide form.
    """
    check_divides(groups, wide)
    where = f"{WHERE} {wide}"
    if reason := refusal(spec, config):
        raise UnsupportedModelError(reason, where=where, fix="convert without --wide")
    if len(set(geometries)) != 1:
        raise UnsupportedModelError(
            "its layers differ in their heads, and the config has one head_dim for all",
            where=where,
            fix="convert without --wide",
        )
    (geometry,) = set(geometries)
    if geometry.head_dim * wide > WIDEST:
        least = WIDEST // geometry.head_dim
        raise UsageError(
            f"head_dim would be {geometry.head_dim * wide}, and attention kernels support at most {WIDEST}",
            where=where,
            fix=f"use at most --wide {least}" if least > 1 else "convert without --wide",
        )
    rotary = stated_rotary_dim(spec, config, geometry.head_dim)
    if rotary % 2 or int(geometry.head_dim * wide * (rotary / geometry.head_dim)) != rotary * wide:
        raise UnsupportedModelError(
            f"{rotary} of {geometry.head_dim} dims are rotary: no fraction gives {wide} times as many",
            where=where,
            fix="convert without --wide",
        )


def check_divides(groups: int, wide: int) -> None:
    """Refuse an R that does not divide G.

    Raises:
        UsageError: It does not.
    """
    if wide > groups:
        what = f"more than the {groups} KV heads that share the cache"
    elif groups % wide:
        what = f"does not divide --groups {groups}"
    else:
        return
    possible = [r for r in range(2, groups + 1) if groups % r == 0]
    fix = f"use one of {', '.join(map(str, possible))}" if possible else "convert without --wide"
    raise UsageError(what, where=f"{WHERE} {wide}", fix=fix)


def stored_heads(groups: Any, wide: int) -> Any:
    """KV heads that a result stores; `groups` itself where it is not a number of heads, which is refused later.

    Raises:
        UsageError: R does not divide G.
    """
    if wide == 1 or not isinstance(groups, int) or groups < 1:
        return groups
    check_divides(groups, wide)
    return groups // wide


def refusal(spec: AttentionSpec, config: Mapping[str, Any]) -> str:
    """Why an architecture has no wide form; empty where it has."""
    if spec.qk_norm or spec.key_symmetry == "plane_rotations":
        return "a norm on each head of q and k covers all dims of the head: it cannot become wider"
    if spec.key_symmetry == "phases":
        return "a norm over all heads of q and k depends on all of their dims: they cannot become wider"
    if spec.position == "alibi":
        return "its positions are ALiBi slopes: wide heads need rotary positions"
    if spec.position not in ("half_split", "interleaved"):
        return "its positions are not rotary, which wide heads need"
    if (spec.key_symmetry, spec.value_symmetry) != ("planes", "linear"):
        return "its attention allows no change of basis of keys and values"
    if not spec.wide:
        name = spec.text_config(config).get("model_type", config.get("model_type"))
        return f"the class of {name} models does not take head_dim and rotary factors from the config"
    return ""


def query_scale(spec: AttentionSpec, wide: int) -> float:
    """What queries are multiplied by, where the class divides logits by the square root of the wide head_dim."""
    return 1.0 if spec.scale_key else math.sqrt(wide)


def wide_changes(
    spec: AttentionSpec, config: Mapping[str, Any], geometry: Geometry, wide: int
) -> dict[tuple[str, ...], Any]:
    """Config keys of the wide form, beside the KV-head count, as paths from the root of config.json.

    The rotary keys come in both spellings (`rope_parameters`, and `rope_scaling` of transformers 4).

    Args:
        spec: The architecture.
        config: The whole raw config of the source.
        geometry: Of its attention modules.
        wide: R.

    Raises:
        UnsupportedModelError: The source's own frequencies depend on the text.
    """
    text = dict(spec.text_config(config))
    text.setdefault("model_type", spec.text_type)
    known = known_config(text)
    rope = dict(getattr(known, "rope_parameters", None) or {})
    rotary = rotary_dim(spec, config, geometry.head_dim)
    scaling = _longrope(known, rope, rotary, wide)
    parameters = scaling | {"rope_theta": rope["rope_theta"]}
    keys: dict[str, Any] = {spec.head_dim_key: geometry.head_dim * wide, "rope_theta": rope["rope_theta"]}
    if rotary != geometry.head_dim:
        fraction = {"partial_rotary_factor": rotary / geometry.head_dim}
        keys, parameters = keys | fraction, parameters | fraction
    if spec.scale_key:  # a class may derive it from head_dim where the config leaves it out
        keys[spec.scale_key] = getattr(known, spec.scale_key)
    keys |= {"rope_parameters": parameters, "rope_scaling": scaling}
    return {(*spec.config_path, key): value for key, value in keys.items()}


def _longrope(known: Any, rope: Mapping[str, Any], rotary: int, wide: int) -> dict[str, Any]:
    """`rope_scaling` that turns pair i of the wide head with the frequency of pair i mod P of the source."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if any(isinstance(value, Mapping) for value in rope.values()) or "rope_theta" not in rope:
        raise UnsupportedModelError(
            "layers have rotary settings of their own, and wide heads need one for all",
            where=f"{WHERE} {wide}",
            fix="convert without --wide",
        )
    base, pairs = float(rope["rope_theta"]), rotary // 2
    reach, factor = known.max_position_embeddings, 1.0
    if kind == "longrope":
        reach, factor = rope["original_max_position_embeddings"], rope.get("factor") or 1.0
    lists, attention = _pair_factors(kind, known, rope, rotary, wide)
    if any(len(factors) != pairs for factors in lists.values()):
        raise CheckpointError(
            f"rope_parameters has no factor for each of {pairs} rotary pairs",
            where="config.json",
            fix="restore the config that came with these tensors",
        )
    repeated = {
        name: [
            base ** (2 * (i % pairs) / rotary - 2 * i / (wide * rotary)) * factors[i % pairs]
            for i in range(wide * pairs)
        ]
        for name, factors in lists.items()
    }
    return {
        "rope_type": "longrope",
        **repeated,
        "attention_factor": float(attention),
        "factor": float(factor),
        "original_max_position_embeddings": reach,
    }


def _pair_factors(
    kind: str, known: Any, rope: Mapping[str, Any], rotary: int, wide: int
) -> tuple[dict[str, list[float]], float]:
    """What the source divides each rotary pair's frequency by, in short and in long texts, and its attention factor.

    Raises:
        UnsupportedModelError: The frequencies depend on the text.
    """
    names = ("short_factor", "long_factor")
    if kind == "default":
        return dict.fromkeys(names, [1.0] * (rotary // 2)), 1.0
    if kind not in (*STATIC, "longrope"):
        raise UnsupportedModelError(
            f"rope_type {kind} gives frequencies that depend on the text",
            where=f"{WHERE} {wide}",
            fix="convert without --wide",
        )
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, attention = ROPE_INIT_FUNCTIONS[kind](known, None)
    if kind == "longrope":
        return {name: [float(x) for x in rope[name]] for name in names}, attention
    base = float(rope["rope_theta"])
    own = [base ** (-2 * j / rotary) / f for j, f in enumerate(frequencies.double().tolist())]
    return dict.fromkeys(names, own), attention
