"""T5, mT5 and umT5 whose decoder shares key/value heads between query heads (GQA, arXiv:2305.13245).

Self-contained: it needs torch and transformers >= 4.57 only and travels beside a converted checkpoint. Only the
decoder's k and v projections (self-attention, cross-attention or both) are narrower than in the stock
class; the encoder, the relative position bias and every forward pass are the stock ones.

Shapes: B batch, T query length, S key length, H query heads, K key/value heads, d head_dim.
"""

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    MT5Config,
    MT5ForConditionalGeneration,
    PretrainedConfig,
    T5Config,
    T5ForConditionalGeneration,
    UMT5Config,
    UMT5ForConditionalGeneration,
)
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.masking_utils import eager_mask
from transformers.models.mt5.modeling_mt5 import MT5Attention
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.models.umt5.modeling_umt5 import UMT5Attention

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


class GqaT5Config(EagerGqa, T5Config):
    """T5 with `num_key_value_heads` (decoder self-attention) and `num_cross_key_value_heads`."""

    model_type = "gqa_t5"
    num_key_value_heads: int | None = None
    num_cross_key_value_heads: int | None = None


class GqaMT5Config(EagerGqa, MT5Config):
    """mT5 with `num_key_value_heads` (decoder self-attention) and `num_cross_key_value_heads`."""

    model_type = "gqa_mt5"
    num_key_value_heads: int | None = None
    num_cross_key_value_heads: int | None = None


class GqaUMT5Config(EagerGqa, UMT5Config):
    """umT5 with `num_key_value_heads` (decoder self-attention) and `num_cross_key_value_heads`."""

    model_type = "gqa_umt5"
    num_key_value_heads: int | None = None
    num_cross_key_value_heads: int | None = None


# Before it used the attention interface, T5 viewed keys and values as H heads, which would fold K into time.
BEFORE_INTERFACE = not T5ForConditionalGeneration._supports_sdpa


