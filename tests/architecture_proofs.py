"""What it takes to call an architecture proven, with the real class and the files transformers writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from mha2gqa import heads
from mha2gqa.architectures import find_sites, find_spec, geometry
from mha2gqa.twin import quiet


def make_every_weight_matter(model: torch.nn.Module) -> None:
    """Random weights of unit gain; biases, norms and sinks off their defaults."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape)
        wide = parameter.dim() > 1
        parameter.data = noise * parameter.shape[-1] ** -0.5 if wide else parameter.data + 0.2 * noise


def load_complete(model_class: Any, path: Path) -> torch.nn.Module:
    """The stock class on a folder; every tensor must be used and none made up."""
    with quiet():
        model, info = model_class.from_pretrained(path, output_loading_info=True, dtype=torch.float32)
    assert not any(info.values()), info
    return model.eval()


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        out |= load_file(file)
    return out


def write_expanded(source: Path, converted: Path, out: Path) -> None:
    """The source's folder with the converted model's heads, repeated up to the source's number."""
    out.mkdir()
    (out / "config.json").write_text((source / "config.json").read_text())
    config = json.loads((source / "config.json").read_text())
    new_config = json.loads((converted / "config.json").read_text())
    spec = find_spec(config)
    wide, narrow = read_tensors(source), read_tensors(converted)
    wide_sites = {site.path: site for site in find_sites(spec, wide)}
    new_spec = find_spec(new_config)
    for site in find_sites(new_spec, narrow):
        shapes = {name: tuple(x.shape) for name, x in narrow.items()}
        few = geometry(new_spec, new_config, site, shapes)
        weights = heads.split(new_spec, few, {role: narrow[name] for role, name in site.names.items()})
        many = geometry(
            spec, config, wide_sites[site.path], {name: tuple(x.shape) for name, x in wide.items()}
        ).num_kv_heads
        stored = heads.unsplit(spec, heads.expand(weights, many, spec))
        wide |= {wide_sites[site.path].names[role]: x for role, x in stored.items()}
    save_file(wide, out / "model.safetensors", metadata={"format": "pt"})


def config_difference(before: Any, after: Any, path: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    """Paths at which two JSON values differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        found: set[tuple[str, ...]] = set()
        for key in before.keys() | after.keys():
            found |= config_difference(before.get(key), after.get(key), (*path, key))
        return found
    return set() if before == after else {path}
