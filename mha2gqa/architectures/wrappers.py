"""Models with a text model inside (vision, speech): only the text model changes. Data only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .spec import AttentionSpec, PerHeadParameter, Rule, Variant
from .table import DECODERS, FULL_NORM, GATED, GEMMA_SHARED, INKLING_DISK, INTERLEAVED, LLAMA, NOPE, QK_NORM

# Where such models keep their text model, on disk and in memory. Vision and audio towers have longer paths.
TEXT_PREFIXES = (
    "language_model.model.",
    "model.language_model.",
    "model.language_model.model.",
    "model.text_model.",
    "text_model.model.",
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
        prefixes: Further places of the text model on disk.
        disk: How its tensors are named on disk, where not as in the text model on its own.
    """

    text_type: str
    path: tuple[str, ...] = ("text_config",)
    prefixes: tuple[str, ...] = ()
    disk: AttentionSpec | None = None


# Text models that exist only inside a wrapper.
_LLAMA_LIKE = (
    "deepseek_ocr2_text", "emu3_text_model", "granite4_vision_text", "granite_docling_text",
    "paddleocr_vl_text", "qwen2_5_omni_text", "qwen2_5_vl_text", "qwen2_vl_text",
    "unlimited_ocr_text", "voxtral_realtime_text",
)  # fmt: skip
_QK_NORM_LIKE = ("molmo2_text", "qwen3_omni_moe_text", "qwen3_vl_moe_text", "qwen3_vl_text")
_SEQ2SEQ = (("self", "layers.{layer}.self_attn"), ("cross", "layers.{layer}.encoder_attn"))
_DECODER = ("model.decoder.", "decoder.")

_DIFFUSION = replace(GEMMA_SHARED, keys_as_values=True, value_symmetry="none")

TEXT_PARTS: dict[str, AttentionSpec] = {
    **dict.fromkeys(_LLAMA_LIKE, LLAMA),
    **dict.fromkeys(_QK_NORM_LIKE, QK_NORM),
    **dict.fromkeys(("ernie4_5_vl_moe_text", "glm4v_text", "glm_ocr_text"), INTERLEAVED),
    "cosmos3_edge_text": LLAMA,
    # Its encoder and its decoder share their weights: on disk there is only the decoder.
    "diffusion_gemma_text": replace(
        _DIFFUSION,
        memory=replace(
            _DIFFUSION,
            modules=(
                ("self", "model.decoder.layers.{layer}.self_attn"),
                ("self", "model.encoder.language_model.layers.{layer}.self_attn"),
            ),
            prefixes=("",),
        ),
    ),
    "glm4v_moe_text": replace(LLAMA, rotary_default=0.5),
    "hunyuan_vl_text": DECODERS["hunyuan_v1_dense"],
    # Cross-attention to the image normalises q and k, self-attention does not.
    "mllama_text_model": replace(
        QK_NORM,
        modules=(("self", "layers.{layer}.self_attn"), ("cross", "layers.{layer}.cross_attn")),
        variants=(Variant(), Variant(kind="cross")),
    ),
    "muse_glimmer_text": replace(GATED, qk_norm=(), key_symmetry="plane_rotations"),
    "muse_spark_text": replace(GATED, qk_norm=(), key_symmetry="plane_rotations"),
    "step3p5": replace(
        QK_NORM,
        per_head=(PerHeadParameter("g_proj.weight", "query"),),
        variants=(Variant("num_attention_heads_per_layer"), Variant()),
    ),
}

RULES: dict[str, tuple[Rule, ...]] = {
    "molmo2_text": (
        Rule(
            "qk_norm_type", "olmo", {"qk_norm": (), "per_head": FULL_NORM.per_head, "key_symmetry": "phases"}
        ),
    ),
}

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
    "qwen3": ("fun_asr_nano", "lighton_ocr", "moss_transcribe_diarize", "qwen3_asr"),
    "qwen3_5_text": ("minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "qwen3_5"),
    "mistral": ("idefics2", "mistral3"),
    "granite": ("granite_speech", "granite_speech_plus"),
    "gemma3_text": ("gemma3",),
    "cohere2": ("aya_vision", "cohere2_vision"),
    "qwen3_vl_text": ("qwen3_vl",),
    "glm4v_text": ("glm46v", "glm4v", "glmga"),
}  # fmt: skip
_ONE_TO_ONE = {
    "apertus1p5": "apertus1p5_text", "aria": "aria_text", "cohere_compass": "cohere_compass_text",
    "deepseek_ocr2": "deepseek_ocr2_text",
    "emu3": "emu3_text_model",
    "ernie4_5_vl_moe": "ernie4_5_vl_moe_text", "exaone4_5": "exaone4", "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text", "gemma4_unified": "gemma4_unified_text", "glm4v_moe": "glm4v_moe_text",
    "glm_ocr": "glm_ocr_text", "granite4_vision": "granite4_vision_text",
    "granite_docling": "granite_docling_text", "hunyuan_vl": "hunyuan_vl_text",
    "hyperclovax_vision_v2": "hyperclovax", "lfm2_vl": "lfm2",
    "lfm3_vl": "lfm3", "llama4": "llama4_text", "minimax_m3_vl": "minimax_m3_vl_text",
    "mllama": "mllama_text_model", "muse_glimmer": "muse_glimmer_text",
    "muse_spark": "muse_spark_text", "paddleocr_vl": "paddleocr_vl_text", "paligemma": "gemma",
    "qwen2_5_omni_thinker": "qwen2_5_omni_text", "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_vl": "qwen2_vl_text", "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe_text", "qwen3_vl_moe": "qwen3_vl_moe_text",
    "qwen4_exp": "qwen4_exp_text", "step3p7": "step3p5", "unlimited_ocr": "unlimited_ocr_text",
    "voxtral_realtime": "voxtral_realtime_text",
}  # fmt: skip

