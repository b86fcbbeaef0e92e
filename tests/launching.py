"""Start several processes of one job on this machine, as torchrun does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

TIMEOUT = 900  # seconds; quiet jobs of these tests take less than a tenth of it


def launch(command: Sequence[str], folder: Path, processes: int = 2) -> list[str]:
    """Run `python COMMAND…` in each process until all have ended well.

    Args:
        command: Arguments of the interpreter.
        folder: Where `output-RANK` files go.
        processes: How many.

    Returns:
        What each process printed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    paths = [folder / f"output-{rank}" for rank in range(processes)]
    running = [
        subprocess.Popen(
            [sys.executable, *command],
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=path.open("w"),  # a pipe that nobody reads would stop them
            stderr=subprocess.STDOUT,
        )
        for rank, path in enumerate(paths)
    ]
    try:
        codes = [process.wait(timeout=TIMEOUT) for process in running]
    finally:
        for process in running:
            process.kill()
    outputs = [path.read_text() for path in paths]
    assert codes == [0] * processes, "\n".join(output[-3000:] for output in outputs)
    return outputs
