"""The original as teacher: frozen, apart from the student, and its logits made only chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UsageError
from .losses import Head, Objective, TopKLogProbs, chunked_loss, teacher_chunks

# Inputs of a batch that change what the model computes, beside input_ids.
EXTRA_INPUTS = ("position_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")


def _declared_heads(config: Any, module: nn.Linear) -> Iterator[Head]:
    """What the config says happens to the logits; the plain product only where it says nothing."""
    scale = getattr(config, "logit_scale", None)
    divisor = getattr(config, "logits_scaling", None)
    softcap = getattr(config, "final_logit_softcapping", None)
    if scale is not None:
        yield Head(module, scale=float(scale))
    if divisor is not None:
        yield Head(module, scale=1.0 / float(divisor))
    if softcap is not None:
        yield Head(module, softcap=float(softcap))
    if scale is None and divisor is None and softcap is None:
        yield Head(module)


@torch.no_grad()
def find_head(model: Any) -> Head | None:
    """The model's output head, proven on a probe to give the model's own logits.

    Args:
        model: A causal language model of transformers.

    Returns:
        The head, or None where the logits are something else (encoder-decoders, odd heads): then the
        model's own logits are used.
    """
    module = model.get_output_embeddings()
    base = getattr(model, model.base_model_prefix, None)
    if type(module) is not nn.Linear or base is None or base is model or model.config.is_encoder_decoder:
        return None
    was_training = model.training
    model.eval()
    count = min(8, model.config.get_text_config().vocab_size)
    ids = torch.arange(count, device=module.weight.device)[None]  # [1, 8]
    wanted = model(input_ids=ids, use_cache=False).logits.float()
    bare = module(base(input_ids=ids, use_cache=False).last_hidden_state).float()
    model.train(was_training)
    tolerance = 1e-5 if module.weight.dtype == torch.float32 else 2e-2
    for head in _declared_heads(model.config.get_text_config(), module):
        if (head(bare) - wanted).abs().max() <= tolerance * max(1.0, float(wanted.abs().max())):
            return head
    return None


class Teacher:
    """The frozen original; gives hidden states (or logits) for a batch, and finishes them chunk by chunk.

    It is deliberately no `nn.Module`: held by a trainer or a student it can never be trained, sharded or
    saved with it.

    Args:
        model: The original, on its final device and in its final dtype. Its parameters are frozen.
    """

    def __init__(self, model: Any) -> None:
        self.model = model.requires_grad_(False).eval()
        self.head = find_head(model)
        self.base = getattr(model, model.base_model_prefix) if self.head is not None else None

    @torch.no_grad()
    def states(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Last hidden states `[N, Dt]` of a batch (N = all its positions), or logits `[N, Vt]`."""
        kwargs = model_inputs(inputs)
        if self.base is not None:
            return self.base(**kwargs).last_hidden_state.flatten(0, 1)
        if self.model.config.is_encoder_decoder and "decoder_input_ids" not in kwargs:
            kwargs["labels"] = inputs["labels"]
        return self.model(**kwargs).logits.flatten(0, 1)


def model_inputs(inputs: Mapping[str, Tensor | None]) -> dict[str, Any]:
    """What a model's forward receives of a batch; labels stay with us, and no cache is built."""
    per_head = {name: inputs[name] for name in EXTRA_INPUTS if inputs.get(name) is not None}
    return {"input_ids": inputs["input_ids"], "use_cache": False, **per_head}


def _head_forward(self: nn.Linear, x: Tensor, run: Any = None) -> Any:
    """The output projection; with `run`, the loss is computed here, where sharded weights are whole."""
    return F.linear(x, self.weight, self.bias) if run is None else run(x)


@contextmanager
def attached(model: Any, spec: Objective, teacher: Teacher | None = None) -> Iterator[Head | None]:
    """Make `model(input_ids=…, labels=…, teacher=…)` return (summed loss, summed cross-entropy).

    The loss is computed inside the model's own forward, so that wrappers (DDP, FSDP) see one call. Only
    instance attributes are set; they are gone afterwards.

    Args:
        model: The student, a causal or encoder-decoder model of transformers.
        spec: The objective while `teacher` states are passed; plain cross-entropy otherwise.
        teacher: Whose head finishes those states.

    Yields:
        The student's output head, None where its own logits are used.
    """
    outer = model
    if hasattr(model, "get_base_model"):  # peft hands inputs through to the model inside
        model = model.get_base_model()
    head = find_head(model)
    own_forward = model.forward
    base: Any = getattr(model, model.base_model_prefix, None)  # T5 has none

    def forward(
        self: Any, labels: Tensor, teacher_states: Tensor | TopKLogProbs | None = None, **inputs: Any
    ) -> Any:
        # labels [B, T] are already shifted: the target of each position
        chunks: Any = None
        if isinstance(teacher_states, TopKLogProbs):
            chunks = teacher_states.part
        elif teacher_states is not None:
            assert teacher is not None
            chunks = teacher_chunks(teacher_states, teacher.head)
        now = spec if chunks is not None else Objective(compiled=spec.compiled, liger=spec.liger)
        kwargs = model_inputs(inputs)
        if head is None:
            if self.config.is_encoder_decoder and "decoder_input_ids" not in kwargs:
                kwargs["labels"] = labels  # from which it makes its decoder inputs
            logits = own_forward(**kwargs).logits.flatten(0, 1)
            return chunked_loss(logits, labels.flatten(), now, teacher=chunks)
        states = base(**kwargs).last_hidden_state.flatten(0, 1)  # [B * T, D]
        return head.module(
            states, run=lambda x: chunked_loss(x, labels.flatten(), now, head=head, teacher=chunks)
        )

    model.forward = MethodType(forward, model)
    if head is not None:
        head.module.forward = MethodType(_head_forward, head.module)  # type: ignore[method-assign]
    try:
        yield head
    finally:
        for module in (outer, model, *([] if head is None else [head.module])):
            module.__dict__.pop("forward", None)  # ours, or accelerate's under bf16 autocast
            module.__dict__.pop("_original_forward", None)  # accelerate's, which holds ours


@dataclass(frozen=True)
class Vocabularies:
    """How two tokenizers and two output widths relate.

    Args:
        tokens: Tokens of the shared tokenizer.
        student, teacher: Columns of each output head.
    """

    tokens: int
    student: int
    teacher: int

    @property
    def note(self) -> str | None:
        """One line when the widths differ, else None."""
        if self.student == self.teacher:
            return None
        return (
            f"the student has {self.student} output columns and the teacher {self.teacher}: "
            f"distilled on the first {min(self.student, self.teacher)} (the tokenizer has {self.tokens})"
        )


def check_tokenizers(student: Any, teacher: Any, where: str | Path) -> int:
    """Refuse a teacher that segments text differently.

    Args:
        student, teacher: Tokenizers.
        where: The teacher, for the message.

    Returns:
        The number of tokens they share.

    Raises:
        UsageError: The vocabularies differ, with the first tokens that do.
    """
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    if ours != theirs:
        different = sorted(
            (token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)),
            key=lambda token: (ours.get(token, theirs.get(token)), token),
        )
        shown = ", ".join(f"{token!r} ({ours.get(token)} / {theirs.get(token)})" for token in different[:3])
        raise UsageError(
            f"its tokenizer differs in {len(different):,} tokens, such as {shown}",
            where=f"teacher {where}",
            fix="distil from the checkpoint that was converted, or use teacher none",
        )
    probe = "The 12 quick brown foxes, naïve façade:\n\tfor i in range(3): x += 1.5  # ok"
    if student(probe)["input_ids"] != teacher(probe)["input_ids"]:
        raise UsageError(
            "its tokenizer has the same tokens but splits text differently",
            where=f"teacher {where}",
            fix="distil from the checkpoint that was converted, or use teacher none",
        )
    return len(ours)


def output_width(model: Any) -> int:
    """Columns of a model's output head."""
    head = model.get_output_embeddings()
    return int(head.weight.shape[0]) if head is not None else int(model.config.get_text_config().vocab_size)


def check_teacher(student: Any, teacher: Any, tokens: int | None) -> Vocabularies:
    """Refuse a teacher that shares parameters with the student or lacks tokens.

    Raises:
        UsageError: Shared modules, or fewer output columns than the tokenizer has tokens.
    """
    ours = {p.data_ptr() for p in student.parameters() if p.numel()}
    if student is teacher or any(p.data_ptr() in ours for p in teacher.parameters() if p.numel()):
        raise UsageError(
            "teacher and student share parameters", where="teacher", fix="load the original a second time"
        )
    widths = Vocabularies(tokens or 0, output_width(student), output_width(teacher))
    if tokens is not None and min(widths.student, widths.teacher) < tokens:
        raise UsageError(
            f"output columns (student {widths.student}, teacher {widths.teacher}) do not cover the "
            f"tokenizer's {tokens} tokens",
            where="teacher",
            fix="distil from the checkpoint that was converted",
        )
    return widths
