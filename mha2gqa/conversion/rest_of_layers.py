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
        known = stored_names(model, checkpoint)
        attention = {name for module in live.modules for name in module.names.values()}
        # What lies in the tensors of attention (sinks, norms) is written with them.
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
        infos = self.checkpoint.tensors
        for stored, group in self._groups(block).items():
            shapes = {name: tuple(x.shape) for name, x in self.as_stored(stored, group, state).items()}
            wrong = [n for n in stored if shapes.get(n) != infos[n].shape or infos[n].dtype not in FLOATS]
            if wrong:
                raise _unwritable(wrong)

    def _groups(self, block: str) -> dict[tuple[str, ...], list[str]]:
        """Names of the files -> the parameters that are stored in them together."""
        groups: dict[tuple[str, ...], list[str]] = {}
        for name, stored in self.parts[block].items():
            groups.setdefault(tuple(stored), []).append(name)
        return groups

    def as_stored(
        self, stored: Sequence[str], group: Sequence[str], state: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Parameters under the names of the files, split and renamed as transformers would save them.

        Args:
            stored: Those names.
            group: The parameters that are stored there.
            state: The model's tensors, these at least.
        """
        name = group[0]
        if len(group) == len(stored) == 1 and state[name].shape == self.checkpoint.tensors[stored[0]].shape:
            return {stored[0]: state[name]}
        from transformers.core_model_loading import revert_weight_conversion

        return dict(revert_weight_conversion(self.model, {name: state[name] for name in group}))

    def tensors(self, state: Callable[[str], Mapping[str, Tensor]]) -> dict[str, NewTensor]:
        """Stored name -> tensor to write.

        Args:
            state: Path of a block -> the fitted model's tensors of it, at least.
        """
        current, infos = _Current(self, state), self.checkpoint.tensors
        return {
            name: NewTensor(
                infos[name].dtype, infos[name].shape, partial(current.take, name, block, stored, group)
            )
            for block in self.parts
            for stored, group in self._groups(block).items()
            for name in stored
        }


def _unwritable(names: Sequence[str]) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{listed(sorted(names))} cannot be written as stored once trained",
        where="--fit train=layer",
        fix="leave it out: attention alone is trained",
    )


class _Current:
    """The block and the group of parameters that are being written: only those are in memory.

    Args:
        rest: What is stored how.
        state: Path of a block -> the fitted model's tensors.
    """

    def __init__(self, rest: RestOfLayers, state: Callable[[str], Mapping[str, Tensor]]) -> None:
        self.rest, self.state = rest, state
        self.block, self.tensors = "", dict[str, Tensor]()
        self.group, self.made = list[str](), dict[str, Tensor]()

    def take(self, name: str, block: str, stored: Sequence[str], group: list[str]) -> Tensor:
        """One of the tensors `stored` that the parameters `group` of a block make."""
        if block != self.block:
            self.block, self.tensors = block, dict(self.state(block))
        if group != self.group:
            self.group, self.made = group, self.rest.as_stored(stored, group, self.tensors)
        return self.made[name].to("cpu", torch_dtype(self.rest.checkpoint.tensors[name].dtype)).contiguous()
