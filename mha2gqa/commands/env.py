"""Versions and devices, for bug reports."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..results import Result


@dataclass
class EnvResult(Result):
    """What `env` prints.

    Args:
        platform: Operating system and machine.
        cpus: Logical CPUs this process may use.
        devices: Accelerators: name and memory in bytes.
        variables: Environment variables that change what the libraries do, never secrets.
    """

    command: ClassVar[str] = "env"
    platform: str
    cpus: int
    devices: list[dict[str, Any]] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)


_SHOWN = ("HF_HUB_OFFLINE", "HF_HOME", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "RANK", "WORLD_SIZE")


def environment() -> EnvResult:
    """Describe the machine; see `EnvResult`."""
    import torch

    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append({"name": properties.name, "memory": properties.total_memory})
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    variables = {name: os.environ[name] for name in _SHOWN if name in os.environ}
    return EnvResult(platform.platform(), cpus, devices, variables)
