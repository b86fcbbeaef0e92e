"""The processes of one job, as torchrun and accelerate announce them. Imports torch only where it is used.

Without a launcher there is one process, and everything here is a no-op.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from .errors import Mha2gqaError, reason

if TYPE_CHECKING:
    from torch import Tensor

TIMEOUT_SECONDS = 7200  # how long one process may work alone while the others wait for it
# What gloo and NCCL say where the other end of a connection is no longer there.
CONNECTION_LOST = (
    "by peer",
    "Broken pipe",
    "Connection refused",
    "remote process exited",
    "communicator was aborted",
    "Timed out waiting",
)


def rank() -> int:
    """Number of this process, 0 for the one that logs and writes."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Processes of the job."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_world_size() -> int:
    """Processes of the job on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def is_rank_zero() -> bool:
    """Whether this process logs and writes."""
    return rank() == 0


def is_launched() -> bool:
    """Whether a launcher started this process, if only one of them."""
    return "RANK" in os.environ


def is_initialized() -> bool:
    """Whether this process has joined the others (`torch.distributed.init_process_group`)."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()


def initialize(device: str = "cpu") -> None:
    """Join the other processes, once; a no-op without a launcher.

    Args:
        device: Kind of device whose tensors are reduced: `cuda` also takes this process's own GPU.
    """
    if not is_launched() or is_initialized():
        return
    import torch

    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    wait = timedelta(seconds=TIMEOUT_SECONDS)
    torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo", timeout=wait)


def barrier() -> None:
    """Wait for the other processes."""
    if is_initialized():
        import torch

        torch.distributed.barrier()


@contextmanager
def rank_zero_first() -> Iterator[None]:
    """The block on rank 0, and once that is done on the others: they read what it has kept in a file."""
    if not is_rank_zero():
        barrier()
    yield
    if is_rank_zero():
        barrier()


def all_reduce_(tensor: Tensor) -> Tensor:
    """Sum a tensor over the processes, in place.

    Args:
        tensor: Of the same shape and dtype in every process.

    Returns:
        The same tensor.
    """
    if is_initialized():
        import torch

        torch.distributed.all_reduce(tensor)
    return tensor


def begin_all_reduce(tensor: Tensor) -> Callable[[], object]:
    """`all_reduce_` while this process goes on with other work, which must not touch the tensor.

    Args:
        tensor: Of the same shape and dtype in every process, which begin their sums in one order.

    Returns:
        To be called before the tensor is read: the sum is there afterwards.
    """
    if not is_initialized():
        return lambda: None
    import torch

    wait: Callable[[], object] = torch.distributed.all_reduce(tensor, async_op=True).wait
    return wait


@contextmanager
def lost_processes(command: str, kept: str, error: type[Mha2gqaError]) -> Iterator[None]:
    """Turn a lost connection into an error that names the reason: another process of the run has ended.

    Args:
        command: Which command runs.
        kept: What the same command goes on from, such as `the last checkpoint`.
        error: The class of error to raise.

    Raises:
        Mha2gqaError: Of that class: another process has ended, inside.
    """
    try:
        yield
    except RuntimeError as lost:
        if not is_initialized() or not any(sign in str(lost) for sign in CONNECTION_LOST):
            raise
        raise error(
            f"another process of the run has ended ({reason(lost, 120)})",
            where=command,
            fix=f"see its log; the same command resumes from {kept}",
        ) from lost


def split(count: int) -> range:
    """This process's share of `count` items: consecutive, none left out, sizes that differ by one at most.

    Example:
        >>> split(10)  # in a job of one process
        range(0, 10)
    """
    number, processes = rank(), world_size()
    return range(count * number // processes, count * (number + 1) // processes)


def destroy() -> None:
    """Leave the other processes, if this one has joined them.

    NCCL's threads must not outlive the interpreter: a process that ends before its group is destroyed can end
    in a segmentation fault, and torchrun then reports a finished run as failed. Not after an error: the others
    may be waiting for this process, and torchrun ends them.
    """
    if is_initialized():
        import torch

        torch.distributed.destroy_process_group()
