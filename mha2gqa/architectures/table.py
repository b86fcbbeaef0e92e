"""model_type -> how its attention is stored: one entry per architecture, deltas on Llama. Data only."""

from __future__ import annotations

from dataclasses import replace

from .spec import AttentionSpec, PerHeadParameter, Rule, Variant, clipped

# --- shapes that many entries share ----------------------------------------------------------------------

LLAMA = AttentionSpec()  # separate projections, RoPE over the halves of a head, nothing between them
INTERLEAVED = replace(LLAMA, position="interleaved")
NOPE = replace(LLAMA, position="none", key_symmetry="linear")

# RMSNorm over each head of q and k, one weight [d] for all heads.
QK_NORM = replace(LLAMA, qk_norm=("q_norm", "k_norm"), key_symmetry="plane_rotations")
# The same without a weight, or with the norm behind RoPE: the same rotations are free.
QK_UNIT = replace(LLAMA, key_symmetry="plane_rotations")
# RMSNorm over all heads at once: its weight has one slice per head.
FULL_NORM = replace(
    LLAMA,
    per_head=(PerHeadParameter("q_norm.weight", "query"), PerHeadParameter("k_norm.weight", "kv")),
    key_symmetry="phases",
)
# An attention sink per query head, under the names it has on disk.
SINKS = tuple(PerHeadParameter(name, "query") for name in ("sinks", "softmax_offset", "attention_sink_bias"))
# A gate on every channel of the attention output forbids any change of basis of the values.
GATED = replace(QK_NORM, per_head=(PerHeadParameter("gate_proj.weight", "query"),), value_symmetry="none")
# The same gate, stored inside q_proj.
GATED_QUERY = replace(QK_NORM, gated_query=True, value_symmetry="none", rotary_default=0.25)
# One gate per head scales whole heads: values stay free.
HEAD_GATE = (PerHeadParameter("g_proj.weight", "query"),)
# Layers that reuse the keys and values of an earlier one see its heads as they are: nothing may move.
GEMMA_SHARED = replace(
    QK_NORM, key_symmetry="none", value_symmetry="none", permutable="never", rotary_keys=()
)
_LAYERNORM_PER_HEAD = (PerHeadParameter("q_norm.weight", "query"), PerHeadParameter("k_norm.weight", "kv"))


def _rotary(spec: AttentionSpec, fraction: float) -> AttentionSpec:
    """`spec` with the rotary fraction that is the class's default."""
    return replace(spec, rotary_default=fraction)


def _modules(spec: AttentionSpec, *paths: str, prefixes: tuple[str, ...] = ("model.", "")) -> AttentionSpec:
    return replace(spec, modules=tuple(("self", path) for path in paths), prefixes=prefixes)


# --- decoders ------------------------------------------------------------------------------------------

_LLAMA_LIKE = (
    "arcee", "aria_text", "cohere_compass_text", "cwm", "falcon_h1", "gemma", "gemma2", "granite",
    "granitemoe", "granitemoeshared", "hyperclovax", "internlm3", "iquestcoder", "jais2", "llama", "minimax",
    "ministral", "ministral3", "mistral", "mixtral", "olmo", "phimoe", "qwen2", "qwen2_moe", "seed_oss",
    "smollm3", "solar_open", "starcoder2", "vaultgemma",
)  # fmt: skip
_QK_NORM_LIKE = (
    "apertus", "apertus1p5_text", "dots1", "exaone4", "exaone_moe", "gemma3_text", "hy_v3", "kolibri1",
    "lara_mini", "mellum", "minimax_m3_vl_text", "qwen3", "qwen3_moe",
)  # fmt: skip
_PHI3 = replace(LLAMA, q="qkv_proj", k="qkv_proj", v="qkv_proj", layout="blocks")
_INKLING_LAYERS = (
    Variant(),
    Variant("swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim"),
)
# A short convolution over time on every channel of k and v ties their basis.
_INKLING = replace(
    LLAMA,
    modules=(("self", "layers.{layer}.self_attn"),),
    variants=_INKLING_LAYERS,
    per_head=(
        PerHeadParameter("k_sconv.conv1d.weight", "kv"),
        PerHeadParameter("v_sconv.conv1d.weight", "kv"),
        PerHeadParameter("r_proj.weight", "query"),
    ),
    position="relative",
    key_symmetry="none",
    value_symmetry="none",
)
INKLING_DISK = replace(
    _INKLING,
    modules=(("self", "layers.{layer}.attn"),),
    prefixes=("model.llm.",),
    q="wq_du",
    k="wk_dv",
    v="wv_dv",
    o="wo_ud",
    per_head=(
        *(PerHeadParameter(f"{side}_sconv.weight", "kv") for side in "kv"),
        *(PerHeadParameter(f"{side}_sconv.static_w", "kv", axis=1) for side in "kv"),
        *(PerHeadParameter(f"{side}_sconv.weight_proj", "kv") for side in "kv"),
        *(
            PerHeadParameter(name, "query")
            for name in (
                "wr_du.weight",
                "attn_sink_proj.weight",
                "gate_attn.weight",
                "q_l2_clip.scale",
                "rel_l2_clip.scale",
            )
        ),
    ),
)
_INKLING2_MEMORY = replace(
    _INKLING,
    q="q_proj.linear",
    k="k_proj.linear",
    v="v_proj.linear",
    o="o_proj.linear",
    per_head=(
        *(PerHeadParameter(f"{side}_proj.sconv.conv1d.weight", "kv") for side in "kv"),
        *(PerHeadParameter(f"{side}_proj.sconv.static_weight", "kv", axis=1) for side in "kv"),
        *(PerHeadParameter(f"{side}_proj.sconv.weight_proj.weight", "kv") for side in "kv"),
        *(
            PerHeadParameter(name, "query")
            for name in (
                "relative_position_bias.linear.weight",
                "sink_proj.weight",
                "o_proj.gate_proj.weight",
                "q_proj.norm.scale",
                "relative_position_bias.norm.scale",
            )
        ),
    ),
)

