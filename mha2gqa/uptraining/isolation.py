"""Packed documents kept apart: proven on the model before it is relied on."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import UnsupportedModelError
from .batches import restarted_positions


@torch.no_grad()
def isolates_documents(model: Any) -> bool:
    """Whether position ids that start over keep packed documents apart in this model.

    Two rows share their second document and differ in the first: its hidden states must not.

    Args:
        model: A causal language model of transformers.
    """
    count = min(24, model.config.get_text_config().vocab_size)
    first = torch.arange(1, count)
    second = first.flip(0)
    eos = torch.zeros(1, dtype=torch.long)
    rows = torch.stack([torch.cat([head, eos, second]) for head in (first, first.roll(1))])
    rows = rows.to(next(model.parameters()).device)
    training = model.training
    model.eval()
    positions = restarted_positions(rows.cpu(), 0).to(rows.device)
    logits = model(input_ids=rows, position_ids=positions, use_cache=False).logits.float()
    model.train(training)
    a, b = logits[:, count:]  # both rows' second document
    return bool((a - b).abs().max() <= 1e-4 * b.abs().max().clamp_min(1e-6))


def require_isolation(model: Any) -> None:
    """Refuse a model in which packed documents would attend to each other.

    Raises:
        UnsupportedModelError: Its attention does not heed restarted positions.
    """
    try:
        apart = isolates_documents(model)
    except TypeError:  # its forward takes no position ids
        apart = False
    if not apart:
        raise UnsupportedModelError(
            f"packed documents cannot be kept apart in {type(model).__name__}",
            where="isolate_documents",
            fix="leave it out: documents then attend to what was packed before them, as in pretraining",
        )
