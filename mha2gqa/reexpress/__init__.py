"""Models whose class cannot hold fewer KV heads, written as a stock class that computes the same and can.

`plan` decides from config and tensor names alone and returns a `Reexpression`: the new raw config, and for
every tensor of the result which source tensors it is made of and how. The number of KV heads stays; the
result's own entry in the table does the sharing. `written` puts it into a folder of its own, tensor by
tensor, so that whatever follows (conversion, calibration, verification) sees a plain checkpoint.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..architectures.reexpressed import REEXPRESSED, Route
from ..checkpoint import Checkpoint, open_checkpoint
from ..errors import UnsupportedModelError, UsageError
from ..writer import NewTensor, check_space, copy_side_files, plan_shards, write_shards, write_text
from . import bigcode, gptj, neox, remote
from .base import Recipe, Reexpression, copied

_ROUTES: dict[tuple[str, str], Callable[[Mapping[str, Any], Iterable[str]], Reexpression]] = {
    ("gpt_neox", "phi"): neox.gpt_neox,
    ("gpt_neox", "nemotron"): neox.gpt_neox,
    ("gptj", "phi"): gptj.gptj,
    ("codegen", "phi"): gptj.codegen,
    ("gpt2", "gpt_bigcode"): bigcode.gpt2,
    ("gpt-sw3", "gpt_bigcode"): bigcode.gpt2,
    ("opt", "gpt_bigcode"): bigcode.opt,
    ("falcon", "falcon"): bigcode.falcon,
    ("baichuan", "llama"): remote.baichuan,
    ("internlm", "llama"): remote.internlm,
    ("internlm2", "llama"): remote.internlm2,
    ("qwen", "qwen2"): remote.qwen,
}


def plan(
    config: Mapping[str, Any], names: Iterable[str], groups: int | None = None, as_: str | None = "auto"
) -> Reexpression | None:
    """How a checkpoint is written as another architecture, or None if it stays what it is.

    Args:
        config: Raw config of the source.
        names: All its tensor names.
        groups: KV heads to reach: some targets hold all or one, nothing between.
        as_: `auto` (or None), or a model type; the source's own type stands for no re-expression.

    Raises:
        UsageError: `as_` is no route from this architecture, or none to `groups` KV heads.
        UnsupportedModelError: This very model does not fit the target.
        CheckpointError: Tensors are missing, or left over.
    """
    model_type = str(config.get("model_type"))
    routes = REEXPRESSED.get(model_type, ())
    heads = config.get("num_attention_heads", config.get("n_head"))
    possible = [r for r in routes if not r.only_mqa or groups in (None, 1, heads)]
    if as_ in (None, "auto"):
        return _first_fitting(config, names, [r for r in possible if r.auto])
    chosen = [r for r in routes if r.target == as_]
    if not chosen:
        if as_ == model_type:
            return None
        known = ", ".join(sorted({r.target for r in routes})) or "nothing else"
        raise UsageError(
            f"{model_type} cannot be written as {as_}", where="--as", fix=f"it can be written as {known}"
        )
    if chosen[0] not in possible:
        raise UsageError(f"{as_} holds all KV heads or one", where="--groups", fix="use --groups 1")
    found = _ROUTES[model_type, chosen[0].target](config, names)
    if found.target_type != as_:
        raise UsageError(
            f"this {model_type} can only be written as {found.target_type}", where="--as", fix="use --as auto"
        )
    return found


def _first_fitting(
    config: Mapping[str, Any], names: Iterable[str], routes: Iterable[Route]
) -> Reexpression | None:
    """The first route that takes this model; one that only reaches all or one KV head may pass."""
    for route in routes:
        try:
            return _ROUTES[str(config["model_type"]), route.target](config, names)
        except UnsupportedModelError:
            if not route.only_mqa:
                raise
    return None


def shapes_of(found: Reexpression, shapes: Mapping[str, Iterable[int]]) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of the result, from those of the source; nothing is read."""

    def meta(recipe: Recipe) -> Tensor:
        return recipe.make(*(torch.empty(tuple(shapes[s]), device="meta") for s in recipe.sources))

    return {name: tuple(meta(recipe).shape) for name, recipe in found.recipes.items()}


@contextmanager
def written(checkpoint: Checkpoint, found: Reexpression | None, beside: Path) -> Iterator[Checkpoint]:
    """The re-expressed checkpoint in a temporary folder, gone when the block ends.

    Args:
        checkpoint: The source.
        found: From `plan`; None hands the source itself through.
        beside: The folder stands beside this path, on the same disk.
    """
    if found is None:
        yield checkpoint
        return
    check_space(beside, 2 * checkpoint.nbytes)
    beside.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{beside.name}.partial-{found.target_type}-", dir=beside.parent))
    try:
        write(checkpoint, found, folder)
        yield open_checkpoint(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write(checkpoint: Checkpoint, found: Reexpression, folder: Path) -> None:
    """Write the re-expressed checkpoint into an existing folder, tensor by tensor."""

    def make(recipe: Recipe) -> Tensor:
        return recipe.make(*(checkpoint.read(name) for name in recipe.sources)).contiguous()

    shapes = shapes_of(found, checkpoint.shapes)
    new = {
        name: NewTensor(checkpoint.tensors[recipe.sources[0]].dtype, shapes[name], partial(make, recipe))
        for name, recipe in found.recipes.items()
        if recipe.make is not copied or recipe.sources != (name,)
    }
    dropped = [name for name in checkpoint.tensors if name not in found.recipes]
    size = 5 * 10**9 if len(checkpoint.files) > 1 else None  # names move, so the files are laid out anew
    write_shards(checkpoint, plan_shards(checkpoint, new, dropped, size), folder)
    copy_side_files(checkpoint, folder)
    write_text(folder / "config.json", json.dumps(found.config, indent=2, ensure_ascii=False) + "\n")


__all__ = ["Recipe", "Reexpression", "plan", "shapes_of", "write", "written"]
