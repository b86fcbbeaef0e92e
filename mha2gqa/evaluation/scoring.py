"""Forward passes to per-token losses: logits in float32, and only where scored.

A vocabulary of 128k over 4k tokens would be 2 GB of float32 logits: the output head runs on slices of the
hidden states instead, through the model's own forward (so scales, soft caps and biases stay its own).
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import CheckpointError
from .batching import Batch, make_batches
from .protocols import Window

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOGIT_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}  # float32 logits alive at once
_SPLITS: WeakKeyDictionary[torch.nn.Module, bool] = WeakKeyDictionary()  # what the first `Head` of each found
LATE = 4  # batches whose results are still under way, so that a GPU always has work queued


# --- logits --------------------------------------------------------------------------------------------


class Head:
    """Logits of chosen positions, slice by slice, in float32.

    Args:
        model: A model of transformers, in eval mode.

    The transformer runs once per batch. Where the class allows it, the output head then runs on slices
    of its result: the model's own `forward`, with its base replaced by the stored hidden states. A
    first small batch decides by comparison whether that gives this model's logits; if not, all logits
    of a batch are computed at once. (Once per model: a model in memory is often scored many times.)
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.budget = LOGIT_BYTES.get(self.device.type, LOGIT_BYTES["cpu"])
        output: Any = model.get_output_embeddings()
        embedding: Any = model.get_input_embeddings()
        self.embeddings = int(embedding.weight.shape[0])
        self.vocabulary = int(output.weight.shape[0]) if hasattr(output, "weight") else self.embeddings
        self.split = self._can_split()

    @property
    def step(self) -> int:
        """How many positions a slice may have."""
        return max(1, self.budget // (4 * self.vocabulary))

    def slices(self, batch: Batch, step: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield `(slice of the N scored targets, float32 logits [n, V])`, n at most `step`."""
        inputs = self.inputs(batch)
        positions = batch.positions.to(self.device, non_blocking=True)
        if self.split:
            output = self.model.base_model(**inputs, use_cache=False)
            hidden = output.last_hidden_state.flatten(0, 1).index_select(0, positions)  # [N, D]
            for start in range(0, len(hidden), step):
                part = slice(start, min(start + step, len(hidden)))
                yield part, self._head(output, hidden[part][None])[0].float()
            return
        logits = self.model(**inputs, use_cache=False).logits.flatten(0, 1)  # [B * T, V]
        for start in range(0, len(positions), step):
            part = slice(start, min(start + step, len(positions)))
            yield part, logits.index_select(0, positions[part]).float()

    def inputs(self, batch: Batch) -> dict[str, Tensor]:
        """Keyword arguments of the model for a batch, on its device."""
        inputs = batch.inputs.to(self.device, non_blocking=True)
        if batch.encoder is None:
            return {"input_ids": inputs}
        ids, mask = (x.to(self.device, non_blocking=True) for x in batch.encoder)
        return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": inputs}

    def _head(self, output: Any, hidden: Tensor) -> Tensor:
        """The model's logits `[1, n, V]` for hidden states `[1, n, D]`."""
        base = self.model.base_model
        stored = type(output)(**{**output, "last_hidden_state": hidden})
        with _replaced_forward(base, stored):
            ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
            return self.model(input_ids=ids, use_cache=False).logits

    def _can_split(self) -> bool:
        known = _SPLITS.get(self.model)
        if known is None:
            known = _SPLITS[self.model] = self._parts_agree()
        return known

    def _parts_agree(self) -> bool:
        from transformers import PreTrainedModel

        model = self.model
        base = getattr(model, "base_model", model)
        if base is model or not isinstance(model, PreTrainedModel) or not isinstance(base, PreTrainedModel):
            return False
        head = model.get_output_embeddings()
        if getattr(model.config, "is_encoder_decoder", False) or not hasattr(head, "weight"):
            return False
        ids = torch.arange(8, device=self.device)[None] % self.vocabulary
        with torch.inference_mode():
            whole = model(input_ids=ids, use_cache=False).logits.float()
            output = base(input_ids=ids, use_cache=False)
            if not hasattr(output, "last_hidden_state"):
                return False
            parts = self._head(output, output.last_hidden_state).float()
        tolerance = 1e-4 if whole.dtype == torch.float32 and model.dtype == torch.float32 else 2e-2
        scale = whole.abs().max().clamp(min=1e-6)
        return parts.shape == whole.shape and bool((parts - whole).abs().max() <= tolerance * scale)


@contextlib.contextmanager
def _replaced_forward(module: torch.nn.Module, output: Any) -> Iterator[None]:
    own = module.__dict__.get("forward")  # set where something has wrapped it
    module.forward = lambda *args, **kwargs: output
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


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
def score_batch(head: Head, batch: Batch, reference: Head | None = None) -> TokenScores:
    """Losses of one batch, with the comparison to `reference` if given."""
    targets = batch.targets.to(head.device, non_blocking=True)
    if reference is None:
        slices = head.slices(batch, head.step)
        losses = [F.cross_entropy(logits, targets[part], reduction="none") for part, logits in slices]
        return TokenScores(torch.cat(losses))
    columns: list[list[Tensor]] = [[], [], [], []]
    step = max(1, min(head.step, reference.step) // 2)
    pairs = zip(head.slices(batch, step), reference.slices(batch, step), strict=True)
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
    head: Head, batches: Iterable[Batch], reference: Head | None = None
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
        if len(waiting) > LATE:
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
        head = Head(model)
        batches = make_batches(windows, batch_size, blocks.shape[1] - 1)
        total = sum(float(s.nll.double().sum()) for _, s in score_batches(head, batches))
    finally:
        model.train(training)
    return total / (blocks.shape[0] * (blocks.shape[1] - 1))
