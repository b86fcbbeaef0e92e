"""An 8-bit KV cache, simulated: what attention reads is rounded as an engine's int8 cache would round it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NAME = "int8_cache"  # the attention function is registered under this


def rounded(x: Tensor) -> Tensor:
    """Each vector of `[…, d]` as 8-bit integers with one scale, symmetric around zero, and back."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale > 0, (x / scale.clamp_min(torch.finfo(x.dtype).tiny)).round() * scale, x)


def round_cache(model: Any) -> None:
    """Let a model read keys (behind RoPE) and values with one int8 scale for each token and KV head.

    The positions that are being read are rounded like those before: a cache that holds all of them.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kw: Any) -> Any:
        return sdpa_attention_forward(module, query, rounded(key), rounded(value), mask, **kw)

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation(NAME)
