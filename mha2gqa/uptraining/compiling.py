"""Compile a model's decoder layers, in place and without changing a name in its state dict."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

WORTH_SECONDS = 180  # a run shorter than this is not worth the compiler's minute
ASSUMED_SPEED = 2e14  # FLOP/s of one GPU, to guess a run's length


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks: modules of the classes that must not be split across devices."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def compile_layers(model: nn.Module) -> int:
    """Compile each block's forward; hooks, masks and the loss stay outside.

    The blocks share one compiled program. Attention masks are made eagerly, so that a causal model
    without padding keeps the mask-free attention kernel.

    Returns:
        The number of blocks compiled.
    """
    layers = repeated_layers(model)
    dynamo: Any = torch._dynamo.config
    name = "recompile_limit" if hasattr(dynamo, "recompile_limit") else "cache_size_limit"
    setattr(dynamo, name, max(getattr(dynamo, name), 16))  # train, eval and gradient-free variants
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=False)  # type: ignore[method-assign]
    return len(layers)


def undo_compile(model: nn.Module) -> None:
    """Give the blocks their own forward back."""
    for layer in repeated_layers(model):
        layer.__dict__.pop("forward", None)


def worth_compiling(flops: float, device: torch.device, devices: int) -> bool:
    """Whether a run of `flops` is long enough on a GPU to pay for compiling."""
    return device.type == "cuda" and flops / (ASSUMED_SPEED * devices) > WORTH_SECONDS
