"""FLOPs of a token, and tokens per second of a run."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..data.spans import noise_counts
from .budget import PairBudget
from .teacher import Teacher

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


def forward_flops(model: Any, window: int, pairs: PairBudget | None = None) -> float:
    """Forward FLOPs of one token: 2 per weight that multiplies, 4 L H d T for attention.

    On pairs a token is a target token, and the encoder's work is its too.

    An untied input embedding is only looked up and does not count. Attention counts the whole square,
    as is usual for MFU, though a causal kernel does half of it.
    """
    if pairs is not None:
        return _encoder_decoder_flops(model, pairs.encoder, pairs.decoder) / pairs.targets
    if (
        model.config.is_encoder_decoder
    ):  # under span corruption they see other numbers of ids than the text has
        noise, spans = noise_counts(window)
        return _encoder_decoder_flops(model, window - noise + spans + 1, noise + spans + 1) / window
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


def flops_per_token(model: Any, window: int, pairs: PairBudget | None = None) -> float:
    """Forward and backward FLOPs of one token: thrice the forward pass, less 2 per frozen weight."""
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    frozen = sum(_size(p) for p in model.parameters() if not p.requires_grad)
    if embedding is not None and head is not None and head.weight is not embedding.weight:
        frozen -= 0 if embedding.weight.requires_grad else embedding.weight.numel()
    return 3 * forward_flops(model, window, pairs) - 2.0 * frozen


def _encoder_decoder_flops(model: Any, source: float, target: float) -> float:
    """Forward FLOPs of an encoder over `source` positions and a decoder over `target`."""

    def weights(module: Any) -> int:
        return sum(p.numel() for name, p in module.named_parameters() if "embed" not in name)

    head = model.get_output_embeddings()
    config = model.config
    layers = getattr(config, "num_decoder_layers", None) or getattr(config, "decoder_layers", None)
    width = config.num_attention_heads * (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    decoder = weights(model.get_decoder()) + (0 if head is None else head.weight.numel())
    square = config.num_hidden_layers * source * source + (layers or config.num_hidden_layers) * target * (
        target + source
    )
    return 2.0 * (weights(model.get_encoder()) * source + decoder * target) + 4.0 * width * square


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


def training_flops(
    model: Any, teacher: Teacher | None, window: int, pairs: PairBudget | None = None
) -> float:
    """Model FLOPs of one trained token, with the teacher's forward pass where there is one."""
    flops = flops_per_token(model, window, pairs)
    return flops if teacher is None else flops + forward_flops(teacher.model, window, pairs)
