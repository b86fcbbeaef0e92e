"""How often a model's bound on the entries of q, k and v (`clip_qkv`) acts on the calibration text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

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

    def watch(
        self, path: str, module: torch.nn.Module, count: Callable[[int, Tensor, int], None]
    ) -> list[RemovableHandle]:
        """Have `count` called for each part of what an attention module's projections give.

        Args:
            path: Of the attention module.
            module: That module.
            count: Takes the part's index in `PARTS`, `[B, T]` how many entries lie beyond the bound, and how many
                entries there are at a position.

        Returns:
            To be removed when no more is to be counted.
        """

        def hook(submodule: torch.nn.Module, args: tuple[Any, ...], output: Tensor, *, name: str) -> None:
            for part, start, end in self.outputs[path][name]:
                beyond = (output.detach()[..., start:end].abs() > self.bound).sum(-1)
                count(part, beyond, end - start)

        return [
            module.get_submodule(name).register_forward_hook(partial(hook, name=name))
            for name in self.outputs[path]
        ]


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

    def count(path: str, part: int, beyond: Tensor, width: int) -> None:
        found[path][part] += torch.tensor([int(beyond.sum()), beyond.numel() * width])

    hooks: list[RemovableHandle] = []
    if clip is not None:
        for path in outputs:
            hooks += clip.watch(path, model.get_submodule(path), partial(count, path))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
