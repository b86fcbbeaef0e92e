"""Calibration text as what a model reads: blocks of tokens, or corrupted spans for an encoder-decoder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..calibration import Batch
from ..checkpoints.hf_config import is_encoder_decoder, known_config, longest_context
from ..data import TextSource, cut_blocks, encode_documents, first_tokens, span_corruption, within
from ..data.spans import sentinel_ids
from ..errors import DataError, UsageError
from ..evaluation import block_loss
from .options import CalibrationOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MIN_TOKENS = 64  # less text says nothing
HELD_OUT = 16  # blocks kept back to judge the result by, at most
SPAN_LABELS = "labels"


@dataclass(frozen=True)
class Inputs:
    """What the model reads.

    Args:
        rows: Ids `[N, T + 1]` (inputs, and targets one later), or keyword tensors with N rows each.
        warnings: What the user should know of the data.
    """

    rows: Batch | Tensor
    warnings: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rows if isinstance(self.rows, Tensor) else next(iter(self.rows.values())))

    def __getitem__(self, index: slice) -> Inputs:
        if isinstance(self.rows, Tensor):
            return replace(self, rows=self.rows[index])
        return replace(self, rows={name: x[index] for name, x in self.rows.items()})

    def to(self, device: torch.device) -> Inputs:
        """A copy on `device`."""
        if isinstance(self.rows, Tensor):
            return replace(self, rows=self.rows.to(device))
        return replace(self, rows={name: x.to(device) for name, x in self.rows.items()})

    @property
    def read(self) -> Batch | Tensor:
        """What the forward pass gets: no targets."""
        if isinstance(self.rows, Tensor):
            return self.rows[:, :-1]
        return {name: x for name, x in self.rows.items() if name != SPAN_LABELS}

    @property
    def window(self) -> int:
        """Tokens of a row (of an encoder-decoder: those the encoder reads)."""
        read = self.read
        return (read if isinstance(read, Tensor) else read["input_ids"]).shape[1]

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return len(self) * self.window


def calibration_inputs(
    tokenizer: PreTrainedTokenizerBase, config: Mapping[str, Any], options: CalibrationOptions
) -> Inputs:
    """The calibration text as a model of this config reads it.

    Args:
        tokenizer: Of the model.
        config: Its raw config.
        options: Text, tokens, window.

    Returns:
        At least one row; shorter than the window where there is less text.

    Raises:
        DataError: Next to no text, or another model's tokenizer.
        UsageError: An encoder-decoder that was not pretrained on corrupted spans.
    """
    texts = TextSource(options.texts, options.text_column)
    window = min(options.window, longest_context(config) or options.window)
    embeddings = getattr(known_config(config), "vocab_size", None)
    where = tokenizer.name_or_path or "tokenizer"
    ids = within(encode_documents(tokenizer, texts), embeddings, where)
    if not is_encoder_decoder(config):
        return Inputs(calibration_blocks(ids, window, options.tokens, overlap=1), tuple(texts.warnings))
    if not sentinel_ids(tokenizer):
        raise UsageError(
            f"plain text cannot calibrate a {config.get('model_type')} model whose tokenizer has no span sentinels",
            where="--calibration",
            fix="use --method joint without text, or --statistics measured with calibration.collect",
        )
    blocks = calibration_blocks(ids, window, options.tokens, overlap=0)
    made = span_corruption(tokenizer, config, blocks.shape[1], options.seed)
    encoder, targets = made(blocks.numpy(), range(len(blocks)))
    rows = {"input_ids": encoder, "decoder_input_ids": made.decoder_inputs(targets), SPAN_LABELS: targets}
    return Inputs({name: torch.from_numpy(x) for name, x in rows.items()}, tuple(texts.warnings))


def calibration_blocks(documents: Iterable[np.ndarray], window: int, tokens: int, overlap: int) -> Tensor:
    """Joined documents cut into blocks of `window` (+ `overlap`) ids, as the protocol `blocks` does.

    Args:
        documents: Token ids `[n]` of one document after the other.
        window: Tokens between the starts of two blocks; less where the text is shorter.
        tokens: Use at most so many.
        overlap: Ids a block shares with the next.

    Raises:
        DataError: Fewer than 64 tokens of text.
    """
    stream = first_tokens(documents, max(tokens + overlap, MIN_TOKENS))
    if len(stream) < MIN_TOKENS:
        raise DataError(
            f"{len(stream)} tokens of text are too few to calibrate on",
            where="--calibration",
            fix="give some 100 tokens for each of the model's hidden dims: hundreds of thousands",
        )
    stream = stream[: tokens + overlap]
    window = min(window, len(stream) - overlap)
    return torch.from_numpy(np.stack(list(cut_blocks([stream], window, overlap=overlap)))).long()


def split_held_out(inputs: Inputs) -> tuple[Inputs, Inputs | None]:
    """Rows to learn from and rows to judge by (None where there are too few to spare any)."""
    if len(inputs) < 4:
        return inputs, None
    kept = min(HELD_OUT, max(1, len(inputs) // 16))
    return inputs[:-kept], inputs[-kept:]


@torch.no_grad()
def held_out_loss(model: Any, kept: Inputs) -> float:
    """Nats per scored token on the rows kept back."""
    if isinstance(kept.rows, Tensor):
        return block_loss(model, kept.rows.cpu(), batch_size=4)
    total, count = 0.0, 0
    for i in range(0, len(kept), 4):
        batch = dict(kept[i : i + 4].rows)
        labels = batch.pop(SPAN_LABELS)
        logits = model(**batch, use_cache=False).logits.float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        total += float(loss)
        count += labels.numel()
    return total / count
