"""The smallest working model of an architecture: the real config class, shrunk by rule.

`pico_config` shrinks every size in the whole tree of configs. What a rule cannot know (a layer pattern, sizes
that a class asserts) is stated per model type in `OVERRIDES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HEADS, HEAD_DIM, LAYERS, VOCAB = 8, 8, 2, 128
HIDDEN = HEADS * HEAD_DIM

# key -> value, wherever a config of the tree holds a number under that key
SIZES: dict[str, int] = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "out_hidden_size", "audio_hidden_size"),
        HIDDEN,
    ),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("encoder_num_attention_heads", "decoder_num_attention_heads"), HEADS),
    **dict.fromkeys(("encoder_num_key_value_heads", "decoder_num_key_value_heads"), HEADS),
    **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads"), HEADS),
    **dict.fromkeys(("cross_num_attention_heads", "cross_num_key_value_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "kv_n_heads"), HEADS),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth"), LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), LAYERS),
    **dict.fromkeys(("encoder_num_hidden_layers", "decoder_num_hidden_layers"), LAYERS),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "ffn_hidden_size"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "n_inner", "mlp_dim"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("head_dim", "attention_head_dim", "v_head_dim", "kv_channels", "d_kv"), HEAD_DIM),
    **dict.fromkeys(("cross_head_dim", "swa_head_dim", "global_head_dim", "swa_v_head_dim"), HEAD_DIM),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), HEAD_DIM),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("vocab_size", "n_positions", "max_position_embeddings", "sliding_window"), VOCAB),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("image_size", "input_size"), 32),
    **dict.fromkeys(("patch_size",), 16),
    **dict.fromkeys(("num_mel_bins",), 16),
    **dict.fromkeys(("num_filters",), 4),
    **dict.fromkeys(("base_channels", "latent_channels", "output_channels", "downsample_hidden_size"), 32),
    **dict.fromkeys(("num_embeddings", "codebook_size", "codebook_vocab_size", "max_img_size"), HIDDEN),
    **dict.fromkeys(
        ("projector_hidden_size", "projection_hidden_dim", "alignment_intermediate_size"), HIDDEN
    ),
    **dict.fromkeys(("hidden_dim", "adapter_hidden_size", "vision_hidden_size", "downsample_dim"), HIDDEN),
    **dict.fromkeys(("projection_dim", "image_token_embed_dim", "fusion_dim", "cross_hidden_size"), HIDDEN),
    **dict.fromkeys(("max_source_positions", "max_target_positions", "max_position"), VOCAB),
    **dict.fromkeys(("hidden_size_per_layer_input",), 8),
    **dict.fromkeys(("vocab_size_per_layer_input",), VOCAB),
    **dict.fromkeys(("mamba_d_state", "mamba_n_heads", "mamba_d_head", "mamba_n_groups"), 8),
}
NESTED = ("encoder", "decoder", "attn_config", "ffn_config")

_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_ROPE_BY_TYPE = {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}}
_D8 = {"head_dim": HEAD_DIM}
_MROPE = {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}}
_MAMBA = {"mamba_n_heads": 16, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
_HYBRID = {"mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 1, "ssm_state_size": 8, "chunk_size": 8}
_INDEXER = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
    "indexer_compress_ratio": 2, "ngram_vocab_size_base": 64, "split_ngram_parts": 2, "ple_embed_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_GEMMA3N = {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2, "intermediate_size": [48] * 4, "activation_sparsity_pattern": [0.0] * 4,
    "laurel_rank": 8,
}  # fmt: skip

# What no rule can know: layer patterns, sizes that a class asserts, keys whose default the class cannot run.
OVERRIDES: dict[str, dict[str, Any]] = {
    "apertus1p5": {
        "image_token_offset": 32,
        "audio_token_offset": 64,
        "text_config": {"vocab_size": 128},
        "vision_config": {"codebook_size": 32, "base_channels": 32},
        "audio_config": {
            "codebook_dim": HIDDEN,
            "codebook_size": 32,
            "decoder_hidden_size": 32,
            "decoder_intermediate_size": 32,
        },
    },
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "blt": {
        "encoder_hash_byte_group_vocab": 50,
        "cross_attn_k": 1,
        "encoder_config": {"hidden_size_global": HIDDEN},
        "decoder_config": {"hidden_size_global": HIDDEN},
    },
    "chameleon": {"vocabulary_map": {}, "vq_config": {"base_channels": 32, "resolution": 32}},
    "cohere_compass": {"text_config": _ROPE_BY_TYPE},
    "cohere_compass_text": _ROPE_BY_TYPE,
    "cosmos3_edge": {"text_config": _MROPE},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_ocr2": {
        "text_config": {
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "mlp_layer_types": ["dense", "sparse"],
        }
    },
    "diffusion_gemma": {"text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "emu3": {"vocabulary_map": {}, "vq_config": {"base_channels": 32}},
    "ernie4_5_vl_moe": {
        "text_config": {
            "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]},
            "moe_intermediate_size": [16, 16],
        }
    },
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": HEADS},
    "gpt_bigcode": {"multi_query": False},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": HIDDEN * 2},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": HIDDEN // 4}},
    "gemma3n": {"text_config": _GEMMA3N},
    "gemma3n_text": _GEMMA3N,
    **{name: {"text_config": _MROPE} for name in ("glm46v", "glm4v", "glm_ocr", "glmga")},
    "gemma4_text": {"num_hidden_layers": 2, "attention_k_eq_v": True},
    "glm4v_moe": {
        "text_config": {"rope_parameters": {**_MROPE["rope_parameters"], "partial_rotary_factor": 1.0}}
    },
    "granite4_vision": {
        "deepstack_layer_map": [[-1, 0]],
        "spatial_target_layers": [0, 1, 0, 1],
        "downsample_rate": "1/2",
    },
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"]},
    "hunyuan_v1_dense": _D8,
    "hunyuan_v1_moe": _D8,
    "hunyuan_vl": {"text_config": {**_D8, **_MROPE}},
    "inkling2": {
        "text_config": {"unpadded_vocab_size": VOCAB},
        "vision_config": {"text_hidden_size": HIDDEN},
    },
    "inkling2_loop": {
        "text_config": {"unpadded_vocab_size": VOCAB},
        "vision_config": {"text_hidden_size": HIDDEN},
    },
    "inkling2_text": {"unpadded_vocab_size": VOCAB},
    "inkling2_loop_text": {"unpadded_vocab_size": VOCAB},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "kyutai_speech_to_text": {
        "codec_config": {
            "upsample_groups": HIDDEN,
            "codebook_dim": 16,
            "vector_quantization_hidden_dimension": 16,
            "num_quantizers": 2,
        },
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mimo_v2_flash": {"num_key_value_heads": HEADS // 2},
    "ministral": _D8,
    "mllama": {"text_config": {"num_hidden_layers": 3, "cross_attention_layers": [1]}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0], "text_hidden_size": HIDDEN}},
    "nemo_speechlm": {"text_config": _HYBRID},
    "nemotron": {"num_key_value_heads": HEADS},
    "nemotron_h": _HYBRID,
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}, "text_config": _HYBRID},
    "paddleocr_vl": {"text_config": _MROPE},
    "perception_lm": {"vision_config": {"model_args": {"embed_dim": HIDDEN}}},
    "qwen2_5_omni_thinker": {"text_config": _MROPE, "vision_start_token_id": 101},
    "qwen2_5_vl": {"text_config": _MROPE},
    "qwen2_vl": {"text_config": _MROPE},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 101},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "lru_width": HIDDEN},
    "step3p7": {"text_config": {"sliding_window": 8}},
    **{
        name: {key: {"downsampling_ratios": [2, 2], "depths": [1, 1, 1]} for key in keys}
        for name, keys in {
            "vibevoice": ("audio_config", "semantic_model_config"),
            "vibevoice_asr": ("acoustic_tokenizer_encoder_config", "semantic_tokenizer_encoder_config"),
        }.items()
    },
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "mamba_dt_rank": 4,
        "attention_hidden_size": 2 * HIDDEN,
        "attention_head_dim": 2 * HEAD_DIM,
    },
}


def _pick(values: list[Any], count: int) -> list[Any]:
    """`count` entries of a per-layer list with as many different ones as fit, in order."""
    distinct = [v for i, v in enumerate(values) if v not in values[:i]]
    return (distinct + [distinct[-1]] * count)[:count]


def _shrink(config: Mapping[str, Any], top: bool = True) -> dict[str, Any]:
    layers = config.get("num_hidden_layers")
    out: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and (key.endswith("config") or key in NESTED) and value:
            out[key] = _shrink(value, False)
        elif key in SIZES and isinstance(value, int) and not isinstance(value, bool):
            out[key] = SIZES[key]
        elif isinstance(value, list) and len(value) == layers and value:
            out[key] = _pick(value, LAYERS)
        elif key.endswith(("token_id", "token_index")) and isinstance(value, int):
            out[key] = value if value < 4 else 100 + sum(map(ord, key)) % 28
        elif key == "model_type" and not top:
            out[key] = value
    return out


def _merge(base: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in changes.items():
        out[key] = (
            _merge(out[key], value)
            if isinstance(value, Mapping) and isinstance(out.get(key), dict)
            else value
        )
    return out


def pico_config(model_type: str, **changes: Any) -> Any:
    """The config of `model_type`, shrunk; `changes` are applied last (nested ones as dicts)."""
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    values = _shrink(config_class().to_dict())
    return config_class(**_merge(_merge(values, OVERRIDES.get(model_type, {})), changes))


def model_class(model_type: str) -> Any:
    """The class that runs a checkpoint of `model_type`."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    if model_type in CLASSES:
        return getattr(transformers, CLASSES[model_type])
    for mapping in (
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    ):
        if model_type in mapping:
            name = mapping[model_type]
            return getattr(transformers, name if isinstance(name, str) else name[0])
    raise LookupError(model_type)


