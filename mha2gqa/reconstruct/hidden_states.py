"""A model walked block by block: what goes into a block, what comes out, and running one alone.

The model's own forward tells how it calls each block (positions, masks, biases): it is run with stand-ins for
the blocks before, which return what those returned, so that only one block's weights are ever needed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..calibration import Batch, batches, model_device, run
from ..errors import UnsupportedModelError
from .module_calls import (
    MASKS,
    Call,
    Reached,
    arguments,
    first_tensor,
    marker_like,
    real_positions,
    with_first,
)
from .row_store import Memory, RowStore


class Stream:
    """A model's hidden states at the input of one of its blocks.

    Only that one stream is kept, and of the model only the current block is run. Where blocks do not form a plain
    chain (each reading what the last one returned), every look inside runs the whole model up to there
    instead: slower, the same numbers, and all its weights are needed.

    Args:
        model: In eval mode.
        inputs: `[N, T]` ids or keyword tensors.
        size: Rows per batch; the last one may have fewer.
        blocks: Paths of its blocks, in order.
        memory: Where the hidden states lie; beside the model by default.
        chained: Whether the blocks are a chain; None finds out, for which the first block is run once.
        masked: Whether, beside hidden states, the model passes its blocks what differs from row to row; None finds
            out. Where the inputs hold masks it does.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Batch | Tensor,
        size: int,
        blocks: Sequence[str],
        memory: Memory | None = None,
        chained: bool | None = None,
        masked: bool | None = None,
    ) -> None:
        self.model, self.size, self.blocks, self.at = model, size, list(blocks), 0
        self.memory = memory or Memory(device=model_device(model))
        self.inputs = {"input_ids": inputs} if isinstance(inputs, Tensor) else dict(inputs)
        self.batches = list(batches(self.inputs, size))
        self.count = len(next(iter(self.inputs.values())))
        self.masked = bool(masked) or any(name in self.inputs for name in MASKS)
        self.real = real_positions(self.inputs)
        self._returned: list[list[Any]] = [[] for _ in self.batches]  # per batch, what each block returned
        self._fixed: dict[Any, dict[str, Any]] = {}
        self.rows = self._first_rows()
        if chained is None:
            chained, varied = self._is_chain()
            self.masked |= varied and masked is None
        self.chained = chained

    # --- how the model calls its blocks --------------------------------------------------------------------

    def _first_rows(self) -> dict[str, RowStore]:
        """The inputs of the first block."""
        stores: dict[str, RowStore] = {}
        for i in range(len(self.batches)):
            call = self._enter_block(self.batches[i], [])
            for name, x in call.rows.items():
                read = next(iter(self.batches[i].values())).shape
                if len(x) != read[0] or (x.ndim > 3 and x.shape[1:3] == read):  # Gemma 3n: [4, B, T, D]
                    raise UnsupportedModelError(
                        f"hidden states of shape {tuple(x.shape)} do not have one row per text",
                        where=self.blocks[0],
                        fix="convert without --calibration",
                    )
                if name not in stores:
                    stores[name] = RowStore((self.count, *x.shape[1:]), x.dtype, self.memory)
                stores[name].write(self.rows_of(i), x)
        return stores

    def rows_of(self, i: int) -> slice:
        """The rows of a batch."""
        return slice(i * self.size, min(self.count, (i + 1) * self.size))

    @torch.no_grad()
    def _enter_block(self, batch: Batch, returned: Sequence[Any]) -> Call:
        """How the model calls the block after those that returned `returned`, on a batch; none of them is run."""
        found: list[Call] = []

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.append(arguments(module, args, kwargs))
            raise Reached

        block = self.model.get_submodule(self.blocks[len(returned)])
        hook = block.register_forward_pre_hook(enter, with_kwargs=True)
        try:
            with self._stand_ins(returned):
                run(self.model, batch, self.memory.device)
        except Reached:
            pass
        finally:
            hook.remove()
        return found[-1]

    @contextlib.contextmanager
    def _stand_ins(self, returned: Sequence[Any]) -> Iterator[None]:
        """While open, the first blocks are not run and return what is given."""
        blocks = [self.model.get_submodule(path) for path in self.blocks[: len(returned)]]
        own = [vars(block).get("forward") for block in blocks]  # accelerate puts one there
        try:
            for block, output in zip(blocks, returned, strict=True):
                block.forward = lambda *args, _output=output, **kwargs: _output
            yield
        finally:
            for block, forward in zip(blocks, own, strict=True):
                del block.forward
                if forward is not None:
                    block.forward = forward

    def _is_chain(self) -> tuple[bool, bool]:
        """Whether the blocks are a chain, and whether they are passed what differs from row to row.

        In a chain each block runs once and reads the very tensor that the one before returned. The first one is run.
        """
        output = self._run(self._read(self.rows_of(0)), self.fixed(0))
        marker = marker_like(first_tensor(output))
        output = with_first(output, marker)
        try:
            calls = self._calls(self.batches[0], output)
        except (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError):
            return False, False  # blocks that return other things than the first one
        passed = [next(iter(call.rows.values()), None) is marker for _, call in calls]
        chained = [number for number, _ in calls] == list(range(len(self.blocks))) and all(passed[1:])
        return chained, chained and self._varied(output)

    @torch.no_grad()
    def _calls(self, batch: Batch, output: Any) -> list[tuple[int, Call]]:
        """The calls of all blocks on a batch, by number, where each returns `output`."""
        found: list[tuple[int, Call]] = []
        hooks = [
            self.model.get_submodule(path).register_forward_pre_hook(
                lambda module, args, kwargs, number=number: found.append(
                    (number, arguments(module, args, kwargs))
                ),
                with_kwargs=True,
            )
            for number, path in enumerate(self.blocks)
        ]
        try:
            with self._stand_ins([output] * len(self.blocks)):
                run(self.model, batch, self.memory.device)
        finally:
            for hook in hooks:
                hook.remove()
        return found

    def _varied(self, output: Any) -> bool:
        """Whether what blocks are passed beside hidden states is another for the first batch read backwards."""
        if self.masked:
            return True
        first = self.batches[0]
        other = {name: x.flip(-1) for name, x in first.items()}
        passed = ([call.fixed for _, call in self._calls(batch, output)] for batch in (first, other))
        one, two = ([x for x in tree_leaves(fixed) if isinstance(x, Tensor)] for fixed in passed)
        return len(one) != len(two) or not all(map(torch.equal, one, two))

    @torch.no_grad()
    def fixed(self, i: int, rows: int | None = None, key: str = "") -> dict[str, Any]:
        """What the model passes to the current block beside the rows, for a batch or its first rows.

        Args:
            i: The batch.
            rows: How many of its rows; all by default.
            key: Distinguishes settings of the model under which it passes other things.
        """
        which = i if self.masked else 0
        if not self.masked and rows is None and i == len(self.batches) - 1:
            rows = self.count - i * self.size
        if rows == len(next(iter(self.batches[which].values()))):
            rows = None
        name = (self.at, which, rows, key)
        if name not in self._fixed:
            self._fixed = {known: x for known, x in self._fixed.items() if known[0] == self.at}
            batch = {n: x[:rows] for n, x in self.batches[which].items()} if rows else self.batches[which]
            returned = self._returned[which][: self.at]
            if rows:
                returned = [with_first(x, first_tensor(x)[:rows]) for x in returned]
            self._fixed[name] = self._enter_block(batch, returned).fixed
        return self._fixed[name]

    def real_rows(self, i: int, states: Tensor) -> Tensor:
        """The real positions of what the model computes for a batch: `[B, T, D]` -> `[n, D]`."""
        if self.real is None or self.real.shape[1:] != states.shape[1:2]:
            return states.flatten(0, -2)
        return states[self.real[self.rows_of(i)].to(states.device)]

    # --- the current block ---------------------------------------------------------------------------------

    @property
    def block(self) -> nn.Module:
        """The block whose input the stream is at."""
        return self.model.get_submodule(self.blocks[self.at])

    def _read(self, rows: slice) -> dict[str, Tensor]:
        return {name: store.read(rows) for name, store in self.rows.items()}

    @torch.no_grad()
    def _run(self, rows: Mapping[str, Tensor], fixed: Mapping[str, Any]) -> Any:
        return self.block(**rows, **fixed)

    @torch.no_grad()
    def run_block(self, i: int, part: slice | None = None, key: str = "") -> Any:
        """Run the current block on a batch, or on some rows of it (of an input without masks).

        Args:
            i: The batch.
            part: Rows of the batch; all by default.
            key: See `fixed`.
        """
        if part is None:
            return self._run(self._read(self.rows_of(i)), self.fixed(i, key=key))
        start = i * self.size
        rows = self._read(slice(start + part.start, start + part.stop))
        return self._run(rows, self.fixed(i, part.stop - part.start, key))

    @torch.no_grad()
    def outputs(self, into: RowStore | None = None) -> RowStore:
        """What the current block returns on every row.

        Args:
            into: Where to write it; the rows themselves, in place, are allowed.
        """
        store = into or self._like()
        for i in range(len(self.batches)):
            output = self.run_block(i) if self.chained else self.call(self.block, i).output
            self._keep(i, output)
            store.write(self.rows_of(i), first_tensor(output))
        return store

    def _like(self) -> RowStore:
        hidden = next(iter(self.rows.values()))
        return RowStore(tuple(hidden.data.shape), hidden.data.dtype, self.memory)

    def _keep(self, i: int, output: Any) -> None:
        """Remember the structure of what a block returned, for the pass to the next one."""
        if self.chained and (self.masked or i == 0) and len(self._returned[i]) == self.at:
            self._returned[i].append(with_first(output, marker_like(first_tensor(output))))

    @torch.no_grad()
    def advance(self, outputs: RowStore | None = None) -> None:
        """Move past the current block, as it is now.

        Args:
            outputs: From `outputs`, where they have been computed.
        """
        if self.chained:
            name = next(iter(self.rows))
            self.rows[name] = outputs or self.outputs(self.rows[name])
        self.at += 1

    @contextlib.contextmanager
    def ahead(self, outputs: RowStore) -> Iterator[None]:
        """While open, the stream is past the current block, as `advance` would move it.

        Args:
            outputs: What the block returned, from `outputs`.
        """
        name = next(iter(self.rows))
        here, self.rows[name] = self.rows[name], outputs
        self.at += 1
        try:
            yield
        finally:
            self.rows[name] = here
            self.at -= 1

    def jump(self, hidden: Tensor, like: Stream) -> None:
        """Move past the current block without running it.

        Args:
            hidden: What it returned, `[N, T, D]`.
            like: A stream of the same model and inputs that has passed it.
        """
        self.skip(like)
        next(iter(self.rows.values())).write(slice(0, self.count), hidden)

    def skip(self, like: Stream) -> None:
        """`jump` where what the block returned is of no use."""
        for own, known in zip(self._returned, like._returned, strict=True):
            own[self.at :] = known[self.at : self.at + 1]
        self.at += 1

    @torch.no_grad()
    def call(self, module: nn.Module, i: int, *, before: bool = False) -> Call:
        """The call of `module`, in the current block, on batch `i`; with `before` it is not run itself."""
        if self.chained and module is self.block:
            call = Call(self._read(self.rows_of(i)), self.fixed(i))
            if not before:
                call.output = first_tensor(self._run(call.rows, call.fixed))
            return call
        found: list[Call] = []

        def enter(mod: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.append(arguments(mod, args, kwargs))
            if before:
                raise Reached

        def leave(mod: nn.Module, args: Any, output: Any) -> None:
            found[-1].output = first_tensor(output)
            raise Reached

        hooks = [
            module.register_forward_pre_hook(enter, with_kwargs=True),
            module.register_forward_hook(leave),
        ]
        try:
            if self.chained:
                self.run_block(i)
            else:
                run(self.model, self.batches[i], self.memory.device)
        except Reached:
            pass
        finally:
            for hook in hooks:
                hook.remove()
        return found[-1]

    # --- after the last block ------------------------------------------------------------------------------

    @torch.no_grad()
    def logits(self, i: int) -> Tensor:
        """What the model predicts from the hidden states after its last block, `[B, T, V]`, on batch `i`."""
        assert self.at == len(self.blocks)
        if not self.chained:
            return self.model(**_on(self.batches[i], self.memory.device), use_cache=False).logits
        hidden = next(iter(self._read(self.rows_of(i)).values()))
        returned = list(self._returned[i if self.masked else 0])
        returned[-1] = with_first(returned[-1], hidden)
        with self._stand_ins(returned):
            return self.model(**_on(self.batches[i], self.memory.device), use_cache=False).logits


def _on(batch: Batch, device: torch.device) -> dict[str, Tensor]:
    return {name: x.to(device) for name, x in batch.items()}
