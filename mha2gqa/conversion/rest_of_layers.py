"""What training whole layers changes beside attention, as the checkpoint stores it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..checkpoints.dtypes import torch_dtype
from ..checkpoints.reader import Checkpoint
from ..checkpoints.streaming import stored_names
from ..checkpoints.writer import NewTensor
from ..errors import UnsupportedModelError, listed
from ..reconstruct.train_state import rest_of_block
from .plan import Plan

FLOATS = ("F64", "F32", "F16", "BF16")


class RestOfLayers:
    """Which stored tensors the other parameters of the fitted layers are made of, and how they are made again.

    Args:
        model: The original, perhaps without weights.
        checkpoint: Where it is stored.
        live: The conversion in the names of its state dict.
        blocks: Paths of its decoder layers.

    Raises:
        UnsupportedModelError: Some of them cannot be written as they are stored; nothing has been done yet.
    """

    def __init__(self, model: Any, checkpoint: Checkpoint, live: Plan, blocks: Sequence[str]) -> None:
        self.model, self.checkpoint = model, checkpoint
        self.parts: dict[str, dict[str, list[str]]] = {}  # block -> name in the model -> names of the files
        self.names = known = stored_names(model, checkpoint)
        attention = {name for module in live.modules for name in module.names.values()}
        taken = {stored for name in attention for stored in known.get(name, ())}
        for block in blocks:
            modules = [m.module for m in live.modules if m.path.startswith(f"{block}.") and not m.unchanged]
            names = rest_of_block(model, block, live.spec, modules) if modules else {}
            if absent := [name for name in names if name not in known]:
                raise _unwritable(absent)
            self.parts[block] = {n: known[n] for n in names if not taken.issuperset(known[n])}
            self._check(block)

    def _check(self, block: str) -> None:
        """Refuse what would not become the tensors that are stored."""
        state = {n: torch.empty_like(self.model.get_parameter(n), device="meta") for n in self.parts[block]}
        for group in self._groups(block):
            wanted = {stored for name in group for stored in self.parts[block][name]}
            made, infos = self._as_stored(group, state), self.checkpoint.tensors
            shapes = {name: tuple(x.shape) for name, x in made.items()}
            wrong = [n for n in wanted if shapes.get(n) != infos[n].shape or infos[n].dtype not in FLOATS]
            if wrong:
                raise _unwritable(wrong)

    def _groups(self, block: str) -> list[list[str]]:
        """Parameters that are stored together."""
        groups: dict[tuple[str, ...], list[str]] = {}
        for name, stored in self.parts[block].items():
            groups.setdefault(tuple(stored), []).append(name)
        return list(groups.values())

    def _as_stored(self, group: Sequence[str], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Some parameters under the names of the files, split and renamed as transformers would save them."""
        name, stored = group[0], self.names[group[0]]
        if len(group) == len(stored) == 1 and state[name].shape == self.checkpoint.tensors[stored[0]].shape:
            return {stored[0]: state[name]}
        from transformers.core_model_loading import revert_weight_conversion

        return dict(revert_weight_conversion(self.model, {name: state[name] for name in group}))

    def tensors(self, state: Callable[[str], Mapping[str, Tensor]]) -> dict[str, NewTensor]:
        """Stored name -> tensor to write.

        Args:
            state: Path of a block -> the fitted model's tensors of it, at least.
        """
        made = _Made(self, state)
        names = {
            stored: (block, group)
            for block in self.parts
            for group in self._groups(block)
            for name in group
            for stored in self.parts[block][name]
        }
        infos = self.checkpoint.tensors
        return {
            name: NewTensor(infos[name].dtype, infos[name].shape, partial(made.take, name, block, group))
            for name, (block, group) in names.items()
        }


def _unwritable(names: Sequence[str]) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{listed(sorted(names))} cannot be written as stored once trained",
        where="--fit train=layer",
        fix="leave it out: attention alone is trained",
    )


class _Made:
    """The tensors of the block and of the group that are being written.

    Args:
        rest: What is stored how.
        state: Path of a block -> the fitted model's tensors.
    """

    def __init__(self, rest: RestOfLayers, state: Callable[[str], Mapping[str, Tensor]]) -> None:
        self.rest, self.state = rest, state
        self.block, self.tensors = "", dict[str, Tensor]()
        self.group, self.stored = list[str](), dict[str, Tensor]()

    def take(self, name: str, block: str, group: list[str]) -> Tensor:
        """A tensor as it is stored."""
        if block != self.block:
            self.block, self.tensors = block, dict(self.state(block))
        if group != self.group:
            self.group, self.stored = group, self.rest._as_stored(group, self.tensors)
        return self.stored[name].to("cpu", torch_dtype(self.rest.checkpoint.tensors[name].dtype)).contiguous()
