"""Checkpoints whose code comes along, written as the stock class that computes the same.

Their own code cannot hold fewer KV heads (or is not at hand), so these routes are taken only where asked for
by name. Layouts are those of the published modelling files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..architectures.spec import Geometry
from ..errors import UnsupportedModelError
from ..heads import split_fused
from .tensor_map import ArchConversion, TensorMapBuilder, carried, number, rope

_NORMS = ("input_layernorm", "post_attention_layernorm")


def _llama_config(config: Mapping[str, Any], **own: Any) -> dict[str, Any]:
    heads = number(config, "num_attention_heads")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **carried(
            config, "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "max_position_embeddings", "rms_norm_eps",
        ),
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "hidden_act": config.get("hidden_act", "silu"),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        **rope(config, 10_000),
        **own,
    }  # fmt: skip


def baichuan(config: Mapping[str, Any], names: Iterable[str]) -> ArchConversion:
    """Baichuan-7B and Baichuan2-7B as Llama: W_pack holds `[q; k; v]`.

    Baichuan2 normalises the rows of its output embedding in every forward pass: the rows are stored
    normalised. Which of the two it is must be plain from both its class name and its vocabulary.
    """
    if "max_position_embeddings" not in config:
        raise UnsupportedModelError(
            "the 13B models use ALiBi, which Llama does not have", where="model_type 'baichuan'"
        )
    version = {"BaiChuanForCausalLM": 1, "BaichuanForCausalLM": 2}.get(
        (config.get("architectures") or [""])[0]
    )
    if version is None or (version == 2) != (config.get("vocab_size") == 125_696):
        raise UnsupportedModelError(
            "cannot tell Baichuan from Baichuan2: class name and vocabulary size disagree",
            where="config.json",
        )
    book = TensorMapBuilder(names, "model.", "embed_tokens.weight")
    book.copy({f"model.{x}.weight": f"{x}.weight" for x in ("embed_tokens", "norm")})
    for layer in range(number(config, "num_hidden_layers")):
        source, target = f"layers.{layer}", f"model.layers.{layer}"
        for part, name in enumerate("qkv"):
            book.add(
                f"{target}.self_attn.{name}_proj.weight",
                lambda w, part=part: w.chunk(3)[part].contiguous(),
                f"{source}.self_attn.W_pack.weight",
            )
        same = ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", *_NORMS)
        book.copy({f"{target}.{x}.weight": f"{source}.{x}.weight" for x in same})
    if version == 2:
        book.head("lm_head.weight", "lm_head.weight", False)
        recipe = book.recipes["lm_head.weight"]
        book.recipes["lm_head.weight"] = type(recipe)(recipe.sources, _unit_rows)
    else:
        book.head("lm_head.weight", "lm_head.weight", bool(config.get("tie_word_embeddings", False)))
    return ArchConversion("baichuan", "llama", _llama_config(config), book.finish())


def _unit_rows(x: Tensor) -> Tensor:
    return torch.nn.functional.normalize(x.float()).to(x.dtype)


def internlm(config: Mapping[str, Any], names: Iterable[str]) -> ArchConversion:
    """InternLM (the first) as Llama: the same names; `bias` becomes `attention_bias`."""
    new = _llama_config(config, attention_bias=bool(config.get("bias", True)), mlp_bias=False)
    book = TensorMapBuilder(names, "", "")
    book.copy({name: name for name in names if not name.endswith("rotary_emb.inv_freq")})
    return ArchConversion("internlm", "llama", new, book.finish())


def internlm2(config: Mapping[str, Any], names: Iterable[str]) -> ArchConversion:
    """InternLM2 as Llama: wqkv holds, per KV head, its queries, then k, then v."""
    heads = number(config, "num_attention_heads")
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = number(config, "hidden_size") // heads
    geometry = Geometry(heads, kv_heads, head_dim, head_dim)
    book = TensorMapBuilder(names, "model.", "tok_embeddings.weight")
    book.copy({"model.embed_tokens.weight": "tok_embeddings.weight", "model.norm.weight": "norm.weight"})
    bias = bool(config.get("bias", False))
    for layer in range(number(config, "num_hidden_layers")):
        source, target = f"layers.{layer}", f"model.layers.{layer}"
        for leaf in ("weight", "bias") if bias else ("weight",):
            for part, name in enumerate("qkv"):
                book.add(
                    f"{target}.self_attn.{name}_proj.{leaf}",
                    lambda w, part=part: split_fused("per_group", w, geometry)[part],
                    f"{source}.attention.wqkv.{leaf}",
                )
            book.copy({f"{target}.self_attn.o_proj.{leaf}": f"{source}.attention.wo.{leaf}"})
        book.copy(
            {
                f"{target}.mlp.gate_proj.weight": f"{source}.feed_forward.w1.weight",
                f"{target}.mlp.up_proj.weight": f"{source}.feed_forward.w3.weight",
                f"{target}.mlp.down_proj.weight": f"{source}.feed_forward.w2.weight",
                f"{target}.input_layernorm.weight": f"{source}.attention_norm.weight",
                f"{target}.post_attention_layernorm.weight": f"{source}.ffn_norm.weight",
            }
        )
    book.head("lm_head.weight", "output.weight", bool(config.get("tie_word_embeddings", False)))
    new = _llama_config(config, attention_bias=bias)
    return ArchConversion("internlm2", "llama", new, book.finish())


def qwen(config: Mapping[str, Any], names: Iterable[str]) -> ArchConversion:
    """Qwen (the first) as Qwen2: c_attn holds `[q; k; v]`; w2 is the gate and w1 what it gates."""
    heads = number(config, "num_attention_heads")
    book = TensorMapBuilder(names, "transformer.", "wte.weight")
    book.copy({"model.embed_tokens.weight": "wte.weight", "model.norm.weight": "ln_f.weight"})
    for layer in range(number(config, "num_hidden_layers")):
        source, target = f"h.{layer}", f"model.layers.{layer}"
        for leaf in ("weight", "bias"):
            for part, name in enumerate("qkv"):
                book.add(
                    f"{target}.self_attn.{name}_proj.{leaf}",
                    lambda w, part=part: w.chunk(3)[part].contiguous(),
                    f"{source}.attn.c_attn.{leaf}",
                )
        book.copy(
            {
                f"{target}.self_attn.o_proj.weight": f"{source}.attn.c_proj.weight",
                f"{target}.mlp.gate_proj.weight": f"{source}.mlp.w2.weight",
                f"{target}.mlp.up_proj.weight": f"{source}.mlp.w1.weight",
                f"{target}.mlp.down_proj.weight": f"{source}.mlp.c_proj.weight",
                f"{target}.input_layernorm.weight": f"{source}.ln_1.weight",
                f"{target}.post_attention_layernorm.weight": f"{source}.ln_2.weight",
            }
        )
    book.head("lm_head.weight", "lm_head.weight", bool(config.get("tie_word_embeddings", False)))
    trained = config.get("seq_length", 2048)
    new = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        **carried(config, "hidden_size", "num_hidden_layers", "num_attention_heads"),
        "num_key_value_heads": heads,
        "intermediate_size": number(config, "intermediate_size") // 2,
        "hidden_act": "silu",
        "max_position_embeddings": trained,
        "rms_norm_eps": config.get("layer_norm_epsilon", 1e-6),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        **rope(config, config.get("rotary_emb_base", 10_000)),
    }
    long = [key for key in ("use_dynamic_ntk", "use_logn_attn") if config.get(key)]
    notes = (f"{', '.join(long)} do not carry over: equal up to {trained} tokens",) if long else ()
    return ArchConversion("qwen", "qwen2", new, book.finish(), notes)


def deepseek(config: Mapping[str, Any], names: Iterable[str]) -> ArchConversion:
    """DeepSeekMoE (the first, 16B) as Qwen2-MoE: the same router, experts, and dense layers named by number.

    Qwen2-MoE multiplies what its shared expert gives by the sigmoid of a gate, which DeepSeek has not: a gate of zeros
    halves it, and a doubled down projection (exact in every dtype) makes up for that.
    """
    _check_deepseek(config)
    layers, experts = number(config, "num_hidden_layers"), number(config, "n_routed_experts")
    width = number(config, "moe_intermediate_size")
    every, first = config.get("moe_layer_freq") or 1, config.get("first_k_dense_replace") or 0
    dense = [layer for layer in range(layers) if layer < first or layer % every]
    book = TensorMapBuilder(names, "model.", "embed_tokens.weight")
    book.copy({f"model.{x}.weight": f"{x}.weight" for x in ("embed_tokens", "norm")})
    parts = ("gate_proj", "up_proj", "down_proj")
    for layer in range(layers):
        at = f"layers.{layer}"
        same = [*_NORMS, *(f"self_attn.{x}_proj" for x in "qkvo")]
        if layer in dense:
            same += [f"mlp.{part}" for part in parts]
        else:
            same += ["mlp.gate", *(f"mlp.experts.{e}.{part}" for e in range(experts) for part in parts)]
            shared, into = f"{at}.mlp.shared_experts", f"model.{at}.mlp.shared_expert"
            book.copy({f"{into}.{part}.weight": f"{shared}.{part}.weight" for part in parts[:2]})
            book.add(f"{into}.down_proj.weight", lambda w: 2 * w, f"{shared}.down_proj.weight")
            book.add(f"{into}_gate.weight", lambda w: torch.zeros_like(w[:1]), f"{at}.mlp.gate.weight")
        book.copy({f"model.{at}.{x}.weight": f"{at}.{x}.weight" for x in same})
    book.head("lm_head.weight", "lm_head.weight", bool(config.get("tie_word_embeddings", False)))
    new = _llama_config(
        config,
        architectures=["Qwen2MoeForCausalLM"],
        model_type="qwen2_moe",
        qkv_bias=False,
        num_experts=experts,
        num_experts_per_tok=number(config, "num_experts_per_tok"),
        moe_intermediate_size=width,
        shared_expert_intermediate_size=width * number(config, "n_shared_experts"),
        norm_topk_prob=bool(config.get("norm_topk_prob", False)),
        decoder_sparse_step=1,
        mlp_only_layers=dense,
    )
    return ArchConversion("deepseek", "qwen2_moe", new, book.finish())


def _check_deepseek(config: Mapping[str, Any]) -> None:
    """Refuse what Qwen2-MoE does not compute.

    Raises:
        UnsupportedModelError: Such a key is set.
    """
    plain = {"scoring_func": "softmax", "topk_method": "greedy", "routed_scaling_factor": 1.0}
    odd = [f"{key} {config[key]}" for key, value in plain.items() if config.get(key) not in (None, value)]
    odd += ["attention_bias"] if config.get("attention_bias") else []
    odd += [f"no {key}" for key in ("n_routed_experts", "n_shared_experts") if not config.get(key)]
    if odd:
        raise UnsupportedModelError(
            f"Qwen2-MoE's experts differ: {', '.join(odd)}", where="model_type 'deepseek'"
        )


__all__ = ["baichuan", "deepseek", "internlm", "internlm2", "qwen"]
