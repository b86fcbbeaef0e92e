"""KV-cache arithmetic from a config alone: bytes per token, at a context, per decode step, maximum batch.

No weights are read and torch is not imported. Sizes are those a server needs: every layer's own KV heads
and head width, sliding windows capped, recurrent and KV-sharing layers free, latent (MLA) caches compressed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from .checkpoints.hf_config import (
    dtype_bytes,
    first_value,
    is_encoder_decoder,
    known_config,
    longest_context,
    optional,
    positive,
    text_config,
)
from .checkpoints.json_files import RESTORE
from .errors import CheckpointError, quoted
from .modeling import EXPORTS, PREFIX

# Stock classes that accept `num_key_value_heads` and ignore it: they cache every head.
IGNORE_KV_HEADS = frozenset(
    {"biogpt", "gpt2", "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gptj", "opt", "bloom", "mpt"}
)
MULTI_QUERY = frozenset({"falcon", "gpt_bigcode"})  # `multi_query` caches one head
NO_CACHE = frozenset({"linear_attention", "mamba", "mamba2", "conv", "recurrent", "rwkv", "moe", "mlp"})
SLIDING = frozenset({"sliding_attention", "chunked_attention", "hybrid_sliding"})

_DECODER_LAYERS = (
    "decoder_layers", "num_decoder_layers", "decoder_num_hidden_layers", "num_layers", "num_hidden_layers",
)  # fmt: skip
_DECODER_HEADS = (
    "decoder_attention_heads", "num_heads", "decoder_num_attention_heads", "num_attention_heads",
)  # fmt: skip
UNLIMITED_CONTEXT = 512  # of an encoder-decoder whose config has no longest: T5's pretraining
# Of an input embedding a step reads a row for each token; where it is the output head too, there is no other.
INPUT_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|embed_in|word_embeddings|tok_embeddings)\.weight$")
OUTPUT_HEAD = re.compile(r"(^|\.)(lm_head|embed_out)\.weight$")
ROUTED_EXPERTS = re.compile(r"(^|\.)experts\.")  # `shared_experts` are read for every token


@dataclass(frozen=True)
class KVLayer:
    """What one attention module caches for each token.

    Args:
        heads: KV heads.
        key_dim: Width of a cached key.
        value_dim: Width of a cached value (0 where keys and values share one latent).
        window: Most tokens it keeps, None for all.
        cross: True for cross-attention, whose tokens are those of the encoder.
    """

    heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    cross: bool = False

    @property
    def values_per_token(self) -> int:
        """Numbers cached for one token."""
        return self.heads * (self.key_dim + self.value_dim)


def kv_layers(config: Mapping[str, Any]) -> tuple[KVLayer, ...]:
    """Every attention module of the decoder, in layer order.

    Args:
        config: The raw `config.json`. Keys it leaves out take transformers' defaults for its
            `model_type` where that is known.

    Raises:
        CheckpointError: It does not say how many layers or heads there are.
    """
    text = text_config(config)
    values = known_config(config)
    if is_encoder_decoder(config):
        return _encoder_decoder(text, values)
    count = first_value(values, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    layers = []
    for index, kind in enumerate(_layer_types(values, positive(count, "num_hidden_layers"))):
        if kind not in NO_CACHE:
            own = _layer_values(values, index)
            window = _window(own) if kind in SLIDING else None
            layers.append(KVLayer(*_shape(text, own), window=window))
    return tuple(layers)


def kv_bytes_per_token(config: Mapping[str, Any], dtype_bytes: int | None = None) -> int:
    """Bytes that one more token of one sequence adds to the cache, while no window is full.

    Args:
        config: The raw `config.json`.
        dtype_bytes: Bytes of a cached number; None for those of the dtype the config names.

    Returns:
        Bytes. For an encoder-decoder: of one source token (cross-attention) and one target token.

    Example:
        >>> kv_bytes_per_token({"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096,
        ...                     "num_attention_heads": 32, "num_key_value_heads": 8, "dtype": "bfloat16"})
        131072
    """
    return sum(layer.values_per_token for layer in kv_layers(config)) * _bytes(config, dtype_bytes)


def kv_bytes(
    config: Mapping[str, Any],
    *,
    context: int,
    batch: int = 1,
    source_context: int | None = None,
    dtype_bytes: int | None = None,
) -> int:
    """Bytes of the cache of `batch` sequences of `context` tokens each.

    Args:
        config: The raw `config.json`.
        context: Tokens per sequence.
        batch: Sequences.
        source_context: Encoder states per sequence. None for what the config fixes (Whisper reads 30 seconds,
            whatever it writes), else as many as `context`.
        dtype_bytes: As in `kv_bytes_per_token`.
    """
    source = source_context or _source_positions(config) or context
    total = 0
    for layer in kv_layers(config):
        tokens = source if layer.cross else context
        total += layer.values_per_token * (tokens if layer.window is None else min(tokens, layer.window))
    return total * batch * _bytes(config, dtype_bytes)


def sequence_cache(
    config: Mapping[str, Any], *, context: int | None = None, dtype_bytes: int | None = None
) -> dict[str, int]:
    """What one sequence of an encoder-decoder caches at the lengths that the model was built for.

    Args:
        config: The raw `config.json`.
        context: Target tokens; the most that the decoder takes where None.
        dtype_bytes: As in `kv_bytes_per_token`.

    Returns:
        `self` and `cross`, the bytes of the decoder's own keys and values and of those of the encoder's states;
        `context` and `source`, the tokens and states they are for. Empty for a decoder, and where the encoder's
        states are a prefix of the decoder's own (MusicGen Melody).

    Example:
        >>> whisper = {"model_type": "whisper", "decoder_layers": 4, "decoder_attention_heads": 6, "d_model": 384}
        >>> sequence_cache(whisper, dtype_bytes=2)
        {'self': 2752512, 'cross': 9216000, 'context': 448, 'source': 1500}
    """
    if not is_encoder_decoder(config):
        return {}
    each, layers = _bytes(config, dtype_bytes), kv_layers(config)
    if not any(layer.cross for layer in layers):
        return {}
    context = context or longest_context(config) or UNLIMITED_CONTEXT
    source = _source_positions(config) or context
    own, cross = (sum(x.values_per_token for x in layers if x.cross == kind) for kind in (False, True))
    return {
        "self": own * context * each,
        "cross": cross * source * each,
        "context": context,
        "source": source,
    }


def _source_positions(config: Mapping[str, Any]) -> int | None:
    """Encoder states of a sequence where the config fixes them (Whisper reads 30 seconds), else None."""
    return optional(getattr(known_config(config), "max_source_positions", None), "max_source_positions")


def max_batch(
    config: Mapping[str, Any],
    *,
    memory_bytes: float,
    context: int,
    weight_bytes: int = 0,
    reserve: float = 0.1,
    dtype_bytes: int | None = None,
) -> int:
    """Most sequences of `context` tokens whose cache fits beside the weights.

    Args:
        config: The raw `config.json`.
        memory_bytes: Memory of the GPU.
        context: Tokens per sequence.
        weight_bytes: Bytes of the weights.
        reserve: Fraction of the memory left to activations and the allocator.
        dtype_bytes: As in `kv_bytes_per_token`.

    Returns:
        0 when not even one fits.
    """
    per_sequence = kv_bytes(config, context=context, dtype_bytes=dtype_bytes)
    free = memory_bytes * (1 - reserve) - weight_bytes
    return max(0, int(free // per_sequence)) if per_sequence else 0


def decode_step_bytes(
    config: Mapping[str, Any],
    *,
    context: int,
    batch: int = 1,
    weight_bytes: int = 0,
    dtype_bytes: int | None = None,
) -> int:
    """Bytes one decode step must move: all weights once, and the cache of every sequence once.

    Divided by the memory bandwidth it is the least time a step can take.
    """
    return weight_bytes + kv_bytes(config, context=context, batch=batch, dtype_bytes=dtype_bytes)


def step_weight_bytes(config: Mapping[str, Any], tensors: Mapping[str, int], batch: int = 1) -> int:
    """Bytes of the weights that one decode step reads: no input embedding, and only the experts that are asked.

    Args:
        config: The raw `config.json`.
        tensors: Bytes of every tensor by name.
        batch: Sequences; their tokens are taken to choose experts evenly and independently.

    Returns:
        All bytes but those of an input embedding beside which there is an output head, where there are no routed experts, or
        the config does not say how many a token asks.

    Example:
        >>> moe = {"num_local_experts": 8, "num_experts_per_tok": 2}
        >>> step_weight_bytes(moe, {"q.weight": 10, "mlp.experts.down_proj": 800})
        210
    """
    total = sum(tensors.values())
    if any(map(OUTPUT_HEAD.search, tensors)):
        total -= sum(size for name, size in tensors.items() if INPUT_EMBEDDING.search(name))
    routed = sum(size for name, size in tensors.items() if ROUTED_EXPERTS.search(name))
    if not routed:
        return total
    values = known_config(config)
    count = first_value(values, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    asked = first_value(values, "num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k", "top_k")
    if not (isinstance(count, int) and isinstance(asked, int) and 0 < asked < count):
        return total
    return total - round(routed * (1 - asked / count) ** batch)


# --- reading a config ----------------------------------------------------------------------------------


def _bytes(config: Mapping[str, Any], explicit: int | None) -> int:
    return dtype_bytes(config) if explicit is None else explicit


def _layer_values(values: Any, index: int) -> Any:
    """Config of one layer where layers differ (`per_layer_config`), else the config."""
    per_layer = getattr(values, "per_layer_config", None)
    if not per_layer:
        return values
    try:
        return per_layer[index]
    except (LookupError, TypeError) as error:
        raise CheckpointError(
            f"per_layer_config has no usable entry for layer {index}", where="config.json", fix=RESTORE
        ) from error


def _layer_types(values: Any, count: int) -> list[str]:
    """Kind of every layer that keeps keys and values of its own; the logic of transformers' caches."""
    kinds = first_value(values, "layer_types", "layers_block_type")
    if kinds is None:
        if first_value(values, "sliding_window", "attention_chunk_size") is not None:
            kinds = ["sliding_attention"] * count
        else:
            kinds = ["full_attention"] * count
    kinds = _listed(kinds, "layer_types")
    modes = getattr(values, "kv_sharing_modes", None)
    if modes is not None:
        return [
            k for k, mode in zip(kinds, _listed(modes, "kv_sharing_modes"), strict=False) if mode != "reuse"
        ]
    return kinds[
        : count
        - (optional(getattr(values, "num_kv_shared_layers", None) or None, "num_kv_shared_layers") or 0)
    ]


