"""Calibration data as what a model reads: blocks of tokens, for an encoder-decoder pairs or corrupted spans."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..calibration import Batch
from ..checkpoints.batch_log import BatchLog
from ..checkpoints.fingerprints import checkpoint_fingerprint
from ..checkpoints.hf_config import is_encoder_decoder, known_config, vocabulary_size
from ..checkpoints.in_memory_model import position_table
from ..checkpoints.loading import load_model
from ..config.convert import MOST_RECORDINGS
from ..data import (
    Pair,
    PairSource,
    TextSource,
    cut_blocks,
    encode_documents,
    first_tokens,
    require_blocks,
    span_corruption,
    within,
)
from ..data.generation import kept_targets, targets_work
from ..data.seq2seq import IGNORE_INDEX, Example, PairEncoder, encoder_positions, is_audio, open_encoder
from ..data.spans import sentinel_ids
from ..data.windows import calibration_window
from ..distributed import is_rank_zero
from ..errors import DataError, UsageError, quoted
from ..evaluation import block_loss
from ..progress import current
from .calibration_options import CalibrationOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MIN_TOKENS, MIN_TARGETS = 64, 8  # less text says nothing
CHECKED_PAIRS = 10_000  # looked at before any is encoded
HELD_OUT = 16  # blocks kept back to judge the result by, at most
LABELS, DECODER_IDS = "labels", "decoder_input_ids"


@dataclass(frozen=True)
class Inputs:
    """What the model reads.

    The rows of a decoder are blocks of one length, so nothing is padded. The rows of an encoder-decoder are the
    keyword tensors of its forward, padded on the right to one length, and these are what a measurement or a fit
    on them can rely on:

    - `attention_mask` `[N, S]` is 1 where the encoder reads something real, `decoder_attention_mask` `[N, T]` where
      the decoder does. A mask that is absent means that all positions are real. (Whisper attends to the silence
      behind a recording as to any sound: its encoder has no mask.)
    - Both masks are passed to the model, so that real positions compute what they compute without padding.
    - Second moments count real positions only: keys and values of self-attention and all queries those of the
      decoder, keys and values of cross-attention those of the encoder (`calibration.mark_padding`).
    - `labels` `[N, T]` is what the decoder must say after each position, -100 where no loss is taken: in padding and
      within the prompt. It is not an argument of the forward (`read` leaves it out).

    Args:
        rows: Ids `[N, T + 1]` (inputs, and targets one later), or keyword tensors with N rows each.
        warnings: What the user should know of the data.
        generated: How the original wrote the targets, `beams` and `retry_temperatures`; None for those of the data.
    """

    rows: Batch | Tensor
    warnings: tuple[str, ...] = ()
    generated: Mapping[str, Any] | None = None

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
        return {name: x for name, x in self.rows.items() if name != LABELS}

    @property
    def window(self) -> int:
        """Positions of a row: tokens, or of an encoder-decoder about as many as its encoder has."""
        read = self.read
        if isinstance(read, Tensor):
            return read.shape[1]
        if "input_ids" in read:
            return read["input_ids"].shape[1]
        encoder = next(x for name, x in read.items() if name.startswith("input_"))
        return max(encoder_positions(encoder.shape[1:], ids=False), read["decoder_input_ids"].shape[1])

    @property
    def tokens(self) -> int:
        """Positions of all rows."""
        return len(self) * self.window

    @property
    def counted(self) -> str:
        """The rows for a message: blocks of so many tokens, or examples."""
        if isinstance(self.rows, Tensor):
            return f"{len(self)} blocks of {self.window} tokens"
        return f"{len(self)} examples"

    @property
    def targets(self) -> dict[str, Any]:
        """`examples` of an encoder-decoder, their `target_tokens`, and how these were `generated`, for the manifest.

        Of a decoder nothing.
        """
        if isinstance(self.rows, Tensor):
            return {}
        count = int((self.rows[LABELS] != IGNORE_INDEX).sum())
        written = {} if self.generated is None else {"generated": dict(self.generated)}
        return {"examples": len(self), "target_tokens": count} | written


def given_inputs(calibration: Any, model: Any, config: Mapping[str, Any]) -> Inputs:
    """What a caller in Python gives to calibrate on, checked.

    Args:
        calibration: Token blocks `[N, T + 1]`; of an encoder-decoder keyword tensors with N rows each.
        model: What reads it.
        config: Its raw config.

    Raises:
        UsageError: It is of another kind, empty, or holds ids that the model has no embedding for.
    """
    embeddings = vocabulary_size(config)
    if not is_encoder_decoder(config):
        require_blocks("calibration", calibration, embeddings, positions=position_table(model, config))
        return Inputs(torch.as_tensor(calibration).long())
    if not isinstance(calibration, Mapping) or not calibration:
        raise UsageError(
            f"must be keyword tensors of an encoder-decoder, not {quoted(calibration)}",
            where="calibration",
            fix=f"give {model.main_input_name}, {DECODER_IDS} and {LABELS}",
        )
    if missing := [n for n in (model.main_input_name, DECODER_IDS, LABELS) if n not in calibration]:
        raise UsageError(f"lacks {' and '.join(missing)}", where="calibration", fix="give tensors of N rows")
    rows = {name: torch.as_tensor(x) for name, x in calibration.items()}
    for name in ("input_ids", DECODER_IDS):
        if name in rows:
            require_blocks(f"calibration[{name!r}]", rows[name], embeddings)
    if len({len(x) for x in rows.values()}) > 1:
        said = ", ".join(f"{name} {len(x)}" for name, x in rows.items())
        raise UsageError(
            f"has tensors of different lengths ({said})", where="calibration", fix="give N rows each"
        )
    return Inputs(rows)


def calibration_inputs(
    tokenizer: PreTrainedTokenizerBase,
    config: Mapping[str, Any],
    options: CalibrationOptions,
    source: str | Path | None = None,
    kept: Path | None = None,
) -> Inputs:
    """The calibration data as a model of this config reads it.

    Args:
        tokenizer: Of the model.
        config: Its raw config.
        options: Text or pairs, tokens, window.
        source: The model's folder or Hub id: a speech model needs its feature extractor, and one that writes its own
            targets is run.
        kept: File of the targets that it writes, to go on with; None keeps none.

    Returns:
        At least one row; shorter than the window where there is less text.

    Raises:
        DataError: Next to no text, text for a model that needs pairs, or another model's tokenizer.
        UsageError: Languages that must be named.
    """
    if is_encoder_decoder(config):
        pairs = options.pairs.open(options.texts, is_audio(config))
        if pairs.audio or not sentinel_ids(tokenizer) or pairs.fits():
            return _pair_inputs(tokenizer, config, options, pairs, source, kept)
    texts = TextSource(options.texts, options.text_column)
    embeddings = getattr(known_config(config), "vocab_size", None)
    where = tokenizer.name_or_path or "tokenizer"
    ids = within(encode_documents(tokenizer, texts), embeddings, where)
    overlap = 0 if is_encoder_decoder(config) else 1
    blocks = calibration_blocks(
        ids, partial(calibration_window, config, asked=options.window), options.tokens, overlap
    )
    read = blocks.shape[1] - overlap
    warnings = (
        *texts.warnings,
        *options.pairs.without_effect(),
        *options.cut(read, len(blocks) * read),
    )
    if not is_encoder_decoder(config):
        return Inputs(blocks, warnings)
    made = span_corruption(tokenizer, config, blocks.shape[1], options.seed)
    encoder, targets = made(blocks.numpy(), range(len(blocks)))
    rows = {"input_ids": encoder, "decoder_input_ids": made.decoder_inputs(targets), LABELS: targets}
    return Inputs({name: torch.from_numpy(x) for name, x in rows.items()}, warnings)


# --- pairs -----------------------------------------------------------------------------------------------


def _pair_inputs(
    tokenizer: PreTrainedTokenizerBase,
    config: Mapping[str, Any],
    options: CalibrationOptions,
    pairs: PairSource,
    source: str | Path | None,
    kept: Path | None,
) -> Inputs:
    """Pairs up to so many target tokens, and no more than `MOST_RECORDINGS`, in one padded batch."""
    options.pairs.check_used()
    path = source or tokenizer.name_or_path
    encoder = open_encoder(path, options.pairs, options.trust_remote_code, tokenizer, config)
    encoder.check(islice(pairs, CHECKED_PAIRS))
    given: Iterable[Pair] = pairs
    if options.pairs.targets == "generate":
        given = _written(path, encoder, pairs, options, kept)
    examples: list[Example] = []
    count = 0
    most = MOST_RECORDINGS if pairs.audio else None
    for pair in islice(given, most):
        example = encoder.encode(pair)
        count += len(example.decoder) - example.prompt
        if examples and count > options.tokens:
            break
        examples.append(example)
    if not examples:
        raise DataError(
            "the model writes nothing for any of it", where="--calibration", fix="give other sources"
        )
    made = encoder.collate(examples)
    if made.target_tokens < MIN_TARGETS:
        raise DataError(
            f"{made.target_tokens} tokens of targets are too few to calibrate on",
            where="--calibration",
            fix="give some hundreds of pairs, or minutes of speech",
        )
    report = [*pairs.warnings, *encoder.report(), *_said(pairs.empty), *options.text_only()]
    if len(examples) == most:
        report.append(f"calibrated on {most:,} recordings, which is the most, with {count:,} target tokens")
    return Inputs(made.rows() | {LABELS: made.labels}, tuple(report), options.pairs.generated)


def _said(empty: int) -> list[str]:
    return [f"{empty:,} rows without a source or a target were left out"] if empty else []


def _written(
    path: str | Path,
    encoder: PairEncoder,
    pairs: Iterable[Pair],
    options: CalibrationOptions,
    kept: Path | None,
) -> Iterator[Pair]:
    """The pairs with targets that the original writes, as many as are drawn."""
    current().stage("writing targets")
    load = partial(load_model, path, device=options.device, trust_remote_code=options.trust_remote_code)
    if kept is None:
        yield from kept_targets(load, encoder, pairs, None)
        return
    work = targets_work(encoder, checkpoint_fingerprint(Path(path)))
    with BatchLog(kept, work, wait=not is_rank_zero()) as log:
        yield from kept_targets(load, encoder, pairs, log)


def calibration_blocks(
    documents: Iterable[np.ndarray], window: Callable[[int], int], tokens: int, overlap: int
) -> Tensor:
    """Joined documents cut into blocks of a window (+ `overlap`) of ids, as the protocol `blocks` does.

    Args:
        documents: Token ids `[n]` of one document after the other.
        window: Tokens between the starts of two blocks, by the tokens of the text; less where the text is shorter.
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
    length = len(stream) - overlap
    blocks = cut_blocks([stream], min(window(length), length), overlap=overlap)
    return torch.from_numpy(np.stack(list(blocks))).long()


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
        labels = batch.pop(LABELS)
        logits = model(**batch, use_cache=False).logits.float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        total += float(loss)
        count += int((labels != IGNORE_INDEX).sum())
    return total / count
