"""All fitted projections together: end to end, on the original's predictions for the calibration text."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div

from ..architectures import AttentionSpec, find_attention_modules
from ..calibration import Batch, Progress, module_key
from ..config.reconstruct import ReconstructConfig
from .driver import split_batches
from .hidden_states import slice_rows
from .regress import minimise, row_order
from .train_state import autocast, float32, frozen, repeatable, trained_parameters

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
    train, held_out = split_batches(inputs, config)
    size = config.batch_size
    seen = slice_rows(inputs, train.stop * size)
    kept = _rows(inputs, torch.arange(train.stop * size, held_out.stop * size))
    modules = find_attention_modules(student_spec or spec, student.state_dict().keys())
    modules = [module for module in modules if only is None or module_key(module) in only]
    parameters = [p for s in modules for p in trained_parameters(student.get_submodule(s.path), s)]
    order = row_order(train.stop * size, size, config.seed)
    device = next(student.parameters()).device

    def divergence(batch: Batch) -> Tensor:
        """Mean KL divergence over the tokens of some rows."""
        batch = {name: x.to(device) for name, x in batch.items()}
        with autocast(next(student.parameters())):
            with torch.no_grad():
                wanted = teacher(**batch, use_cache=False).logits.float().log_softmax(-1)
            made = student(**batch, use_cache=False).logits.float().log_softmax(-1)
        return kl_div(made.flatten(0, -2), wanted.flatten(0, -2), reduction="batchmean", log_target=True)

    done = 0

    def backward() -> None:
        nonlocal done
        for share, batch in _pieces(teacher, _rows(seen, next(order))):
            (divergence(batch) * share).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        done += 1
        if progress:
            progress(done, config.distill_steps)

    @torch.no_grad()
    def validate() -> float:
        return sum(share * float(divergence(batch)) for share, batch in _pieces(teacher, kept))

    knobs = replace(config, steps=config.distill_steps, learning_rate=config.distill_rate, relative=False)
    with frozen(teacher, student), repeatable(), float32(parameters), torch.enable_grad():
        before = validate()
        steps = minimise(parameters, backward, validate, knobs)
        return Distilled(before, validate(), steps)


def _rows(inputs: Batch | Tensor, index: Tensor) -> Batch:
    rows = {"input_ids": inputs} if isinstance(inputs, Tensor) else inputs
    return {name: x[index.to(x.device)] for name, x in rows.items()}


def _pieces(model: Any, batch: Batch) -> Iterator[tuple[float, Batch]]:
    """A batch in pieces whose logits fit, each with its share of the rows."""
    rows = next(iter(batch.values()))
    table = model.get_output_embeddings()
    device = next(model.parameters()).device.type
    each = rows.shape[1] * (table.weight.shape[0] if table is not None else 2**16)
    size = max(1, LOGITS.get(device, LOGITS["default"]) // each)
    for start in range(0, len(rows), size):
        piece = {name: x[start : start + size] for name, x in batch.items()}
        yield len(next(iter(piece.values()))) / len(rows), piece
