"""How models are set up while they are fitted: frozen but for projections, repeatable, in float32."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..architectures import AttentionModule, AttentionSpec

PROJECTIONS = ("q", "k", "v", "o", "qkv")


@contextmanager
def frozen(*models: nn.Module) -> Iterator[None]:
    """Models in eval mode, no gradients but those asked for; restored afterwards."""
    wanted = [(p, p.requires_grad) for model in models for p in model.parameters()]
    modes = [(model, model.training) for model in models]
    for p, _ in wanted:
        p.requires_grad_(False)
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for p, value in wanted:
            p.requires_grad_(value)
        for model, mode in modes:
            model.train(mode)


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Gradients and dtypes as they are without the caller's inference mode and autocast."""
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        yield


@contextmanager
def repeatable() -> Iterator[None]:
    """Backward passes that add up in one order, so that the same seed gives the same bytes on a GPU too."""
    if not torch.cuda.is_available():
        yield
        return
    own = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    switches: Any = torch.utils.deterministic
    fills = switches.fill_uninitialized_memory
    with warnings.catch_warnings():
        # Where an operation has no such form torch warns; cuBLAS is repeatable on one stream as it is.
        warnings.filterwarnings("ignore", message=".*deterministic.*")
        torch.use_deterministic_algorithms(True, warn_only=True)
        switches.fill_uninitialized_memory = False  # costs time and changes nothing here
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(own, warn_only=warns)
            switches.fill_uninitialized_memory = fills


@contextmanager
def behind_masks(masks: bool = True) -> Iterator[None]:
    """Attention with gradients that are finite behind masks.

    On Hopper torch 2.11 and later run attention in half precision by cuDNN, whose backward pass (before 9.26) gives NaN
    for queries all of whose logits are below -88, where the keys fill half of their last 128 and there is a mask.

    Args:
        masks: Whether attention is given any; without, kernels stay as they are.
    """
    kernels: Any = torch.backends.cuda
    own = kernels.cudnn_sdp_enabled()
    kernels.enable_cudnn_sdp(own and not masks)
    try:
        yield
    finally:
        kernels.enable_cudnn_sdp(own)


def trained_parameters(instance: nn.Module, module: AttentionModule) -> list[nn.Parameter]:
    """The projections of one attention module, and the gains of its norms of q and k."""
    wanted = {
        name.removeprefix(f"{module.path}.")
        for role, name in module.names.items()
        if role.split(".")[0] in PROJECTIONS or re.match(r"(q|k|query|key)_\w*norm\.weight", role)
    }
    return [p for name, p in instance.named_parameters() if name in wanted]


def rest_of_block(
    model: nn.Module, path: str, spec: AttentionSpec, modules: Sequence[AttentionModule]
) -> dict[str, nn.Parameter]:
    """What `trained_parameters` leaves out of a block, by full name.

    Left out are parameters that other parts of the model share: tied ones, and a position bias that is passed on.

    Args:
        model: The model.
        path: Of the block in it.
        spec: Its architecture.
        modules: The attention modules of the block that are fitted.
    """
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    known = {id(p) for m in modules for p in trained_parameters(model.get_submodule(m.path), m)}
    passed_on = {
        name
        for m in modules
        for role, name in m.names.items()
        if spec.permutable_of(m.kind) == "model" and role.split(".")[0] not in PROJECTIONS
    }
    shared = {*tied, *tied.values(), *passed_on}
    found = {f"{path}.{name}": p for name, p in model.get_submodule(path).named_parameters()}
    return {
        name: p
        for name, p in found.items()
        if id(p) not in known and name not in shared and p.is_floating_point()
    }


@contextmanager
def float32(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Parameters in float32 (float64 stays) and asking for gradients; afterwards as they were, rounded back."""
    dtypes = [p.dtype for p in parameters]
    for p in parameters:
        p.data = p.data.to(torch.promote_types(p.dtype, torch.float32))
        p.requires_grad_(True)
    try:
        yield
    finally:
        for p, dtype in zip(parameters, dtypes, strict=True):
            p.requires_grad_(False)
            p.grad = None
            p.data = p.data.to(dtype)


def product_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Dtype of matrix products: bfloat16 on a GPU, and wherever the model itself is in half precision; float64 stays.

    Args:
        device: Where the model runs.
        dtype: Of its hidden states.
    """
    halved = device.type == "cuda" and dtype != torch.float64  # which autocast leaves alone
    return torch.bfloat16 if halved or dtype in (torch.bfloat16, torch.float16) else dtype


def autocast(like: Tensor) -> contextlib.AbstractContextManager[object]:
    """Matrix products in `product_dtype` of a tensor, where that is not its own precision anyway.

    Nothing is cached: torch keeps the casts of the weights until the outermost autocast ends, which may be the caller's
    and last for all steps, so that every step would see the weights of the first.
    """
    products = product_dtype(like.device, like.dtype)
    if products != torch.bfloat16:
        return contextlib.nullcontext()
    return torch.autocast(like.device.type, products, cache_enabled=False)
