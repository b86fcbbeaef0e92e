"""GPT-Neo and BioGPT with grouped-query attention (GQA).

Self-contained: it needs torch and transformers >= 4.57 only and travels beside a converted checkpoint. Only the
k and v projections are narrower than in the stock class.

Shapes: B batch, T query length, S key length, H query heads, K key/value heads, d head_dim.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    BioGptConfig,
    BioGptForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    PretrainedConfig,
)
from transformers.masking_utils import eager_mask
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention

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


# --- the families --------------------------------------------------------------------------------------


def share_heads(attention: nn.Module, num_kv_heads: int | None) -> None:
    """Give one attention module k and v projections of `num_kv_heads` heads."""
    num_kv_heads = num_kv_heads or attention.num_heads
    attention.num_key_value_groups = check_heads(attention.num_heads, num_kv_heads)  # read by SDPA
    attention.eager_attention = eager_gqa
    width = num_kv_heads * attention.head_dim
    for name in ("k_proj", "v_proj"):
        has_bias = getattr(attention, name).bias is not None  # GPT-Neo's have none
        setattr(attention, name, nn.Linear(attention.embed_dim, width, bias=has_bias))


class GqaGPTNeoConfig(GPTNeoConfig):
    """GPT-Neo with `num_key_value_heads`."""

    model_type = "gqa_gpt_neo"
    num_key_value_heads: int | None = None


class GqaGPTNeoSelfAttention(GPTNeoSelfAttention):
    """GPT-Neo's attention, global and local; keys and values stay K heads in the cache."""

    def _split_heads(self, tensor: Tensor, num_heads: int, attn_head_size: int) -> Tensor:
        return tensor.view(*tensor.shape[:-1], -1, attn_head_size).transpose(1, 2)  # [B, H or K, T, d]

    def _attn(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        groups = self.num_key_value_groups
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        return super()._attn(query, key, value, *args, **kwargs)


class GqaGPTNeoForCausalLM(GPTNeoForCausalLM):
    """GPT-Neo with grouped-query attention; runs with eager attention, as the stock class does without FlashAttention."""

    config: GqaGPTNeoConfig

    def __init__(self, config: GqaGPTNeoConfig) -> None:
        super().__init__(config)
        for block in self.transformer.h:
            attention = block.attn.attention
            if type(attention) is not GPTNeoSelfAttention:
                raise ValueError("only eager attention is available with grouped-query attention")
            share_heads(attention, config.num_key_value_heads)
            attention.__class__ = GqaGPTNeoSelfAttention  # built as the stock module
        self.post_init()


class GqaBioGptConfig(EagerGqa, BioGptConfig):
    """BioGPT with `num_key_value_heads`."""

    model_type = "gqa_biogpt"
    num_key_value_heads: int | None = None


class GqaBioGptForCausalLM(BioGptForCausalLM):
    """BioGPT with grouped-query attention; the stock forward takes as many KV heads as k and v have."""

    config: GqaBioGptConfig

    def __init__(self, config: GqaBioGptConfig) -> None:
        super().__init__(config)
        for layer in self.biogpt.layers:
            share_heads(layer.self_attn, config.num_key_value_heads)
        self.post_init()
