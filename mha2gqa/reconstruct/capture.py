"""What goes into a module and comes out of it while a whole model runs, and running it alone afterwards."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..calibration import Batch, batches, run

SEQUENCES = (
    "key_value_states",
    "encoder_hidden_states",
)  # inputs that differ from row to row, like the first


class _Reached(Exception):
    """The forward pass has got as far as needed."""


def first_tensor(output: Any) -> Tensor:
    """A module's output without what it returns beside it."""
    return output[0] if isinstance(output, (tuple, list)) else output


@dataclass
class Call:
    """One call of a module.

    Args:
        rows: Inputs that differ from row to row, by parameter name; the first is the hidden states.
        fixed: All other arguments (positions, masks): the same for every batch of the same shape.
        output: `[B, T, D]`, None if the pass was stopped before.
    """

    rows: dict[str, Tensor]
    fixed: dict[str, Any]
    output: Tensor | None = None


def _arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    signature = inspect.signature(module.forward)
    bound = dict(signature.bind_partial(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            bound |= bound.pop(name, {})
    first = next(iter(bound))
    rows = {n: x for n, x in bound.items() if (n == first or n in SEQUENCES) and isinstance(x, Tensor)}
    return Call(rows, {n: x for n, x in bound.items() if n not in rows})


@torch.no_grad()
def call_of(model: nn.Module, module: nn.Module, batch: Batch, *, before: bool = False) -> Call:
    """Run `model` until `module` has run (or, with `before`, is about to) and return that call."""
    found: list[Call] = []

    def enter(mod: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(_arguments(mod, args, kwargs))
        if before:
            raise _Reached

    def leave(mod: nn.Module, args: Any, output: Any) -> None:
        found[-1].output = first_tensor(output)
        raise _Reached

    hooks = [module.register_forward_pre_hook(enter, with_kwargs=True), module.register_forward_hook(leave)]
    try:
        run(model, batch)
    except _Reached:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return found[-1]


@dataclass
class Calls:
    """All calls of one module over a text, ready to be repeated in batches of one size.

    Args:
        rows: Parameter name -> `[N, T, D]`.
        fixed: The other arguments, as of a batch of `size` rows.
        target: `[N, T, D]` what the module should return.
        size: Rows per batch; masks may depend on it.
    """

    rows: dict[str, Tensor]
    fixed: dict[str, Any]
    target: Tensor
    size: int
    scale: float = field(init=False)

    def __post_init__(self) -> None:
        self.scale = float(self.target.float().var()) or 1.0

    def __len__(self) -> int:
        return len(self.target)

    def output(self, module: nn.Module, index: Tensor) -> Tensor:
        """Run `module` alone on the rows `index` (`size` of them)."""
        return first_tensor(module(**{name: x[index] for name, x in self.rows.items()}, **self.fixed))


def gather(
    model: nn.Module,
    module: nn.Module,
    inputs: Batch | Tensor,
    size: int,
    target_model: nn.Module,
    target_module: nn.Module,
    *,
    own_inputs: bool,
) -> Calls:
    """Pair what `module` sees in `model` with what `target_module` returns in `target_model`.

    Args:
        model, module: The student and its module.
        inputs: `[N, T]` ids or keyword tensors; N must be a multiple of `size`.
        size: Rows per batch.
        target_model, target_module: The original and its module.
        own_inputs: Whether the rows are those the student sees, or those the original sees.
    """
    fixed = call_of(model, module, next(batches(inputs, size)), before=True)
    names = list(fixed.rows)
    kept: dict[str, list[Tensor]] = {name: [] for name in names}
    targets = []
    for batch in batches(inputs, size):
        wanted = call_of(target_model, target_module, batch)
        assert wanted.output is not None
        targets.append(wanted.output)
        source = call_of(model, module, batch, before=True).rows if own_inputs else wanted.rows
        for name, x in zip(names, source.values(), strict=True):  # parameter names may differ
            kept[name].append(x)
    return Calls({n: torch.cat(x) for n, x in kept.items()}, fixed.fixed, torch.cat(targets), size)


def row_batches(count: int, size: int) -> Iterator[Tensor]:
    """Index batches of exactly `size` rows (`count` is a multiple)."""
    for start in range(0, count, size):
        yield torch.arange(start, start + size)


def slice_rows(inputs: Batch | Tensor, start: int, stop: int | None = None) -> Batch | Tensor:
    """Rows of ids or of every keyword tensor."""
    if isinstance(inputs, Mapping):
        return {name: x[start:stop] for name, x in inputs.items()}
    return inputs[start:stop]
