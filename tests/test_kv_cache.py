"""KV bytes from the config equal the bytes that a running model really caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from mha2gqa.checkpoints.hf_config import as_numbers, known_config
from mha2gqa.errors import CheckpointError
from mha2gqa.kv_cache import (
    decode_step_bytes,
    kv_bytes,
    kv_bytes_per_token,
    kv_layers,
    max_batch,
    step_weight_bytes,
)

SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
LLAMA_2_7B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "torch_dtype": "float16",
}
TYPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 6},
    "mixtral": {"num_local_experts": 2, "sliding_window": None},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 6},
    "qwen3": {"head_dim": 12},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 6},
    "gemma3_text": {"head_dim": 16, "sliding_window": 6},
    "cohere2": {"sliding_window": 6},
    "phi": {},
    "stablelm": {"partial_rotary_factor": 0.5},
    "olmo2": {},
    "starcoder2": {"sliding_window": 6},
    "gpt_neox": {},
    "gpt2": {},
    "gptj": {"rotary_dim": 4},
    "opt": {"ffn_dim": 32, "word_embed_proj_dim": 32},
    "bloom": {},
    "falcon": {"multi_query": True, "new_decoder_architecture": False},
    "gpt_bigcode": {"multi_query": True},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False, "num_experts": 2},
    "qwen3_next": {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "head_dim": 8,
    },
}


@pytest.mark.parametrize("model_type", TYPES)
def test_equals_what_a_model_caches(model_type: str) -> None:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**{**SIZES, **TYPES[model_type]})
    model = AutoModelForCausalLM.from_config(config).eval()
    raw = config.to_diff_dict() | {"model_type": model_type}  # what save_pretrained writes: no defaults
    layers = kv_layers(raw)
    length = 10
    with torch.no_grad():
        cache = model(torch.arange(1, length + 1)[None], use_cache=True).past_key_values
    held = sum(
        x.numel()
        for layer in cache.layers
        for x in (getattr(layer, "keys", None), getattr(layer, "values", None))
        if isinstance(x, torch.Tensor)
    )
    # Between two steps transformers drops the token that leaves the window next.
    kept = [length if w is None else min(length, w - 1) for w in (layer.window for layer in layers)]
    assert held == sum(layer.values_per_token * n for layer, n in zip(layers, kept, strict=True))


def test_the_ignored_key_saves_nothing() -> None:
    gqa = {**LLAMA_2_7B, "num_key_value_heads": 8}
    assert kv_bytes_per_token(LLAMA_2_7B) == 2 * 32 * 32 * 128 * 2 == 4 * kv_bytes_per_token(gqa)
    neox = {"model_type": "gpt_neox", "num_hidden_layers": 6, "hidden_size": 512, "num_attention_heads": 8}
    assert kv_bytes_per_token(neox) == kv_bytes_per_token({**neox, "num_key_value_heads": 1})


def test_dtype_and_nested_text_config() -> None:
    assert kv_bytes_per_token(LLAMA_2_7B, dtype_bytes=1) == 2 * 32 * 4096
    assert kv_bytes_per_token({**LLAMA_2_7B, "torch_dtype": "float32"}) == 2 * kv_bytes_per_token(LLAMA_2_7B)
    nested = {"model_type": "llava", "text_config": LLAMA_2_7B}
    assert kv_bytes_per_token(nested) == kv_bytes_per_token(LLAMA_2_7B)


def test_an_unknown_type_is_read_from_its_keys() -> None:
    own = {"model_type": "in_house", "n_layer": 3, "n_head": 4, "n_embd": 64, "dtype": "bfloat16"}
    assert kv_bytes_per_token(own) == 2 * 3 * 64 * 2
    assert kv_bytes_per_token({**own, "num_key_value_heads": 1, "head_dim": 8}) == 2 * 3 * 8 * 2
    with pytest.raises(CheckpointError, match="num_hidden_layers"):
        kv_bytes_per_token({"model_type": "in_house"})
    with pytest.raises(CheckpointError, match="head count"):
        kv_bytes_per_token({"model_type": "in_house", "n_layer": 3})


def test_windows_cap_the_cache() -> None:
    config = {**LLAMA_2_7B, "model_type": "mistral", "sliding_window": 1024, "num_key_value_heads": 8}
    per_token = kv_bytes_per_token(config)
    assert kv_bytes(config, context=100, batch=3) == 300 * per_token
    assert kv_bytes(config, context=4096) == kv_bytes(config, context=1024) == 1024 * per_token


def test_latent_attention_caches_its_latent() -> None:
    config = {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 2,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    }
    assert kv_bytes_per_token({**config, "dtype": "bfloat16"}) == 2 * (512 + 64) * 2


def test_encoder_decoder_counts_self_and_cross() -> None:
    t5 = {"model_type": "t5", "is_encoder_decoder": True, "num_layers": 3, "num_heads": 8, "d_kv": 16}
    assert kv_bytes_per_token(t5) == 3 * 2 * 2 * 8 * 16 * 4
    assert kv_bytes_per_token({**t5, "num_key_value_heads": 2}) == kv_bytes_per_token(
        t5
    )  # T5 has no such key
    exported = {**t5, "model_type": "t5_of_ours", "num_key_value_heads": 2}
    assert kv_bytes_per_token(exported) * 4 == kv_bytes_per_token(t5)
    assert kv_bytes(t5, context=10, source_context=100) == 110 * kv_bytes_per_token(t5) // 2
    whisper = {"model_type": "whisper", "decoder_layers": 2, "decoder_attention_heads": 4, "d_model": 32}
    raw = {**whisper, "is_encoder_decoder": True, "num_key_value_heads": 1, "encoder_attention_heads": 1}
    assert kv_bytes_per_token(raw) == 2 * 2 * 2 * 32 * 4


def test_a_step_reads_the_experts_that_are_asked() -> None:
    """One token reads 2 of 8; of n tokens each leaves an expert alone with 3/4. Shared experts are always read."""
    config = {"num_local_experts": 8, "num_experts_per_tok": 2}
    sizes = {"q.weight": 1000, "m.experts.gate_up_proj": 6000, "m.experts.3.w2.weight": 2000}
    sizes |= {"m.shared_experts.w2.weight": 100, "m.gate.weight": 10}
    assert step_weight_bytes(config, sizes, 1) == 1110 + 8000 * 2 / 8
    assert step_weight_bytes(config, sizes, 2) == 1110 + 8000 * (1 - 0.75**2)
    assert step_weight_bytes(config, sizes, 10_000) == 9110
    assert step_weight_bytes({}, sizes) == 9110  # what is not known is not guessed
    assert step_weight_bytes(LLAMA_2_7B, {"q.weight": 7}) == 7


def test_a_step_reads_rows_of_an_embedding_and_the_whole_head() -> None:
    own, tied = (
        {"model.embed_tokens.weight": 500, "q.weight": 7},
        {"transformer.wte.weight": 500, "q.weight": 7},
    )
    assert step_weight_bytes(LLAMA_2_7B, own | {"lm_head.weight": 600}) == 607
    assert step_weight_bytes(LLAMA_2_7B, own) == step_weight_bytes(LLAMA_2_7B, tied) == 507


@pytest.mark.parametrize("changes", [{"num_attention_heads": 33}, {"num_attention_heads": "32"}])
def test_a_config_that_transformers_refuses_is_one_line(changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"config.json: transformers refuses it .*33|'32'") as caught:
        kv_bytes_per_token(LLAMA_2_7B | changes)
    assert "\n" not in str(caught.value)


def test_maximum_batch_and_decode_bytes() -> None:
    weights = 13_476_839_424
    one = kv_bytes(LLAMA_2_7B, context=4096)
    assert one == 4096 * 524_288
    room = {"context": 4096, "weight_bytes": weights, "reserve": 0.0}
    assert max_batch(LLAMA_2_7B, memory_bytes=weights + 5 * one, **room) == 5
    assert max_batch(LLAMA_2_7B, memory_bytes=weights + 5 * one - 1, **room) == 4
    assert max_batch(LLAMA_2_7B, memory_bytes=weights - 1, **room) == 0
    assert decode_step_bytes(LLAMA_2_7B, context=4096, batch=5, weight_bytes=weights) == weights + 5 * one


def test_infinities_as_transformers_writes_them_are_read() -> None:
    limits = [0.0, {"__float__": "Infinity"}]
    config = {"model_type": "bamba", "time_step_limit": limits, "mamba_n_heads": 8, "mamba_d_head": 8} | SIZES
    assert known_config(config).time_step_limit[1] == float("inf")
    assert as_numbers({"a": [{"__float__": "-Infinity"}, {"b": 1}]}) == {"a": [float("-inf"), {"b": 1}]}
