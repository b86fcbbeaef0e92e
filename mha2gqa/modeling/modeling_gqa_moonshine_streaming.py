"""Moonshine Streaming with grouped-query attention (GQA).

Self-contained: it needs torch and transformers >= 5.17 only and travels beside a converted checkpoint. Only the
decoder's k and v projections are narrower than in the stock class, whose attention shapes its queries by the number of
KV heads and so cannot run with fewer: its forward is written anew here.

Shapes: B batch, T query length, S key length, H query heads, K key/value heads, d head_dim.
"""

from typing import Any

from torch import Tensor, nn
from transformers import Cache, MoonshineStreamingConfig, MoonshineStreamingForConditionalGeneration
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.moonshine_streaming.modeling_moonshine_streaming import (
    MoonshineStreamingAttention,
    MoonshineStreamingDecoder,
    apply_rotary_pos_emb,
    eager_attention_forward,
)


def check_heads(num_heads: int, num_kv_heads: int) -> int:
    """H / K, how many query heads share one key/value head."""
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"{num_kv_heads} key/value heads cannot serve {num_heads} query heads")
    return num_heads // num_kv_heads


class GqaMoonshineStreamingConfig(MoonshineStreamingConfig):
    """Moonshine Streaming with `num_key_value_heads` (self-attention) and `num_cross_key_value_heads` in its decoder."""

    model_type = "gqa_moonshine_streaming"
    num_key_value_heads: int | None = None
    num_cross_key_value_heads: int | None = None


class GqaMoonshineStreamingAttention(MoonshineStreamingAttention):
    """Moonshine Streaming's attention with as many KV heads as its k and v projections have."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        key_value_states: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend within `hidden_states` `[B, T, D]` or to `key_value_states` `[B, S, D]` (before 5.24 with `past_key_values`)."""
        cache = past_key_values if cache is None else cache
        query = self._heads(self.q_proj(hidden_states))  # [B, H, T, d]
        if key_value_states is None:
            key, value = self._own(
                hidden_states, cache, kwargs.pop("cache_position", None), position_embeddings
            )
            query, _ = apply_rotary_pos_emb(query, query, *position_embeddings)
        else:
            key, value = self._crossed(key_value_states, cache)
        causal = self.is_causal and attention_mask is None and query.shape[2] > 1
        width = query.shape[3]
        query, key, value = (nn.functional.pad(x, (0, self.head_dim_padding)) for x in (query, key, value))
        name = self.config._attn_implementation
        attend = eager_attention_forward if name in (None, "eager") else ALL_ATTENTION_FUNCTIONS[name]
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            is_causal=causal,
            **kwargs,
        )
        return self.o_proj(output[..., :width].flatten(2)), weights

    def _heads(self, states: Tensor) -> Tensor:
        return states.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _own(
        self, states: Tensor, cache: Cache | None, position: Tensor | None, rotary: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of the decoder itself, `[B, K, S, d]`, with those of the cache."""
        key, value = self._heads(self.k_proj(states)), self._heads(self.v_proj(states))
        key, _ = apply_rotary_pos_emb(key, key, *rotary)
        if cache is None:
            return key, value
        own = getattr(cache, "self_attention_cache", cache)
        return own.update(key, value, self.layer_idx, {"cache_position": position})

    def _crossed(self, states: Tensor, cache: Cache | None) -> tuple[Tensor, Tensor]:
        """Keys and values of the encoder's states, made once."""
        if cache is not None and cache.is_updated.get(self.layer_idx):
            layer = cache.cross_attention_cache.layers[self.layer_idx]
            return layer.keys, layer.values
        key, value = self._heads(self.k_proj(states)), self._heads(self.v_proj(states))
        if cache is not None:
            cache.is_updated[self.layer_idx] = True
            key, value = cache.cross_attention_cache.update(key, value, self.layer_idx)
        return key, value


class GqaMoonshineStreamingDecoder(MoonshineStreamingDecoder):
    """The decoder, which leaves the encoder's states as they are: the stock one adds positions in place, at each call anew."""

    def forward(self, *args: Any, encoder_hidden_states: Tensor, **kwargs: Any) -> Any:
        """As the stock decoder's."""
        return super().forward(*args, encoder_hidden_states=encoder_hidden_states.clone(), **kwargs)


class GqaMoonshineStreamingForConditionalGeneration(MoonshineStreamingForConditionalGeneration):
    """Moonshine Streaming with grouped-query attention in its decoder."""

    config: GqaMoonshineStreamingConfig

    def __init__(self, config: GqaMoonshineStreamingConfig) -> None:
        counts = config.num_key_value_heads, config.num_cross_key_value_heads
        config.num_key_value_heads = config.num_attention_heads  # of the stock modules that are built
        super().__init__(config)
        config.num_key_value_heads = counts[0]
        self.model.decoder.__class__ = GqaMoonshineStreamingDecoder
        for layer in self.model.decoder.layers:
            for attention, count in zip((layer.self_attn, layer.encoder_attn), counts, strict=True):
                share_heads(attention, count)
        self.post_init()


def share_heads(attention: nn.Module, num_kv_heads: int | None) -> None:
    """Give one attention module k and v projections of `num_kv_heads` heads."""
    attention.__class__ = GqaMoonshineStreamingAttention
    num_heads = attention.q_proj.out_features // attention.head_dim
    num_kv_heads = num_kv_heads or num_heads
    attention.num_key_value_groups = check_heads(num_heads, num_kv_heads)  # read by eager attention and SDPA
    for name in ("k_proj", "v_proj"):
        stock = getattr(attention, name)
        shared = nn.Linear(stock.in_features, num_kv_heads * attention.head_dim, bias=stock.bias is not None)
        setattr(attention, name, shared)