def _listed(value: Any, name: str) -> list[str]:
    """One word for each layer.

    Raises:
        CheckpointError: It is something else.
    """
    if not isinstance(value, list | tuple) or not all(isinstance(word, str) for word in value):
        raise CheckpointError(f"no usable {name} ({quoted(value)})", where="config.json", fix=RESTORE)
    return list(value)


def _window(values: Any) -> int | None:
    found = first_value(values, "sliding_window", "attention_chunk_size")
    return None if found in (0, -1) else optional(found, "sliding_window")


def _shape(text: Mapping[str, Any], values: Any) -> tuple[int, int, int]:
    """`(KV heads, key width, value width)` of one layer."""
    latent = optional(getattr(values, "kv_lora_rank", None) or None, "kv_lora_rank")
    if latent:  # MLA: one compressed latent and one rotary key, shared by all heads
        rotary = getattr(values, "qk_rope_head_dim", None) or None
        return 1, latent + (optional(rotary, "qk_rope_head_dim") or 0), 0
    heads = positive(
        first_value(values, "num_attention_heads", "n_head", "n_heads", "num_heads"), "head count"
    )
    width = first_value(values, "hidden_size", "n_embd", "d_model")
    key_dim = optional(first_value(values, "head_dim", "attention_head_dim", "kv_channels"), "head_dim")
    key_dim = key_dim or positive(width, "hidden_size") // heads
    value_dim = optional(getattr(values, "v_head_dim", None) or None, "v_head_dim") or key_dim
    return _kv_heads(text, values, heads), key_dim, value_dim


