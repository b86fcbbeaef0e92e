"""Liger's fused linear cross-entropy in place of our chunks, where a run asks for Liger's kernels."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from ..errors import UsageError
from .losses import IGNORED, Head

# Liger would replace the forward of the whole model, which returns our loss.
OWN_LOSS = {"fused_linear_cross_entropy": False}


def require_liger() -> None:
    """Say what to install.

    Raises:
        UsageError: liger-kernel is not installed.
    """
    if find_spec("liger_kernel") is None:
        raise UsageError(
            "needs the package liger-kernel", where="use_liger_kernel", fix="pip install liger-kernel"
        )


def liger_cross_entropy(hidden: Tensor, labels: Tensor, head: Head, dtype: torch.dtype) -> Tensor | None:
    """Summed next-token loss by Liger's kernel, in `dtype` products with float32 sums.

    Args:
        hidden: Last hidden states `[N, D]`.
        labels: Next tokens `[N]`, `IGNORED` where masked.
        head: The output head.
        dtype: Of the products.

    Returns:
        The differentiable sum, None where the kernel cannot express the head (a factor on the logits).
    """
    if head.scale != 1.0:
        return None
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    bias = head.module.bias
    loss = liger_fused_linear_cross_entropy(
        hidden.to(dtype),
        head.module.weight.to(dtype),
        labels,
        None if bias is None else bias.to(dtype),
        ignore_index=IGNORED,
        reduction="sum",
        softcap=head.softcap,
        accum_dtype=torch.float32,
    )
    return loss.float()