# The number of KV heads a type can hold, where it is not any divisor.
GROUPS = {"gpt_bigcode": 1}
# Wrappers whose vision tower is a timm model.
TIMM = ("fast_vlm", "gemma3n", "perception_lm")
# Where a submodule is run: the whole model demands an image or audio.
INSIDE = {
    "blt": "model.global_transformer",
    "llama4": "language_model",
    "shieldgemma2": "model",
    "voxtral_realtime": "model.language_model",
}
# The class of a checkpoint, where the auto mappings name another.
CLASSES = {"shieldgemma2": "ShieldGemma2ForImageClassification"}
# Classes that cannot use a cache, or answer differently with one, before any conversion.
NO_CACHE = ("blt", "dory")
# Classes whose forward takes no `use_cache`.
NO_USE_CACHE = ("blt", "pi0")
# Classes whose `generate` demands an image, audio or a package.
NO_GENERATE = ("dia", "diffusion_gemma", "kyutai_speech_to_text", "pi0", "vibevoice", "voxtral_realtime")


def pico_inputs(model: Any, ids: Any) -> dict[str, Any]:
    """What a forward pass takes: tokens, and for an encoder-decoder what the encoder gives."""
    config, kind = model.config, model.config.model_type
    if kind in _SPECIAL_INPUTS:
        return _SPECIAL_INPUTS[kind](config, ids)
    if config.is_encoder_decoder:
        return {"input_ids": ids, "decoder_input_ids": ids.flip(1)}
    return {"input_ids": ids}


