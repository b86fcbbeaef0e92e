"""Hooks that add up moments while a model runs, its attention observed."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..checkpoints.loading import quiet
from ..errors import CheckpointError
from .clipping import PARTS, Clip
from .second_moments import SecondMoments

IMPLEMENTATION = "mha2gqa_observed"  # the name our attention function is registered under


@dataclass(frozen=True)
class Padding:
    """Which positions of a batch are real, `[B, S]` and `[B, T]` of ones and zeros; None for all."""

    encoder: Tensor | None = None
    decoder: Tensor | None = None


def mark_padding(accumulators: Mapping[str, Accumulator], batch: Mapping[str, Tensor]) -> None:
    """Tell accumulators which positions of the batch that comes next are real.

    Keys and values of self-attention, and all queries, are the decoder's; those of cross-attention the encoder's.

    Args:
        accumulators: Of `observing`.
        batch: Keyword tensors of the model's forward. Without `decoder_input_ids` the model is a decoder, and
            `attention_mask` its own.
    """
    encoder, decoder = batch.get("attention_mask"), batch.get("decoder_attention_mask")
    seq2seq = "decoder_input_ids" in batch
    padding = Padding(encoder, decoder) if seq2seq else Padding(None, encoder)
    for accumulator in accumulators.values():
        accumulator.padding = padding


def _fitting(mask: Tensor | None, states: Tensor) -> Tensor | None:
    """A mask for states `[B, S, …]`, None where all is real.

    Where convolutions have made states of samples, as many are real as the share of samples that is.
    """
    if mask is None or bool(mask.all()) or len(mask) != len(states):
        return None
    count = states.shape[1]
    if mask.shape[1] > count:
        real = (mask.sum(1, keepdim=True) * count / mask.shape[1]).ceil()
        mask = torch.arange(count, device=mask.device) < real
    return mask.to(states.device, torch.float64) if mask.shape[1] == count else None


class Accumulator:
    """Running sums of one module."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.inputs: Tensor | None = None
        self.mixed: Tensor | None = None
        self.queries: Tensor | None = None
        self.tokens = self.read = 0
        self.cross = False
        self.current: Tensor | None = None  # [B, S, n] of the pass that is running
        self.received: Tensor | None = None  # [B, S] attention received in it
        self.padding = Padding()  # of the batch that is running
        self.keys: Tensor | None = None  # [B, S] which of `current` are real; None for all
        self.clipped: Tensor | None = None  # [3, 2] of q, k, v: entries beyond the model's bound, and all

    def see(self, states: Tensor, cross: bool) -> None:
        """Inputs of keys and values, `[B, S, D]`."""
        x = states.detach().to(torch.float64)
        self.current = torch.cat([x, x.new_ones(*x.shape[:2], 1)], 2)
        self.received = None
        self.cross = cross
        self.keys = _fitting(self.padding.encoder if cross else self.padding.decoder, x)

    def attend(self, queries: Tensor, weights: Tensor) -> None:
        """Queries `[B, H, T, d]` and attention weights `[B, H, T, S]`."""
        assert self.current is not None
        real = _fitting(self.padding.decoder, queries.transpose(1, 2))  # [B, T]
        if real is not None:
            queries, weights = queries * real[:, None, :, None], weights * real[:, None, :, None]
        scores = weights.detach().flatten(1, 2).float()  # [B, H T, S]
        self.received = scores.mean(1).to(torch.float64) * scores.shape[2]  # [B, S], about 1 on average
        if real is not None:
            self.received *= real.shape[1] / real.sum(1, keepdim=True)
        if self.keys is not None:
            self.received *= self.keys.sum(1, keepdim=True) / self.keys.shape[1]
        mixed = self._mixed(scores, weights.shape[1])
        q = queries.detach().transpose(0, 1).flatten(1, 2).to(torch.float64)  # [H, B T, d]
        second = q.mT @ q
        self.mixed = mixed if self.mixed is None else self.mixed.add_(mixed)
        self.queries = second if self.queries is None else self.queries.add_(second)
        self.read += queries.shape[0] * queries.shape[2] if real is None else int(real.sum())

    def _mixed(self, scores: Tensor, heads: int) -> Tensor:
        """Sum of `y yᵀ` over the inputs y that queries average, `[n, n]`, from their weights `[B, H T, S]`; mean of heads."""
        assert self.current is not None
        if scores.shape[1] < scores.shape[2]:  # few queries on much sound: the averages themselves
            y = scores.to(torch.float64) @ self.current  # [B, H T, n]
            return (y.mT @ y).sum(0) / heads
        gram = (scores.mT @ scores).to(torch.float64) / heads  # [B, S, S]
        mixed = sum(x.T @ (g @ x) for g, x in zip(gram, self.current, strict=True))
        assert isinstance(mixed, Tensor)
        return mixed

    def leave(self) -> None:
        """The call is over."""
        assert self.current is not None
        flat = self.current.flatten(0, 1)
        weighted = flat if self.received is None else flat * ((1 + self.received) / 2).flatten()[:, None]
        if self.keys is not None:
            weighted = weighted * self.keys.flatten()[:, None]
        gram = weighted.T @ flat
        self.inputs = gram if self.inputs is None else self.inputs.add_(gram)
        self.tokens += len(flat) if self.keys is None else int(self.keys.sum())
        self.current = self.received = self.keys = None

    def count(self, part: int, beyond: Tensor, width: int) -> None:
        """Entries beyond the bound of `clip_qkv` at each position, `[B, T]`, of `width` that each has."""
        real = _fitting(self.padding.decoder, beyond)
        if self.clipped is None:
            self.clipped = torch.zeros(len(PARTS), 2, dtype=torch.int64, device=beyond.device)
        positions = beyond.numel() if real is None else int(real.sum())
        self.clipped[part, 0] += (beyond if real is None else beyond * real.long()).sum()
        self.clipped[part, 1] += positions * width

    def pool(self, all_reduce: Callable[[Tensor], Tensor]) -> None:
        """Add up the sums of all processes.

        Args:
            all_reduce: Sums a tensor over the processes, in place.
        """
        for x in (self.inputs, self.mixed, self.queries, self.clipped):
            if x is not None:
                all_reduce(x)
        if self.inputs is not None:
            counts = all_reduce(torch.tensor([self.tokens, self.read], device=self.inputs.device))
            self.tokens, self.read = (int(n) for n in counts)

    def finish(self) -> SecondMoments:
        """Means over tokens."""
        if self.inputs is None:
            raise CheckpointError(
                "was never run on the calibration text", where=self.path, fix="this layout is not supported"
            )

        def mean(x: Tensor | None, count: int) -> Tensor | None:
            return None if x is None else (x + x.mT) / (2 * count)

        inputs = mean(self.inputs, self.tokens)
        assert inputs is not None
        clipped = None if self.clipped is None else self.clipped.cpu()
        return SecondMoments(
            inputs,
            mean(self.mixed, self.read),
            mean(self.queries, self.read),
            self.tokens,
            self.cross,
            clipped,
        )


