"""ANNalog (Queen Mary University of London, MIT) from PyPI's `annalog`: SMILES to SMILES, as transformers' Marian.

It normalises after each block, has ReLU, learned positions and scaled embeddings: Marian computes the same when the
positions, the untied head and its bias are given.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from packages import added, digest, package, write_model

LAYERS, HEADS = 3, 8
PIECES = r"\[[^\]]*\]|%\d{2}|Br|Cl|."
PROJECTIONS = {"q_proj": "fc_q", "k_proj": "fc_k", "v_proj": "fc_v", "out_proj": "fc_o"}


class PlainUnpickler(pickle.Unpickler):
    """Reads a table of words and nothing that could run."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse every class."""
        raise pickle.UnpicklingError(f"{module}.{name} is no plain data")


def renamed(raw: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights under their names in transformers."""
    found: dict[str, torch.Tensor] = {}

    def put(new: str, old: str) -> None:
        found[f"{new}.weight"], found[f"{new}.bias"] = raw[f"{old}.weight"], raw[f"{old}.bias"]

    for side in ("encoder", "decoder"):
        found[f"model.{side}.embed_tokens.weight"] = raw[f"{side}.tok_embedding.weight"]
        found[f"model.{side}.embed_positions.weight"] = raw[f"{side}.pos_embedding.weight"]
        for layer in range(LAYERS):
            new, old = f"model.{side}.layers.{layer}", f"{side}.layers.{layer}"
            kinds = [("self_attn", "self_attention", "self_attn_layer_norm")]
            if side == "decoder":
                kinds.append(("encoder_attn", "encoder_attention", "enc_attn_layer_norm"))
            for ours, theirs, norm in kinds:
                for a, b in PROJECTIONS.items():
                    put(f"{new}.{ours}.{a}", f"{old}.{theirs}.{b}")
                put(f"{new}.{ours}_layer_norm", f"{old}.{norm}")
            put(f"{new}.final_layer_norm", f"{old}.ff_layer_norm")
            for a, b in (("fc1", "fc_1"), ("fc2", "fc_2")):
                put(f"{new}.{a}", f"{old}.positionwise_feedforward.{b}")
    found["lm_head.weight"] = raw["decoder.fc_out.weight"]
    found["final_logits_bias"] = raw["decoder.fc_out.bias"][None]
    return found


def smiles_tokenizer(table: dict[str, int]) -> dict[str, Any]:
    """`tokenizer.json`: atoms, bonds and rings, between start and end."""
    start, end = table["<sos>"], table["<eos>"]
    special = {"<sos>": start, "<eos>": end}
    return {
        "version": "1.0",
        "added_tokens": [added(table[token], token) for token in ("<unk>", "<pad>", "<sos>", "<eos>")],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": PIECES},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<sos>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": "<eos>", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {
                token: {"id": token, "ids": [number], "tokens": [token]} for token, number in special.items()
            },
        },
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": table, "unk_token": "<unk>"},
    }


def build(cache: Path, models: Path) -> None:
    """Write `annalog`."""
    wheel, folder = package("annalog", "1.0.6", cache), "annalog/ckpt_and_vocab"
    data = wheel.read(f"{folder}/Lev_extended.pt")
    words = PlainUnpickler(io.BytesIO(wheel.read(f"{folder}/stereo_experiment_vocab_ttf.pkl"))).load()
    raw = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    tensors, table = renamed(raw), dict(words["stoi"])
    positions, width = tensors["model.encoder.embed_positions.weight"].shape
    ids = {
        "pad_token_id": table["<pad>"],
        "bos_token_id": table["<sos>"],
        "eos_token_id": table["<eos>"],
        "decoder_start_token_id": table["<sos>"],
    }
    config: dict[str, Any] = {
        "architectures": ["MarianMTModel"],
        "model_type": "marian",
        "is_encoder_decoder": True,
        "d_model": width,
        "vocab_size": len(raw["encoder.tok_embedding.weight"]),
        "decoder_vocab_size": len(raw["decoder.tok_embedding.weight"]),
        "max_position_embeddings": positions,
        "activation_function": "relu",
        "scale_embedding": True,
        "share_encoder_decoder_embeddings": False,
        "tie_word_embeddings": False,
        "dropout": 0.0,
        "forced_eos_token_id": None,
        "torch_dtype": "float32",
        **ids,
    }
    for side in ("encoder", "decoder"):
        inner = len(tensors[f"model.{side}.layers.0.fc1.bias"])
        config |= {
            f"{side}_layers": LAYERS,
            f"{side}_attention_heads": HEADS,
            f"{side}_ffn_dim": inner,
        }
    files = {
        "generation_config.json": ids | {"max_length": positions},
        "tokenizer.json": smiles_tokenizer(table),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<sos>",
            "eos_token": "<eos>",
            "unk_token": "<unk>",
            "pad_token": "<pad>",
            "model_max_length": positions,
            "clean_up_tokenization_spaces": False,
        },
        "origin.json": {"from": "PyPI annalog 1.0.6", "licence": "MIT", "sha256": digest(data)},
    }
    write_model(models / "annalog", config, tensors, files)
