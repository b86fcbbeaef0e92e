"""Architectures without a KV-head count in transformers: their result travels with modelling code.

Data only. Each entry serves the stock type and the exported one (`t5` and `gqa_t5`), so a checkpoint that
was exported once can be shared further. `mha2gqa.modeling` says which class each becomes.
"""

from __future__ import annotations

from dataclasses import replace

from .spec import AttentionSpec, PerHeadParameter, Rule, Variant, clipped


def _both_kinds(heads_key: str, head_dim_key: str = "head_dim") -> tuple[Variant, ...]:
    """Decoder self-attention and cross-attention, each with a KV-head count of its own."""
    return (
        Variant(heads_key, "num_key_value_heads", head_dim_key, "self"),
        Variant(heads_key, "num_cross_key_value_heads", head_dim_key, "cross"),
    )


# The relative bias belongs to query heads. In T5 and mT5 layer 0 holds it for all decoder self-attention:
# one order of heads for all those layers. umT5 has a bias in every layer. The first T5 checkpoints hold one
# for cross-attention too, which transformers ignores: it is not part of the model.
T5 = AttentionSpec(
    modules=(
        ("self", "decoder.block.{layer}.layer.0.SelfAttention"),
        ("cross", "decoder.block.{layer}.layer.1.EncDecAttention"),
    ),
    prefixes=("",),
    q="q",
    k="k",
    v="v",
    o="o",
    per_head=(PerHeadParameter("relative_attention_bias.weight", "query", axis=1, kind="self"),),
    position="relative",
    key_symmetry="linear",
    permutable="model",
    permutable_cross="layer",
    heads_key="num_heads",
    head_dim_key="d_kv",
    layers_key="num_decoder_layers",
    variants=_both_kinds("num_heads", "d_kv"),
)

BART = AttentionSpec(
    modules=(("self", "decoder.layers.{layer}.self_attn"), ("cross", "decoder.layers.{layer}.encoder_attn")),
    o="out_proj",
    position="none",
    key_symmetry="linear",
    heads_key="decoder_attention_heads",
    layers_key="decoder_layers",
    variants=_both_kinds("decoder_attention_heads"),
)

# Rotary pairs lie side by side in self-attention; cross-attention has no positions, and is allowed no more than that.
MOONSHINE = AttentionSpec(
    modules=BART.modules,
    position="interleaved",
    rotary_default=0.9,
    heads_key="decoder_num_attention_heads",
    layers_key="decoder_num_hidden_layers",
    variants=tuple(
        Variant("decoder_num_attention_heads", key, kind=kind)
        for kind, key in (("self", "decoder_num_key_value_heads"), ("cross", "num_cross_key_value_heads"))
    ),
)

MOONSHINE_STREAMING = replace(
    MOONSHINE,
    rotary_default=0.8,
    heads_key="num_attention_heads",
    layers_key="num_hidden_layers",
    variants=_both_kinds("num_attention_heads"),
    unread="its encoder takes sound in whole frames of 5 ms, and recordings are not cut into such frames here",
)

MUSICGEN = AttentionSpec(
    modules=BART.modules,
    prefixes=("decoder.model.", "model."),
    o="out_proj",
    position="none",
    key_symmetry="linear",
    config_path=("decoder",),
    variants=_both_kinds("num_attention_heads"),
    unread="its decoder writes the codes of a sound codec, several at a time, and only text and transcripts are read here",
)

# What the text and the melody encoder give is a prefix of the decoder's own states: there is no cross-attention.
MUSICGEN_MELODY = replace(
    MUSICGEN,
    modules=(("self", "decoder.layers.{layer}.self_attn"),),
    variants=_both_kinds("num_attention_heads")[:1],
)

GPT2 = AttentionSpec(
    modules=(("self", "h.{layer}.attn"),),
    prefixes=("transformer.", ""),
    q="c_attn",
    k="c_attn",
    v="c_attn",
    o="c_proj",
    layout="blocks",
    transposed=True,
    position="none",
    key_symmetry="linear",
    heads_key="n_head",
    layers_key="n_layer",
)

OPT = AttentionSpec(
    modules=(("self", "decoder.layers.{layer}.self_attn"),),
    o="out_proj",
    position="none",
    key_symmetry="linear",
)

# Its scores are not divided by the root of the head's width, which changes no symmetry.
GPT_NEO = AttentionSpec(
    modules=(("self", "h.{layer}.attn.attention"),),
    prefixes=("transformer.", ""),
    o="out_proj",
    position="none",
    key_symmetry="linear",
    heads_key="num_heads",
    layers_key="num_layers",
)

BIOGPT = replace(OPT, modules=(("self", "layers.{layer}.self_attn"),), prefixes=("biogpt.", ""))

# ALiBi: each query head has the slope of its index, so heads keep their order.
BLOOM = AttentionSpec(
    modules=(("self", "h.{layer}.self_attention"),),
    prefixes=("transformer.", ""),
    q="query_key_value",
    k="query_key_value",
    v="query_key_value",
    o="dense",
    layout="per_head",
    position="alibi",
    key_symmetry="linear",
    permutable="never",
    heads_key="n_head",
    layers_key="n_layer",
)

MPT = replace(
    BLOOM,
    modules=(("self", "blocks.{layer}.attn"),),
    q="Wqkv",
    k="Wqkv",
    v="Wqkv",
    o="out_proj",
    layout="blocks",
    heads_key="n_heads",
    layers_key="n_layers",
)

STOCK: dict[str, AttentionSpec] = {
    "t5": T5,
    "mt5": T5,
    "umt5": replace(T5, permutable="layer"),
    **dict.fromkeys(("bart", "mbart", "pegasus", "marian", "m2m_100", "whisper"), BART),
    "moonshine": MOONSHINE,
    "moonshine_streaming": MOONSHINE_STREAMING,
    "musicgen": MUSICGEN,
    "musicgen_melody": MUSICGEN_MELODY,
    "gpt2": GPT2,
    "opt": OPT,
    "gpt_neo": GPT_NEO,
    "biogpt": BIOGPT,
    "bloom": BLOOM,
    "mpt": MPT,
}
EXPORTED: dict[str, AttentionSpec] = {
    **STOCK,
    **{f"gqa_{model_type}": spec for model_type, spec in STOCK.items()},
}
RULES: dict[str, tuple[Rule, ...]] = dict.fromkeys(
    ("mpt", "gqa_mpt"), (clipped("attn_config.clip_qkv", MPT),)
)
