"""Forward passes to per-token losses: logits in float32, and only where scored."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import CheckpointError
from ..lm_head import ChunkedLogits, chunk_slices
from .batching import Batch, make_batches
from .protocols import Window

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOGIT_ELEMENTS = {"cpu": 2**24, "default": 2**27}  # float32 logits alive at once
MAX_IN_FLIGHT = 4  # batches whose results are still under way, so that a GPU always has work queued


# --- logits --------------------------------------------------------------------------------------------


class Scorer(ChunkedLogits):
    """Logits of chosen positions, slice by slice, in float32.

    Args:
        model: A model of transformers, in eval mode.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.device = next(model.parameters()).device
        self.elements = LOGIT_ELEMENTS.get(self.device.type, LOGIT_ELEMENTS["default"])

    def slices(self, batch: Batch, elements: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield `(slice of the N scored targets, float32 logits [n, V])`, n V at most `elements`."""
        positions = batch.positions.to(self.device, non_blocking=True)
        states = self.states(**self.inputs(batch)).index_select(0, positions)  # [N, D]
        for part in chunk_slices(len(states), self.vocabulary, self.device.type, elements):
            yield part, self.logits(states[part]).float()

    def inputs(self, batch: Batch) -> dict[str, Tensor]:
        """Keyword arguments of the model for a batch, on its device."""
        inputs = batch.inputs.to(self.device, non_blocking=True)
        if batch.encoder is None:
            return {"input_ids": inputs}
        read, mask = batch.encoder
        features = read.is_floating_point()
        name = self.model.main_input_name if features else "input_ids"
        dtype = self.model.dtype if features else None
        rows = {name: read.to(self.device, dtype, non_blocking=True), "decoder_input_ids": inputs}
        if mask is not None:
            rows["attention_mask"] = mask.to(self.device, non_blocking=True)
        return rows


# --- losses --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenScores:
    """Per scored target of one batch.

    Args:
        nll: float32 `[N]`, nats.
        reference_nll: The same of the reference model, or None.
        divergence: float32 `[N]`, KL(reference || model) in nats, or None.
        agreement: bool `[N]`, both models rank the same token first, or None.
    """

    nll: Tensor
    reference_nll: Tensor | None = None
    divergence: Tensor | None = None
    agreement: Tensor | None = None

    def fetch(self) -> Callable[[], TokenScores]:
        """Begin to copy the scores to the CPU; the function returned waits for them."""
        device = self.nll.device
        fields = (self.nll, self.reference_nll, self.divergence, self.agreement)
        queued = device.type == "cuda"
        copies = (None if x is None else x.to("cpu", non_blocking=queued) for x in fields)
        scores = TokenScores(*copies)  # type: ignore[arg-type]
        if not queued:
            return lambda: scores
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(device))

        def wait() -> TokenScores:
            copied.synchronize()
            return scores

        return wait


@torch.inference_mode()
def score_batch(head: Scorer, batch: Batch, reference: Scorer | None = None) -> TokenScores:
    """Losses of one batch, with the comparison to `reference` if given."""
    targets = batch.targets.to(head.device, non_blocking=True)
    if reference is None:
        slices = head.slices(batch, head.elements)
        losses = [F.cross_entropy(logits, targets[part], reduction="none") for part, logits in slices]
        return TokenScores(torch.cat(losses))
    columns: list[list[Tensor]] = [[], [], [], []]
    width = max(head.vocabulary, reference.vocabulary)
    limit = min(head.elements, reference.elements) // 2 // width  # positions of a slice, of both alike
    mine, theirs = (x.slices(batch, max(1, limit) * x.vocabulary) for x in (head, reference))
    pairs = zip(mine, theirs, strict=True)
    for (part, logits), (_, expected) in pairs:
        log_q = torch.log_softmax(logits, -1)
        log_p = torch.log_softmax(expected.to(log_q.device), -1)
        columns[0].append(F.nll_loss(log_q, targets[part], reduction="none"))
        columns[1].append(F.nll_loss(log_p, targets[part], reduction="none"))
        columns[2].append(divergence(log_p, log_q))
        columns[3].append(log_q.argmax(-1) == log_p.argmax(-1))
    return TokenScores(*(torch.cat(column) for column in columns))


def divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) in nats over the last axis; columns only one of them has are left out.

    A padded vocabulary is longer than the other: both are renormalised on the common columns.
    """
    if log_p.shape[-1] != log_q.shape[-1]:
        common = min(log_p.shape[-1], log_q.shape[-1])
        log_p = torch.log_softmax(log_p[..., :common], -1)
        log_q = torch.log_softmax(log_q[..., :common], -1)
    p = log_p.exp()
    return torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)  # 0 log 0 = 0


def score_batches(
    head: Scorer, batches: Iterable[Batch], reference: Scorer | None = None
) -> Iterator[tuple[Batch, TokenScores]]:
    """Score batch after batch; results are waited for a few batches late, so that the device never waits."""
    waiting: deque[tuple[Batch, Callable[[], TokenScores]]] = deque()
    for batch in batches:
        if batch.highest >= head.embeddings:
            raise CheckpointError(
                f"the tokenizer gives id {batch.highest}, the model has {head.embeddings} embeddings",
                where=head.model.name_or_path or "model",
                fix="use the tokenizer the model was trained with",
            )
        waiting.append((batch, score_batch(head, batch, reference).fetch()))
        if len(waiting) > MAX_IN_FLIGHT:
            scored, wait = waiting.popleft()
            yield scored, wait()
    for scored, wait in waiting:
        yield scored, wait()


def block_loss(
    model: PreTrainedModel, blocks: Tensor, batch_size: int = 8, device: torch.device | str | None = None
) -> float:
    """Mean loss of a model over token blocks, every position scored.

    Args:
        model: A causal model; its training mode is left as found.
        blocks: int64 `[N, T + 1]` from `token_blocks`: inputs `[:, :-1]`, targets `[:, 1:]`.
        batch_size: Blocks per forward pass.
        device: Where the model is moved first; None leaves it where it is.

    Returns:
        Nats per token, summed in float64.
    """
    training = model.training
    model.eval()
    if device is not None:
        torch.nn.Module.to(model, device)
    try:
        windows = [Window(ids, 0, i, "") for i, ids in enumerate(blocks.numpy())]
        head = Scorer(model)
        batches = make_batches(windows, batch_size, blocks.shape[1] - 1)
        total = sum(float(s.nll.double().sum()) for _, s in score_batches(head, batches))
    finally:
        model.train(training)
    return total / (blocks.shape[0] * (blocks.shape[1] - 1))
