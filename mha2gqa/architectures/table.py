"""model_type -> how its attention is stored: one entry per architecture, deltas on Llama. Data only."""

from __future__ import annotations

from dataclasses import replace

from .exported import EXPORTED
from .spec import AttentionSpec, HeadExtra

# --- shared shapes of entries --------------------------------------------------------------------------

LLAMA = AttentionSpec()  # separate projections, RoPE over halves of the head, nothing between them
INTERLEAVED = replace(LLAMA, position="interleaved")
NOPE = replace(LLAMA, position="none", key_symmetry="linear")

# RMSNorm over each head of q and k, one weight [d] for all heads.
QK_NORM = replace(LLAMA, qk_norm=("q_norm", "k_norm"), key_symmetry="plane_rotations")
# RMSNorm over all heads at once: its weight has one slice per head.
FULL_NORM = replace(
    LLAMA,
    extras=(HeadExtra("q_norm.weight", "query"), HeadExtra("k_norm.weight", "kv")),
    key_symmetry="phases",
)
# An attention sink per query head: a constant key is no longer invisible, the planes still are free.
SINKS = (HeadExtra("sinks", "query"),)
# A gate on every channel of the attention output forbids any change of basis of the values.
GATE = (HeadExtra("gate_proj.weight", "query"),)
# A gate per head (g_proj rows [H]) scales whole heads: values stay free.
HEAD_GATE = (HeadExtra("g_proj.weight", "query"),)


def _rotary(spec: AttentionSpec, fraction: float) -> AttentionSpec:
    """`spec` with a class default of the rotary fraction."""
    return replace(spec, rotary_default=fraction)


# --- decoders whose class honours num_key_value_heads with separate projections -----------------------

_LLAMA_LIKE = (
    "arcee", "aria_text", "cwm", "falcon_h1", "gemma", "gemma2", "granite", "granitemoe",
    "granitemoeshared", "hyperclovax", "internlm3", "iquestcoder", "jais2", "llama", "minimax",
    "ministral", "ministral3", "mistral", "mixtral", "olmo", "phimoe", "qwen2", "qwen2_moe", "seed_oss",
    "smollm3", "solar_open", "starcoder2", "vaultgemma",
)  # fmt: skip
_QK_NORM_LIKE = (
    "apertus", "apertus1p5_text", "dots1", "exaone4", "exaone_moe", "gemma3_text", "hy_v3", "kolibri1",
    "lara_mini", "mellum", "qwen3", "qwen3_moe",
)  # fmt: skip

DECODERS: dict[str, AttentionSpec] = {
    **dict.fromkeys(_LLAMA_LIKE, LLAMA),
    **dict.fromkeys(_QK_NORM_LIKE, QK_NORM),
    **dict.fromkeys(("cohere", "cohere2", "cohere2_moe", "ernie4_5", "ernie4_5_moe", "helium"), INTERLEAVED),
    **dict.fromkeys(("glm", "glm4"), _rotary(INTERLEAVED, 0.5)),
    **dict.fromkeys(("flex_olmo", "minimax_m2", "olmo2", "olmo3", "olmoe"), FULL_NORM),
    "bamba": _rotary(LLAMA, 0.5),
    "glm4_moe": _rotary(LLAMA, 0.5),
    "gpt_oss": replace(LLAMA, extras=SINKS),
    "granitemoehybrid": NOPE,
    "jamba": NOPE,
    "nemotron": _rotary(LLAMA, 0.5),
    "phi": _rotary(replace(LLAMA, o="dense"), 0.5),
    "stablelm": _rotary(LLAMA, 0.25),
}
SUPPORTED: dict[str, AttentionSpec] = {**EXPORTED, **DECODERS}
