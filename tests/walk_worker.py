"""One process that converts with calibration: walk_worker.py SOURCE OUT TEXT [KILL_AFTER_LAYER]; torchrun starts several.

`die:N` instead of a layer ends process N on its second layer, `layer` trains whole layers.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mha2gqa import distributed
from mha2gqa.conversion.checkpoint import convert
from mha2gqa.conversion.work_dir import WorkDir
from mha2gqa.reconstruct import ReconstructConfig
from mha2gqa.reconstruct.driver import Fitter

if TYPE_CHECKING:
    import pytest

FIT = ReconstructConfig(steps=12, batch_size=4, check_every=4, holdout=0.2, learning_rate=1e-2)
OPTIONS: dict[str, Any] = {"calibration_window": 16, "fit": FIT, "device": "cpu"}


def kill_after(layer: int) -> None:
    """Let this process be killed as soon as a layer is finished, before anything else happens."""
    put = WorkDir.put

    def killing(self: WorkDir, number: int, *args: Any) -> None:
        put(self, number, *args)
        if number == layer:
            self.wait()  # a layer is finished when it is on disk
            os.kill(os.getpid(), signal.SIGKILL)

    WorkDir.put = killing  # type: ignore[method-assign]


def stop_after(patch: pytest.MonkeyPatch, layer: int) -> None:
    """Let a conversion in this process be interrupted when a layer is finished."""
    put = WorkDir.put

    def stopping(self: WorkDir, number: int, *args: Any) -> None:
        put(self, number, *args)
        if number == layer:
            raise KeyboardInterrupt

    patch.setattr(WorkDir, "put", stopping)


def die_on(rank: int) -> None:
    """Let one process of several end without a word on its second layer."""
    visit = Fitter.visit

    def dying(self: Fitter, pairs: Any) -> Any:
        if ".1." in pairs[0].module.path and distributed.rank() == rank:
            os._exit(9)
        return visit(self, pairs)

    Fitter.visit = dying  # type: ignore[method-assign]


def main() -> None:
    torch.set_num_threads(1)
    source, out, text, *rest = sys.argv[1:]
    if rest == ["layer"]:
        OPTIONS["fit"] = replace(FIT, train="layer")
    elif rest and rest[0].startswith("die:"):
        die_on(int(rest[0].removeprefix("die:")))
    elif rest:
        kill_after(int(rest[0]))
    convert(source, Path(out), 2, calibration=[text], **OPTIONS)
    distributed.destroy()


if __name__ == "__main__":
    main()
