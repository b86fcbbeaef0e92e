"""Whether a model's loss rises with the length of context: its config may state more than it was trained on."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .evaluate_result import PositionLoss

RISE = 0.2  # nats: more than text of another kind at other places makes of it
ENOUGH = 1024  # tokens from which a mean is worth comparing


def context_warnings(name: str, curve: Sequence[PositionLoss]) -> list[str]:
    """What to know where the longest contexts are harder for a model than shorter ones.

    Args:
        name: What the model is called.
        curve: Its mean loss by length of context, shortest first.

    Returns:
        One sentence, or none: a model trained on such lengths reads on with less and less loss.

    Example:
        >>> context_warnings("m", [PositionLoss(257, 512, 9000, 3.3), PositionLoss(513, 1024, 9000, 4.6)])[0][:41]
        'm: the loss rises with the context (3.300'
    """
    known = [point for point in curve if point.tokens >= ENOUGH and math.isfinite(point.loss)]
    if not known:
        return []
    best, last = min(known, key=lambda point: point.loss), known[-1]
    if last.loss - best.loss < RISE:
        return []
    reach = max(point.high for point in known if point.loss - best.loss < RISE / 2)
    return [
        f"{name}: the loss rises with the context ({best.loss:.4f} at {best.low:,} to {best.high:,} tokens, "
        f"{last.loss:.4f} at {last.low:,} to {last.high:,}): the model was probably trained on shorter sequences; "
        f"use windows of {reach:,} tokens"
    ]
