"""GPT-2 and OPT with grouped-query attention (GQA).

Self-contained: it needs torch and transformers >= 4.57 only and travels beside a converted checkpoint. Only the
k and v projections are narrower than in the stock class.

Shapes: B batch, T query length, S key length, H query heads, K key/value heads, d head_dim.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    GPT2Config,
    GPT2LMHeadModel,
    OPTConfig,
    OPTForCausalLM,
    PretrainedConfig,
)
from transformers.cache_utils import Cache
from transformers.masking_utils import eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.opt.modeling_opt import OPTAttention
from transformers.pytorch_utils import Conv1D

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


class GqaGPT2Config(EagerGqa, GPT2Config):
    """GPT-2 with `num_key_value_heads`."""

    model_type = "gqa_gpt2"
    num_key_value_heads: int | None = None


class GqaGPT2LMHeadModel(GPT2LMHeadModel):
    """GPT-2 with grouped-query attention: `c_attn` is [q of H heads; k of K; v of K], the forward stock."""

    config: GqaGPT2Config

    def __init__(self, config: GqaGPT2Config) -> None:
        super().__init__(config)
        if config.reorder_and_upcast_attn:
            raise ValueError("reorder_and_upcast_attn is not available with grouped-query attention")
        for block in self.transformer.h:
            attention = block.attn
            num_kv_heads = config.num_key_value_heads or attention.num_heads
            attention.num_key_value_groups = check_heads(attention.num_heads, num_kv_heads)  # read by SDPA
            attention.eager_attention = eager_gqa
            width = num_kv_heads * attention.head_dim
            attention.c_attn = Conv1D(attention.embed_dim + 2 * width, attention.embed_dim)
            attention.split_size = [attention.embed_dim, width, width]
        self.post_init()


class GqaOPTConfig(EagerGqa, OPTConfig):
    """OPT with `num_key_value_heads`."""

    model_type = "gqa_opt"
    num_key_value_heads: int | None = None


class GqaOPTAttention(OPTAttention):
    """OPT's attention; the stock forward views keys and values as H heads, which would fold K into time."""

    def forward(
        self,
        hidden_states: Tensor,
        cache: Cache | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend within `hidden_states` `[B, T, D]` and the cache (called `past_key_values` before 5.24)."""
        cache = past_key_values if cache is None else cache
        position = {"cache_position": kwargs.pop("cache_position", None)}  # read by caches before 5
        heads = (*hidden_states.shape[:-1], -1, self.head_dim)
        # Queries are scaled before the product, as in the stock class: float16 scores stay finite.
        query = (self.q_proj(hidden_states) * self.scaling).view(heads).transpose(1, 2)  # [B, H, T, d]
        key = self.k_proj(hidden_states).view(heads).transpose(1, 2)  # [B, K, T, d]
        value = self.v_proj(hidden_states).view(heads).transpose(1, 2)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx, position)
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get(self.config._attn_implementation, eager_gqa)
        dropout = self.dropout if self.training else 0.0
        output, weights = attend(
            self, query, key, value, attention_mask, dropout=dropout, scaling=1.0, **kwargs
        )
        return self.out_proj(output.reshape(*hidden_states.shape[:-1], -1).contiguous()), weights


class GqaOPTForCausalLM(OPTForCausalLM):
    """OPT with grouped-query attention (pre- and post-LN, with and without `word_embed_proj_dim`)."""

    config: GqaOPTConfig

    def __init__(self, config: GqaOPTConfig) -> None:
        super().__init__(config)
        for layer in self.model.decoder.layers:
            attention = layer.self_attn
            num_kv_heads = config.num_key_value_heads or attention.num_heads
            attention.num_key_value_groups = check_heads(attention.num_heads, num_kv_heads)  # read by SDPA
            attention.eager_attention = eager_gqa
            width = num_kv_heads * attention.head_dim
            attention.k_proj = nn.Linear(attention.embed_dim, width, bias=config.enable_bias)
            attention.v_proj = nn.Linear(attention.embed_dim, width, bias=config.enable_bias)
            attention.__class__ = GqaOPTAttention  # built as the stock module; only the forward differs
        self.post_init()
