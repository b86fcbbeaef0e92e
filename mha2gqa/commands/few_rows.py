"""Products of a few rows with a weight, by a kernel of our own where it is faster than the library's.

A decode step multiplies as many rows as there are sequences with every weight, and a library's kernels for so few leave
memory idle while one ends and the next begins. This one asks for its weight before its rows are there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .fixed_cache import suppress_refusal, timed
from .merged import Product

MOST_ROWS = 32
ENOUGH = 4e8  # bytes of weights that are read in turn while a kernel is timed: more than a GPU's cache holds
AHEAD = 4  # blocks of a weight that are asked for early


@dataclass(frozen=True)
class Blocks:
    """How the kernel cuts a product: columns and depth of a block, blocks that are on their way, warps."""

    columns: int
    depth: int
    stages: int
    warps: int


CHOICES = (
    Blocks(32, 128, 4, 4), Blocks(32, 256, 3, 4), Blocks(16, 256, 4, 4), Blocks(64, 128, 4, 4), Blocks(32, 128, 5, 8),
    Blocks(32, 256, 4, 8),
)  # fmt: skip


@torch.library.custom_op("mha2gqa::few_rows", mutates_args=())
def few_rows(x: Tensor, weight: Tensor, columns: int, depth: int, stages: int, warps: int) -> Tensor:
    """`x[rows, D] @ weight[N, D].T`; by torch where it is not on a GPU."""
    if x.device.type != "cuda":
        return F.linear(x, weight)
    from .few_rows_kernel import product

    (rows, inner), outer = x.shape, weight.shape[0]
    y = torch.empty(rows, outer, dtype=x.dtype, device=x.device)
    product[(outer // columns,)](
        x, weight, y, rows, outer, inner, BLOCK_M=16 if rows <= 16 else MOST_ROWS, BLOCK_N=columns, BLOCK_K=depth,
        STAGES=stages, OVERLAPPED=True, AHEAD=AHEAD, num_warps=warps, launch_pdl=True,
    )  # fmt: skip
    return y


@few_rows.register_fake
def _(x: Tensor, weight: Tensor, columns: int, depth: int, stages: int, warps: int) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def product_by(table: dict[tuple[int, int], Blocks]) -> Product:
    """A product that takes our kernel for weights of the shapes of a table."""

    def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        blocks = table.get((weight.shape[0], weight.shape[1]))
        rows = x.numel() // x.shape[-1]
        if blocks is None or bias is not None or rows > MOST_ROWS:
            return F.linear(x, weight, bias)
        flat = x.reshape(rows, x.shape[-1]).contiguous()
        found = few_rows(flat, weight, blocks.columns, blocks.depth, blocks.stages, blocks.warps)
        return found.view(*x.shape[:-1], weight.shape[0])

    return product


def quickest_products(weights: Iterable[Tensor], rows: int) -> dict[tuple[int, int], Blocks]:
    """Shapes of weights for which our kernel is faster than the library's, with its best blocks.

    Args:
        weights: Of a model's layers, on a GPU.
        rows: Sequences.
    """
    table: dict[tuple[int, int], Blocks] = {}
    if rows > MOST_ROWS or find_spec("triton") is None:
        return table
    by_shape: dict[tuple[int, int], list[Tensor]] = {}
    for weight in weights:
        if weight.dtype in (torch.bfloat16, torch.float16) and weight.is_contiguous():
            by_shape.setdefault((weight.shape[0], weight.shape[1]), []).append(weight)
    for shape, found in by_shape.items():
        used = found[: max(1, int(ENOUGH / found[0].nbytes))]
        x = torch.randn(rows, shape[1], dtype=used[0].dtype, device=used[0].device)
        seconds: dict[Blocks | None, float] = {}
        seconds[None] = timed(lambda: [F.linear(x, w) for w in used])  # noqa: B023
        for blocks in CHOICES:
            if shape[0] % blocks.columns or shape[1] % blocks.depth:
                continue
            product = product_by({shape: blocks})
            with suppress_refusal():
                seconds[blocks] = timed(lambda: [product(x, w, None) for w in used])  # noqa: B023
        best = min(seconds, key=seconds.__getitem__)
        if best is not None:
            table[shape] = best
    return table


def use_product(layer: nn.Module, product: Product) -> list[nn.Linear]:
    """Let the plain linear layers in a layer multiply by `product`; those whose forward is their own already stay."""
    found: list[nn.Linear] = []
    for module in layer.modules():
        if type(module) is nn.Linear and "forward" not in module.__dict__:
            module.forward = _forward(module, product)  # type: ignore[method-assign]
            found.append(module)
    return found


def _forward(module: nn.Linear, product: Product) -> Any:
    def forward(x: Tensor) -> Tensor:
        return product(x, module.weight, module.bias)

    return forward


__all__ = ["CHOICES", "Blocks", "few_rows", "product_by", "quickest_products", "use_product"]
