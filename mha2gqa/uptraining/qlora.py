"""QLoRA: the frozen weights in 4 bits while adapters train; the result is merged onto the full-precision ones."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoints.hf_config import stored_dtype
from ..checkpoints.loading import load_model
from ..errors import UsageError
from .adapters import EXACT, add_adapter, merge_adapter, plan_adapter, probe, relative_difference
from .budget import UptrainConfig

logger = logging.getLogger(__name__)

BLOCK = 64  # weights that share a scale


def require_bitsandbytes() -> Any:
    """The package, or one line that says what to install.

    Raises:
        UsageError: It is not installed.
    """
    try:
        import bitsandbytes
    except ImportError as error:
        raise UsageError(
            "needs the package bitsandbytes", where="train qlora", fix="pip install bitsandbytes"
        ) from error
    return bitsandbytes


def quantise(model: Any, keep: set[str], device: torch.device, compute: torch.dtype) -> int:
    """Replace the linear layers of a model by 4-bit ones (NF4, double quantisation), in place.

    Args:
        model: A float model; what stays in full precision moves to `device` too.
        keep: Modules left as they are. So are the output head and rows that are no multiple of a block.
        device: Where the model will train.
        compute: Dtype of the products.

    Returns:
        The number of weights quantised.

    Raises:
        UsageError: There is nothing to quantise, or bitsandbytes is not installed.
    """
    bnb = require_bitsandbytes()
    head, count = model.get_output_embeddings(), 0
    found = [
        (name, module)
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and module is not head
        and name not in keep
        and module.in_features % BLOCK == 0
    ]
    if not found:
        raise UsageError(
            f"no linear layer has rows of whole blocks of {BLOCK} weights",
            where="train qlora",
            fix="train lora",
        )
    for name, module in found:
        narrow = bnb.nn.Linear4bit(
            module.in_features,
            module.out_features,
            bias=module.bias is not None,
            compute_dtype=compute,
            compress_statistics=True,
            quant_type="nf4",
            device="meta",
        )
        narrow.weight = bnb.nn.Params4bit(
            module.weight.data.to("cpu", copy=True),
            requires_grad=False,
            compress_statistics=True,
            quant_type="nf4",
            module=narrow,
        ).to(device)  # which is what quantises it
        narrow.bias = None if module.bias is None else nn.Parameter(module.bias.data, requires_grad=False)
        count += module.weight.numel()
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, narrow)
    model.to(device)
    logger.info("%.1f million weights of %d layers in 4 bits", count / 1e6, len(found))
    return count


def add_quantised_adapter(
    model: Any, config: Mapping[str, Any], run: UptrainConfig, device: torch.device, compute: torch.dtype
) -> Any:
    """Wrap a model for QLoRA: frozen 4-bit weights, low-rank q and o, pooled keys and values in full.

    Args:
        model, config, run: As in `add_adapter`.
        device, compute: As in `quantise`.
    """
    quantise(model, set(plan_adapter(model, config).full), device, compute)
    model.is_loaded_in_4bit = True  # by which peft picks its layers
    try:
        return add_adapter(model, config, run)
    finally:
        del model.is_loaded_in_4bit


@torch.no_grad()
def merge_quantised(
    wrapped: Any,
    run: UptrainConfig,
    source: Path,
    config: Mapping[str, Any],
    folder: Path,
    batch: Mapping[str, torch.Tensor] | None = None,
) -> tuple[Any, dict[str, float]]:
    """Put the trained adapter on the full-precision model and merge it there.

    The merged model equals adapter and full-precision model within `EXACT`, as with plain LoRA, and differs
    from what was trained by the rounding of the frozen weights to 4 bits.

    Args:
        wrapped: The trained 4-bit `PeftModel`.
        run: The run.
        source: The full-precision checkpoint.
        config: Its raw config.
        folder: Where the adapter goes.
        batch: As in `merge_adapter`.

    Returns:
        The merged model, float32; the differences of `merge_adapter` and `quantised`, the merged model's
        to the 4-bit one, relative to the logits' spread.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    wrapped.eval()
    device = next(wrapped.parameters()).device
    batch = dict(probe(wrapped, device) if batch is None else batch)
    here = {key: x.to(device) for key, x in batch.items()}
    trained = wrapped(**here, use_cache=False).logits.float().cpu()
    whole = load_model(source, dtype=torch.float32, device="cpu", trust_remote_code=run.trust_remote_code)
    whole = add_adapter(whole, config, run)
    state = {name: x.cpu() for name, x in get_peft_model_state_dict(wrapped).items()}
    set_peft_model_state_dict(whole, state)
    merged, difference = merge_adapter(whole, folder, run.model, stored_dtype(config), batch)
    there = {key: x.to("cpu") for key, x in batch.items()}
    difference["quantised"] = relative_difference(merged, there, trained)
    logger.info(
        "merged onto the full-precision weights: within %.0e of the adapter on them, %.2g of the logits' "
        "spread from the 4-bit model that was trained",
        EXACT,
        difference["quantised"],
    )
    return merged, difference
