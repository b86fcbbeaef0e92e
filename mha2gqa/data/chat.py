"""Chats to token ids: the model's own template, and which tokens the assistant said.

A token without loss is stored as `-id - 1`, so that ids and mask travel as one array.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import DataError, reason
from .chat_limits import Watch, check_template
from .reading import Document


def hide(ids: np.ndarray, spoken: np.ndarray) -> np.ndarray:
    """Ids `[n]` with those outside the mask stored as `-id - 1`."""
    return np.where(spoken, ids, -ids - 1).astype(np.int32)


def unhide(stored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ids and the mask of those with loss, from what `hide` stored; any shape."""
    return np.where(stored < 0, -stored - 1, stored), stored >= 0


def _applied(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], where: str, watch: Watch, **how: Any
) -> Any:
    """What the template makes of a chat.

    Raises:
        DataError: It rejects it, fails, or takes too much.
    """
    try:
        with watch.over(where):
            return tokenizer.apply_chat_template(list(messages), tokenize=True, **how)
    except DataError:
        raise
    except Exception as error:  # a template is a program: it may raise anything
        raise DataError(
            f"the chat template rejects it ({reason(error)})", where=where, fix="correct or remove that chat"
        ) from error


def _apply(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], prompt: bool, where: str, watch: Watch
) -> list[int]:
    return list(_applied(tokenizer, messages, where, watch, add_generation_prompt=prompt, return_dict=False))


def _marked(tokenizer: Any, document: Document, watch: Watch) -> tuple[list[int], list[bool]]:
    """By the template's own `{% generation %}` marks."""
    marks = {"return_dict": True, "return_assistant_tokens_mask": True}
    found = _applied(tokenizer, document.messages or (), document.source, watch, **marks)
    return list(found["input_ids"]), [bool(x) for x in found["assistant_masks"]]


def _by_prefix(tokenizer: Any, document: Document, watch: Watch) -> tuple[list[int], list[bool]]:
    """By comparing the chat up to a turn's prompt with the chat up to its end."""
    messages = document.messages or ()
    ids = _apply(tokenizer, messages, False, document.source, watch)
    spoken = [False] * len(ids)
    for i, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        before = _apply(tokenizer, messages[:i], True, document.source, watch) if i else []
        after = _apply(tokenizer, messages[: i + 1], False, document.source, watch)
        if ids[: len(before)] != before or ids[: len(after)] != after:
            raise DataError(
                "the chat template writes earlier turns differently once later ones follow, so that the "
                "assistant's tokens cannot be located",
                where=document.source,
                fix="mark them with {% generation %} in the template, or set assistant_only_loss false",
            )
        spoken[len(before) : len(after)] = [True] * (len(after) - len(before))
    return ids, spoken


def encode_chats(
    tokenizer: Any, documents: Iterable[Document], assistant_only: bool = True
) -> Iterator[np.ndarray]:
    """Token ids of each chat through the tokenizer's chat template.

    Args:
        tokenizer: With a chat template.
        documents: Chats (`messages` of roles and contents).
        assistant_only: Whether only the assistant's tokens carry loss.

    Yields:
        int32 ids `[n]`, tokens without loss as `-id - 1`. The first token of a chat never carries loss:
        what comes before it is another chat.

    Raises:
        DataError: No template, a text among the chats, or a chat that the template rejects.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            "the tokenizer has no chat template",
            where=tokenizer.name_or_path or "tokenizer",
            fix="add chat_template.jinja to the checkpoint, or train on text",
        )
    check_template(str(tokenizer.chat_template), tokenizer.name_or_path or "tokenizer")
    marks = "generation" in str(tokenizer.chat_template).replace("add_generation_prompt", "")
    with Watch() as watch:
        for document in documents:
            if document.messages is None:
                raise DataError(
                    "a text among chats", where=document.source, fix="train on one kind of data at a time"
                )
            if not assistant_only:
                ids = _apply(tokenizer, document.messages, False, document.source, watch)
                spoken = [True] * len(ids)
            else:
                ids, spoken = (_marked if marks else _by_prefix)(tokenizer, document, watch)
            if ids:
                spoken[0] = False
                yield hide(np.array(ids, dtype=np.int32), np.array(spoken, dtype=bool))
