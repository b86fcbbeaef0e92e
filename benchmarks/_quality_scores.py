"""Loss, loss by position, and divergence from the original on token blocks, apart from the product's own code."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

EDGES = (0, 32, 64, 128, 256, 512, 1024, 2048)


def position_edges(window: int) -> list[int]:
    """Where the ranges of positions begin and end."""
    return [*(edge for edge in EDGES if edge < window), window]


@torch.no_grad()
def scores(model: Any, original: Any | None, blocks: Tensor, batch_tokens: int = 16_384) -> dict[str, Any]:
    """Score every position of `blocks` in float32.

    Args:
        model: A causal model in float32.
        original: What its predictions are compared with; None leaves the divergence out.
        blocks: `[N, T + 1]`.
        batch_tokens: Tokens per forward pass.

    Returns:
        `loss` (nats per token), `kl` (of the original's predictions to the model's, nats per token) and
        `loss_by_position`: mean loss of the positions between two edges.
    """
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # training in this process may have allowed TF32
    try:
        return _scores(model, original, blocks, batch_tokens)
    finally:
        torch.set_float32_matmul_precision(precision)


def _scores(model: Any, original: Any | None, blocks: Tensor, batch_tokens: int) -> dict[str, Any]:
    window, device = blocks.shape[1] - 1, next(model.parameters()).device
    by_position = torch.zeros(window, dtype=torch.float64)
    divergence = 0.0
    for batch in blocks.split(max(1, batch_tokens // window)):
        ids = batch.to(device)
        logs = model(input_ids=ids[:, :-1], use_cache=False).logits.float().log_softmax(-1)
        nll = -logs.gather(2, ids[:, 1:, None])[..., 0]
        by_position += nll.double().sum(0).cpu()
        if original is not None:
            wanted = original(input_ids=ids[:, :-1], use_cache=False).logits.float().log_softmax(-1)
            divergence += float((wanted.exp() * (wanted - logs)).sum(-1).double().sum())
    edges = position_edges(window)
    each = by_position / len(blocks)
    out: dict[str, Any] = {"loss": float(each.mean())}
    if original is not None:
        out["kl"] = divergence / (len(blocks) * window)
    out["loss_by_position"] = {f"{a}-{b}": round(float(each[a:b].mean()), 5) for a, b in pairwise(edges)}
    return out