DECODERS: dict[str, AttentionSpec] = {
    **dict.fromkeys(_LLAMA_LIKE, LLAMA),
    **dict.fromkeys(_QK_NORM_LIKE, QK_NORM),
    **dict.fromkeys(("cohere", "cohere2", "cohere2_moe", "ernie4_5", "ernie4_5_moe", "helium"), INTERLEAVED),
    **dict.fromkeys(("glm", "glm4"), _rotary(INTERLEAVED, 0.5)),
    **dict.fromkeys(("flex_olmo", "minimax_m2", "olmo2", "olmo3", "olmo_hybrid", "olmoe"), FULL_NORM),
    **dict.fromkeys(("granite_swa", "granitemoe_swa", "gpt_oss"), replace(LLAMA, per_head=SINKS)),
    **dict.fromkeys(("granitemoehybrid", "jamba"), NOPE),
    **dict.fromkeys(("phi3", "phi4_multimodal"), _PHI3),
    **dict.fromkeys(
        ("hunyuan_v1_dense", "hunyuan_v1_moe"), replace(QK_NORM, qk_norm=("query_layernorm", "key_layernorm"))
    ),
    **dict.fromkeys(
        ("lfm2", "lfm2_moe"), replace(QK_NORM, o="out_proj", qk_norm=("q_layernorm", "k_layernorm"))
    ),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), GATED_QUERY),
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), GEMMA_SHARED),
    "gemma3n_text": replace(
        GEMMA_SHARED, uncalibrated="its layers pass on four hidden states of a text at once"
    ),
    "afmoe": GATED,
    "bamba": _rotary(LLAMA, 0.5),
    "beam": replace(GATED, per_head=(*GATED.per_head, PerHeadParameter("gate_bias", "query"))),
    "bitnet": replace(
        LLAMA, per_head=(PerHeadParameter("attn_sub_norm.weight", "query"),), value_symmetry="none"
    ),
    "blt": replace(
        INTERLEAVED,
        prefixes=("model.global_transformer.",),
        config_path=("global_config",),
        note="only the global transformer is converted; the small byte-level encoder and decoder stay",
    ),
    "dbrx": replace(
        LLAMA,
        modules=(("self", "blocks.{layer}.norm_attn_norm.attn"),),
        prefixes=("transformer.", ""),
        q="Wqkv",
        k="Wqkv",
        v="Wqkv",
        o="out_proj",
        layout="blocks",
        heads_key="n_heads",
        kv_heads_keys=("attn_config.kv_n_heads", "num_key_value_heads"),
        layers_key="n_layers",
    ),
    # Heads h and h + H/2 share a pair of value heads.
    "diffllama": replace(LLAMA, value_symmetry="none", permutable="never", min_groups=2),
    "doge": replace(
        QK_NORM,
        per_head=(PerHeadParameter("A", "kv"), PerHeadParameter("dt_proj.weight", "kv", reads_kv=True)),
        value_symmetry="none",
    ),
    "dory": replace(
        QK_UNIT,
        prefixes=("backbone.", "model.", ""),
        per_head=(
            PerHeadParameter("sqk", "query"),
            PerHeadParameter("s_gate", "query"),
            PerHeadParameter("gate_proj.weight", "query"),
            PerHeadParameter("g_proj.weight", "query"),
        ),
        key_symmetry="none",
        value_symmetry="none",
    ),
    "exaone": replace(
        _modules(LLAMA, "h.{layer}.attn.attention", prefixes=("transformer.", "")),
        o="out_proj",
        memory=LLAMA,
    ),
    "flint": replace(QK_NORM, per_head=SINKS),
    "glm4_moe": _rotary(LLAMA, 0.5),
    "inkling_text": _INKLING,
    **dict.fromkeys(("inkling2_text", "inkling2_loop_text"), replace(INKLING_DISK, memory=_INKLING2_MEMORY)),
    "laguna": replace(
        QK_NORM,
        per_head=HEAD_GATE,
        rotary_default=0.5,
        variants=(Variant("num_attention_heads_per_layer"), Variant()),
    ),
    "lfm3": replace(QK_NORM, per_head=(*HEAD_GATE, *GATED.per_head), rotary_keys=()),
    "llama4_text": replace(QK_UNIT, position="interleaved"),
    "mimo_v2_flash": replace(LLAMA, per_head=SINKS, rotary_default=0.334, kv_multiples=(1, 2)),
    "moshi": replace(
        LLAMA,
        q="q_proj.linear",
        k="k_proj.linear",
        v="v_proj.linear",
        o="o_proj.linear",
        prefixes=("model.", "decoder.model.", ""),
        note="only the main decoder is converted; the depth decoder stays",
    ),
    "nanochat": QK_UNIT,
    "nemotron": _rotary(LLAMA, 0.5),
    "nemotron_h": _modules(NOPE, "layers.{layer}.mixer", prefixes=("backbone.", "model.", "")),
    "phi": _rotary(replace(LLAMA, o="dense"), 0.5),
    "qwen4_exp_text": _rotary(GATED_QUERY, 1.0),
    "recurrent_gemma": _rotary(_modules(LLAMA, "layers.{layer}.temporal_block"), 0.5),
    "sarvam_moe": replace(
        _modules(QK_NORM, "layers.{layer}.attention"),
        q="query_key_value",
        k="query_key_value",
        v="query_key_value",
        o="dense",
        layout="blocks",
        qk_norm=("query_layernorm", "key_layernorm"),
        memory=QK_NORM,
    ),
    "stablelm": _rotary(LLAMA, 0.25),
    "zamba": replace(
        _modules(NOPE, "layers.{layer}.shared_transf.self_attn"), head_dim_key="attention_head_dim"
    ),
    "zamba2": replace(
        _modules(NOPE, "layers.{layer}.shared_transformer.self_attn"), head_dim_key="attention_head_dim"
    ),
}

