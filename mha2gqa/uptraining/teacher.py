"""The original as teacher: frozen, apart from the student, and its logits made only chunk by chunk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoints.loading import load_model
from ..errors import UsageError
from ..lm_head import ChunkedLogits, LMHead
from .distributed_training import whole_models
from .eight_bits import round_to_eight_bits
from .prepare import PreparedRun

# What a model may be given of a batch.
INPUTS = (
    "input_ids",
    "input_features",
    "input_values",
    "position_ids",
    "attention_mask",
    "decoder_input_ids",
    "decoder_attention_mask",
)


class Teacher:
    """The frozen original; gives hidden states (or logits) for a batch, and finishes them chunk by chunk.

    It is deliberately no `nn.Module`: held by a trainer or a student it can never be trained, sharded or
    saved with it.

    Args:
        model: The original, on its final device and in its final dtype. Its parameters are frozen.
    """

    def __init__(self, model: Any) -> None:
        self.model = model.requires_grad_(False).eval()
        self.output = ChunkedLogits(model)

    @property
    def head(self) -> LMHead | None:
        """Its output head, None where its own logits are used."""
        return self.output.head

    @torch.no_grad()
    def states(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Last hidden states `[N, Dt]` of a batch (N = all its positions), or logits `[N, Vt]`."""
        kwargs = {
            name: value.to(self.model.dtype) if value.is_floating_point() else value
            for name, value in model_inputs(inputs).items()
        }  # features of sound come in float32, a teacher often in bfloat16 and without autocast
        if self.model.config.is_encoder_decoder and "decoder_input_ids" not in kwargs:
            kwargs["labels"] = inputs["labels"]
        return self.output.states(**kwargs)


def model_inputs(inputs: Mapping[str, Tensor | None]) -> dict[str, Any]:
    """What a model's forward receives of a batch; labels stay with us."""
    return {name: inputs[name] for name in INPUTS if inputs.get(name) is not None}


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


def load_teacher(run: PreparedRun, args: Any, student: Any, tokens: int) -> Teacher:
    """The original on its device, checked against the student.

    Args:
        run: Whose `teacher` it is.
        args: The run's TrainingArguments.
        student: The model that learns.
        tokens: Size of the shared tokenizer.

    Raises:
        UsageError: See `check_teacher` and `round_to_eight_bits`.
    """
    assert run.teacher is not None
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    consent = run.config.trust_remote_code
    narrow = run.config.teacher_dtype == "int8"
    with whole_models(args):
        place = "cpu" if narrow else args.device
        original = load_model(run.teacher.name, dtype=dtype, device=place, trust_remote_code=consent)
    widths = check_teacher(student, original, tokens)
    if widths.note is not None:
        run.warn(widths.note)
    if narrow:
        round_to_eight_bits(original, args.device, f"teacher {run.teacher.name}")
    return Teacher(original)
