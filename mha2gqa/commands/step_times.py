"""The figures of a timed decode step, and the bandwidth of a copy on the device."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

WARM_UP = 3  # steps before the clock starts


@dataclass(frozen=True)
class DecodeTimes:
    """What was measured.

    Args:
        seconds: Of one decode step, the median.
        first_token_seconds: From a prompt of one sequence to its first token.
        context: Tokens that the timed steps attend to (at the last of them, where a cache grows).
        path: What was timed, in words.
        attention: Kernel of the step, and whether it reads shared heads as they are.
        native_gqa: Whether keys and values are read without being repeated.
        cuda_graph, compiled: Whether the step is replayed as a graph, and its layers compiled.
        warnings: Why the step is not the one that servers run, where it is not.
        kernels: Seconds of one layer's attention by kernel, where there was a choice.
        variants: Seconds of a step by the way its layers run, where there was a choice.
    """

    seconds: float
    first_token_seconds: float
    context: int
    path: str
    attention: str
    native_gqa: bool
    cuda_graph: bool = False
    compiled: bool = False
    warnings: tuple[str, ...] = ()
    kernels: dict[str, float] = field(default_factory=dict)
    variants: dict[str, float] = field(default_factory=dict)


def copy_bandwidth(device: torch.device, gigabytes: float | None = None) -> float:
    """Bytes per second that a copy in the device's memory moves (each byte is read and written): the best of a few.

    Args:
        device: Where.
        gigabytes: Size of the copied buffer; None for 2 on a GPU and 0.25 elsewhere.
    """
    size = int((gigabytes or (2 if device.type == "cuda" else 0.25)) * 1e9)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(6):
        wait(device)
        began = time.perf_counter()
        target.copy_(source)
        wait(device)
        best = min(best, time.perf_counter() - began)
    return 2 * size / best


def wait(device: torch.device) -> None:
    """Until everything that was started on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
