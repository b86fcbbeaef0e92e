"""Training on several processes: an exact reduction, a sharded teacher, whole weights."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed import local_world_size
from ..errors import CheckpointError


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks: modules of the classes that must not be split across devices."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def is_fsdp2(accelerator: Any) -> bool:
    """Whether this run shards parameters with FSDP2."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    return plugin is not None and getattr(plugin, "fsdp_version", 1) == 2


def reduce_in_float32(accelerator: Any) -> None:
    """Sum gradients over processes in float32; accelerate would do it in bf16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if accelerator.mixed_precision == "bf16":
        accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )


@contextmanager
def shared_cores(accelerator: Any) -> Iterator[None]:
    """Inside, where the optimiser is on the host, each process takes its share of the cores for it.

    Launchers of several processes leave torch one thread each.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy

    if not is_fsdp2(accelerator) or not isinstance(
        accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy
    ):
        yield
        return
    own = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(own, cores // local_world_size()))
    try:
        yield
    finally:
        torch.set_num_threads(own)


def shard_teacher(model: Any, mesh: Any = None) -> None:
    """Shard a frozen model's transformer blocks over all processes, in place.

    Embeddings, last norm and output head stay whole on every process: the head is used chunk by chunk
    outside the model's forward.

    Args:
        model: The teacher, on this process's device.
        mesh: The device mesh, None for all processes.
    """
    from torch.distributed.fsdp import fully_shard

    layers = repeated_layers(model)
    inside = {id(p) for layer in layers for p in layer.parameters()}
    outside = {p for p in model.parameters() if id(p) not in inside}
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    base = getattr(model, model.base_model_prefix)
    fully_shard(base, mesh=mesh, ignored_params=outside)  # one root, so that blocks are fetched ahead


def is_zero3(accelerator: Any) -> bool:
    """Whether this run shards parameters with DeepSpeed's ZeRO-3."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return plugin is not None and int(plugin.zero_stage) == 3


def check_zero_shards(checkpoint: Path, processes: int) -> None:
    """Refuse a checkpoint that ZeRO cannot deal out anew.

    Args:
        checkpoint: The folder to resume from.
        processes: That run under DeepSpeed now, 0 for a run without it.

    Raises:
        CheckpointError: It holds the shards of another number of processes.
    """
    shards = len(list(checkpoint.glob("global_step*/*_optim_states.pt")))
    if shards != processes:
        raise CheckpointError(
            f"holds the state of {shards} processes under DeepSpeed, and this run has {processes}",
            where=checkpoint,
            fix=f"continue on {shards} with the same deepspeed" if shards else "continue without deepspeed",
        )


@contextmanager
def whole_models(args: Any) -> Iterator[None]:
    """Inside, models are loaded whole on every process; otherwise ZeRO-3 shards them as they are read.

    What is proven on a model before it trains (its head, its adapters) needs its weights.
    """
    config = getattr(args, "hf_deepspeed_config", None)
    if config is None:
        yield
        return
    from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        set_hf_deepspeed_config(config)


def frozen_weights(model: Any) -> dict[str, Tensor]:
    """What does not train, by name, on the CPU; to be taken before ZeRO rounds it to bf16 for good."""
    parameters = model.named_parameters(remove_duplicate=False)
    return {name: p.detach().cpu() for name, p in parameters if not p.requires_grad}


def gather_master_weights(model: Any, frozen: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of a model under ZeRO, from the optimiser's float32 weights; all processes take part.

    Args:
        model: The model inside DeepSpeed's engine.
        frozen: From `frozen_weights`.
    """
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    state = dict(frozen)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in frozen:
            continue
        whole = safe_get_full_fp32_param(parameter)
        if whole is None:
            with deepspeed.zero.GatheredParameters([parameter]):
                whole = parameter.detach().clone()
        state[name] = whole.cpu()
    buffers = dict(model.named_buffers(remove_duplicate=False))
    return state | {name: buffers[name].cpu() for name in model.state_dict() if name in buffers}
