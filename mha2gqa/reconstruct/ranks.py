"""The processes that share a walk: each holds every n-th row of the text, and sums go over all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .. import distributed
from ..errors import UsageError

T = TypeVar("T")
COUNTS = (1, 2, 4, 8)  # of processes that can share the fits


def check_shared(blocks: int | None, processes: int, of: int = 0) -> None:
    """Refuse steps that the processes cannot share out evenly.

    Args:
        blocks: Of a step; None where they are not known yet.
        processes: How many there are.
        of: Blocks of the text, where these limit those of a step; 0 where they do not.

    Raises:
        UsageError: With what to do.
    """
    where = "--nproc_per_node"
    if processes not in COUNTS:
        raise UsageError(
            f"fits cannot be shared by {processes} processes", where=where, fix="start 1, 2, 4 or 8"
        )
    if blocks is None or blocks % processes == 0:
        return
    fix = f"start fewer, or give more text: a step takes an eighth of its {of} blocks at most"
    if not of:
        fix = "start fewer, or give a --fit batch_size that they divide"
    raise UsageError(
        f"{blocks} blocks a step cannot be shared by {processes} processes", where=where, fix=fix
    )


@dataclass(frozen=True)
class Ranks:
    """This process among those that share the rows.

    Args:
        rank: Its number; it holds the rows `rank`, `rank + count`, …
        count: How many there are.
    """

    rank: int = 0
    count: int = 1

    @classmethod
    def here(cls) -> Ranks:
        """Those of the process group, if one is initialised."""
        return cls(distributed.rank(), distributed.world_size()) if distributed.is_initialized() else cls()

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        return distributed.all_reduce_(x) if self.count > 1 else x

    @contextmanager
    def mean_gradients(
        self,
        parameters: Sequence[nn.Parameter],
        rest: Sequence[nn.Parameter] = (),
        products: torch.dtype = torch.float32,
    ) -> Iterator[Callable[[], None]]:
        """While open, each gradient is summed over the ranks as soon as a backward pass has it.

        Gradients of matrices are sent in the dtype of the products that gave them: they hold no more digits, and the
        sums of the last ones, behind which no computing hides them, take half the time.

        Args:
            parameters: Have a gradient after every pass, on every rank.
            rest: May have none (experts that no token of this rank reached); summed once the pass is over. Those
                that no rank reached stay without, so that the optimiser leaves them alone as on one rank.
            products: Dtype of the matrix products of the backward pass.

        Yields:
            To be called after each backward pass: takes the means of the sums.
        """
        begun: list[tuple[Tensor, Tensor, Callable[[], object]]] = []

        def begin(p: Tensor) -> None:
            assert p.grad is not None
            sent = p.grad.to(products) if p.dim() > 1 else p.grad
            begun.append((p.grad, sent, distributed.begin_all_reduce(sent)))

        def finish() -> None:
            assert len(begun) == len(hooks), "a parameter has no gradient, or has two"
            for p, reached in zip(rest, self._reached(rest), strict=True):
                if reached and self.count > 1:
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                    begin(p)
            while begun:
                gradient, sent, wait = begun.pop(0)
                wait()
                torch.div(sent, self.count, out=gradient)

        hooks = [p.register_post_accumulate_grad_hook(begin) for p in parameters if self.count > 1]
        try:
            yield finish
        finally:
            for hook in hooks:
                hook.remove()

    def _reached(self, parameters: Sequence[nn.Parameter]) -> list[bool]:
        """Which parameters have a gradient on any rank."""
        found = [p.grad is not None for p in parameters]
        if self.count == 1 or not found:
            return found
        counts: list[int] = self.sum(
            torch.tensor(found, dtype=torch.int32, device=parameters[0].device)
        ).tolist()
        return [count > 0 for count in counts]

    def share(self, x: Tensor) -> Tensor:
        """This rank's rows of a tensor."""
        return x[self.rank :: self.count]

    def agree(self, value: T) -> T:
        """What rank 0 has of a small picklable value."""
        if self.count == 1:
            return value
        box = [value]
        torch.distributed.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """What every rank has of a small picklable value, in their order."""
        if self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(found, value)
        return found

    def copy_first(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors with those of rank 0, so that rounding cannot let the ranks drift apart."""
        for x in tensors if self.count > 1 else ():
            torch.distributed.broadcast(x, src=0)