def _key_states(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, bool]:
    """What keys and values of this call are made of, and whether that is another sequence."""
    bound = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    bound = {**bound, **bound.get("kwargs", {})}
    for name in ("key_value_states", "encoder_hidden_states"):
        if bound.get(name) is not None:
            return bound[name], True
    return next(iter(bound.values())), False


@contextlib.contextmanager
def observing(
    model: Any, modules: Mapping[str, torch.nn.Module], clip: Clip | None = None
) -> Iterator[dict[str, Accumulator]]:
    """While open, every forward pass of `model` adds to the accumulators, one per module.

    The model's attention runs through its own eager function (soft caps, sinks and position biases
    included), in float32, and is put back afterwards.

    Args:
        model: The model.
        modules: Path -> attention module.
        clip: Where the model bounds the entries of q, k and v: how often that acts is counted.
    """
    from transformers import AttentionInterface, PreTrainedModel
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    found = {path: Accumulator(path) for path in modules}
    running: list[Accumulator] = []

    def attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kw: Any,
    ) -> tuple[Tensor, Tensor]:
        eager = getattr(module, "eager_attention", None)  # of exported modules; stock ones repeat nothing
        eager = eager or vars(sys.modules[type(module).__module__])["eager_attention_forward"]
        out, weights = eager(module, query.float(), key.float(), value.float(), attention_mask, **kw)
        if running:
            running[-1].attend(query, weights)
        return out.to(query.dtype), weights

    def before(accumulator: Accumulator) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            accumulator.see(*_key_states(module, args, kwargs))
            running.append(accumulator)

        return hook

    def after(*_: Any) -> None:
        running.pop().leave()

    AttentionInterface.register(IMPLEMENTATION, attention)
    AttentionMaskInterface.register(IMPLEMENTATION, ALL_MASK_ATTENTION_FUNCTIONS["eager"])

    inner = [m.config for m in model.modules() if isinstance(m, PreTrainedModel)]
    own = [config._attn_implementation for config in inner]
    hooks = []
    try:
        with quiet():
            model.set_attn_implementation(IMPLEMENTATION)
        for path, module in modules.items():
            hooks.append(module.register_forward_pre_hook(before(found[path]), with_kwargs=True))
            hooks.append(module.register_forward_hook(after))
            hooks += [] if clip is None else clip.watch(path, module, found[path].count)
        yield found
    finally:
        for hook in hooks:
            hook.remove()
        for config, name in zip(inner, own, strict=True):  # from the outermost, which tells its parts
            config._attn_implementation = name