def _noise(ids: Any, *shape: int) -> Any:
    """Random numbers `[B, *shape]`."""
    import torch

    return torch.randn(ids.shape[0], *shape, generator=torch.Generator().manual_seed(3))


def _encoded(config: Any, ids: Any) -> dict[str, Any]:
    """Hidden states in place of an encoder's."""
    from transformers.modeling_outputs import BaseModelOutput

    encoded = BaseModelOutput(_noise(ids, 5, HIDDEN))
    encoded.attention_mask = None
    return {"encoder_outputs": encoded, "decoder_input_ids": ids}


def _actions(config: Any, ids: Any) -> dict[str, Any]:
    """State and noise of a robot's policy behind embedded tokens; no image."""
    return {
        "state": _noise(ids, config.max_state_dim),
        "noise": _noise(ids, config.chunk_size, config.max_action_dim),
        "timestep": _noise(ids).sigmoid(),
        "inputs_embeds": _noise(ids, ids.shape[1], HIDDEN),
        "pixel_values": _noise(ids),
    }


_SPECIAL_INPUTS: dict[str, Any] = {
    "blt": lambda config, ids: {"inputs_embeds": _noise(ids, ids.shape[1], HIDDEN)},
    "canary": _encoded,
    "cohere_asr": _encoded,
    "dia": lambda config, ids: {
        "input_ids": ids,
        "decoder_input_ids": _channels(ids, config.decoder_config.num_channels),
    },
    "diffusion_gemma": lambda config, ids: {"input_ids": ids, "decoder_input_ids": ids.flip(1)},
    "kyutai_speech_to_text": lambda config, ids: {"input_ids": _channels(ids % 60, config.num_codebooks + 1)},
    "mllama": lambda config, ids: {"input_ids": ids, "cross_attention_states": _noise(ids, 5, HIDDEN)},
    "pi0": _actions,
    "voxtral_realtime": lambda config, ids: {"input_ids": ids, "t_cond": _noise(ids, 1, HIDDEN) * 0},
}


def _channels(ids: Any, count: int) -> Any:
    """`[B, T]` -> `[B, T, count]` for models that read several streams of tokens."""
    return ids[..., None].repeat(1, 1, count)


def runnable(model: Any) -> Any:
    """The module whose outputs are compared."""
    inside = INSIDE.get(model.config.model_type)
    return model if inside is None else model.get_submodule(inside)
