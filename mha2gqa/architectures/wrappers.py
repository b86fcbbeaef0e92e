"""Models with a text model inside (vision, speech): only the text model changes. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from .spec import AttentionSpec, HeadExtra, Rule, Variant
from .table import DECODERS, GATED, GEMMA_SHARED, INTERLEAVED, LLAMA, QK_NORM, QK_UNIT

# Where such models keep their text model, on disk and in memory. Vision and audio towers have longer paths.
TEXT_PREFIXES = (
    "language_model.model.",
    "model.language_model.",
    "model.language_model.model.",
    "model.text_model.",
    "model.",
    "language_model.",
    "thinker.model.",
)


@dataclass(frozen=True)
class Wrapper:
    """A model with a text model inside.

    Args:
        text_type: Model type of the text model, where its config does not say.
        path: Keys that lead to the text model's config.
        change: Fields of the text model's spec that differ here.
    """

    text_type: str
    path: tuple[str, ...] = ("text_config",)
    change: dict[str, Any] = field(default_factory=dict, hash=False)


# Text models that exist only inside a wrapper.
_LLAMA_LIKE = (
    "deepseek_ocr2_text", "emu3_text_model", "evolla", "granite4_vision_text", "granite_docling_text",
    "mllama_text_model", "paddleocr_vl_text", "qwen2_5_omni_text", "qwen2_5_vl_text", "qwen2_vl_text",
    "unlimited_ocr_text", "voxtral_realtime_text",
)  # fmt: skip
_QK_NORM_LIKE = ("molmo2_text", "qwen3_omni_moe_text", "qwen3_vl_moe_text", "qwen3_vl_text")
_SEQ2SEQ = (("self", "layers.{layer}.self_attn"), ("cross", "layers.{layer}.encoder_attn"))
_DECODER = ("model.decoder.", "decoder.")

TEXT_PARTS: dict[str, AttentionSpec] = {
    **dict.fromkeys(_LLAMA_LIKE, LLAMA),
    **dict.fromkeys(_QK_NORM_LIKE, QK_NORM),
    **dict.fromkeys(("ernie4_5_vl_moe_text", "glm4v_text", "glm_ocr_text"), INTERLEAVED),
    "cosmos3_edge_text": LLAMA,
    "diffusion_gemma_text": GEMMA_SHARED,
    "glm4v_moe_text": replace(LLAMA, rotary_default=0.5),
    "hunyuan_vl_text": DECODERS["hunyuan_v1_dense"],
    "inkling2_text": LLAMA,
    "muse_glimmer_text": replace(GATED, qk_norm=(), key_symmetry="plane_rotations"),
    "muse_spark_text": replace(GATED, qk_norm=(), key_symmetry="plane_rotations"),
    "step3p5": replace(
        QK_NORM,
        extras=(HeadExtra("g_proj.weight", "query"),),
        variants=(Variant("num_attention_heads_per_layer"), Variant()),
    ),
}

RULES: dict[str, tuple[Rule, ...]] = {}

# --- wrappers ------------------------------------------------------------------------------------------

# Any supported text model may sit inside these: their config names it, this is the default.
_BY_TEXT: dict[str, tuple[str, ...]] = {
    "llama": (
        "deepseek_vl", "deepseek_vl_hybrid", "glmasr", "idefics3", "janus", "llava", "llava_next",
        "llava_next_video", "omniasr", "perception_lm", "smolvlm", "video_llava", "vipllava", "voxtral",
    ),
    "qwen2": (
        "audioflamingo3", "fast_vlm", "got_ocr2", "internvl", "llava_onevision", "musicflamingo", "ovis2",
        "pp_chart2table", "qwen2_audio", "vibevoice", "vibevoice_asr", "video_llama_3",
    ),
    "qwen3": ("fun_asr_nano", "lighton_ocr", "moss_transcribe_diarize", "qianfan_ocr", "qwen3_asr"),
    "qwen3_5_text": ("minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "qwen3_5"),
    "mistral": ("idefics2", "mistral3"),
    "granite": ("granite_speech", "granite_speech_plus"),
    "nemotron_h": ("nemo_speechlm", "nemotron_h_omni"),
    "gemma3_text": ("gemma3", "shieldgemma2"),
    "cohere2": ("aya_vision", "cohere2_vision"),
    "qwen3_vl_text": ("cosmos3_omni", "qwen3_vl"),
    "glm4v_text": ("glm46v", "glm4v", "glmga"),
}  # fmt: skip
_ONE_TO_ONE = {
    "apertus1p5": "apertus1p5_text", "aria": "aria_text", "cohere_compass": "cohere_compass_text",
    "cosmos3_edge": "cosmos3_edge_text", "deepseek_ocr2": "deepseek_ocr2_text",
    "diffusion_gemma": "diffusion_gemma_text", "emu3": "emu3_text_model",
    "ernie4_5_vl_moe": "ernie4_5_vl_moe_text", "exaone4_5": "exaone4", "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text", "gemma4_unified": "gemma4_unified_text", "glm4v_moe": "glm4v_moe_text",
    "glm_ocr": "glm_ocr_text", "granite4_vision": "granite4_vision_text",
    "granite_docling": "granite_docling_text", "hunyuan_vl": "hunyuan_vl_text",
    "hyperclovax_vision_v2": "hyperclovax", "inkling_mm_model": "inkling_text", "lfm2_vl": "lfm2",
    "lfm3_vl": "lfm3", "llama4": "llama4_text", "minimax_m3_vl": "minimax_m3_vl_text",
    "mllama": "mllama_text_model", "molmo2": "molmo2_text", "muse_glimmer": "muse_glimmer_text",
    "muse_spark": "muse_spark_text", "paddleocr_vl": "paddleocr_vl_text", "paligemma": "gemma",
    "qwen2_5_omni_thinker": "qwen2_5_omni_text", "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_vl": "qwen2_vl_text", "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe_text", "qwen3_vl_moe": "qwen3_vl_moe_text",
    "qwen4_exp": "qwen4_exp_text", "step3p7": "step3p5", "unlimited_ocr": "unlimited_ocr_text",
    "voxtral_realtime": "voxtral_realtime_text",
}  # fmt: skip

WRAPPERS: dict[str, Wrapper] = {
    **{name: Wrapper(text) for text, names in _BY_TEXT.items() for name in names},
    **{name: Wrapper(text) for name, text in _ONE_TO_ONE.items()},
}

# --- encoder-decoder models and others that keep their own layout ----------------------------------------

ENCODER_DECODERS: dict[str, AttentionSpec] = {
    "t5gemma": replace(
        LLAMA,
        modules=(("self", "layers.{layer}.self_attn"), ("cross", "layers.{layer}.cross_attn")),
        prefixes=_DECODER,
        config_path=("decoder",),
        variants=(Variant(), Variant(kind="cross")),
    ),
    "t5gemma2": replace(QK_NORM, prefixes=_DECODER, config_path=("decoder",)),
}
FLAT: dict[str, AttentionSpec] = {
    "chameleon": replace(
        LLAMA,
        key_symmetry="none",
        extras=tuple(
            HeadExtra(f"{side}_norm.{leaf}", per)
            for side, per in (("q", "query"), ("k", "kv"))
            for leaf in ("weight", "bias")
        ),
    ),
    "evolla": LLAMA,
}
__all__ = [
    "ENCODER_DECODERS",
    "FLAT",
    "QK_UNIT",
    "RULES",
    "TEXT_PARTS",
    "TEXT_PREFIXES",
    "WRAPPERS",
    "Wrapper",
]
