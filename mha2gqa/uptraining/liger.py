"""Liger's fused linear cross-entropy in place of our chunks, where a run asks for Liger's kernels."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from .losses import IGNORE_INDEX, Head

# The one would replace the forward of the whole model, which returns our loss; the other, Granite's default,
# torch's own cross_entropy for the whole process.
OWN_LOSS = {"fused_linear_cross_entropy": False, "cross_entropy": False}


def require_liger() -> None:
    """Say what to install.

    Raises:
        UsageError: liger-kernel is not installed.
    """
    if find_spec("liger_kernel") is None:
        raise UsageError(
            "needs the package liger-kernel", where="use_liger_kernel", fix="pip install liger-kernel"
        )


@contextmanager
def liger_withdrawn(model: Any) -> Iterator[None]:
    """Take Liger's kernels out of a model and of its modeling module again.

    They run on GPUs only, while a merge, a check or the user may want a model of that class on a CPU.

    Args:
        model: The model that is trained inside, plain or of peft.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    names = vars(sys.modules[type(base).__module__])
    before = dict(names)
    try:
        yield
    finally:
        names.update(before)
        for part in model.modules():
            forward = part.__dict__.get("forward")
            if (getattr(forward, "__module__", None) or "").startswith("liger_kernel"):
                for name in ("forward", "extra_repr", "_get_name"):
                    part.__dict__.pop(name, None)


def liger_cross_entropy(hidden: Tensor, labels: Tensor, head: Head, dtype: torch.dtype) -> Tensor | None:
    """Summed next-token loss by Liger's kernel, in `dtype` products with float32 sums.

    Args:
        hidden: Last hidden states `[N, D]`.
        labels: Next tokens `[N]`, `IGNORE_INDEX` where masked.
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
        ignore_index=IGNORE_INDEX,
        reduction="sum",
        softcap=head.softcap,
        accum_dtype=torch.float32,
    )
    return loss.float()
