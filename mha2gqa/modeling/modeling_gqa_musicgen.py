"""MusicGen and MusicGen Melody with grouped-query attention (GQA) in their decoder.

Self-contained: it needs torch and transformers >= 4.57 only and travels beside a converted checkpoint. Only the
decoder's k and v projections (self-attention, cross-attention or both) are narrower than in the stock class; the text
encoder, the codec and every forward pass are the stock ones.

Shapes: B batch, T query length, S key length, H query heads, K key/value heads, d head_dim.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    MusicgenConfig,
    MusicgenForCausalLM,
    MusicgenForConditionalGeneration,
    MusicgenMelodyConfig,
    MusicgenMelodyForCausalLM,
    MusicgenMelodyForConditionalGeneration,
    PretrainedConfig,
)
from transformers.masking_utils import eager_mask
from transformers.models.musicgen.configuration_musicgen import MusicgenDecoderConfig
from transformers.models.musicgen_melody.configuration_musicgen_melody import MusicgenMelodyDecoderConfig

# --- the same lines in every exported file that uses the attention interface ---------------------------


def eager_gqa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Eager attention of query `[B, H, T, d]` on key and value `[B, K, S, d]`, each read by H / K heads.

    The stock eager functions of these classes do not repeat keys and values: they fail for 1 < K < H.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling  # [B, H, T, S]
    for bias in (position_bias, attention_mask):
        scores = scores if bias is None else scores + bias
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


AttentionInterface.register("eager_gqa", eager_gqa)
AttentionMaskInterface.register("eager_gqa", eager_mask)


class EagerGqa:
    """Config mixin: whoever asks for eager attention gets `eager_gqa`."""

    @property
    def _attn_implementation(self) -> str | None:
        name = PretrainedConfig._attn_implementation.fget(self)
        return "eager_gqa" if name == "eager" else name

    @_attn_implementation.setter
    def _attn_implementation(self, value: str | dict | None) -> None:
        PretrainedConfig._attn_implementation.fset(self, value)


def check_heads(num_heads: int, num_kv_heads: int) -> int:
    """H / K, how many query heads share one key/value head."""
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"{num_kv_heads} key/value heads cannot serve {num_heads} query heads")
    return num_heads // num_kv_heads


# --- MusicGen ------------------------------------------------------------------------------------------


def share_heads(attention: nn.Module, num_kv_heads: int | None) -> None:
    """Give one attention module k and v projections of `num_kv_heads` heads."""
    num_kv_heads = num_kv_heads or attention.num_heads
    attention.num_key_value_groups = check_heads(attention.num_heads, num_kv_heads)  # read by SDPA
    attention.eager_attention = eager_gqa
    width = num_kv_heads * attention.head_dim
    for name in ("k_proj", "v_proj"):
        has_bias = getattr(attention, name).bias is not None  # MusicGen's have none
        setattr(attention, name, nn.Linear(attention.embed_dim, width, bias=has_bias))


class GqaMusicgenDecoderConfig(EagerGqa, MusicgenDecoderConfig):
    """MusicGen's decoder with `num_key_value_heads` (self-attention) and `num_cross_key_value_heads`."""

    num_key_value_heads: int | None = None
    num_cross_key_value_heads: int | None = None


class GqaMusicgenConfig(MusicgenConfig):
    """MusicGen whose `decoder` has `num_key_value_heads` and `num_cross_key_value_heads`."""

    model_type = "gqa_musicgen"


class GqaMusicgenForCausalLM(MusicgenForCausalLM):
    """MusicGen's decoder with grouped-query attention."""

    config: GqaMusicgenDecoderConfig

    def __init__(self, config: GqaMusicgenDecoderConfig) -> None:
        super().__init__(config)
        for layer in self.model.decoder.layers:
            share_heads(layer.self_attn, config.num_key_value_heads)
            share_heads(layer.encoder_attn, config.num_cross_key_value_heads)
        self.post_init()


class GqaMusicgenForConditionalGeneration(MusicgenForConditionalGeneration):
    """MusicGen with grouped-query attention in its decoder."""

    config: GqaMusicgenConfig

    def __init__(
        self,
        config: GqaMusicgenConfig | None = None,
        text_encoder: Any = None,
        audio_encoder: Any = None,
        decoder: Any = None,
    ) -> None:
        if config is not None and decoder is None:
            # MusicGen's config makes a stock decoder config of what it is given.
            config.decoder.__class__ = GqaMusicgenDecoderConfig
            decoder = GqaMusicgenForCausalLM._from_config(config.decoder)
        super().__init__(config, text_encoder, audio_encoder, decoder)


# --- MusicGen Melody: text and melody are a prefix of the decoder's own states -------------------------


class GqaMusicgenMelodyDecoderConfig(EagerGqa, MusicgenMelodyDecoderConfig):
    """MusicGen Melody's decoder with `num_key_value_heads`."""

    num_key_value_heads: int | None = None


class GqaMusicgenMelodyConfig(MusicgenMelodyConfig):
    """MusicGen Melody whose `decoder` has `num_key_value_heads`."""

    model_type = "gqa_musicgen_melody"


class GqaMusicgenMelodyForCausalLM(MusicgenMelodyForCausalLM):
    """MusicGen Melody's decoder with grouped-query attention."""

    config: GqaMusicgenMelodyDecoderConfig

    def __init__(self, config: GqaMusicgenMelodyDecoderConfig) -> None:
        super().__init__(config)
        for layer in self.model.decoder.layers:
            share_heads(layer.self_attn, config.num_key_value_heads)
        self.post_init()


class GqaMusicgenMelodyForConditionalGeneration(MusicgenMelodyForConditionalGeneration):
    """MusicGen Melody with grouped-query attention in its decoder."""

    config: GqaMusicgenMelodyConfig

    def __init__(
        self,
        config: GqaMusicgenMelodyConfig | None = None,
        text_encoder: Any = None,
        audio_encoder: Any = None,
        decoder: Any = None,
    ) -> None:
        if config is not None and decoder is None:
            # Its config makes a stock decoder config of what it is given.
            config.decoder.__class__ = GqaMusicgenMelodyDecoderConfig
            decoder = GqaMusicgenMelodyForCausalLM._from_config(config.decoder)
        super().__init__(config, text_encoder, audio_encoder, decoder)
