"""The weights of a walk: those of the blocks that are loaded, and those of the converted model made of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints.streaming import Layers
from ..reconstruct.ranks import Ranks


class BlockWeights:
    """Weights of the original and of the converted model, block by block.

    Args:
        layers: The original, whose blocks are loaded one at a time.
        student: The converted model, on the meta device until a block is filled.
        blocks: Paths of the blocks, in order.
        ranks: The processes, which all take the first one's new tensors.
    """

    def __init__(self, layers: Layers, student: Any, blocks: Sequence[str], ranks: Ranks) -> None:
        self.layers, self.teacher, self.student = layers, layers.model, student
        self.blocks, self.ranks = blocks, ranks

    def read(self, name: str) -> Tensor:
        """A tensor of the original's block that is loaded."""
        return tensor_of(self.teacher, name)

    def read_anywhere(self, name: str, at: int) -> Tensor:
        """A tensor of the original, whose block is loaded for it unless it is block number `at`."""
        x = self.read(name)
        if not x.is_meta:
            return x
        block = next(b for b in self.blocks if name.startswith(f"{b}."))
        self.layers.load(block)
        x = self.read(name)
        if block != self.blocks[at]:
            self.layers.free(block)
        return x

    def fill(self, block: str, new: Mapping[str, Tensor], own: Collection[str]) -> None:
        """Give a block of the converted model its tensors: new ones, and the original's for the rest.

        Args:
            block: Its path.
            new: The new tensors, by name.
            own: Names of all tensors that are trained, which must not be the original's.
        """
        module = self.student.get_submodule(block)
        tensors = {}
        for name in module.state_dict():
            full = f"{block}.{name}"
            x = new[full] if full in new else self.read(full)
            alone = full in own or self.layers.resident
            tensors[name] = x.detach().clone() if alone else x.detach()
        module.load_state_dict(tensors, assign=True, strict=True)
        module.requires_grad_(False)
        self.ranks.copy_first(tensors[name] for name in sorted(tensors) if f"{block}.{name}" in own)

    def share_outside(self) -> None:
        """Give the converted model what lies outside the blocks."""
        inside = tuple(f"{block}." for block in self.blocks)
        known = dict(self.teacher.named_parameters(remove_duplicate=False))
        for name, p in list(self.student.named_parameters(remove_duplicate=False)):
            if p.is_meta and not name.startswith(inside) and name in known and not known[name].is_meta:
                x = known[name].detach()
                owner, _, leaf = name.rpartition(".")
                kept = nn.Parameter(x.clone() if self.layers.resident else x, requires_grad=False)
                setattr(self.student.get_submodule(owner), leaf, kept)
        if self.layers.resident and hasattr(self.student, "tie_weights"):
            self.student.tie_weights()

    def free(self, block: str) -> None:
        """Let go of a block of both models, as far as they are not in memory as a whole."""
        self.layers.free(block)
        if not self.layers.resident:
            _forget(self.student.get_submodule(block))


def tensor_of(model: nn.Module, name: str) -> Tensor:
    """The tensor of this name in a model's state dict, on the meta device where it is not loaded."""
    owner, _, leaf = name.rpartition(".")
    x = getattr(model.get_submodule(owner), leaf)
    assert isinstance(x, Tensor), name
    return x


def _forget(module: nn.Module) -> None:
    """Let go of the weights of a module; its shapes stay."""
    for name, p in list(module.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        absent = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=False)
        setattr(module.get_submodule(owner), leaf, absent)
