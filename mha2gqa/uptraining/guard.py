"""What watches a run: loss spikes, interruption, speed."""

from __future__ import annotations

import math
import signal
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from ..data.spans import noise_counts
from ..errors import TrainingError

# Dense bf16 peak of one device in FLOP/s, by a part of its name (vendor data sheets, without sparsity).
PEAK_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "4090": 165e12,
    "3090": 71e12,
    "MI300X": 1307e12,
}


class Interrupted(TrainingError):
    """The run was told to stop; everything needed to go on is saved."""

    exit_code = 130


@dataclass
class SpikeGuard:
    """Decides for each optimiser step whether its gradient may be used.

    A loss or gradient norm that is not finite, or a loss far above chance, stops the run before it touches
    the weights. A gradient norm `factor` times the recent median, with a loss above its own median, is
    skipped; after `patience` skipped steps in a row the run stops.

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
        if loss > self._ceiling() or not (math.isfinite(loss) and math.isfinite(norm)):
            raise TrainingError(
                f"loss {loss:g}, gradient norm {norm:g} at step {step}",
                where="uptrain",
                fix="no weight has moved yet: look for values that are not finite in the model and its teacher"
                if self.first is None
                else "lower learning_rate or lengthen warmup_steps; checkpoints saved before are kept",
            )
        self.first = loss if self.first is None else self.first
        limits = self._spike_limits()
        if limits is not None and norm > limits[0] and loss > limits[1]:
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


class Reading:
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


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collect SIGTERM and the first SIGINT instead of dying of them.

    Yields:
        A list that receives the signal numbers; a second SIGINT interrupts as usual.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, before[signal.SIGINT])

    for number in before:
        signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def forward_flops(model: Any, window: int) -> float:
    """Forward FLOPs of one token: 2 per weight that multiplies, 4 L H d T for attention.

    An untied input embedding is only looked up and does not count. Attention counts the whole square,
    as is usual for MFU, though a causal kernel does half of it.
    """
    if model.config.is_encoder_decoder:
        return _encoder_decoder_flops(model, window)
    config = model.config.get_text_config()
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    weights = sum(_size(p) for p in model.parameters())
    if head is not None and embedding is not None and head.weight is not embedding.weight:
        weights -= embedding.weight.numel()
    heads = getattr(config, "num_attention_heads", 0)
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // max(1, heads))
    return 2.0 * weights + 4.0 * config.num_hidden_layers * width * window


def _size(parameter: Tensor) -> int:
    """Weights of a parameter; one in 4 bits holds two to an element."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else math.prod(state.shape)


def flops_per_token(model: Any, window: int) -> float:
    """Forward and backward FLOPs of one token: thrice the forward pass, less 2 per frozen weight."""
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    frozen = sum(_size(p) for p in model.parameters() if not p.requires_grad)
    if embedding is not None and head is not None and head.weight is not embedding.weight:
        frozen -= 0 if embedding.weight.requires_grad else embedding.weight.numel()
    return 3 * forward_flops(model, window) - 2.0 * frozen


def _encoder_decoder_flops(model: Any, window: int) -> float:
    """The same per token of text under span corruption: encoder and decoder see other numbers of ids."""
    noise, spans = noise_counts(window)
    read, said = window - noise + spans + 1, noise + spans + 1

    def weights(module: Any) -> int:
        return sum(p.numel() for name, p in module.named_parameters() if "embed" not in name)

    head = model.get_output_embeddings()
    config = model.config
    layers = getattr(config, "num_decoder_layers", None) or getattr(config, "decoder_layers", None)
    width = config.num_attention_heads * (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    decoder = weights(model.get_decoder()) + (0 if head is None else head.weight.numel())
    square = config.num_hidden_layers * read * read + (layers or config.num_hidden_layers) * said * (
        said + read
    )
    return (2.0 * (weights(model.get_encoder()) * read + decoder * said) + 4.0 * width * square) / window


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 peak of a device, None where it is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


class Meter:
    """Tokens per second since the last reading, without the time of evaluations and saves.

    Args:
        flops: Model FLOPs per token (with the teacher's forward where there is one).
        peak: Peak FLOP/s of all devices together, None where unknown.
    """

    def __init__(self, flops: float, peak: float | None) -> None:
        self.flops, self.peak = flops, peak
        self.reset(0)
        self.rates: list[float] = []

    def reset(self, tokens: int) -> None:
        """Start measuring at a token count."""
        self.tokens, self.since, self.paused = tokens, time.perf_counter(), 0.0

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave what happens inside out of the measured time."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.paused += time.perf_counter() - begin

    def read(self, tokens: int, left: int) -> dict[str, float]:
        """Speed since the last reading.

        Args:
            tokens: Tokens trained so far.
            left: Tokens still to train.

        Returns:
            `tokens_per_second`, `eta_seconds`, and `mfu`, `memory_gib` where they are known.
        """
        seconds = time.perf_counter() - self.since - self.paused
        rate = (tokens - self.tokens) / max(seconds, 1e-9)
        self.reset(tokens)
        found = {"tokens_per_second": rate, "eta_seconds": left / max(rate, 1e-9)}
        self.rates.append(rate)
        if self.peak is not None:
            found["mfu"] = rate * self.flops / self.peak
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            found["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return found
