"""BLOOM and MPT with grouped-query attention (GQA).

Self-contained: it needs torch and transformers >= 4.57 only and travels beside a converted checkpoint. Only the
fused projection is narrower than in the stock class. Neither class uses the attention interface (eager
attention only), and ALiBi ties each query head to its slope: heads keep their order.

Shapes: B batch, T query length, S key length, H query heads, K key/value heads, d head_dim.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import BloomConfig, BloomForCausalLM, MptConfig, MptForCausalLM
from transformers.cache_utils import Cache
from transformers.models.bloom.modeling_bloom import BloomAttention
from transformers.models.mpt.modeling_mpt import MptAttention


def check_heads(num_heads: int, num_kv_heads: int) -> int:
    """H / K, how many query heads share one key/value head."""
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"{num_kv_heads} key/value heads cannot serve {num_heads} query heads")
    return num_heads // num_kv_heads


class GqaBloomConfig(BloomConfig):
    """BLOOM with `num_key_value_heads`."""

    model_type = "gqa_bloom"
    num_key_value_heads: int | None = None


class RepeatingCache:
    """Stands before the real cache (or none): stores K heads, hands H out to the stock forward."""

    def __init__(self, cache: Cache | None, groups: int) -> None:
        self.cache, self.groups = cache, groups

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Cache key and value `[B, K, T, d]`; returns all so far, repeated to `[B, H, S, d]`."""
        if self.cache is not None:
            key, value = self.cache.update(key, value, *args, **kwargs)
        return key.repeat_interleave(self.groups, dim=1), value.repeat_interleave(self.groups, dim=1)


class GqaBloomAttention(BloomAttention):
    """BLOOM's attention on `query_key_value` rows (group, [its queries, k, v])."""

    def _reshape(self, fused_qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        groups = self.num_key_value_groups
        fused = fused_qkv.view(*fused_qkv.shape[:2], -1, groups + 2, self.head_dim)  # [B, T, K, m + 2, d]
        query, key, value = fused.split([groups, 1, 1], dim=3)
        return tuple(x.flatten(2, 3).transpose(1, 2) for x in (query, key, value))  # [B, H or K, T, d]

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Tensor,
        attention_mask: Tensor,
        layer_past: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """The stock forward on keys and values repeated after the cache."""
        cache = RepeatingCache(layer_past, self.num_key_value_groups)
        return super().forward(hidden_states, residual, alibi, attention_mask, layer_past=cache, **kwargs)


class GqaBloomForCausalLM(BloomForCausalLM):
    """BLOOM with grouped-query attention."""

    config: GqaBloomConfig

    def __init__(self, config: GqaBloomConfig) -> None:
        super().__init__(config)
        for block in self.transformer.h:
            attention = block.self_attention
            num_kv_heads = config.num_key_value_heads or attention.num_heads
            attention.num_key_value_groups = check_heads(attention.num_heads, num_kv_heads)
            width = attention.hidden_size + 2 * num_kv_heads * attention.head_dim
            attention.query_key_value = nn.Linear(attention.hidden_size, width)
            attention.__class__ = GqaBloomAttention  # built as the stock module; only the forward differs
        self.post_init()


class GqaMptConfig(MptConfig):
    """MPT with `num_key_value_heads`."""

    model_type = "gqa_mpt"
    num_key_value_heads: int | None = None


class GqaMptAttention(MptAttention):
    """MPT's attention on `Wqkv` rows [q of H heads; k of K; v of K]."""

    def forward(
        self,
        hidden_states: Tensor,
        position_bias: Tensor,
        cache: Cache | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Attend within `hidden_states` `[B, T, D]` and the cache (called `past_key_values` before 5.24)."""
        cache = past_key_values if cache is None else cache
        qkv = self.Wqkv(hidden_states)
        if self.clip_qkv:
            qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        groups = self.num_key_value_groups
        width = self.hidden_size // groups  # K * d
        heads = (*hidden_states.shape[:2], -1, self.head_dim)
        query, key, value = (
            x.reshape(heads).transpose(1, 2) for x in qkv.split([self.hidden_size, width, width], dim=2)
        )
        if cache is not None:
            position = {"cache_position": kwargs.get("cache_position")}  # read by caches before 5
            key, value = cache.update(key, value, self.layer_idx, position)  # [B, K, S, d]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        scores = torch.matmul(query, key.transpose(-1, -2)) * self.softmax_scale  # [B, H, T, S]
        # ALiBi [H, 1, max_seq_len]: its last S columns belong to the S keys.
        scores = scores + position_bias[:, :, max(0, position_bias.shape[-1] - key.shape[-2]) :]
        if attention_mask is not None:
            scores = scores.masked_fill(attention_mask, torch.finfo(query.dtype).min)
        weights = nn.functional.softmax(scores.float(), dim=-1).to(value.dtype)
        weights = nn.functional.dropout(weights, p=self.attn_dropout_p, training=self.training)
        output = torch.matmul(weights, value).transpose(1, 2).flatten(2)
        return self.out_proj(output), weights


class GqaMptForCausalLM(MptForCausalLM):
    """MPT with grouped-query attention."""

    config: GqaMptConfig

    def __init__(self, config: GqaMptConfig) -> None:
        super().__init__(config)
        for block in self.transformer.blocks:
            attention = block.attn
            num_kv_heads = config.num_key_value_heads or attention.n_heads
            attention.num_key_value_groups = check_heads(attention.n_heads, num_kv_heads)
            width = attention.hidden_size + 2 * num_kv_heads * attention.head_dim
            attention.Wqkv = nn.Linear(attention.hidden_size, width, bias=False)
            attention.__class__ = GqaMptAttention  # built as the stock module; only the forward differs
        self.post_init()
