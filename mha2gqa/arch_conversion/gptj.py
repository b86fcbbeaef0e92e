"""GPT-J and CodeGen as Phi."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from ..heads import codegen_part, interleaved_to_half_split, join_heads, view_heads
from .tensor_map import (
    ArchConversion,
    TensorMapBuilder,
    carried,
    copied,
    copy_or_zero_bias,
    number,
    rope,
    zero_rows,
)


def _half_split_rows(heads: int, rotary: int, x: Tensor) -> Tensor:
    """Rows of q or k re-ordered from interleaved RoPE pairs to halves, head by head."""
    return join_heads(interleaved_to_half_split(view_heads(x, heads), rotary))


def gptj(config: Mapping[str, Any], names: Iterable[str]) -> ArchConversion:
    """GPT-J as Phi: rows of q and k move so that RoPE pairs lie half a rotary width apart; zero biases."""
    return _gptj_like(config, names, "gptj")


def codegen(config: Mapping[str, Any], names: Iterable[str]) -> ArchConversion:
    """CodeGen as Phi: GPT-J with q, v and k in one tensor of four blocks."""
    return _gptj_like(config, names, "codegen")


def _gptj_like(config: Mapping[str, Any], names: Iterable[str], model_type: str) -> ArchConversion:
    heads, layers = number(config, "n_head"), number(config, "n_layer")
    width, rotary = number(config, "n_embd"), config.get("rotary_dim", 64)
    head_dim = width // heads
    rotary = head_dim if rotary is None else int(rotary)
    book = TensorMapBuilder(names, "transformer.", "wte.weight")
    book.copy({"model.embed_tokens.weight": "wte.weight"})
    turn = partial(_half_split_rows, heads, rotary)
    for layer in range(layers):
        source, target = f"h.{layer}", f"model.layers.{layer}"
        for part, name in enumerate(("q_proj", "k_proj", "v_proj")):
            if model_type == "gptj":
                origin, rows = f"{source}.attn.{name}.weight", copied
            else:  # CodeGen holds q, v, k
                origin, rows = f"{source}.attn.qkv_proj.weight", partial(codegen_part, (0, 2, 1)[part])
            moved = copied if name == "v_proj" else turn
            book.add(
                f"{target}.self_attn.{name}.weight", lambda w, rows=rows, moved=moved: moved(rows(w)), origin
            )
            book.add(f"{target}.self_attn.{name}.bias", lambda w, rows=rows: zero_rows(rows(w)), origin)
        copy_or_zero_bias(book, f"{target}.self_attn.dense", f"{source}.attn.out_proj")
        for leaf in ("weight", "bias"):
            book.copy(
                {
                    f"{target}.input_layernorm.{leaf}": f"{source}.ln_1.{leaf}",
                    f"{target}.mlp.fc1.{leaf}": f"{source}.mlp.fc_in.{leaf}",
                    f"{target}.mlp.fc2.{leaf}": f"{source}.mlp.fc_out.{leaf}",
                }
            )
    book.copy({f"model.final_layernorm.{leaf}": f"ln_f.{leaf}" for leaf in ("weight", "bias")})
    tied = bool(config.get("tie_word_embeddings", False))
    book.head("lm_head.weight", "lm_head.weight", tied)
    book.head("lm_head.bias", "lm_head.bias", False)
    new = {
        "architectures": ["PhiForCausalLM"],
        "model_type": "phi",
        **carried(config),
        "hidden_size": width,
        "intermediate_size": config.get("n_inner") or 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": config.get("n_positions", 2048),
        "hidden_act": config.get("activation_function", "gelu_new"),
        "layer_norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "tie_word_embeddings": tied,
        **rope(config, 10_000, _fraction(rotary, head_dim)),
        "qk_layernorm": False,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attention_dropout": config.get("attn_pdrop", 0.0),
    }
    return ArchConversion(model_type, "phi", new, book.finish())


def _fraction(rotary: int, head_dim: int) -> float:
    """The share that a config class turns back into exactly `rotary` dims by `int(head_dim * share)`."""
    share = rotary / head_dim
    return share if int(head_dim * share) == rotary else (rotary + 0.5) / head_dim
