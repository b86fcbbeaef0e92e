"""BART and its kin (mBART, PEGASUS, Marian, M2M100/NLLB, Whisper) with grouped-query attention (GQA).

Self-contained: it needs torch and transformers >= 4.57 only and travels beside a converted checkpoint. Only the
decoder's k and v projections (self-attention, cross-attention or both) are narrower than in the stock
class; the encoder and every forward pass are the stock ones.

Shapes: B batch, T query length, S key length, H query heads, K key/value heads, d head_dim.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    BartConfig,
    BartForConditionalGeneration,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    MBartConfig,
    MBartForConditionalGeneration,
    PegasusConfig,
    PegasusForConditionalGeneration,
    PretrainedConfig,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from transformers.masking_utils import eager_mask

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


# --- the family ----------------------------------------------------------------------------------------


def share_heads(attention: nn.Module, num_kv_heads: int | None) -> None:
    """Give one attention module k and v projections of `num_kv_heads` heads."""
    if num_kv_heads is None or num_kv_heads == attention.num_heads:
        return
    attention.num_key_value_groups = check_heads(attention.num_heads, num_kv_heads)  # read by SDPA
    attention.eager_attention = eager_gqa
    width = num_kv_heads * attention.head_dim
    for name in ("k_proj", "v_proj"):
        has_bias = getattr(attention, name).bias is not None  # Whisper's k_proj has none
        setattr(attention, name, nn.Linear(attention.embed_dim, width, bias=has_bias))


class SharedDecoder:
    """Model mixin: narrows the decoder's k and v once the stock class has built itself."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        for layer in self.model.decoder.layers:
            share_heads(layer.self_attn, config.num_key_value_heads)
            share_heads(layer.encoder_attn, config.num_cross_key_value_heads)
        self.post_init()


class GqaBartConfig(EagerGqa, BartConfig):
    """BART with `num_key_value_heads` (decoder self-attention) and `num_cross_key_value_heads`."""

    model_type = "gqa_bart"
    num_key_value_heads: int | None = None
    num_cross_key_value_heads: int | None = None


class GqaBartForConditionalGeneration(SharedDecoder, BartForConditionalGeneration):
    """BART with grouped-query attention in its decoder."""

    config: GqaBartConfig


class GqaMBartConfig(EagerGqa, MBartConfig):
    """mBART with `num_key_value_heads` (decoder self-attention) and `num_cross_key_value_heads`."""

    model_type = "gqa_mbart"
    num_key_value_heads: int | None = None
    num_cross_key_value_heads: int | None = None


class GqaMBartForConditionalGeneration(SharedDecoder, MBartForConditionalGeneration):
    """mBART with grouped-query attention in its decoder."""

    config: GqaMBartConfig


class GqaPegasusConfig(EagerGqa, PegasusConfig):
    """PEGASUS with `num_key_value_heads` (decoder self-attention) and `num_cross_key_value_heads`."""

    model_type = "gqa_pegasus"
    num_key_value_heads: int | None = None
    num_cross_key_value_heads: int | None = None


class GqaPegasusForConditionalGeneration(SharedDecoder, PegasusForConditionalGeneration):
    """PEGASUS with grouped-query attention in its decoder."""

    config: GqaPegasusConfig


class GqaMarianConfig(EagerGqa, MarianConfig):
    """Marian with `num_key_value_heads` (decoder self-attention) and `num_cross_key_value_heads`."""

    model_type = "gqa_marian"
    num_key_value_heads: int | None = None
    num_cross_key_value_heads: int | None = None


class GqaMarianMTModel(SharedDecoder, MarianMTModel):
    """Marian with grouped-query attention in its decoder."""

    config: GqaMarianConfig


class GqaM2M100Config(EagerGqa, M2M100Config):
    """M2M100 (NLLB) with `num_key_value_heads` (decoder self-attention) and `num_cross_key_value_heads`."""

    model_type = "gqa_m2m_100"
    num_key_value_heads: int | None = None
    num_cross_key_value_heads: int | None = None


class GqaM2M100ForConditionalGeneration(SharedDecoder, M2M100ForConditionalGeneration):
    """M2M100 (NLLB) with grouped-query attention in its decoder."""

    config: GqaM2M100Config


class GqaWhisperConfig(EagerGqa, WhisperConfig):
    """Whisper with `num_key_value_heads` (decoder self-attention) and `num_cross_key_value_heads`."""

    model_type = "gqa_whisper"
    # Stock Whisper makes num_key_value_heads another name of encoder_attention_heads.
    attribute_map = {k: v for k, v in WhisperConfig.attribute_map.items() if k != "num_key_value_heads"}  # noqa: RUF012
    num_key_value_heads: int | None = None
    num_cross_key_value_heads: int | None = None


class GqaWhisperForConditionalGeneration(SharedDecoder, WhisperForConditionalGeneration):
    """Whisper with grouped-query attention in its decoder."""

    config: GqaWhisperConfig

    def __init__(self, config: GqaWhisperConfig) -> None:
        super().__init__(config)
        for layer in self.model.decoder.layers:
            for attention in (layer.self_attn, layer.encoder_attn):
                # Whisper's forward reads num_heads only to view keys and values: H would fold K heads
                # into the time axis without an error.
                attention.num_heads = attention.k_proj.out_features // attention.head_dim
