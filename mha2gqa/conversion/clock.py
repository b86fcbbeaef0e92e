"""Seconds and device memory of the stages of a conversion."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Seconds and peak device memory of each stage."""

    def __init__(self, device: torch.device) -> None:
        self.device = device if device.type == "cuda" else None
        self.seconds: dict[str, float] = {}
        self.peak: dict[str, int] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        began = time.monotonic()
        if self.device is not None:
            torch.cuda.reset_peak_memory_stats(self.device)
        yield
        if self.device is not None:
            torch.cuda.synchronize(self.device)
            self.peak[stage] = max(self.peak.get(stage, 0), torch.cuda.max_memory_allocated(self.device))
        self.seconds[stage] = round(self.seconds.get(stage, 0.0) + time.monotonic() - began, 2)

    def pinned(self) -> int:
        """Peak bytes of page-locked host memory so far; 0 where torch does not count them."""
        if self.device is None or not hasattr(torch.cuda, "host_memory_stats"):
            return 0
        return int(torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0))
