"""Karpathy's stories260K (MIT) from two files of llama2.c, `stories260K.bin` and `tok512.bin`; no registry has them.

python benchmarks/real/stories260k.py stories260K.bin tok512.bin MODELS
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from packages import added, digest, repeated_heads, write_model

SPECIAL = ("<unk>", "<s>", "</s>")
BYTES = 259  # ids below it are special tokens and bytes


def weights(data: bytes) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Config and tensors of a llama2.c checkpoint: seven numbers, then matrices in a fixed order.

    Raises:
        ValueError: It holds another number of weights.
    """
    width, inner, layers, heads, kv_heads, vocabulary, context = struct.unpack_from("<7i", data)
    tied, vocabulary, dim = vocabulary > 0, abs(vocabulary), width // heads
    numbers, at = np.frombuffer(data, "<f4", offset=28), 0
    order = {
        "embed": (vocabulary, width),
        "input_layernorm": (layers, width),
        "self_attn.q_proj": (layers, width, width),
        "self_attn.k_proj": (layers, kv_heads * dim, width),
        "self_attn.v_proj": (layers, kv_heads * dim, width),
        "self_attn.o_proj": (layers, width, width),
        "post_attention_layernorm": (layers, width),
        "mlp.gate_proj": (layers, inner, width),
        "mlp.down_proj": (layers, width, inner),
        "mlp.up_proj": (layers, inner, width),
        "norm": (width,),
        "frequencies": (2, context, dim // 2),
    } | ({} if tied else {"lm_head": (vocabulary, width)})
    parts = {}
    for name, shape in order.items():
        count = int(np.prod(shape))
        parts[name] = torch.from_numpy(numbers[at : at + count].reshape(shape).copy())
        at += count
    if at != len(numbers):
        raise ValueError(f"{len(numbers)} weights, not {at}")
    tensors = {"model.embed_tokens.weight": parts.pop("embed"), "model.norm.weight": parts.pop("norm")}
    del parts["frequencies"]
    if not tied:
        tensors["lm_head.weight"] = parts.pop("lm_head")
    for name, stack in parts.items():
        for layer, weight in enumerate(stack):
            if name.endswith(("q_proj", "k_proj")):  # rotary pairs lie side by side
                weight = weight.unflatten(0, (-1, dim // 2, 2)).transpose(1, 2).flatten(0, 2)
            tensors[f"model.layers.{layer}.{name}.weight"] = weight
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    return config, tensors


def tokenizer(data: bytes, size: int) -> dict[str, Any]:
    """llama2.c's tokenizer, which joins the pair whose union scores highest: BPE with merges in that order."""
    at, vocabulary, scores = 4, {}, []
    for number in range(size):
        score, length = struct.unpack_from("<fi", data, at)
        word = data[at + 8 : at + 8 + length].decode("utf-8", "replace")
        at += 8 + length
        word = word.strip() if word.strip() in SPECIAL else word
        vocabulary.setdefault(word.replace(" ", "▁"), number)
        scores.append(score)
    merges = [
        [word[:cut], word[cut:]]
        for word, number in sorted(vocabulary.items(), key=lambda item: -scores[item[1]])
        if number >= BYTES
        for cut in range(1, len(word))
        if word[:cut] in vocabulary and word[cut:] in vocabulary
    ]
    start = {"id": "<s>", "ids": [1], "tokens": ["<s>"]}
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "version": "1.0",
        "added_tokens": [added(number, token) for number, token in enumerate(SPECIAL)],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, sequence],
            "pair": [sequence, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": start},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocabulary,
            "merges": merges,
        },
    }


def build(checkpoint: Path, words: Path, models: Path) -> None:
    """Write `stories260k` and, with 8 KV heads, `stories260k-mha`."""
    data = checkpoint.read_bytes()
    config, tensors = weights(data)
    files = {
        "tokenizer.json": tokenizer(words.read_bytes(), config["vocab_size"]),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "model_max_length": config["max_position_embeddings"],
        },
        "origin.json": {"from": "llama2.c's stories260K.bin", "licence": "MIT", "sha256": digest(data)},
    }
    write_model(models / "stories260k", config, tensors, files)
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    twin = repeated_heads(tensors, layers, heads, config["num_key_value_heads"])
    write_model(models / "stories260k-mha", config | {"num_key_value_heads": heads}, twin, files)


if __name__ == "__main__":
    build(*map(Path, sys.argv[1:4]))
