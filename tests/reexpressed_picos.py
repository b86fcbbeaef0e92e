"""Pico models of every stock class that is re-expressed, and what each becomes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from architecture_proofs import make_every_weight_matter

H = 8
IDS = {"vocab_size": 96, "bos_token_id": 0, "eos_token_id": 2}
NEOX: dict[str, Any] = IDS | {
    "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": H,
    "max_position_embeddings": 64,
}  # fmt: skip
GPTJ: dict[str, Any] = IDS | {
    "n_embd": 64, "n_layer": 2, "n_head": H, "n_positions": 64, "rotary_dim": 4, "tie_word_embeddings": False,
}  # fmt: skip
GPT2: dict[str, Any] = IDS | {
    "n_embd": 64, "n_layer": 2, "n_head": H, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}  # fmt: skip
OPT: dict[str, Any] = IDS | {
    "hidden_size": 64, "ffn_dim": 80, "num_hidden_layers": 2, "num_attention_heads": H, "dropout": 0.0,
    "max_position_embeddings": 64, "word_embed_proj_dim": 64, "pad_token_id": 1,
}  # fmt: skip
FALCON: dict[str, Any] = IDS | {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": H, "multi_query": False, "bias": True,
    "parallel_attn": True, "alibi": False, "new_decoder_architecture": False,
}  # fmt: skip
# name -> (class, config, `as_`, model type of the result)
ROUTES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "gpt_neox": ("GPTNeoX", NEOX, "auto", "phi"),
    "gpt_neox-tied": ("GPTNeoX", {**NEOX, "tie_word_embeddings": True}, "auto", "phi"),
    "gpt_neox-no-bias": ("GPTNeoX", {**NEOX, "attention_bias": False}, "auto", "phi"),
    "gpt_neox-full-rotary": ("GPTNeoX", {**NEOX, "rotary_pct": 1.0, "rotary_emb_base": 500}, "auto", "phi"),
    "gpt_neox-sequential": ("GPTNeoX", {**NEOX, "use_parallel_residual": False}, "auto", "nemotron"),
    "gptj": ("GPTJ", GPTJ, "auto", "phi"),
    "gptj-all-rotary": ("GPTJ", {**GPTJ, "rotary_dim": 8}, "phi", "phi"),
    "codegen": ("CodeGen", GPTJ, "auto", "phi"),
    "gpt2": ("GPT2", GPT2, "gpt_bigcode", "gpt_bigcode"),
    "gpt-sw3": ("GPT2", GPT2, "gpt_bigcode", "gpt_bigcode"),
    "gpt2-untied": ("GPT2", {**GPT2, "tie_word_embeddings": False}, "gpt_bigcode", "gpt_bigcode"),
    "opt": ("OPT", OPT, "gpt_bigcode", "gpt_bigcode"),
    "falcon": ("Falcon", FALCON, "falcon", "falcon"),
}


TARGETS = {"phi": "Phi", "nemotron": "Nemotron", "gpt_bigcode": "GPTBigCode", "falcon": "Falcon"}


def class_of(name: str) -> Any:
    """The causal model class of a family."""
    suffix = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    return getattr(transformers, name + suffix)


def save_source(name: str, path: Path) -> torch.nn.Module:
    """A random model of the source's class, saved as transformers saves it."""
    cls = class_of(ROUTES[name][0])
    torch.manual_seed(0)
    model = cls(cls.config_class(**ROUTES[name][1])).float().eval()
    make_every_weight_matter(model)
    model.save_pretrained(path)
    if name == "gpt-sw3":  # the same class under another name
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "gpt-sw3"}))
    return model


# What float32 sums in another order may change, as a share of the spread of the logits: the rounding of one
# number times the terms of the longest sums (a few layers of width 64). A wrong weight changes a hundredth.
ROUNDING = torch.finfo(torch.float32).eps * 4 * 64