def attend_eagerly(
    self: T5Attention | MT5Attention | UMT5Attention,
    hidden_states: Tensor,
    key_value_states: Tensor | None,
    mask: Tensor | None,
    position_bias: Tensor | None,
    cache: Cache | None,
    cache_position: Tensor | None,
    layer_head_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """What the forward of older T5 classes does, for K heads: output `[B, T, D]`, position bias, weights."""
    if layer_head_mask is not None:
        raise ValueError("head masks are not available with grouped-query attention")

    def heads(x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.key_value_proj_dim).transpose(1, 2)

    cross = key_value_states is not None
    both = cache if isinstance(cache, EncoderDecoderCache) else None
    if both is not None:
        cache = both.cross_attention_cache if cross else both.self_attention_cache
    query = heads(self.q(hidden_states))  # [B, H, T, d]
    seen = 0 if cache is None else cache.get_seq_length(self.layer_idx)
    seen = seen.clone() if isinstance(seen, Tensor) else seen  # a static cache counts in place
    if cross and both is not None and both.is_updated.get(self.layer_idx):
        layer = cache.layers[self.layer_idx]
        key, value = layer.keys, layer.values
    else:
        states = key_value_states if cross else hidden_states
        key, value = heads(self.k(states)), heads(self.v(states))  # [B, K, S, d]
        if cache is not None:
            position = {"cache_position": None if cross else cache_position}
            key, value = cache.update(key, value, self.layer_idx, position)
            if both is not None and cross:
                both.is_updated[self.layer_idx] = True
    length, keys = query.shape[2], key.shape[2]
    if position_bias is None:
        if self.has_relative_attention_bias:
            named = "cache_position" in signature(self.compute_bias).parameters
            place = {"cache_position": cache_position} if named else {"past_seen_tokens": seen}
            position_bias = self.compute_bias(length, keys, device=query.device, **place)[:, :, -length:]
        else:
            position_bias = query.new_zeros(1, self.n_heads, length, keys)
        if mask is not None:
            position_bias = position_bias + mask[..., :keys]
    output, weights = eager_gqa(
        self, query, key, value, None, scaling=1.0, dropout=self.dropout, position_bias=position_bias
    )
    return self.o(output.flatten(2)), position_bias, weights


class GqaT5Attention(T5Attention):
    """T5's and mT5's attention in classes older than the attention interface."""

    def forward(
        self,
        hidden_states: Tensor,
        mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        position_bias: Tensor | None = None,
        past_key_values: Cache | None = None,
        cache_position: Tensor | None = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, ...]:
        output, bias, weights = attend_eagerly(
            self, hidden_states, key_value_states, mask, position_bias, past_key_values, cache_position,
            kwargs.get("layer_head_mask"),
        )  # fmt: skip
        return (output, bias, weights) if output_attentions else (output, bias)


class GqaUMT5Attention(UMT5Attention):
    """umT5 views keys and values as H heads, which would fold K heads into time; T5's forward does not."""

    gradient_checkpointing = False

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if BEFORE_INTERFACE:
            cache, position = kwargs.pop("past_key_values", None), kwargs.pop("cache_position", None)
            output, _, weights = attend_eagerly(
                self, hidden_states, encoder_hidden_states, attention_mask, None, cache, position, **kwargs
            )
            return output, weights
        output, _, weights = T5Attention.forward(
            self, hidden_states, mask=attention_mask, key_value_states=encoder_hidden_states, **kwargs
        )
        return output, weights


# transformers 4 says with one key that the head is tied and that what it reads is scaled.
OLD_TIES = not getattr(T5Config(tie_word_embeddings=False), "tie_word_embeddings", True)


def scales_outputs(config: PretrainedConfig) -> bool:
    """Whether the decoder's outputs are scaled before the head."""
    return not isinstance(config, MT5Config) and getattr(config, "scale_decoder_outputs", True)


def share_heads(attention: nn.Module, num_kv_heads: int | None) -> None:
    """Give one attention module k and v projections of `num_kv_heads` heads."""
    if num_kv_heads is None or num_kv_heads == attention.n_heads:
        return
    attention.num_key_value_groups = check_heads(attention.n_heads, num_kv_heads)  # read by SDPA
    attention.eager_attention = eager_gqa
    width = num_kv_heads * attention.key_value_proj_dim
    attention.k = nn.Linear(attention.d_model, width, bias=False)
    attention.v = nn.Linear(attention.d_model, width, bias=False)
    if isinstance(attention, UMT5Attention):
        attention.__class__ = GqaUMT5Attention
    elif BEFORE_INTERFACE:
        attention.__class__ = GqaT5Attention


class SharedDecoder:
    """Model mixin: narrows the decoder's k and v once the stock class has built itself."""

    def __init__(self, config: PretrainedConfig) -> None:
        if OLD_TIES and config.tie_word_embeddings and not scales_outputs(config):
            raise ValueError(
                "transformers 4 scales what a tied head reads, which this model does not: use 5 or later"
            )
        super().__init__(config)  # type: ignore[call-arg]
        for block in self.decoder.block:
            # Stock umT5 of transformers 5.17 says False: SDPA without a mask then looks ahead.
            block.layer[0].SelfAttention.is_causal = True
            share_heads(block.layer[0].SelfAttention, config.num_key_value_heads)
            share_heads(block.layer[1].EncDecAttention, config.num_cross_key_value_heads)
        self.post_init()


class GqaT5ForConditionalGeneration(SharedDecoder, T5ForConditionalGeneration):
    """T5 with grouped-query attention in its decoder."""

    config: GqaT5Config


class GqaMT5ForConditionalGeneration(SharedDecoder, MT5ForConditionalGeneration):
    """mT5 with grouped-query attention in its decoder."""

    config: GqaMT5Config


class GqaUMT5ForConditionalGeneration(SharedDecoder, UMT5ForConditionalGeneration):
    """umT5 with grouped-query attention in its decoder."""

    config: GqaUMT5Config
