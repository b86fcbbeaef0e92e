"""Watching for loss spikes and divergence."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import TrainingError


@dataclass
class SpikeGuard:
    """Decides for each optimiser step whether its gradient may be used.

    A loss that is not finite or far above chance stops the run before it touches the weights, a gradient
    norm that is not finite does so in the first step. Later, a step is skipped whose gradient norm is not
    finite, or is `factor` times the recent median with a loss above its own median; after `patience` skipped
    steps in a row the run stops.

    `rejects` decides where the numbers are, without waiting for them; `accept` decides alike and keeps the
    record, once they have arrived.

    Args:
        uniform: Loss of a uniform guess, log(vocabulary); thrice it (or thrice the first loss) is divergence.
        factor: How many medians are a spike; 0 switches spikes off.
        history: Steps the medians look back on.
        warmup: Steps before spikes are judged.
        patience: Skipped steps in a row before the run stops.
    """

    uniform: float = math.inf
    factor: float = 10.0
    history: int = 100
    warmup: int = 20
    patience: int = 10
    skipped: list[int] = field(default_factory=list)
    unlabelled: list[int] = field(default_factory=list)
    norms: deque[float] = field(default_factory=deque)
    losses: deque[float] = field(default_factory=deque)
    in_a_row: int = 0
    first: float | None = None

    def rejects(self, loss: Tensor, norm: Tensor, labels: int) -> Tensor:
        """Whether `accept` will refuse these values, or stop the run for them.

        Args:
            loss, norm: Scalars (float64, so that both judge alike) on any device.
            labels: Labelled tokens of the step.

        Returns:
            A bool scalar on that device. All earlier steps must have been given to `accept`.
        """
        bad = ~(torch.isfinite(loss) & torch.isfinite(norm)) | (loss > self._ceiling())
        if (limits := self._spike_limits()) is not None:
            bad |= (norm > limits[0]) & (loss > limits[1])
        return bad if labels else torch.ones_like(bad)

    def accept(self, step: int, loss: float, norm: float, labels: int) -> bool:
        """Judge one step.

        Args:
            step: Number of the step, from 1.
            loss: Mean loss over the step's labelled tokens.
            norm: Gradient norm before clipping.
            labels: Labelled tokens of the step.

        Returns:
            Whether the optimiser may use the gradient.

        Raises:
            TrainingError: Not finite, or too many skipped in a row.
        """
        if labels == 0:
            self.unlabelled.append(step)
            return False
        broken = not math.isfinite(norm)
        if loss > self._ceiling() or not math.isfinite(loss) or (broken and not self._skips()):
            raise TrainingError(
                f"loss {loss:g}, gradient norm {norm:g} at step {step}",
                where="uptrain",
                fix="no weight has moved yet: look for values that are not finite in the model and its teacher"
                if self.first is None
                else "lower learning_rate or lengthen warmup_steps; checkpoints saved before are kept",
            )
        self.first = loss if self.first is None else self.first
        limits = self._spike_limits()
        if broken or (limits is not None and norm > limits[0] and loss > limits[1]):
            self.skipped.append(step)
            self.in_a_row += 1
            if self.in_a_row >= self.patience:
                raise TrainingError(
                    f"{self.patience} steps in a row spiked, the last at step {step} with loss {loss:.3g} "
                    f"(median {statistics.median(self.losses):.3g}) and gradient norm {norm:.3g} "
                    f"(median {statistics.median(self.norms):.3g})",
                    where="uptrain",
                    fix="lower learning_rate; checkpoints saved before are kept",
                )
            return False
        self.in_a_row = 0
        for values, value in ((self.norms, norm), (self.losses, loss)):
            values.append(value)
            if len(values) > self.history:
                values.popleft()
        return True

    def _skips(self) -> bool:
        """Whether a gradient that is not finite is skipped: one batch of many, not the model."""
        return bool(self.factor) and self.first is not None

    def _ceiling(self) -> float:
        """A loss above this is divergence; the first loss is none."""
        return math.inf if self.first is None else 3 * max(self.uniform, self.first)

    def _spike_limits(self) -> tuple[float, float] | None:
        """Norm and loss that a spike exceeds, None before there is a history."""
        if not self.factor or len(self.norms) < self.warmup:
            return None
        return self.factor * statistics.median(self.norms), statistics.median(self.losses)

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to judge alike."""
        return {
            "skipped": self.skipped,
            "unlabelled": self.unlabelled,
            "norms": list(self.norms),
            "losses": list(self.losses),
            "in_a_row": self.in_a_row,
            "first": self.first,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore `state()`."""
        self.skipped, self.unlabelled = list(state["skipped"]), list(state["unlabelled"])
        self.norms, self.losses = deque(state["norms"]), deque(state["losses"])
        self.in_a_row, self.first = state["in_a_row"], state["first"]


class AsyncScalars:
    """Numbers on their way from the device; waiting for them does not hold up what was queued after them.

    Args:
        values: A small tensor.
    """

    def __init__(self, values: Tensor) -> None:
        self.event, self.values = None, values
        if values.is_cuda:
            self.values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self.values.copy_(values, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    def wait(self) -> list[float]:
        """The numbers."""
        if self.event is not None:
            self.event.synchronize()
        return self.values.tolist()
