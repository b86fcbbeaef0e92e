"""Small random models with the config of a checkpoint: its class, its config made small."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..architectures import AttentionSpec, find_spec, lookup
from ..checkpoints.hf_config import is_encoder_decoder
from ..checkpoints.loading import loading_class, quiet
from ..data.pairs import is_audio
from ..modeling import exported_class, find_export, part_class
from .wide_heads import cut_factors, width

_WIDTH, _LAYERS, _VOCAB = 8, 2, 96
_SMALL = {
    "vocab_size": _VOCAB, "decoder_vocab_size": _VOCAB, "vocab_size_per_layer_input": _VOCAB,
    "unpadded_vocab_size": _VOCAB, "moe_hidden_size": 16,
    "intermediate_size": 32, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "ffn_dim": 32,
    "n_inner": 32, "ffn_hidden_size": 32, "d_ff": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
    "word_embed_proj_dim": 32, "num_mel_bins": 8, "max_position_embeddings": 64, "n_positions": 64,
    "max_seq_len": 64, "mamba_chunk_size": 8, "max_source_positions": 8, "max_target_positions": 64, "initializer_range": 0.3,
}  # fmt: skip
_WIDTHS = ("hidden_size", "d_model", "n_embd")
_ENCODER_LAYERS = ("num_layers", "encoder_layers", "encoder_num_hidden_layers")  # beside the spec's own key
_ENCODER_HEADS = ("encoder_attention_heads", "encoder_num_attention_heads", "encoder_num_key_value_heads")
_SAMPLES = 4000  # of sound
KERNELS = (
    "attn_implementation", "_attn_implementation", "_attn_implementation_internal",
    "experts_implementation", "_experts_implementation", "_experts_implementation_internal",
)  # fmt: skip
CODE = ("auto_map", "architectures")
LARGEST = 50_000_000  # parameters of a small model: what a config keeps wide after all is not built
# Types of which transformers cannot build or run a small model of the text model alone. (Of
# evolla, nemo_speechlm and phi4_multimodal it would be larger than `LARGEST`: parts beside attention keep their width.)
NO_TINY_MODEL = frozenset({
    "blt", "canary", "cohere_asr", "deepseek_ocr2", "dia", "diffusion_gemma", "emu3", "ernie4_5_vl_moe", "evolla",
    "gemma3n", "gemma3n_text", "granite4_vision", "kyutai_speech_to_text", "mllama", "nemo_speechlm",
    "paddleocr_vl", "phi4_multimodal", "pi0",
    "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker", "step3p7", "t5gemma", "t5gemma2", "unlimited_ocr",
    "voxtral_realtime", "zamba",
})  # fmt: skip


def unbuildable() -> tuple[type[Exception], ...]:
    """What a class may raise for sizes or inputs it cannot take."""
    # Not above: it loads an HTTP client, which converting does not need.
    from huggingface_hub.errors import StrictDataclassError

    return (
        RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError, AssertionError, ImportError,
        ArithmeticError, StrictDataclassError,
    )  # fmt: skip


def model_class(config: Mapping[str, Any]) -> Any:
    """The class of transformers that holds a checkpoint, or the one exported by us; None where there is none.

    The one that the config names, if it is of the config's model type; else the one that transformers takes for
    that type. So a config that names code of its own, or nothing, is held against the stock class all the same.
    """
    import transformers

    if (exported := exported_class(config)) is not None:
        return exported
    kind, names = config.get("model_type"), config.get("architectures")
    for name in names if isinstance(names, list) else ():
        found = getattr(transformers, name, None) if isinstance(name, str) else None
        own = getattr(getattr(found, "config_class", None), "model_type", None)
        if found is not None and own == kind:
            return found
    return _usual_class(config)


def _usual_class(config: Mapping[str, Any]) -> Any:
    """The class that the auto classes take for a model type; None where they know none."""
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return None
    named = {key: value for key, value in config.items() if key not in CODE}
    found = loading_class(named)._model_mapping.get(CONFIG_MAPPING[kind], None)
    return found[0] if isinstance(found, tuple) else found


def of_own_code(config: Mapping[str, Any]) -> bool:
    """Whether a config names code of its own to be loaded with, which is not ours."""
    return "auto_map" in config and exported_class(config) is None


def neutral(value: Any) -> Any:
    """A part of a raw config without what chooses kernels or code: it must not choose what is checked."""
    if isinstance(value, Mapping):
        return {key: neutral(part) for key, part in value.items() if key not in (*KERNELS, *CODE)}
    return [neutral(part) for part in value] if isinstance(value, list) else value


def source_class(config: Mapping[str, Any], source: Mapping[str, Any]) -> Any:
    """The class of the source: for a result with exported code, the stock class that the code stands for."""
    import transformers

    export = find_export(config)
    if export is None or exported_class(config) is None or exported_class(source) is not None:
        return model_class(source)
    return getattr(transformers, export.stock[0])


def tiny_config(spec: AttentionSpec, config: Mapping[str, Any]) -> dict[str, Any]:
    """The (text) config with its head counts kept and everything else made small."""
    text = json.loads(json.dumps(neutral(spec.text_config(config))))
    encoder_decoder = is_encoder_decoder(text)
    num_heads, layers = lookup(text, spec.heads_key), text.get(spec.layers_key)
    if (own := width(replace(spec, config_path=()), text)) > 0:
        cut_factors(text, own, _WIDTH)
    text |= {key: value for key, value in _SMALL.items() if key in text or _slow_by_default(text, key)}
    text |= dict.fromkeys([k for k in _WIDTHS if k in text] or _WIDTHS[:1], num_heads * _WIDTH)
    for key in {spec.head_dim_key, *(v.head_dim_key for v in spec.variants)} & text.keys():
        text[key] = None if text[key] is None else _WIDTH
    text |= dict.fromkeys([k for k in _ENCODER_LAYERS if k in text] + [spec.layers_key], _LAYERS)
    text |= dict.fromkeys([key for key in _ENCODER_HEADS if key in text], num_heads)
    for key, value in text.items():
        if isinstance(value, list) and len(value) == layers:
            text[key] = value[:_LAYERS]
        if key.endswith("_token_id") and value is not None:
            text[key] = 1 if encoder_decoder else 0
    text.pop("quantization_config", None)
    return text


def _slow_by_default(config: Mapping[str, Any], key: str) -> bool:
    """Whether a key that a config lacks makes its class slow: scans over long chunks, a hundred times the rest."""
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type")
    if key != "mamba_chunk_size" or not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return False
    return hasattr(CONFIG_MAPPING[kind], key)


def small_source(config: Mapping[str, Any]) -> dict[str, Any]:
    """A small config of a model that has no entry in the table of its own."""
    heads_key, layers_key = (
        next(key for key in keys if key in config)
        for keys in (("num_attention_heads", "n_head"), ("num_hidden_layers", "n_layer"))
    )
    spec = AttentionSpec(heads_key=heads_key, layers_key=layers_key)
    small = tiny_config(spec, config)
    if isinstance(small.get("rotary_dim"), int):
        small["rotary_dim"] = _WIDTH // 2
    if small.get("word_embed_proj_dim") is not None:
        small["word_embed_proj_dim"] = small["hidden_size"]
    return small


Tiny = tuple[AttentionSpec, Mapping[str, Any], torch.nn.Module]


def tiny_model(cls: Any, config: Mapping[str, Any], attention: str | None) -> Tiny:
    """A small random model, its (text) config, and the spec that describes them."""
    spec = find_spec(config).in_memory()
    small = tiny_config(spec, config)
    part = part_class(config)
    inside = bool(spec.config_path) and part is None
    # Nothing leads to the text model's config any more: it is all there is.
    return replace(spec, config_path=()), small, build_tiny(part or cls, small, attention, inside)


def build_tiny(
    cls: Any, config: Mapping[str, Any], attention: str | None = None, inside: bool = False
) -> torch.nn.Module:
    """A random model whose every weight matters: matrices of unit gain, biases and norms off their defaults.

    Args:
        cls: The checkpoint's class.
        config: Raw config.
        attention: Attention implementation; the class's choice where None.
        inside: Whether `config` is that of a text model inside a larger one: `cls` is not used then.

    Raises:
        ValueError: It would have more than `LARGEST` parameters.
    """
    from transformers import MODEL_MAPPING, AutoConfig, AutoModel

    with quiet(), torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        (Path(folder) / "config.json").write_text(json.dumps(config))
        built = (AutoConfig if inside else cls.config_class).from_pretrained(folder)
        if inside and type(built) not in MODEL_MAPPING:  # to ask for its class would import every other
            raise ValueError(f"{type(built).__name__} has no model class of its own")
        built._attn_implementation = attention
        make = (lambda: AutoModel.from_config(built)) if inside else (lambda: cls(built))
        if (size := count_parameters(make)) > LARGEST:
            raise ValueError(f"{size / 1e6:,.0f} million parameters")
        model = make().float().eval()
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            wide = parameter.dim() > 1
            parameter.data = noise / math.sqrt(parameter.shape[-1]) if wide else parameter.data + 0.1 * noise
    return model


def count_parameters(make: Callable[[], Any]) -> int:
    """Parameters of a model, counted without making one; 0 where its class asks for values meanwhile.

    What else is wrong with a config is met here, before anything large has been made.
    """
    with suppress(RuntimeError), torch.device("meta"):
        return sum(parameter.numel() for parameter in make().parameters())
    return 0


def tiny_inputs(config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tokens, and for an encoder-decoder what its encoder reads."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, _VOCAB, (2, 12), generator=generator)
    if config.get("model_type") in (
        "musicgen_decoder",
        "musicgen_melody_decoder",
    ):  # rows of each codebook, and what the text encoder gives
        ids = torch.randint(3, _VOCAB, (2 * config["num_codebooks"], 12), generator=generator)
        return {
            "input_ids": ids,
            "encoder_hidden_states": torch.randn(2, 5, config["hidden_size"], generator=generator),
        }
    if not is_encoder_decoder(config):
        return {"input_ids": ids}
    if config.get("num_mel_bins") is not None:
        frames = 2 * config["max_source_positions"]
        features = torch.randn(2, config["num_mel_bins"], frames, generator=generator)
        return {"input_features": features, "decoder_input_ids": ids}
    if is_audio(config):
        return {"input_values": torch.randn(2, _SAMPLES, generator=generator), "decoder_input_ids": ids}
    return {"input_ids": ids.flip(1), "decoder_input_ids": ids}


def run_tiny(model: torch.nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """Logits, or hidden states of a text model without a head."""
    with torch.no_grad():
        out = model(**inputs, use_cache=False)
    return out.logits if "logits" in out else out.last_hidden_state
