"""Frozen weights in 8 bits: one scale for each row, products in the dtype of the inputs."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..errors import UsageError

logger = logging.getLogger(__name__)

LEVELS = 127  # of either sign
# What the integers are kept as, bit by bit: FSDP2 of torch 2.11 shards parameters of floating dtypes alone.
KEPT_AS = torch.float8_e4m3fn


class EightBitLinear(nn.Module):
    """A frozen linear layer whose weights are 8-bit integers times a scale for each output.

    The integers are exact in bfloat16, so that only rounding to them makes a difference: at most half a
    step, `max |row| / 254` for each weight. It is made of ordinary parameters: FSDP2 shards it like any other
    layer, which tensor subclasses of quantisation libraries do not allow.

    Args:
        weight: `[out, in]`; its dtype is that of the scales.
        bias: `[out]` or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        largest = weight.abs().amax(1, keepdim=True).float()
        # Rounded before it divides, so that its own rounding is not an error of the product.
        scale = (largest / LEVELS).clamp_min(torch.finfo(torch.float32).tiny).to(weight.dtype)
        whole = (weight.float() / scale.float()).round().clamp(-LEVELS, LEVELS).to(torch.int8)
        # The scale first: classes take the dtype of their first floating parameter for that of the model.
        self.scale = nn.Parameter(scale[:, 0].clone(), requires_grad=False)
        self.weight = nn.Parameter(whole.view(KEPT_AS), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)

    @property
    def integers(self) -> Tensor:
        """The weights `[out, in]` before they are scaled, int8."""
        return self.weight.view(torch.int8)

    def forward(self, x: Tensor) -> Tensor:
        """`[…, in]` to `[…, out]`."""
        y = F.linear(x, self.integers.to(x.dtype)) * self.scale.to(x.dtype)
        return y if self.bias is None else y + self.bias.to(x.dtype)


@torch.no_grad()
def round_to_eight_bits(model: Any, device: torch.device, where: str) -> int:
    """Put a frozen model on its device with its linear layers in 8 bits, in place.

    Embeddings and the output head stay as they are, and so do experts that a class keeps in one tensor. Layers
    move one by one: the device never holds more than the result and one layer.

    Args:
        model: On the host, in the dtype that it computes in.
        device: Where it goes.
        where: What to call it in an error.

    Returns:
        The number of weights rounded.

    Raises:
        UsageError: It has no linear layer.
    """
    head = model.get_output_embeddings()
    found = [
        (name, module)
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, Conv1D) and module is not head
    ]
    if not found:
        raise UsageError(
            "has no linear layer that 8 bits would make smaller", where=where, fix="leave out teacher_dtype"
        )
    count = 0
    for name, module in found:
        weight = module.weight.data.to(device)
        bias = None if module.bias is None else module.bias.data.to(device)
        parent, _, leaf = name.rpartition(".")
        narrow = EightBitLinear(weight.t() if type(module) is Conv1D else weight, bias)
        setattr(model.get_submodule(parent), leaf, narrow)
        count += weight.numel()
    model.to(device)
    logger.info("%.1f million weights of the teacher in 8 bits", count / 1e6)
    return count
