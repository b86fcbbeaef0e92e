"""Pico models of every family whose result travels with modelling code."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from mha2gqa import modeling

H = 8
IDS = {"vocab_size": 64, "pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 0}
T5: dict[str, Any] = {
    "vocab_size": 64, "d_model": 32, "d_kv": 6, "d_ff": 48, "num_layers": 3, "num_decoder_layers": 2,
    "num_heads": H, "dropout_rate": 0.0, "decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu",
}  # fmt: skip
BART: dict[str, Any] = IDS | {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4, "decoder_attention_heads": H, "max_position_embeddings": 64,
    "decoder_start_token_id": 2, "forced_eos_token_id": None, "dropout": 0.0,
}  # fmt: skip
WHISPER = BART | {"num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 64}
MOONSHINE: dict[str, Any] = IDS | {
    "hidden_size": 96, "intermediate_size": 48, "encoder_num_hidden_layers": 1, "decoder_num_hidden_layers": 2,
    "encoder_num_attention_heads": H, "decoder_num_attention_heads": H, "decoder_start_token_id": 2,
}  # fmt: skip
MOONSHINE_STREAMING: dict[str, Any] = IDS | {
    "hidden_size": 96, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": H, "num_key_value_heads": H,
    "decoder_start_token_id": 2,
    "encoder_config": {
        "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
        "sliding_windows": [[8, 2]],
    },
}  # fmt: skip
MUSICGEN: dict[str, Any] = {
    "text_encoder": {**T5, "model_type": "t5"},
    "audio_encoder": {
        "model_type": "encodec", "hidden_size": 16, "num_filters": 4, "codebook_size": 64, "codebook_dim": 16,
        "upsampling_ratios": [20, 20], "num_lstm_layers": 1, "target_bandwidths": [1.5],
    },
    "decoder": {
        "model_type": "musicgen_decoder", "vocab_size": 64, "hidden_size": 48, "ffn_dim": 48, "num_hidden_layers": 2,
        "num_attention_heads": H, "num_codebooks": 2, "max_position_embeddings": 64, "pad_token_id": 64,
        "bos_token_id": 64, "dropout": 0.0,
    },
}  # fmt: skip
MUSICGEN_MELODY = {
    **MUSICGEN,
    "decoder": MUSICGEN["decoder"] | {"model_type": "musicgen_melody_decoder"},
    "num_chroma": 6,
    "chroma_length": 5,
}
GPT2: dict[str, Any] = IDS | {
    "n_embd": 32, "n_layer": 2, "n_head": H, "n_positions": 64,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
OPT: dict[str, Any] = IDS | {
    "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": H,
    "max_position_embeddings": 64, "word_embed_proj_dim": 32, "dropout": 0.0,
}  # fmt: skip
GPT_NEO: dict[str, Any] = IDS | {
    "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": H, "max_position_embeddings": 64,
    "attention_types": [[["global", "local"], 1]], "window_size": 4,
}  # fmt: skip
BIOGPT: dict[str, Any] = IDS | {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": H,
    "max_position_embeddings": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
MPT: dict[str, Any] = IDS | {"d_model": 32, "n_layers": 2, "n_heads": H, "max_seq_len": 64}

# name -> (model_type, config); the names after a dash are the awkward variants of a type
PICOS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("t5", T5),
    "t5-untied": ("t5", {**T5, "tie_word_embeddings": False}),
    "mt5": ("mt5", T5),
    "umt5": ("umt5", T5),
    "bart": ("bart", BART),
    "mbart": ("mbart", BART),
    "pegasus": ("pegasus", BART),
    "marian": ("marian", BART),
    "m2m_100": ("m2m_100", BART),
    "whisper": ("whisper", WHISPER),
    "moonshine": ("moonshine", MOONSHINE),
    "moonshine-padded": (
        "moonshine",
        {**MOONSHINE, "pad_head_dim_to_multiple_of": 8, "attention_bias": True},
    ),
    "moonshine_streaming": ("moonshine_streaming", MOONSHINE_STREAMING),
    "musicgen": ("musicgen", MUSICGEN),
    "musicgen_melody": ("musicgen_melody", MUSICGEN_MELODY),
    "gpt2": ("gpt2", GPT2),
    "opt": ("opt", OPT),
    "opt-350m": ("opt", {**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 16}),
    "gpt_neo": ("gpt_neo", GPT_NEO),
    "biogpt": ("biogpt", BIOGPT),
    "bloom": ("bloom", {**IDS, "hidden_size": 32, "n_layer": 2, "n_head": H}),
    "mpt": ("mpt", MPT),
    "mpt-clip": ("mpt", {**MPT, "attn_config": {"clip_qkv": 1.0}}),
}
CASES = [
    (name, attention)
    for name, (model_type, _) in PICOS.items()
    for attention in (
        ("eager",)
        if model_type in ("bloom", "mpt", "gpt_neo", "musicgen", "musicgen_melody")
        else ("eager", "sdpa")
    )
]


def export_of(name: str) -> modeling.Export:
    """What the pico model `name` becomes."""
    return modeling.EXPORTS[PICOS[name][0]]


def stock_model(name: str, attention: str = "eager") -> nn.Module:
    """A random stock model whose attention is far from uniform and whose biases are not zero."""
    model_type, changes = PICOS[name]
    model_class = getattr(transformers, export_of(name).stock[0])
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **copy.deepcopy(changes))
    model = model_class._from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):  # sinusoids are not saved
            parameter.add_(torch.randn_like(parameter) * 0.3)
    if model_type == "umt5":  # transformers 5.17 forgets it: its SDPA looks ahead
        for block in model.decoder.block:
            block.layer[0].SelfAttention.is_causal = True
    return model


def inputs(name: str, rows: int = 3) -> dict[str, Tensor]:
    """Model inputs without padding; the decoder of an encoder-decoder gets tokens of its own."""
    generator = torch.Generator().manual_seed(1)

    def ids(length: int) -> Tensor:
        return torch.randint(3, 64, (rows, length), generator=generator)

    if PICOS[name][0] == "musicgen_melody":  # rows of each codebook behind the text
        return {"input_ids": ids(11), "decoder_input_ids": torch.cat([ids(7), ids(7)])}
    if not export_of(name).cross:
        return {"input_ids": ids(11)}
    if PICOS[name][0] == "whisper":
        return {"input_features": torch.randn(rows, 8, 24, generator=generator), "decoder_input_ids": ids(7)}
    if PICOS[name][0].startswith("moonshine"):
        return {"input_values": torch.randn(rows, 3040, generator=generator), "decoder_input_ids": ids(7)}
    if PICOS[name][0] == "musicgen":  # rows of each codebook
        return {"input_ids": ids(11), "decoder_input_ids": torch.cat([ids(7), ids(7)])}
    return {"input_ids": ids(11), "decoder_input_ids": ids(7)}


def logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Logits of one forward pass without cache."""
    with torch.no_grad():
        return model(**batch, use_cache=False).logits


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    """The same function, summed in another order: kernels and processors differ in no more than this.

    The tolerance is the dtype's rounding times the terms that the longest sums of these models have (a few
    layers of width 32 to 64), relative to the largest value. A wrong head changes hundreds of times more.
    """
    allowed = torch.finfo(theirs.dtype).eps * 4 * 64 * float(theirs.detach().abs().max())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=allowed)


def llama_shape(folder: Path, hidden: int, feed: int, heads: int, layers: int) -> Path:
    """The config of a Llama as the benchmarks make it, without weights."""
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": hidden,
        "intermediate_size": feed, "num_attention_heads": heads, "num_key_value_heads": heads,
        "num_hidden_layers": layers, "vocab_size": 32000, "dtype": "bfloat16", "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder
