"""Next-token cross-entropy, forward KL to the original, or a mix, a chunk of tokens at a time.

Student and teacher logits over a large vocabulary never exist whole: hidden states are multiplied by the
output head for a few thousand tokens, turned into loss and gradient in float32, and dropped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..lm_head import LMHead, chunk_slices, finish, finish_backward, gives_wide_products, product

IGNORE_INDEX = -100  # label of a position without loss, as everywhere in transformers
EPS = 1e-7  # a rest of a distribution below this is the rounding of 1 minus a sum in float32


@dataclass(frozen=True)
class TopKLogProbs:
    """A teacher's likeliest tokens at each position; what is left of its distribution is one bucket.

    Args:
        ids: Token ids `[N, k]`, int64.
        log_probs: Their log-probabilities under the whole (softened) distribution `[N, k]`.
        width: Columns both distributions are over; the student's further ones are padding.
    """

    ids: Tensor
    log_probs: Tensor
    width: int

    def part(self, tokens: slice) -> TopKLogProbs:
        """The same for a slice of positions."""
        return TopKLogProbs(self.ids[tokens], self.log_probs[tokens], self.width)


TeacherChunk = Callable[[slice], "Tensor | TopKLogProbs"]


@dataclass(frozen=True)
class Objective:
    """What is minimised.

    Args:
        distil: Whether a teacher takes part.
        temperature: Both distributions are softened by it; the KL is scaled by its square.
        ce_weight: Share of the next-token loss (1 without a teacher).
        compiled: Fuse the float32 work of a chunk with `torch.compile`.
        liger: Train on plain next-token loss by Liger's fused kernel.
    """

    distil: bool = False
    temperature: float = 1.0
    ce_weight: float = 1.0
    compiled: bool = False
    liger: bool = False


def objective(
    z: Tensor,
    labels: Tensor,
    teacher: Tensor | TopKLogProbs | None,
    temperature: float,
    ce_weight: float,
    scale: float,
    softcap: float | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of one chunk and its gradient, computed in z's (float) precision.

    Args:
        z: Bare student logits `[C, V]`, before factor and cap.
        labels: Next tokens `[C]`, `IGNORE_INDEX` where no loss is wanted.
        teacher: Finished teacher logits `[C, Vt]`; columns beyond the shorter vocabulary are padding
            and both sides are renormalised without them. Or its `TopKLogProbs` distribution.
        temperature, ce_weight: See `Objective`.
        scale, softcap: See `LMHead`.
        dtype: What the gradient is rounded to.

    Returns:
        The summed loss, the summed cross-entropy (0 where it would cost extra), both scalars, and
        dloss/dz `[C, V]`.
    """
    keep = (labels != IGNORE_INDEX).to(z.dtype)[:, None]  # [C, 1]
    target = labels.clamp(min=0)[:, None]
    y = finish(z, scale, softcap)
    grad = None
    ce_sum = loss = z.new_zeros(())
    width = z.shape[1]
    if teacher is not None:
        width = min(width, teacher.width if isinstance(teacher, TopKLogProbs) else teacher.shape[1])
    same = teacher is not None and temperature == 1.0 and width == z.shape[1]
    if teacher is None or ce_weight > 0 or same:
        logq = F.log_softmax(y, dim=-1)
        ce_sum = -(logq.gather(1, target) * keep).sum()
    if teacher is None or ce_weight > 0:
        weight = 1.0 if teacher is None else ce_weight
        loss = weight * ce_sum
        hit = torch.arange(z.shape[1], device=z.device) == target  # compared, not scattered: it fuses
        grad = weight * keep * (logq.exp() - hit.to(z.dtype))
    if teacher is not None and ce_weight < 1:
        weight = 1.0 - ce_weight
        soft_q = logq if same else F.log_softmax(y[:, :width] / temperature, dim=-1)
        if isinstance(teacher, TopKLogProbs):
            kl, kl_grad = _truncated_kl(soft_q, teacher)
        else:
            soft_p = F.log_softmax(teacher[:, :width] / temperature, dim=-1)
            p = soft_p.exp()
            kl, kl_grad = (p * (soft_p - soft_q)).sum(-1, keepdim=True), soft_q.exp() - p
        loss = loss + weight * temperature**2 * (kl * keep).sum()
        # d/dy of T^2 KL(p || softmax(y / T)) is T (q - p)
        kl_grad = F.pad((weight * temperature) * keep * kl_grad, (0, z.shape[1] - width))
        grad = kl_grad if grad is None else grad + kl_grad
    assert grad is not None
    return loss, ce_sum, finish_backward(grad, y, scale, softcap).to(dtype)


def _truncated_kl(log_q: Tensor, teacher: TopKLogProbs) -> tuple[Tensor, Tensor]:
    """KL over the teacher's k tokens and one bucket for all others, `[C, 1]`, and its gradient `[C, V]`.

    sum_K p (log p - log q) + r (log r - log s), with r = 1 - sum_K p and s = 1 - sum_K q: a lower bound of the
    whole KL, equal to it where k is the vocabulary. Its gradient is that of the whole KL to the teacher
    whose others are shared out as the student's: q - p on K, q (1 - r / s) elsewhere.
    """
    p, log_qk = teacher.log_probs.exp(), log_q.gather(1, teacher.ids)  # [C, k]
    qk = log_qk.exp()
    r = (1 - p.sum(-1, keepdim=True)).clamp(min=0.0)  # [C, 1]
    s = (1 - qk.sum(-1, keepdim=True)).clamp(min=EPS)
    r = torch.where(r > EPS, r, torch.zeros_like(r))
    kl = (p * (teacher.log_probs - log_qk)).sum(-1, keepdim=True)
    kl = kl + torch.where(r > 0, r * (r.clamp(min=EPS).log() - s.log()), torch.zeros_like(r))
    return kl, (log_q.exp() * (1 - r / s)).scatter(1, teacher.ids, qk - p)


@functools.cache
def _compiled_objective() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    return torch.compile(objective, dynamic=False)


@functools.cache
def _adds_products(device: str) -> bool:
    """Whether a half-precision product can be added to a float32 matrix in one pass, by trying it."""
    if not gives_wide_products(device):
        return False
    ones = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    total = torch.ones(16, 16, device=device)
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)  # type: ignore[call-overload]
    except (TypeError, RuntimeError):
        return False
    return bool((total == 17).all())


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total += a @ b`, in total's (float) precision."""
    if a.dtype in (torch.bfloat16, torch.float16) and _adds_products(a.device.type):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)  # type: ignore[call-overload]
    else:
        total += product(a, b)


def _widened(teacher: Tensor | TopKLogProbs, wide: torch.dtype) -> Tensor | TopKLogProbs:
    if isinstance(teacher, TopKLogProbs):
        return TopKLogProbs(teacher.ids, teacher.log_probs.to(wide), teacher.width)
    return teacher.to(wide)


class _ChunkedLoss(torch.autograd.Function):
    """Sum of the objective over tokens; gradients are made with the loss, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [N, D], or the logits [N, V] where weight is None
        weight: Tensor | None,  # [V, D]
        bias: Tensor | None,  # [V]
        labels: Tensor,  # [N]
        teacher: TeacherChunk | None,
        spec: Objective,
        scale: float,
        softcap: float | None,
        dtype: torch.dtype,
        with_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        run = _compiled_objective() if spec.compiled else objective
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        vocabulary = hidden.shape[1] if weight is None else weight.shape[0]
        loss = hidden.new_zeros((), dtype=wide)
        ce = torch.zeros_like(loss)
        grad_hidden = torch.empty_like(hidden) if with_grad and ctx.needs_input_grad[0] else None
        grad_weight = grad_bias = None
        if with_grad and weight is not None and ctx.needs_input_grad[1]:
            grad_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device)
        if with_grad and bias is not None and ctx.needs_input_grad[2]:
            grad_bias = torch.zeros(bias.shape, dtype=wide, device=bias.device)
        head = None if weight is None else weight.to(dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            for part in chunk_slices(len(hidden), vocabulary, hidden.device.type):
                x = hidden[part].to(dtype)
                z = x.to(wide) if head is None else product(x, head.t())
                if bias is not None:
                    z = z + bias.to(wide)
                t = None if teacher is None else _widened(teacher(part), wide)
                part_loss, part_ce, grad_z = run(
                    z, labels[part], t, spec.temperature, spec.ce_weight, scale, softcap, dtype
                )
                loss += part_loss
                ce += part_ce
                if grad_hidden is not None:
                    grad_hidden[part] = (grad_z if head is None else grad_z @ head).to(hidden.dtype)
                if grad_weight is not None:
                    add_product(grad_weight, grad_z.t(), x)
                if grad_bias is not None:
                    grad_bias += grad_z.sum(0, dtype=wide)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = [None if p is None else p.dtype for p in (hidden, weight, bias)]
        ctx.mark_non_differentiable(ce)
        return loss, ce

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grads = [
            None if grad is None else grad.mul_(grad_loss.to(grad.dtype)).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*grads, None, None, None, None, None, None, None)


def _compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matrix products here: autocast's where it is on, else the tensor's own."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def teacher_chunks(hidden: Tensor, head: LMHead | None) -> TeacherChunk:
    """Teacher logits for a slice of tokens.

    Args:
        hidden: The teacher's last hidden states `[N, Dt]`, or its logits `[N, Vt]` where head is None.
        head: Its output head.
    """
    if head is None:
        return lambda part: hidden[part]
    weight = head.module.weight.to(hidden.dtype)  # [Vt, Dt]
    bias = head.module.bias

    def chunk(part: slice) -> Tensor:
        z = product(hidden[part], weight.t())
        return head.finish(z if bias is None else z + bias.to(z.dtype))

    return chunk


def chunked_loss(
    hidden: Tensor,
    labels: Tensor,
    spec: Objective,
    *,
    head: LMHead | None = None,
    teacher: TeacherChunk | None = None,
) -> tuple[Tensor, Tensor]:
    """Summed loss over tokens without whole float32 logits.

    Args:
        hidden: The student's last hidden states `[N, D]`; its logits `[N, V]` where head is None.
        labels: Next token of each position `[N]`, `IGNORE_INDEX` where masked.
        spec: The objective.
        head: The student's output head.
        teacher: From `teacher_chunks`, where `spec.distil`.

    Returns:
        The summed loss (differentiable scalar) and the summed cross-entropy, both float32.

    Example:
        >>> loss, _ = chunked_loss(hidden, labels, Objective(), head=find_lm_head(model))
        >>> (loss / len(labels)).backward()
    """
    if spec.distil != (teacher is not None):
        raise ValueError("a teacher is given exactly when the objective distils")
    dtype, with_grad = _compute_dtype(hidden), torch.is_grad_enabled()
    if head is None:
        # Logits are what they are: only the gradient returns in their dtype.
        return _ChunkedLoss.apply(
            hidden, None, None, labels, teacher, spec, 1.0, None, hidden.dtype, with_grad
        )
    if spec.liger and teacher is None and with_grad:
        fused = liger_cross_entropy(hidden, labels, head, dtype)
        if fused is not None:
            return fused, fused.detach()
    weight, bias = head.module.weight, head.module.bias
    return _ChunkedLoss.apply(
        hidden, weight, bias, labels, teacher, spec, head.scale, head.softcap, dtype, with_grad
    )


def liger_cross_entropy(hidden: Tensor, labels: Tensor, head: LMHead, dtype: torch.dtype) -> Tensor | None:
    """Summed next-token loss by Liger's kernel, in `dtype` products with float32 sums.

    Args:
        hidden: Last hidden states `[N, D]`.
        labels: Next tokens `[N]`, `IGNORE_INDEX` where masked.
        head: The output head.
        dtype: Of the products.

    Returns:
        The differentiable sum, None where the kernel cannot express the head (a factor on the logits).
    """
    if head.scale != 1.0:
        return None
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    bias = head.module.bias
    loss = liger_fused_linear_cross_entropy(
        hidden.to(dtype),
        head.module.weight.to(dtype),
        labels,
        None if bias is None else bias.to(dtype),
        ignore_index=IGNORE_INDEX,
        reduction="sum",
        softcap=head.softcap,
        accum_dtype=torch.float32,
    )
    return loss.float()
