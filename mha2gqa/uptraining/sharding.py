"""What FSDP2 needs from us: an exact reduction, memory that does not grow, a sharded teacher."""

from __future__ import annotations

from typing import Any

import torch

from .compiling import repeated_layers


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
