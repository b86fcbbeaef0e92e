"""The oracle of wide heads: a small random GQA-G model, placed in the wide class, must compute the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import heads
from ..architectures import (
    AttentionSpec,
    config_changes,
    find_attention_modules,
    geometry,
    lookup,
    query_scale,
    rotary_dim,
    wide_changes,
)
from ..checkpoints.hf_config import known_config
from ..checkpoints.reader import edit_config

Build = Callable[[Mapping[str, Any]], torch.nn.Module]
FACTORS = ("short_factor", "long_factor")


def width(spec: AttentionSpec, config: Mapping[str, Any]) -> int:
    """Head dim that a raw config states or implies; 0 where it does neither."""
    text = spec.text_config(config)
    stated, num_heads = lookup(text, spec.head_dim_key), lookup(text, spec.heads_key)
    if isinstance(stated, int):
        return stated
    hidden = text.get("hidden_size")
    return hidden // num_heads if isinstance(hidden, int) and isinstance(num_heads, int) and num_heads else 0


def wideness(spec: AttentionSpec, config: Mapping[str, Any], source: Mapping[str, Any]) -> int:
    """How many times as wide as the source's the heads of a result are."""
    before, after = width(spec, source), width(spec, config)
    return after // before if spec.wide and before and after % before == 0 else 1


def wide_difference(
    spec: AttentionSpec,
    small: Mapping[str, Any],
    groups: int,
    wide: int,
    build: Build,
    run: Callable[[Any], Tensor],
) -> float:
    """Largest difference of outputs, over their spread, of a random GQA-G model and its wide form.

    Args:
        spec: The architecture, as its models are in memory.
        small: Raw config of a small source model.
        groups: G.
        wide: R.
        build: Raw config -> random model.
        run: Model -> outputs.
    """
    plain = edit_config(small, config_changes(spec, small, lookup(small, spec.heads_key), groups))
    narrow = build(plain)
    state = dict(narrow.state_dict())
    shapes = {name: tuple(x.shape) for name, x in state.items()}
    for module in find_attention_modules(spec, shapes):
        own = geometry(spec, plain, module, shapes)
        weights = heads.split(spec, own, {role: state[name] for role, name in module.names.items()})
        rotary = rotary_dim(spec, plain, own.head_dim, module.layer)
        made = heads.widen(weights, wide, spec.position, rotary, query_scale(spec, wide))
        roles = heads.unsplit(spec, made)
        state |= {name: roles[role] for role, name in module.names.items() if role in roles}
    changes = config_changes(spec, plain, own.num_heads, groups // wide) | wide_changes(
        spec, plain, own, wide
    )
    placed = build(edit_config(plain, changes))
    placed.load_state_dict(state)
    right, got = run(narrow), run(placed)
    return float((got - right).abs().max() / right.std().clamp_min(1e-12))


def frequency_difference(
    spec: AttentionSpec, config: Mapping[str, Any], source: Mapping[str, Any], wide: int
) -> float:
    """Largest relative difference of a result's rotary frequencies from the source's, `wide` times."""
    worst = 0.0
    for length in (None, 10**9):  # longrope has a list for longer texts
        right, got = (_frequencies(spec, raw, length) for raw in (source, config))
        right = right.repeat(wide)
        if right.shape != got.shape:
            return float("inf")
        worst = max(worst, float(((got - right) / right).abs().max()))
    return worst


def _frequencies(spec: AttentionSpec, config: Mapping[str, Any], length: int | None) -> Tensor:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    text = dict(spec.text_config(config))
    text.setdefault("model_type", spec.text_type)
    known = known_config(text)
    rope = known.rope_parameters
    if rope["rope_type"] in ROPE_INIT_FUNCTIONS:
        return ROPE_INIT_FUNCTIONS[rope["rope_type"]](known, None, seq_len=length)[0].double()
    rotary = rotary_dim(spec, config, width(spec, config))
    return rope["rope_theta"] ** (-torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)


def cut_factors(text: dict[str, Any], before: int, after: int) -> None:
    """Leave as many of longrope's factors as a head dim of `after` has room for, where they were for `before`."""
    for key in ("rope_parameters", "rope_scaling"):
        rope = text.get(key)
        if isinstance(rope, dict):
            text[key] = {
                name: x[: len(x) * after // before] if name in FACTORS and isinstance(x, list) else x
                for name, x in rope.items()
            }