def _kv_heads(text: Mapping[str, Any], values: Any, heads: int) -> int:
    model_type = text.get("model_type")
    if model_type in IGNORE_KV_HEADS:
        return heads
    if model_type in MULTI_QUERY and not getattr(values, "new_decoder_architecture", False):
        return 1 if getattr(values, "multi_query", False) else heads
    found = first_value(values, "num_key_value_heads", "num_kv_heads", "n_kv_heads", "multi_query_group_num")
    return heads if found is None else positive(found, "num_key_value_heads")


def _encoder_decoder(text: Mapping[str, Any], values: Any) -> tuple[KVLayer, ...]:
    """Self- and cross-attention of every decoder layer (T5, BART, Whisper and their like)."""
    part = _decoder_part(text)
    values = values if part is None else known_config(part)
    layers = positive(first_value(values, *_DECODER_LAYERS), "decoder layers")
    heads = positive(first_value(values, *_DECODER_HEADS), "heads")
    dim = optional(first_value(values, "d_kv", "head_dim"), "d_kv")
    dim = dim or positive(first_value(values, "d_model", "hidden_size"), "d_model") // heads
    # Classes that have an exported form know no such count themselves; Whisper's is of the *encoder's* heads.
    if text.get("model_type") in EXPORTS:
        stated = SimpleNamespace(**(text if part is None else part)) if "auto_map" in text else None
    else:
        stated = values
    own, cross = (heads, heads) if stated is None else _own_and_cross(stated, heads)
    export = EXPORTS.get(str(text.get("model_type")).removeprefix(PREFIX))
    if (
        export is not None and not export.cross
    ):  # MusicGen Melody: what is encoded is a prefix of the decoder's states
        return (KVLayer(own, dim, dim),) * layers
    cross_dim = optional(getattr(values, "cross_head_dim", None), "cross_head_dim") or dim
    return (KVLayer(own, dim, dim), KVLayer(cross, cross_dim, cross_dim, cross=True)) * layers


def _decoder_part(text: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The raw config of the decoder, where it is a part of the model with one of its own."""
    found = (text.get(key) for key in ("decoder", "decoder_config"))
    return next((part for part in found if isinstance(part, Mapping)), None)


def _own_and_cross(values: Any, heads: int) -> tuple[int, int]:
    """KV heads of self- and of cross-attention."""
    named = first_value(values, "decoder_num_key_value_heads", "num_key_value_heads")
    own = heads if named is None else positive(named, "num_key_value_heads")
    named = first_value(values, "num_cross_key_value_heads", "cross_num_key_value_heads")
    return own, own if named is None else positive(named, "num_cross_key_value_heads")
