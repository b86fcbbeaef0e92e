"""GPT-NeoX as Phi (parallel residual) or Nemotron (sequential)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..architectures.spec import Geometry
from ..errors import UnsupportedModelError
from ..heads import split_fused
from .tensor_map import (
    ArchConversion,
    TensorMapBuilder,
    carried,
    copy_or_zero_bias,
    number,
    rope,
    wide,
    zero_rows,
)


def scaled_columns(weight: Tensor, gamma: Tensor) -> Tensor:
    """`weight [R, D]` that reads the normalised input without its gain `gamma [D]`."""
    return (wide(weight) * wide(gamma)).to(weight.dtype)


def shifted_bias(weight: Tensor, beta: Tensor, bias: Tensor | None = None) -> Tensor:
    """Bias `[R]` of a layer whose input lost its shift `beta [D]`."""
    shift = wide(weight) @ wide(beta)
    return (shift if bias is None else shift + wide(bias)).to(weight.dtype)


def _ones(x: Tensor) -> Tensor:
    return torch.ones_like(x)


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x)


def _neox_rows(part: int, num_heads: int, x: Tensor) -> Tensor:
    """Rows of q, k or v (0, 1, 2) of a fused tensor that holds `[q, k, v]` head by head."""
    head_dim = x.shape[0] // (3 * num_heads)
    return split_fused("per_head", x, Geometry(num_heads, num_heads, head_dim, head_dim))[part]


def gpt_neox(config: Mapping[str, Any], names: Iterable[str]) -> ArchConversion:
    """GPT-NeoX (Pythia, NeoX-20B, Dolly: parallel residual) as Phi, or sequential (RedPajama) as Nemotron.

    NeoX normalises attention and feed-forward input apart, Phi once: both gains and shifts go into the
    weights behind them. Nemotron stores each norm's gain minus one.
    """
    heads, layers = number(config, "num_attention_heads"), number(config, "num_hidden_layers")
    parallel = config.get("use_parallel_residual", True)
    book = TensorMapBuilder(names, "gpt_neox.", "embed_in.weight")
    book.copy({"model.embed_tokens.weight": "embed_in.weight"})
    for layer in range(layers):
        (_neox_phi_layer if parallel else _neox_nemotron_layer)(book, layer, heads)
    tied = bool(config.get("tie_word_embeddings", False))
    head = "embed_out.weight" if "embed_out.weight" in book.names else "lm_head.weight"
    book.head("lm_head.weight", head, tied)
    if parallel:
        norm, source = "model.final_layernorm", "final_layer_norm"
        book.copy({f"{norm}.{leaf}": f"{source}.{leaf}" for leaf in ("weight", "bias")})
        book.add("lm_head.bias", zero_rows, "embed_in.weight")
    else:
        book.add("model.norm.weight", _minus_one, "final_layer_norm.weight")
        book.copy({"model.norm.bias": "final_layer_norm.bias"})
    recipes = book.finish()
    new = _neox_config(config, heads, parallel)
    return ArchConversion("gpt_neox", new["model_type"], new, recipes)


def _minus_one(gamma: Tensor) -> Tensor:
    return (wide(gamma) - 1).to(gamma.dtype)


def _neox_config(config: Mapping[str, Any], heads: int, parallel: bool) -> dict[str, Any]:
    pct = (config.get("rope_parameters") or {}).get("partial_rotary_factor", config.get("rotary_pct", 0.25))
    head_dim = number(config, "hidden_size") // heads
    if int(head_dim * pct) % 2:
        raise UnsupportedModelError(
            f"{pct} of {head_dim} dims of a head are rotary: an odd number, which classes read differently",
            where="config.json",
        )
    theta = config.get("rope_theta", config.get("rotary_emb_base", 10_000))
    same = carried(
        config, "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "max_position_embeddings", "attention_dropout",
    )  # fmt: skip
    same |= {"num_key_value_heads": heads, "hidden_act": config.get("hidden_act", "gelu")}
    same |= {"tie_word_embeddings": bool(config.get("tie_word_embeddings", False))}
    same |= rope(config, theta, pct)
    eps = config.get("layer_norm_eps", 1e-5)
    if parallel:
        return {
            "architectures": ["PhiForCausalLM"],
            "model_type": "phi",
            **same,
            "layer_norm_eps": eps,
            "qk_layernorm": False,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
        }
    return {
        "architectures": ["NemotronForCausalLM"],
        "model_type": "nemotron",
        **same,
        "norm_eps": eps,
        "head_dim": head_dim,
        "attention_bias": True,
        "mlp_bias": True,
    }


def _neox_phi_layer(book: TensorMapBuilder, layer: int, heads: int) -> None:
    source, target = f"layers.{layer}", f"model.layers.{layer}"
    qkv, ln1, ln2 = (
        f"{source}.{m}" for m in ("attention.query_key_value", "input_layernorm", "post_attention_layernorm")
    )
    for part, name in enumerate(("q_proj", "k_proj", "v_proj")):
        rows = partial(_neox_rows, part, heads)
        book.add(
            f"{target}.self_attn.{name}.weight",
            lambda w, gamma, rows=rows: scaled_columns(rows(w), gamma),
            f"{qkv}.weight",
            f"{ln1}.weight",
        )
        biases = (f"{qkv}.bias",) if book.has(f"{qkv}.bias") else ()
        book.add(
            f"{target}.self_attn.{name}.bias",
            lambda w, beta, *b, rows=rows: shifted_bias(rows(w), beta, *(rows(x) for x in b)),
            f"{qkv}.weight",
            f"{ln1}.bias",
            *biases,
        )
    copy_or_zero_bias(book, f"{target}.self_attn.dense", f"{source}.attention.dense")
    up = f"{source}.mlp.dense_h_to_4h"
    book.add(f"{target}.mlp.fc1.weight", scaled_columns, f"{up}.weight", f"{ln2}.weight")
    book.add(f"{target}.mlp.fc1.bias", shifted_bias, f"{up}.weight", f"{ln2}.bias", f"{up}.bias")
    book.copy({f"{target}.mlp.fc2.{x}": f"{source}.mlp.dense_4h_to_h.{x}" for x in ("weight", "bias")})
    book.add(f"{target}.input_layernorm.weight", _ones, f"{ln1}.weight")
    book.add(f"{target}.input_layernorm.bias", _zeros, f"{ln1}.bias")


def _neox_nemotron_layer(book: TensorMapBuilder, layer: int, heads: int) -> None:
    source, target = f"layers.{layer}", f"model.layers.{layer}"
    qkv = f"{source}.attention.query_key_value"
    for part, name in enumerate(("q_proj", "k_proj", "v_proj")):
        rows = partial(_neox_rows, part, heads)
        book.add(f"{target}.self_attn.{name}.weight", rows, f"{qkv}.weight")
        if book.has(f"{qkv}.bias"):
            book.add(f"{target}.self_attn.{name}.bias", rows, f"{qkv}.bias")
        else:
            book.add(
                f"{target}.self_attn.{name}.bias", lambda w, rows=rows: zero_rows(rows(w)), f"{qkv}.weight"
            )
    copy_or_zero_bias(book, f"{target}.self_attn.o_proj", f"{source}.attention.dense")
    for leaf in ("weight", "bias"):
        book.copy({f"{target}.mlp.up_proj.{leaf}": f"{source}.mlp.dense_h_to_4h.{leaf}"})
        book.copy({f"{target}.mlp.down_proj.{leaf}": f"{source}.mlp.dense_4h_to_h.{leaf}"})
    for norm in ("input_layernorm", "post_attention_layernorm"):
        book.add(f"{target}.{norm}.weight", _minus_one, f"{source}.{norm}.weight")
        book.copy({f"{target}.{norm}.bias": f"{source}.{norm}.bias"})
