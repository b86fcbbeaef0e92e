"""How often a model's bound on the entries of q, k and v (`clip_qkv`) acts on the calibration text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..architectures import AttentionModule, AttentionSpec, Geometry, lookup
from ..architectures import geometry as module_geometry

PARTS = ("q", "k", "v")


@dataclass(frozen=True)
class Clip:
    """Where a model bounds the entries of its queries, keys and values.

    Args:
        bound: Largest absolute value that passes unchanged.
        outputs: Of each attention module by path: submodule whose output is bounded -> the parts it holds,
            `(index in PARTS, first column, end)`.
    """

    bound: float
    outputs: Mapping[str, Mapping[str, tuple[tuple[int, int, int], ...]]]

    def counts(self, path: str, name: str, states: Tensor) -> Iterator[tuple[int, Tensor, int]]:
        """For each part in an output `[B, T, n]` its index, `[B, T]` how many entries lie beyond the bound, and its width."""
        for part, start, end in self.outputs[path][name]:
            yield part, (states.detach()[..., start:end].abs() > self.bound).sum(-1), end - start


def clip_bound(spec: AttentionSpec, config: Mapping[str, Any]) -> float | None:
    """The bound that a model of this raw config has; None for none."""
    value = lookup(spec.text_config(config), spec.clip_key) if spec.clip_key else None
    return float(value) if isinstance(value, int | float) and value else None


def find_clip(model: Any, spec: AttentionSpec, modules: Iterable[AttentionModule]) -> Clip | None:
    """Where a live model bounds its queries, keys and values; None where it does not.

    Args:
        model: A transformers model.
        spec: Its architecture, in the names of its state dict.
        modules: Its attention modules.
    """
    if not spec.clip_key:
        return None
    config = json.loads(model.config.to_json_string(use_diff=False))
    bound = clip_bound(spec, config)
    if bound is None:
        return None
    shapes = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    outputs = {m.path: _outputs(spec, m, module_geometry(spec, config, m, shapes)) for m in modules}
    return Clip(bound, outputs)


def _outputs(
    spec: AttentionSpec, module: AttentionModule, geometry: Geometry
) -> dict[str, tuple[tuple[int, int, int], ...]]:
    """The submodules whose outputs are bounded: projections, or the norms behind them."""
    heads, kv_heads = geometry.num_heads, geometry.num_kv_heads
    widths = (heads * geometry.head_dim, kv_heads * geometry.head_dim, kv_heads * geometry.value_dim)
    if spec.layout == "separate":
        names = (spec.q, spec.k, spec.v)
        normed = {part: f"{part}_norm" for part in PARTS if f"{part}_norm.weight" in module.names}
        return {
            normed.get(part, name): ((i, 0, widths[i]),)
            for i, (part, name) in enumerate(zip(PARTS, names, strict=True))
        }
    assert spec.layout == "blocks", spec.layout  # [q; k; v] one after the other
    ends = (widths[0], widths[0] + widths[1], sum(widths))
    return {
        spec.q: tuple((i, end - width, end) for i, (width, end) in enumerate(zip(widths, ends, strict=True)))
    }


@contextmanager
def counted_clips(model: Any, clip: Clip | None) -> Iterator[dict[str, Tensor]]:
    """While open, count how often the bound acts in a model: `[3, 2]` by path, as in `SecondMoments.clipped`.

    Args:
        model: A model whose modules run.
        clip: Where it bounds; None counts nothing.
    """
    outputs = {} if clip is None else clip.outputs
    found = {path: torch.zeros(len(PARTS), 2, dtype=torch.int64) for path in outputs}

    def counted(path: str, name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            assert clip is not None
            for part, beyond, width in clip.counts(path, name, output):
                found[path][part] += torch.tensor([int(beyond.sum()), beyond.numel() * width])

        return hook

    hooks = [
        model.get_submodule(path).get_submodule(name).register_forward_hook(counted(path, name))
        for path, names in outputs.items()
        for name in names
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