_COSMOS = replace(LLAMA, q="to_q", k="to_k", v="to_v", o="to_out", prefixes=("",))
_COSMOS_NORMS: dict[str, Any] = {"qk_norm": ("norm_q", "norm_k"), "key_symmetry": "plane_rotations"}
_MOLMO = replace(
    QK_NORM,
    modules=(("self", "transformer.blocks.{layer}.self_attn"),),
    prefixes=("model.",),
    q="att_proj",
    k="att_proj",
    v="att_proj",
    o="attn_out",
    layout="blocks",
)

WRAPPERS: dict[str, Wrapper] = {
    **{name: Wrapper(text) for text, names in _BY_TEXT.items() for name in names},
    **{name: Wrapper(text) for name, text in _ONE_TO_ONE.items()},
    "cosmos3_edge": Wrapper("cosmos3_edge_text", disk=_COSMOS),
    "cosmos3_omni": Wrapper("qwen3_vl_text", disk=replace(_COSMOS, **_COSMOS_NORMS)),
    "diffusion_gemma": Wrapper("diffusion_gemma_text", prefixes=("model.decoder.",)),
    **{name: Wrapper(name + "_text") for name in ("inkling2", "inkling2_loop")},
    "inkling_mm_model": Wrapper("inkling_text", disk=INKLING_DISK),
    "molmo2": Wrapper("molmo2_text", disk=_MOLMO),
    "nemo_speechlm": Wrapper("nemotron_h", prefixes=("llm.model.", "llm.backbone.")),
    "nemotron_h_omni": Wrapper("nemotron_h", prefixes=("language_model.backbone.",)),
    "shieldgemma2": Wrapper(
        "gemma3_text", prefixes=("model.model.language_model.model.", "model.model.language_model.")
    ),
    "qianfan_ocr": Wrapper("qwen3", prefixes=("language_model.model.encoder.",)),
}

# --- encoder-decoder models and others that keep their own layout ----------------------------------------

_COHERE_ASR = replace(NOPE, modules=_SEQ2SEQ, prefixes=_DECODER, variants=(Variant(), Variant(kind="cross")))

ENCODER_DECODERS: dict[str, AttentionSpec] = {
    "t5gemma": replace(
        LLAMA,
        modules=(("self", "layers.{layer}.self_attn"), ("cross", "layers.{layer}.cross_attn")),
        prefixes=_DECODER,
        config_path=("decoder",),
        variants=(Variant(), Variant(kind="cross")),
    ),
    "t5gemma2": replace(QK_NORM, prefixes=_DECODER, config_path=("decoder",)),
    "canary": replace(
        NOPE,
        modules=_SEQ2SEQ,
        prefixes=_DECODER,
        config_path=("decoder_config",),
        variants=(Variant(), Variant(kind="cross")),
    ),
    "cohere_asr": replace(
        _COHERE_ASR,
        modules=(("self", "layers.{layer}.first_sub_layer"), ("cross", "layers.{layer}.second_sub_layer")),
        prefixes=("model.transf_decoder._decoder.", "transf_decoder._decoder."),
        q="query_net",
        k="key_net",
        v="value_net",
        o="out_projection",
        memory=_COHERE_ASR,
    ),
    "dia": replace(
        LLAMA,
        modules=(("self", "layers.{layer}.self_attention"), ("cross", "layers.{layer}.cross_attention")),
        prefixes=_DECODER,
        config_path=("decoder_config",),
        variants=(
            Variant(),
            Variant("cross_num_attention_heads", "cross_num_key_value_heads", "cross_head_dim", "cross"),
        ),
    ),
}
FLAT: dict[str, AttentionSpec] = {
    "chameleon": replace(
        LLAMA,
        key_symmetry="none",
        per_head=tuple(
            PerHeadParameter(f"{side}_norm.{leaf}", "query" if side == "q" else "kv")
            for side in "qk"
            for leaf in ("weight", "bias")
        ),
    ),
    "evolla": LLAMA,
    "kyutai_speech_to_text": replace(DECODERS["moshi"], note=""),
    # The action expert attends to the keys and values of the language model: both share alike, nothing moves.
    "pi0": replace(
        LLAMA,
        modules=(
            ("self", "paligemma.model.language_model.model.layers.{layer}.self_attn"),
            ("self", "gemma_expert.model.layers.{layer}.self_attn"),
        ),
        prefixes=("paligemma_with_expert.",),
        key_symmetry="none",
        value_symmetry="none",
        permutable="never",
        variants=tuple(
            Variant(*(f"{part}.{key}" for key in ("num_attention_heads", "num_key_value_heads", "head_dim")))
            for part in ("vlm_config.text_config", "dit_config")
        ),
        memory=replace(
            LLAMA,
            modules=(
                ("self", "model.vlm.language_model.layers.{layer}.self_attn"),
                ("self", "model.dit.layers.{layer}.self_attn"),
            ),
            prefixes=("",),
        ),
    ),
}
