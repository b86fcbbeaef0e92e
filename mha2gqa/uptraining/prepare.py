"""What a block of text teaches: the next token, or for encoder-decoders the spans T5 takes out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..checkpoints.hf_config import is_encoder_decoder
from ..data import block_tokens, eos_id, span_corruption
from ..data.spans import ENCODER_TOKENS
from ..errors import UsageError
from .batches import Collator, SpanCollator
from .budget import UptrainConfig

LONGEST = 2048  # default window of decoders, where their positions allow


def choose_window(asked: int | None, raw: Mapping[str, Any], name: str) -> int:
    """Tokens of text per block: by default the decoder's context up to 2,048, or T5's for encoder-decoders.

    Args:
        asked: What the user names.
        raw: The raw config.
        name: The model, for the message.

    Raises:
        UsageError: More than the model has positions.
    """
    from ..evaluation.setup import context_length

    limit = context_length(raw)
    if asked is None:
        return block_tokens(ENCODER_TOKENS) if is_encoder_decoder(raw) else min(LONGEST, limit or LONGEST)
    if limit is not None and asked > limit:
        raise UsageError(
            f"longer than the context of {name}", where=f"window {asked}", fix=f"use at most {limit}"
        )
    return asked


def choose_objective(config: UptrainConfig, raw: Mapping[str, Any]) -> str:
    """`next-token` or `span-corruption`, from what the model is.

    Raises:
        UsageError: The objective asked for is not one the model can have.
    """
    own = "span-corruption" if is_encoder_decoder(raw) else "next-token"
    if config.objective not in ("auto", own):
        raise UsageError(
            f"{raw.get('model_type')} models cannot be trained so",
            where=f"objective {config.objective}",
            fix=f"use {own}",
        )
    if own == "span-corruption" and config.isolate_documents:
        raise UsageError("is for decoders", where="isolate_documents", fix="leave it out")
    return own


def make_collator(
    config: UptrainConfig, raw: Mapping[str, Any], tokenizer: Any, window: int
) -> Collator | SpanCollator:
    """The collator of a run.

    Raises:
        UsageError, DataError: The objective does not fit the model, or the tokenizer lacks sentinels.
    """
    if choose_objective(config, raw) == "span-corruption":
        return SpanCollator(span_corruption(tokenizer, raw, window, config.seed))
    return Collator(eos_id(tokenizer) if config.isolate_documents else None)


def check_taught(config: UptrainConfig, taught: bool, notices: list[str]) -> None:
    """Refuse words of distillation where nobody teaches; tell where a teacher would have no share.

    Args:
        config: The run.
        taught: Whether there is a teacher.
        notices: Extended by what comes up.

    Raises:
        UsageError: Such a word is given.
    """
    if taught:
        if config.ce_weight == 1:
            notices.append("ce_weight 1 leaves the teacher no share: teacher none does the same for less")
        return
    words = (
        ("temperature", config.temperature, config.temperature != 1),
        ("ce_weight", config.ce_weight, 0 < config.ce_weight < 1),
        ("teacher_top_k", config.teacher_top_k, config.teacher_top_k is not None),
    )
    for name, value, given in words:
        if given:
            raise UsageError(
                "is of distillation, and there is no teacher",
                where=f"{name} {value:g}",
                fix=f"give teacher, or leave {name} out",
            )
