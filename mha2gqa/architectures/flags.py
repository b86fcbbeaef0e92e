"""Architectures whose very layout follows from flags of the config: Falcon and GPTBigCode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .spec import AttentionSpec, Target

_FALCON = AttentionSpec(
    modules=(("self", "h.{layer}.self_attention"),),
    prefixes=("transformer.", ""),
    q="query_key_value",
    k="query_key_value",
    v="query_key_value",
    o="dense",
    kv_heads_keys=(),
)
FALCON_CACHE = (
    "transformers' Falcon caches every query head under new_decoder_architecture: fewer KV heads save "
    "parameters, but no KV cache"
)
_ONE_KV_HEAD = Target("blocks", {"multi_query": True})


def falcon(config: Mapping[str, Any]) -> AttentionSpec:
    """The spec of one of Falcon's three layouts.

    Old models hold all heads (one `[q; k; v]` after the other) or one KV head (`multi_query`), whatever
    `num_kv_heads` says. Only `new_decoder_architecture` honours it.

    Args:
        config: The whole raw config.
    """
    alibi = bool(config.get("alibi"))
    spec = replace(
        _FALCON,
        position="alibi" if alibi else "half_split",
        key_symmetry="linear" if alibi else "planes",
        permutable="never" if alibi else "layer",
    )
    if config.get("new_decoder_architecture"):
        return replace(spec, layout="per_group", kv_heads_keys=("num_kv_heads",), note=FALCON_CACHE)
    if config.get("multi_query", True):
        return replace(spec, layout="blocks")
    spec = replace(spec, layout="per_head", mqa=_ONE_KV_HEAD)
    if not config.get("parallel_attn", True):
        return replace(
            spec, refused_gqa="with parallel_attn false Falcon can hold all KV heads or one, nothing between"
        )
    return replace(
        spec,
        refused_gqa="only Falcon's new_decoder_architecture holds that many KV heads (--as falcon writes it so), and "
        "it caches every query head all the same",
    )


def gpt_bigcode(config: Mapping[str, Any]) -> AttentionSpec:
    """The spec of GPTBigCode: the layout of `c_attn` changes with `multi_query`."""
    spec = AttentionSpec(
        modules=(("self", "h.{layer}.attn"),),
        prefixes=("transformer.", ""),
        q="c_attn",
        k="c_attn",
        v="c_attn",
        o="c_proj",
        layout="blocks",
        position="none",
        key_symmetry="linear",
        heads_key="n_head",
        layers_key="n_layer",
        kv_heads_keys=(),
    )
    if config.get("multi_query", True):
        return spec
    stated = config.get("num_key_value_heads") == config.get("n_head")  # written by transformers, never read
    return replace(
        spec,
        layout="per_head",
        kv_heads_keys=("num_key_value_heads",) if stated else (),
        mqa=_ONE_KV_HEAD,
        refused_gqa="GPTBigCode holds all KV heads or one (multi_query), nothing between",
    )
