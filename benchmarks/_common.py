"""What every benchmark records, and how a child process is watched."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mha2gqa
from mha2gqa.results import versions

RESULTS = Path(__file__).parent / "results"
PACKAGE = Path(mha2gqa.__file__).parent


def hardware(device: str = "cpu") -> dict[str, Any]:
    """CPU, cores, memory and (for a GPU device) the GPU's name."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = models[0].split(":", 1)[1].strip() if models else cpu
    found: dict[str, Any] = {"cpu": cpu, "cores": os.cpu_count()}
    if hasattr(os, "sysconf"):
        found["memory_gib"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    if device.startswith("cuda"):
        import torch

        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def gpu_names() -> list[str]:
    """What `CUDA_VISIBLE_DEVICES` calls the GPUs that this process may use."""
    import torch

    masked, count = os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count()
    return masked.split(",")[:count] if masked else [str(i) for i in range(count)]


def code_digest() -> str:
    """Which code measured: the start of a SHA-256 over the package's Python files."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def provenance(device: str = "cpu", seed: int | None = None) -> dict[str, Any]:
    """Versions, code, hardware, date and the command line that is running; paths shortened to their names."""
    words = [Path(word).name if os.sep in word else word for word in sys.argv[1:]]
    return {
        "command_line": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words]),
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions(),
        "code": code_digest(),
        "hardware": hardware(device),
        "seed": seed,
    }


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write `record` whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def anonymous_bytes(pid: int) -> int:
    """Anonymous resident memory of a process and its children in bytes (mapped files left out); 0 once gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        threads = [thread.read_text() for thread in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return 0
    own = [int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon:")]
    children = [int(child) for thread in threads for child in thread.split()]
    return sum(own) * 1024 + sum(map(anonymous_bytes, children))


def watch(command: Sequence[str], interval: float = 0.01) -> dict[str, float]:
    """Run `command`, then sync the disks; its wall seconds and its peak anonymous memory.

    Args:
        command: The command line.
        interval: Seconds between two looks at its memory and its children's.

    Returns:
        `seconds` up to the end of the sync, `seconds_to_exit`, `peak_anonymous_mib` (0 where there is no
        /proc).

    Raises:
        subprocess.CalledProcessError: It failed.
    """
    began = time.monotonic()
    peak = 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as child:
        while child.poll() is None:
            peak = max(peak, anonymous_bytes(child.pid))
            time.sleep(interval)
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, list(command))
    exited = time.monotonic() - began
    os.sync()
    return {
        "seconds": round(time.monotonic() - began, 3),
        "seconds_to_exit": round(exited, 3),
        "peak_anonymous_mib": round(peak / 2**20, 1),
    }
