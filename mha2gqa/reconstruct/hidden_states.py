"""Two models walked block by block: what goes into a module, what comes out, and running it alone."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..calibration import Batch, batches, run

SEQUENCES = ("key_value_states", "encoder_hidden_states")  # differ from row to row, like hidden states


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


class Stream:
    """A model's hidden states at the input of one of its blocks, batch by batch.

    Only that one stream is kept. Where blocks are no plain chain (each reading what the last one returned),
    every look inside runs the whole model up to there instead: slower, the same numbers.

    Args:
        model: In eval mode.
        inputs: `[N, T]` ids or keyword tensors; N must be a multiple of `size`.
        size: Rows per batch.
        blocks: Paths of its blocks, in order.
    """

    def __init__(self, model: nn.Module, inputs: Batch | Tensor, size: int, blocks: Sequence[str]) -> None:
        self.model, self.size = model, size
        self.batches = list(batches(inputs, size))
        self.blocks, self.at = list(blocks), 0
        self._calls = _all_calls(model, self.blocks, self.batches[0])
        self.chained = all(
            a.output is not None and torch.equal(a.output, next(iter(b.rows.values())))
            for a, b in zip(self._calls, self._calls[1:], strict=False)
        )
        first = model.get_submodule(self.blocks[0])
        self._rows = [self.call(first, i, before=True).rows for i in range(len(self.batches))]

    @property
    def block(self) -> nn.Module:
        """The block whose input the stream is at."""
        return self.model.get_submodule(self.blocks[self.at])

    @torch.no_grad()
    def advance(self) -> None:
        """Move past the current block, as it is now."""
        if self.chained:
            for i, rows in enumerate(self._rows):
                rows[next(iter(rows))] = self._through(i)
        self.at += 1

    def _through(self, i: int) -> Tensor:
        return first_tensor(self.block(**self._rows[i], **self._calls[self.at].fixed))

    @torch.no_grad()
    def call(self, module: nn.Module, i: int, *, before: bool = False) -> Call:
        """The call of `module`, in the current block, on batch `i`; with `before` it is not run itself."""
        found: list[Call] = []

        def enter(mod: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.append(_arguments(mod, args, kwargs))
            if before:
                raise _Reached

        def leave(mod: nn.Module, args: Any, output: Any) -> None:
            found[-1].output = first_tensor(output)
            raise _Reached

        hooks = [
            module.register_forward_pre_hook(enter, with_kwargs=True),
            module.register_forward_hook(leave),
        ]
        try:
            if self.chained and hasattr(self, "_rows"):
                self._through(i)
            else:
                run(self.model, self.batches[i])
        except _Reached:
            pass
        finally:
            for hook in hooks:
                hook.remove()
        return found[-1]


@torch.no_grad()
def _all_calls(model: nn.Module, blocks: Sequence[str], batch: Batch) -> list[Call]:
    """How the model calls each of its blocks on a batch."""
    calls: dict[str, Call] = {}
    hooks = []

    def watch(path: str) -> None:
        def enter(mod: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls[path] = _arguments(mod, args, kwargs)

        def leave(mod: nn.Module, args: Any, output: Any) -> None:
            calls[path].output = first_tensor(output)

        block = model.get_submodule(path)
        hooks.append(block.register_forward_pre_hook(enter, with_kwargs=True))
        hooks.append(block.register_forward_hook(leave))

    try:
        for path in blocks:
            watch(path)
        run(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return [calls[path] for path in blocks]


@dataclass
class Calls:
    """Calls of one module, ready to be repeated in batches of one size.

    Args:
        rows: Parameter name -> `[N, T, D]`.
        fixed: The other arguments, as of a batch of `size` rows.
        target: `[N, T, D]` what the module should return.
        size: Rows per batch; masks may depend on it.
        metric: `[D, D]` or None: errors are multiplied by it, each token's taken relative to its target's
            length (what follows normalises it); trace(metric metricᵀ) is D.
    """

    rows: dict[str, Tensor]
    fixed: dict[str, Any]
    target: Tensor
    size: int
    metric: Tensor | None = None
    scale: float = field(init=False)

    def __post_init__(self) -> None:
        self.scale = float(self.target.float().var()) or 1.0 if self.metric is None else 1.0

    def __len__(self) -> int:
        return len(self.target)

    def loss(self, output: Tensor, index: Tensor) -> Tensor:
        """Mean squared error of `output` on the rows `index`, about relative to the target's variance."""
        target = self.target[index].float()
        error = output.float() - target
        if self.metric is not None:
            error = error @ self.metric / target.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-12)
        return error.square().mean() / self.scale

    def output(self, module: nn.Module, index: Tensor) -> Tensor:
        """Run `module` alone on the rows `index` (`size` of them)."""
        return first_tensor(module(**{name: x[index] for name, x in self.rows.items()}, **self.fixed))


def gather(
    student: Stream,
    module: nn.Module,
    teacher: Stream,
    target: nn.Module,
    own: bool,
    which: range,
    metric: Tensor | None = None,
) -> Calls:
    """Pair what `module` reads with what the original's module returns.

    Args:
        student, module: Where the student is, and its module.
        teacher, target: Where the original is, and its module.
        own: Whether `module` reads what it sees in the student, or what the original's sees.
        which: Batches.
        metric: See `Calls`.
    """
    sample = student.call(module, which[0], before=True)
    kept: dict[str, list[Tensor]] = {name: [] for name in sample.rows}
    targets = []
    for i in which:
        wanted = teacher.call(target, i)
        assert wanted.output is not None
        targets.append(wanted.output)
        source = student.call(module, i, before=True).rows if own else wanted.rows
        for name, x in zip(kept, source.values(), strict=True):  # parameter names may differ
            kept[name].append(x)
    rows = {name: torch.cat(x) for name, x in kept.items()}
    return Calls(rows, sample.fixed, torch.cat(targets), student.size, metric)


def slice_rows(inputs: Batch | Tensor, stop: int) -> Batch | Tensor:
    """The first rows of ids or of every keyword tensor."""
    if isinstance(inputs, Mapping):
        return {name: x[:stop] for name, x in inputs.items()}
    return inputs[:stop]
