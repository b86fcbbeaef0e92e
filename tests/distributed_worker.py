"""One process of the distributed tests: distributed_worker.py FOLDER…; rank 0 writes JSON into each.

A folder's name is the mode that is tried in it: ddp, fsdp, offload or zero3.
"""

from __future__ import annotations

import json
import math
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from conftest import pico_llama
from training import TINY

from mha2gqa.errors import TrainingError
from mha2gqa.uptraining import run, train_model, trainer, uptrain
from mha2gqa.uptraining.guard import SpikeGuard
from mha2gqa.uptraining.trainer import UptrainTrainer

RUN = {"tokens": 64 * 6, "save_steps": 2, "learning_rate": 3e-3, **TINY, "keep_checkpoints": True}
BLOCKS = torch.randint(0, 64, (24, 17), generator=torch.Generator().manual_seed(0))
IN_MEMORY = {
    "tokens": 6 * 8 * 16,
    "batch_tokens": 8 * 16,
    "device": "cpu",
    "learning_rate": 3e-3,
    "logging_steps": 1,
}


OF_MODE: dict[str, dict[str, Any]] = {  # what a run from a checkpoint tries along with it
    "ddp": {"streaming": True},
    "offload": {"teacher_dtype": "int8"},
}


class Killed(BaseException):
    """Stands for a process that is gone."""


def pretend_gpus() -> None:
    """accelerate shards only on accelerators: let it take these CPU processes for some."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType
    from torch.distributed.fsdp import CPUOffloadPolicy

    build = run.build_arguments

    def built(*args: Any, **more: Any) -> Any:
        arguments = build(*args, **more)
        assert arguments.device.type == "cpu"
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        if (arguments.fsdp_plugin_args or {}).get("cpu_offload"):  # there is no driver that could pin memory
            arguments.fsdp_plugin_args["cpu_offload"] = CPUOffloadPolicy(pin_memory=False)
        return arguments

    run.build_arguments = built


def killed_at(step: int) -> Any:
    accept = SpikeGuard.accept

    def killing(self: SpikeGuard, at: int, *args: Any) -> bool:
        if at == step:
            raise Killed
        return accept(self, at, *args)

    return accept, killing


def in_memory(**more: Any) -> list[float]:
    student, teacher = pico_llama(num_key_value_heads=2), pico_llama()
    result = train_model(student, BLOCKS, teacher=teacher, held_out=BLOCKS[:5], **IN_MEMORY, **more)
    return [e["loss"] for e in result.losses["train"]] + [e["eval_loss"] for e in result.losses["held_out"]]


def from_checkpoint(folder: Path, begun: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Killed at step 5 of 6 (`begun`: what was set until then), resumed from step 4, published."""
    accept, SpikeGuard.accept = killed_at(5)
    try:
        uptrain(folder / "gqa", folder / "up", folder / "text.jsonl", **RUN, **(more | begun))
    except Killed:
        SpikeGuard.accept = accept
    result = uptrain(folder / "gqa", folder / "up", folder / "text.jsonl", **RUN, **more)
    return {"resumed": result.resumed_from, "losses": [e["loss"] for e in result.losses["train"]]}


def guarded(factor: float) -> list[int] | str:
    """Steps skipped, or what stopped the run, where the last process alone has a bad loss at step 4."""
    compute = UptrainTrainer.compute_loss

    def spoilt(self: UptrainTrainer, *args: Any, **more: Any) -> torch.Tensor:
        before = self._sums[0].clone()
        loss = compute(self, *args, **more)
        if self.state.global_step == 3 and self.args.process_index == self.args.world_size - 1:
            self._sums[0] += (self._sums[0] - before) * min(factor, 2.0)  # what the guard sees; NaN stays NaN
            return loss * factor
        return loss

    UptrainTrainer.compute_loss = spoilt  # type: ignore[method-assign]
    options = IN_MEMORY | {"ddp_backend": "gloo", "per_device_train_batch_size": 2}
    try:
        student, teacher = pico_llama(num_key_value_heads=2), pico_llama()
        return train_model(student, BLOCKS, teacher=teacher, **options).skipped_steps
    except TrainingError as error:
        return str(error)
    finally:
        UptrainTrainer.compute_loss = compute  # type: ignore[method-assign]


def try_mode(mode: str, place: Path) -> None:
    """Train in memory and from a checkpoint, and where nothing is sharded meet a spike and a NaN."""
    sharded: dict[str, Any] = {}
    if mode in ("fsdp", "offload"):
        pretend_gpus()
        sharded = {"fsdp": True}
    begun = (
        {"fsdp_config": {"cpu_offload": True}} if mode == "fsdp" else {}
    )  # on the host, until it was killed
    if mode == "fsdp":  # layers are traced as for a compiler, and run as they are
        sharded["torch_compile"] = True
        torch.compile = partial(torch.compile, backend="eager")  # type: ignore[assignment]
    if mode == "offload":
        sharded["fsdp_config"] = {"cpu_offload": True}
    if mode == "zero3":
        sharded = {"deepspeed": str(Path(__file__).parents[1] / "examples" / "deepspeed_zero3.json")}
    found = {
        "in memory": in_memory(ddp_backend="gloo", **sharded),
        "checkpoint": from_checkpoint(place, begun, ddp_backend="gloo", **OF_MODE.get(mode, {}), **sharded),
    }
    if mode == "ddp":
        trainer.SpikeGuard = partial(SpikeGuard, warmup=2)  # type: ignore[misc, assignment]
        trainer.SpikeGuard.factor = SpikeGuard.factor  # type: ignore[attr-defined]
        guard = json.dumps([guarded(1000.0), guarded(math.nan)])
        trainer.SpikeGuard = SpikeGuard  # type: ignore[misc]
        (place / f"guard-{os.environ['RANK']}.json").write_text(guard)
    if os.environ["RANK"] == "0":
        (place / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for folder in map(Path, sys.argv[1:]):
        try_mode(folder.name, folder)
    torch.distributed.destroy_process_group()
