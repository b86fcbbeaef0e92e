"""Validation rows on their way through the original, the merged and the fitted model, and the losses at the end."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..evaluation.metrics import Positions
from ..reconstruct.hidden_states import Stream
from ..reconstruct.row_store import Memory
from .inputs import LABELS, Inputs

LOGITS = {"cpu": 2**26, "cuda": 2**28}  # logits of one batch of validation rows that exist at a time


class Validation:
    """The hidden states of each model on the validation rows, all before the same block.

    Args:
        rows: What the models read, with targets.
        teacher, student: The original and the converted model.
        blocks: Paths of their blocks.
        vocabulary: Logits of a position.
        device: Where the models run.
        fitted: Whether modules are fitted: then the merged model is one of its own.
        masked: As in `Stream`.
    """

    def __init__(
        self,
        rows: Inputs,
        teacher: Any,
        student: Any,
        blocks: list[str],
        vocabulary: int,
        device: torch.device,
        fitted: bool,
        masked: bool,
    ) -> None:
        self.device = device
        beside, self.rows, self.positions = Memory("device", device), rows, Positions()
        size = max(1, LOGITS.get(device.type, LOGITS["cuda"]) // (rows.window * vocabulary))
        self.streams = {
            name: Stream(model, rows.read, size, blocks, beside, chained=True, masked=masked)
            for name, model in (("original", teacher), ("merged", student), ("fitted", student))
            if fitted or name != "fitted"
        }

    def advance(self, *names: str) -> None:
        """Move some of the models past the block, with the weights that it has now."""
        for name in names:
            if name in self.streams:
                self.streams[name].advance()

    @property
    def merged(self) -> Tensor | None:
        """Hidden states `[N, T, D]` of the merged, unfitted model, whose weights nobody keeps; None where they are lost."""
        return next(iter(self.streams["merged"].rows.values())).data if "merged" in self.streams else None

    def restore(self, merged: Tensor | None, last: bool) -> None:
        """Move all past a block that an earlier run finished, which has its final weights.

        Args:
            merged: What `merged` was after it, where that was kept.
            last: Whether the next block is made anew: it needs `merged`, without which that model is left out.
        """
        self.advance("original", "fitted")
        own, fitted = self.streams["merged"], self.streams.get("fitted")
        if fitted is None:
            own.advance()
        elif merged is not None:
            own.jump(merged.to(self.device), fitted)
        elif last:
            del self.streams["merged"]
        else:
            own.skip(fitted)

    def losses(self) -> dict[str, float]:
        """Loss of each model, after the last block."""
        return {
            name: stream_loss(stream, self.rows, self.positions if name == "original" else None)
            for name, stream in self.streams.items()
        }


@torch.no_grad()
def stream_loss(stream: Stream, kept: Inputs, positions: Positions | None = None) -> float:
    """`held_out_loss` from the hidden states after a model's last block.

    Args:
        stream: At the end of its model, on the rows of `kept`.
        kept: Rows with their targets.
        positions: Receives the losses by length of context.
    """
    targets = kept.rows[:, 1:] if isinstance(kept.rows, Tensor) else kept.rows[LABELS]
    total, count = 0.0, 0
    for i in range(len(stream.batches)):
        logits = stream.logits(i)
        labels = targets[i * stream.size : i * stream.size + len(logits)].to(logits.device)
        losses = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100
        ).double()
        total += float(losses.sum())
        if positions is not None and isinstance(kept.rows, Tensor):
            context = torch.arange(1, labels.shape[1] + 1).repeat(len(labels))
            positions.add(losses.cpu().numpy(), context.numpy())
        count += int((labels != -100).sum())
    return total / count
