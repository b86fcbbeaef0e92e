"""The Triton kernel of `few_rows`, imported where there is Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def product(  # type: ignore[no-untyped-def]  # Triton takes no other annotations
    x, w, y, rows, columns, depth,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, OVERLAPPED: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """`y[rows, columns] = x[rows, depth] @ w[columns, depth].T`, one program for BLOCK_N columns.

    A weight is read once, so that it is memory that takes the time. OVERLAPPED asks for the first AHEAD blocks of the weight,
    which no other kernel writes, before the kernel that makes `x` has ended; the next kernel may start only after that.
    """
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, BLOCK_M)
    inner = tl.arange(0, BLOCK_K)
    if OVERLAPPED:
        line = tl.arange(0, BLOCK_K // 64) * 64  # 128 bytes
        for i in tl.static_range(AHEAD):
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l",
                [w + column[:, None] * depth + (i * BLOCK_K + line)[None, :]],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
        gdc_wait()
        gdc_launch_dependents()
    x_at = x + row[:, None] * depth + inner[None, :]
    w_at = w + column[:, None] * depth + inner[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for i in tl.range(0, depth, BLOCK_K, num_stages=STAGES):
        some = tl.load(x_at + i, mask=row[:, None] < rows, other=0.0)
        total = tl.dot(some, tl.load(w_at + i, eviction_policy="evict_first").T, total)
    at = y + row[:, None] * columns + column[None, :]
    tl.store(at, total.to(y.dtype.element_ty), mask=row[:, None] < rows)
