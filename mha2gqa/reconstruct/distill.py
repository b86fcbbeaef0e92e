"""All fitted projections together: end to end, on the original's predictions for the calibration text."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div

from ..architectures import AttentionSpec, find_attention_modules
from ..calibration import Batch, Progress, module_key
from ..config.reconstruct import ReconstructConfig
from ..lm_head import ChunkedLogits, chunk_slices
from .calls import slice_rows
from .driver import split_batches, window_of
from .module_calls import MASKS, real_positions
from .regress import minimise, row_order
from .train_state import autocast, behind_masks, float32, frozen, repeatable, trained_parameters

LOGITS = {"cpu": 2**26, "default": 2**29}  # float32 logits of one model that exist at a time


@dataclass(frozen=True)
class Distilled:
    """What end-to-end training did.

    Args:
        before, after: KL divergence from the original's predictions on held-out blocks, nats per token.
        steps: Steps made.
    """

    before: float
    after: float
    steps: int


def distill(
    teacher: Any,
    student: Any,
    spec: AttentionSpec,
    inputs: Batch | Tensor,
    config: ReconstructConfig,
    progress: Progress | None = None,
    *,
    student_spec: AttentionSpec | None = None,
    only: Collection[str] | None = None,
) -> Distilled:
    """Train the projections of every attention module together; `student` changes in place.

    Args:
        teacher: The original model, left as it is.
        student: The merged and fitted model, on the same device.
        spec: The original's architecture.
        inputs: Token ids `[N, T]`, or keyword tensors of both models' forward with N rows each.
        config: `distill_steps`, `distill_rate`; batches, schedule, held-out blocks and patience as for modules.
        progress: Called after each step with `(steps done, steps)`.
        student_spec: The student's architecture, where it is another.
        only: Keys (`module_key`) of the modules to train; None trains all.

    Returns:
        Held-out divergence before and after.

    Raises:
        DataError: Fewer than two batches of blocks.

    Example:
        >>> distill(teacher, student, spec, blocks[:, :-1], ReconstructConfig(distill_steps=200))  # doctest: +SKIP
    """
    config = config.for_window(window_of(inputs))
    train, held_out = split_batches(inputs, config)
    size = config.batch_size
    seen = slice_rows(inputs, train.stop * size)
    kept = _rows(inputs, torch.arange(train.stop * size, held_out.stop * size))
    modules = find_attention_modules(student_spec or spec, student.state_dict().keys())
    modules = [module for module in modules if only is None or module_key(module) in only]
    parameters = [p for s in modules for p in trained_parameters(student.get_submodule(s.path), s)]
    order = row_order(train.stop * size, size, config.seed)
    outputs = _Outputs(teacher, student)

    done = 0

    def backward() -> None:
        nonlocal done
        outputs.divergence(_rows(seen, next(order)), learn=True)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        done += 1
        if progress:
            progress(done, config.distill_steps)

    @torch.no_grad()
    def validate() -> float:
        rows = len(next(iter(kept.values())))
        batches = [torch.arange(start, min(start + size, rows)) for start in range(0, rows, size)]
        weights = [_real_count(_rows(kept, index)) for index in batches]
        found = [outputs.divergence(_rows(kept, index)) for index in batches]
        return sum(weight / sum(weights) * x for weight, x in zip(weights, found, strict=True))

    knobs = replace(config, steps=config.distill_steps, learning_rate=config.distill_rate, relative=False)
    masks = not isinstance(inputs, Tensor) and any(name in inputs for name in MASKS)
    with (
        frozen(teacher, student),
        repeatable(),
        behind_masks(masks),
        float32(parameters),
        torch.enable_grad(),
    ):
        before = validate()
        steps = minimise(parameters, backward, validate, knobs)
        return Distilled(before, validate(), steps)


def _rows(inputs: Batch | Tensor, index: Tensor) -> Batch:
    rows = {"input_ids": inputs} if isinstance(inputs, Tensor) else inputs
    return {name: x[index.to(x.device)] for name, x in rows.items()}


def _real_count(batch: Batch) -> int:
    """Positions of the decoder that count."""
    real, read = real_positions(batch), batch.get("decoder_input_ids", next(iter(batch.values())))
    return read.shape[0] * read.shape[1] if real is None else int(real.sum())


class _Outputs:
    """What teacher and student predict for a batch, compared a chunk of positions at a time.

    Args:
        teacher, student: On one device.
    """

    def __init__(self, teacher: Any, student: Any) -> None:
        self.teacher, self.student = ChunkedLogits(teacher), ChunkedLogits(student)
        self.parameter = next(student.parameters())

    def divergence(self, batch: Batch, *, learn: bool = False) -> float:
        """Mean KL divergence over the tokens of some rows, nats; `learn` adds its gradient to the student's."""
        device = self.parameter.device
        batch = {name: x.to(device) for name, x in batch.items()}
        real = real_positions(batch)
        with autocast(self.parameter):
            with torch.no_grad():
                target = self.teacher.states(**batch)
            states = self.student.states(**batch)
        if real is not None and real.numel() == len(states):
            target, states = target[real.flatten()], states[real.flatten()]
        leaf = states.detach().requires_grad_(learn)
        total = torch.zeros((), dtype=torch.float64, device=device)
        limit = LOGITS.get(device.type, LOGITS["default"])
        for part in chunk_slices(len(leaf), self.student.vocabulary, device.type, limit):
            loss = self._chunk(target[part], leaf[part]) / len(leaf)
            if learn:
                loss.backward()
            total += loss.detach()
        if learn:
            states.backward(leaf.grad)
        return float(total)

    def _chunk(self, target: Tensor, states: Tensor) -> Tensor:
        """Summed KL divergence of some positions, from the states of both models."""
        with autocast(self.parameter):
            with torch.no_grad():
                expected = self.teacher.logits(target).float().log_softmax(-1)
            made = self.student.logits(states).float().log_softmax(-1)
        return kl_div(made, expected, reduction="sum", log_target=True)
