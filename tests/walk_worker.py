"""One process that converts with calibration: walk_worker.py SOURCE OUT TEXT [KILL_AFTER_LAYER]; torchrun starts several.

Further words: `die:N` ends process N on its second layer, `layer` trains whole layers, `stored` works in the dtype that
is stored, as for large models.
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
from mha2gqa.conversion import through_model
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
    source, out, text, *words = sys.argv[1:]
    for word in words:
        if word == "layer":
            OPTIONS["fit"] = replace(FIT, train="layer")
        elif word == "stored":
            through_model.FLOAT32_PARAMETERS = 0
        elif word.startswith("die:"):
            die_on(int(word.removeprefix("die:")))
        else:
            kill_after(int(word))
    convert(source, Path(out), 2, calibration=[text], **OPTIONS)
    distributed.destroy()


if __name__ == "__main__":
    main()