# --- wide heads ------------------------------------------------------------------------------------------

# Classes that take head_dim, and longrope's factor for each rotary pair, from the config. Not Nemotron's: that of
# transformers 4 knows no scaling, and would give other logits without a word.
_WIDE = (
    "arcee", "aria_text", "cohere", "cohere2", "cohere2_moe", "cwm", "ernie4_5", "ernie4_5_moe", "exaone", "gemma",
    "glm", "glm4", "glm4_moe", "gpt_oss", "internlm3", "iquestcoder", "jais2", "llama", "ministral", "mistral",
    "mixtral", "olmo", "phi", "qwen2", "qwen2_moe", "seed_oss", "smollm3", "solar_open", "starcoder2",
)  # fmt: skip
_SCALED_BY = {
    **dict.fromkeys(
        ("granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared", "hyperclovax"),
        "attention_multiplier",
    ),
    **dict.fromkeys(("gemma2", "vaultgemma"), "query_pre_attn_scalar"),
}
DECODERS |= {
    name: replace(DECODERS[name], wide=True, scale_key=_SCALED_BY.get(name, ""))
    for name in (*_WIDE, *_SCALED_BY)
}

# --- what a flag of the config changes -------------------------------------------------------------------

_NOT_SHARED = Rule(  # the values pass a norm without weights
    "num_kv_shared_layers",
    0,
    {"key_symmetry": "plane_rotations", "value_symmetry": "orthogonal", "permutable": "layer"},
)
_KEYS_AS_VALUES = Rule(
    "attention_k_eq_v", None, {"keys_as_values": True, "key_symmetry": "none", "value_symmetry": "none"}
)

RULES: dict[str, tuple[Rule, ...]] = {
    "olmo": (clipped("clip_qkv", LLAMA),),
    "olmoe": (clipped("clip_qkv", FULL_NORM),),
    **dict.fromkeys(
        ("cohere",), (Rule("use_qk_norm", change={"per_head": _LAYERNORM_PER_HEAD, "key_symmetry": "none"}),)
    ),
    "dbrx": (clipped("attn_config.clip_qkv", LLAMA),),
    "gemma3n_text": (_NOT_SHARED,),
    **dict.fromkeys(
        ("gemma4_text", "gemma4_unified_text"),
        (_NOT_SHARED, _KEYS_AS_VALUES),
    ),
    "glm4_moe": (
        Rule("use_qk_norm", change={"qk_norm": QK_NORM.qk_norm, "key_symmetry": "plane_rotations"}),
    ),
    "granitemoehybrid": (
        Rule("position_embedding_type", "rope", change={"position": "half_split", "key_symmetry": "planes"}),
    ),
    "laguna": (Rule("gating", "per-element", change={"value_symmetry": "none"}),),
    "phi": (Rule("qk_layernorm", change={"key_symmetry": "none"}),),
    "stablelm": (
        Rule(
            "qk_layernorm",
            change={
                "key_symmetry": "none",
                "per_head": (
                    PerHeadParameter("q_layernorm.norms.{head}.weight", "query"),
                    PerHeadParameter("k_layernorm.norms.{head}.weight", "kv"),
                ),
            },
        ),
    ),
    "zamba2": (
        Rule("use_mem_rope", change={"position": "half_split", "key_symmetry": "planes"}),
        Rule(
            "use_shared_attention_adapter",
            refusal="its low-rank adapters of k and v are as wide as all query heads, so K/V heads cannot be fewer",
        ),
    ),
}
