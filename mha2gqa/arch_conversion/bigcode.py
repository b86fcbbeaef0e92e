"""GPT-2 and OPT as GPTBigCode, which holds all KV heads or one; old Falcon as new."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from ..architectures.spec import Geometry
from ..errors import UnsupportedModelError
from ..heads import fuse
from .tensor_map import ArchConversion, TensorMapBuilder, carried, number


def _bigcode_config(config: Mapping[str, Any], **own: Any) -> dict[str, Any]:
    return {
        "architectures": ["GPTBigCodeForCausalLM"],
        "model_type": "gpt_bigcode",
        **carried(config),
        **own,
        "multi_query": False,
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", True)),
    }


def _transposed(x: Tensor) -> Tensor:
    return x.t().contiguous()


def _per_head(heads: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q, k and v rows woven head by head, as GPTBigCode holds them before heads are shared."""
    head_dim = q.shape[0] // heads
    return fuse("per_head", q, k, v, Geometry(heads, heads, head_dim, head_dim))


def gpt2(config: Mapping[str, Any], names: Iterable[str]) -> ArchConversion:
    """GPT-2 as GPTBigCode: its Conv1D matrices turned, q, k and v woven head by head."""
    for key in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"):
        if config.get(key):
            raise UnsupportedModelError(f"GPTBigCode has no {key}", where="config.json")
    heads, layers = number(config, "n_head"), number(config, "n_layer")
    book = TensorMapBuilder(names, "transformer.", "wte.weight")
    book.copy({f"transformer.{x}.weight": f"{x}.weight" for x in ("wte", "wpe")})

    def woven(x: Tensor) -> Tensor:
        return _per_head(heads, *x.chunk(3))

    for layer in range(layers):
        source, target = f"h.{layer}", f"transformer.h.{layer}"
        book.add(f"{target}.attn.c_attn.weight", lambda x: woven(x.t()), f"{source}.attn.c_attn.weight")
        book.add(f"{target}.attn.c_attn.bias", woven, f"{source}.attn.c_attn.bias")
        for part in ("attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
            book.add(f"{target}.{part}.weight", _transposed, f"{source}.{part}.weight")
            book.copy({f"{target}.{part}.bias": f"{source}.{part}.bias"})
        book.copy(
            {f"{target}.{n}.{x}": f"{source}.{n}.{x}" for n in ("ln_1", "ln_2") for x in ("weight", "bias")}
        )
    book.copy({f"transformer.ln_f.{leaf}": f"ln_f.{leaf}" for leaf in ("weight", "bias")})
    book.head("lm_head.weight", "lm_head.weight", bool(config.get("tie_word_embeddings", True)))
    keys = (
        "n_positions", "n_embd", "n_layer", "n_head", "n_inner", "resid_pdrop", "embd_pdrop", "attn_pdrop",
        "layer_norm_epsilon", "scale_attn_weights",
    )  # fmt: skip
    own = {key: config[key] for key in keys if key in config}
    new = _bigcode_config(config, **own, activation_function=config.get("activation_function", "gelu_new"))
    return ArchConversion(str(config.get("model_type")), "gpt_bigcode", new, book.finish())


def opt(config: Mapping[str, Any], names: Iterable[str]) -> ArchConversion:
    """OPT (norm before attention) as GPTBigCode: q, k and v woven, the position table without its offset."""
    width = number(config, "hidden_size")
    if not config.get("do_layer_norm_before", True):
        raise UnsupportedModelError(
            "its norms come after attention, GPTBigCode's before it", where="config.json"
        )
    if config.get("word_embed_proj_dim", width) not in (None, width):
        raise UnsupportedModelError("GPTBigCode has no word_embed_proj_dim", where="config.json")
    if not config.get("enable_bias", True) or not config.get("layer_norm_elementwise_affine", True):
        raise UnsupportedModelError("GPTBigCode needs biases and affine norms", where="config.json")
    heads, layers = number(config, "num_attention_heads"), number(config, "num_hidden_layers")
    book = TensorMapBuilder(names, "model.decoder.", "embed_tokens.weight")
    if not book.prefix:
        book = TensorMapBuilder(names, "decoder.", "embed_tokens.weight")
    book.copy({"transformer.wte.weight": "embed_tokens.weight"})
    book.add("transformer.wpe.weight", lambda x: x[2:].contiguous(), "embed_positions.weight")
    for layer in range(layers):
        source, target = f"layers.{layer}", f"transformer.h.{layer}"
        for x in ("weight", "bias"):
            book.add(
                f"{target}.attn.c_attn.{x}",
                partial(_per_head, heads),
                *(f"{source}.self_attn.{p}_proj.{x}" for p in "qkv"),
            )
            book.copy(
                {
                    f"{target}.attn.c_proj.{x}": f"{source}.self_attn.out_proj.{x}",
                    f"{target}.mlp.c_fc.{x}": f"{source}.fc1.{x}",
                    f"{target}.mlp.c_proj.{x}": f"{source}.fc2.{x}",
                    f"{target}.ln_1.{x}": f"{source}.self_attn_layer_norm.{x}",
                    f"{target}.ln_2.{x}": f"{source}.final_layer_norm.{x}",
                }
            )
    book.copy({f"transformer.ln_f.{x}": f"final_layer_norm.{x}" for x in ("weight", "bias")})
    book.head("lm_head.weight", "lm_head.weight", bool(config.get("tie_word_embeddings", True)))
    new = _bigcode_config(
        config,
        n_positions=config.get("max_position_embeddings", 2048),
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        n_inner=config.get("ffn_dim", 4 * width),
        activation_function=config.get("activation_function", "relu"),
        resid_pdrop=config.get("dropout", 0.1),
        embd_pdrop=0.0,
        attn_pdrop=config.get("attention_dropout", 0.0),
        layer_norm_epsilon=1e-5,
    )
    note = "OPT counts positions from the attention mask, GPTBigCode from position_ids: left-padded batches need them"
    return ArchConversion("opt", "gpt_bigcode", new, book.finish(), (note,))


def falcon(config: Mapping[str, Any], names: Iterable[str]) -> ArchConversion:
    """Old Falcon with all KV heads in the new decoder architecture: the same tensors under another config."""
    if config.get("new_decoder_architecture") or config.get("multi_query", True):
        raise UnsupportedModelError(
            "only a Falcon that holds all KV heads can be written as another architecture",
            where="config.json",
        )
    if not config.get("parallel_attn", True):
        raise UnsupportedModelError(
            "the new decoder architecture cannot run with parallel_attn false", where="config.json"
        )
    book = TensorMapBuilder(names, "", "")
    book.copy({name: name for name in names})
    new = dict(config) | {
        "new_decoder_architecture": True,
        "num_kv_heads": number(config, "num_attention_heads"),
        "num_ln_in_parallel_attn": 1,
    }
    return ArchConversion("falcon", "falcon", new, book.finish())
