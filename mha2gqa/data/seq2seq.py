"""Pairs as what an encoder-decoder reads and must say: features or ids, prompt, targets, padding and masks."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..checkpoints.hf_config import known_config, load_config_json
from ..checkpoints.json_files import RESTORE, read_json
from ..checkpoints.loading import load_tokenizer
from ..errors import CheckpointError, DataError, UsageError, reason
from .audio import Audio, KeptFeatures, check_length
from .extractors import check_extractor, least_samples, load_extractor, make_features
from .pair_options import PairOptions
from .pairs import Pair, stock_type
from .pairs import is_audio as is_audio
from .prompts import WHISPER, WRAPPED, decoder_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORE_INDEX = -100
SAMPLES_A_POSITION = 320  # of sound, about
UNMASKED = (WHISPER,)  # encoders that attend to all of their input, silence behind a recording included
DECODER_VOCABULARY = ("decoder_vocab_size",)  # of a Marian whose target language has a vocabulary of its own
NO_LIMIT = 10**9  # a tokenizer's `model_max_length` beyond this means that none is known
SOURCE_LIMITS = ("max_source_positions", "max_encoder_position_embeddings", "max_position_embeddings")
TARGET_LIMITS = ("max_target_positions", "max_decoder_position_embeddings", "max_position_embeddings")


@dataclass(frozen=True)
class Example:
    """One pair as a model reads it.

    Args:
        encoder: int32 `[S]` ids; or float32 features, `[mels, frames]`, `[frames, mels]` or `[samples]`.
        decoder: int32 `[T + 1]`: what the decoder reads and, one later, what it must say.
        prompt: How many ids of `decoder` are given; those after them are targets.
        place: Where it comes from.
        target: The target as text.
    """

    encoder: np.ndarray
    decoder: np.ndarray
    prompt: int
    place: str
    target: str = ""


@dataclass(frozen=True)
class ExampleSet:
    """Examples of one batch, padded on the right.

    Args:
        name: Name of the encoder's input: `input_ids`, `input_features` or `input_values`.
        encoder: int64 ids `[N, S]`, or float32 features `[N, …]`.
        encoder_mask: int64 `[N, S]`, 1 where the encoder reads something real; None where it reads all.
        decoder_input_ids: int64 `[N, T]`.
        decoder_mask: int64 `[N, T]`, 1 for real ones.
        labels: int64 `[N, T]`: what the decoder must say after each; -100 within the prompt and in padding.
    """

    name: str
    encoder: Tensor
    encoder_mask: Tensor | None
    decoder_input_ids: Tensor
    decoder_mask: Tensor
    labels: Tensor

    def rows(self) -> dict[str, Tensor]:
        """Keyword arguments of the model's forward, labels left out."""
        rows = {
            self.name: self.encoder,
            "decoder_input_ids": self.decoder_input_ids,
            "decoder_attention_mask": self.decoder_mask,
        }
        return rows if self.encoder_mask is None else rows | {"attention_mask": self.encoder_mask}

    @property
    def target_tokens(self) -> int:
        """Targets that carry loss."""
        return int((self.labels != IGNORE_INDEX).sum())


class PairEncoder:
    """Encodes pairs for one model.

    Args:
        tokenizer: Of the model.
        config: Its raw config.
        options: Languages, task, prefix.
        generation: Its raw generation config.
        extractor: Its feature extractor, of a speech model.
        name: The model, for messages.

    Attributes:
        prompt: Ids that every target begins with and that are given to the decoder.
        cut: Sources longer than the model takes, cut as its processor does.
        resampled: Recordings of another sampling rate.
        silent: Recordings of nothing but zeros.
        unanswered: Sources left out since the model wrote nothing for them.
        kept: Where features stay that will be asked for again; None where each is made anew.

    Raises:
        UsageError: A language or task that the tokenizer does not have, or that must be named.
        DataError: The config does not say how the decoder starts.

    Example:
        >>> encoder = PairEncoder(tokenizer, config, PairOptions())  # doctest: +SKIP
        >>> batch = encoder.collate([encoder.encode(pair) for pair in pairs])  # doctest: +SKIP
        >>> loss = model(**batch.rows(), labels=batch.labels).loss  # doctest: +SKIP
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: Mapping[str, Any],
        options: PairOptions,
        generation: Mapping[str, Any] | None = None,
        extractor: Any = None,
        name: str = "model",
    ) -> None:
        self.tokenizer, self.options, self.extractor, self.name = tokenizer, options, extractor, name
        self.known, self.generation = known_config(config), generation or {}
        self.model_type, self.audio = stock_type(config), is_audio(config)
        self.kept: KeptFeatures | None = None
        self.reset()
        if self.audio and extractor is None:
            raise DataError(
                "no feature extractor",
                where=name,
                fix="copy the original's preprocessor_config.json beside it",
            )
        if self.audio and options.source_prefix:
            raise UsageError(
                "recordings have no text before them", where="--source-prefix", fix="leave it out"
            )
        if self.audio:
            check_extractor(extractor, self.model_type, self.known, name)
        self.prompt = decoder_prompt(tokenizer, self.model_type, self.known, self.generation, options, name)
        self._check_ids(np.array(self.prompt), name, *DECODER_VOCABULARY)
        self.source_limit = self._limit(SOURCE_LIMITS, tokenizer.model_max_length)
        self.target_limit = self._limit(TARGET_LIMITS, NO_LIMIT)

    def _limit(self, keys: Sequence[str], own: int) -> int | None:
        found = [n for key in keys if isinstance(n := getattr(self.known, key, None), int)][:1]
        limits = [n for n in (*found, own) if 0 < n < NO_LIMIT]
        return min(limits, default=None)

    def encode(self, pair: Pair) -> Example:
        """One pair as the model reads it.

        Raises:
            DataError: A recording that cannot be read, a target longer than the decoder takes, another
                model's tokenizer.
        """
        source, decoder, prompt = self.encode_raw(pair)
        if self.audio:
            source = self._heard(source, pair.place)
        return Example(source, decoder, prompt, pair.place, pair.target or "")

    def encode_raw(self, pair: Pair) -> tuple[np.ndarray, np.ndarray, int]:
        """One pair, of a recording its samples: int32 ids `[S]` or float32 `[n]`, decoder ids, and their prompt.

        Raises:
            DataError: As `encode`.
        """
        if isinstance(pair.source, Audio):
            return self._samples(pair.source), *self._checked_decoder(pair)
        return self._read(pair.source, pair.place), *self._checked_decoder(pair)

    def _checked_decoder(self, pair: Pair) -> tuple[np.ndarray, int]:
        decoder, prompt = self._decoder(pair)
        if self.target_limit is not None and len(decoder) - 1 > self.target_limit:
            raise DataError(
                f"the target needs {len(decoder) - 1} positions, the decoder has {self.target_limit}",
                where=pair.place,
                fix="split the example, or leave it out",
            )
        self._check_ids(decoder, pair.place, *DECODER_VOCABULARY)
        return decoder, prompt

    def _read(self, text: str, place: str) -> np.ndarray:
        text = self.options.source_prefix + text
        ids = self.tokenizer(text, verbose=False)["input_ids"]
        if self.source_limit is not None and len(ids) > self.source_limit:
            self.cut += 1
            ids = self.tokenizer(text, truncation=True, max_length=self.source_limit)["input_ids"]
        found = np.array(ids, dtype=np.int32)
        self._check_ids(found, place)
        return found

    def _check_ids(self, ids: np.ndarray, place: str, *sizes: str) -> None:
        """Refuse ids beyond the embeddings, whose number the first of `sizes` that the config has tells."""
        found = (getattr(self.known, key, None) for key in (*sizes, "vocab_size"))
        size = next((n for n in found if isinstance(n, int)), None)
        if size is not None and ids.max(initial=0) >= size:
            raise DataError(
                f"the tokenizer gives id {ids.max()}, the model has {size} embeddings",
                where=place,
                fix="use the tokenizer the model was trained with",
            )

    def _samples(self, audio: Audio) -> np.ndarray:
        """float32 `[n]` of one channel at the model's rate, no more than it hears."""
        rate = int(self.extractor.sampling_rate)
        samples, own = audio.load(rate)
        check_length(len(samples), audio.place, least_samples(self.model_type))
        self.resampled += own != rate
        self.silent += not samples.any()
        longest = getattr(self.extractor, "n_samples", None)
        if not isinstance(longest, int) or len(samples) <= longest:
            return samples
        self.cut += 1
        return samples[:longest]

    def _heard(self, samples: np.ndarray, place: str) -> np.ndarray:
        """`features`, or what was kept of them."""
        if self.kept is None:
            return self.features(samples, place)
        key = hashlib.blake2b(samples.tobytes(), digest_size=16).digest()
        return self.kept.of(key, lambda: self.features(samples, place))

    def features(self, samples: np.ndarray, place: str) -> np.ndarray:
        """What the encoder reads of samples `[n]` at the model's rate, by its feature extractor.

        Raises:
            DataError: The extractor refuses them.
        """
        return make_features(self.extractor, samples, place)

    def _input_name(self) -> str:
        return str(self.extractor.model_input_names[0]) if self.audio else "input_ids"

    def _target_ids(self, text: str) -> list[int]:
        """Labels of a target: its own prompt, the text, the end."""
        end = self.end
        if self.model_type == WHISPER:
            # Whisper writes a space before the first word.
            ids = self.tokenizer(f" {text.strip()}", add_special_tokens=False, verbose=False)["input_ids"]
            return [*self.prompt[1:], *ids, *([] if end is None else [end])]
        ids = list(self.tokenizer(text_target=text, verbose=False)["input_ids"])
        return ids if end is None or end in ids[-2:] else [*ids, int(end)]

    def _decoder(self, pair: Pair) -> tuple[np.ndarray, int]:
        """Ids of the decoder with their prompt's length."""
        if pair.target_ids is not None:
            ids = [*self.prompt, *pair.target_ids]
        else:
            labels = self._target_ids(pair.target or "")
            wrapped = self.model_type in WRAPPED
            ids = [labels[-1] if wrapped else self.prompt[0], *labels]
        same = 0
        while same < min(len(self.prompt), len(ids)) and ids[same] == self.prompt[same]:
            same += 1
        return np.array(ids, dtype=np.int32), max(1, same)

    def check(self, pairs: Iterable[Pair]) -> None:
        """Look at pairs as far as that costs little: headers of recordings, lengths of targets.

        Raises:
            DataError: As `encode`.
        """
        for pair in pairs:
            if isinstance(pair.source, Audio):
                pair.source.check(int(self.extractor.sampling_rate), least_samples(self.model_type))
            self._checked_decoder(pair)

    def collate(self, examples: Sequence[Example]) -> ExampleSet:
        """Examples as one batch."""
        name = self._input_name()
        encoder, real_inputs = pad_encoder([e.encoder for e in examples], self.pad)
        mask = None if self.model_type in UNMASKED else real_inputs
        width = max(len(e.decoder) for e in examples) - 1
        inputs = torch.full((len(examples), width), self.pad)
        labels = torch.full((len(examples), width), IGNORE_INDEX)
        real = torch.zeros((len(examples), width), dtype=torch.long)
        for row, example in enumerate(examples):
            ids = torch.from_numpy(example.decoder).long()
            n, first = len(ids) - 1, example.prompt - 1
            inputs[row, :n], labels[row, first:n], real[row, :n] = ids[:-1], ids[first + 1 :], 1
        return ExampleSet(name, encoder, mask, inputs, real, labels)

    @property
    def pad(self) -> int:
        """The id of padding."""
        pad = getattr(self.known, "pad_token_id", None)
        return pad if isinstance(pad, int) else int(self.tokenizer.pad_token_id or 0)

    @property
    def end(self) -> int | None:
        """The id that ends a target."""
        return self.tokenizer.eos_token_id

    def reset(self) -> None:
        """Count anew."""
        self.cut = self.resampled = self.silent = self.unanswered = 0

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Inside, nothing that is encoded counts: it will be encoded again."""
        before = self.cut, self.resampled, self.silent
        yield
        self.cut, self.resampled, self.silent = before

    def report(self) -> list[str]:
        """What the user should know of what has been encoded so far."""
        kept = "" if self.options.targets == "generate" else " (the targets are not)"
        counts = (
            (self.cut, f"longer than the model takes, cut as its processor does{kept}"),
            (
                self.resampled,
                f"of another sampling rate, brought to {getattr(self.extractor, 'sampling_rate', 0)} Hz",
            ),
            (self.silent, "of silence"),
            (self.unanswered, "left out, for which the model writes nothing"),
        )
        kind = "recordings" if self.audio else "sources"
        return [f"{count:,} {kind} {what}" for count, what in counts if count]


def encoder_positions(shape: Sequence[int], ids: bool) -> int:
    """About how many positions an encoder has: convolutions halve features and shorten sound by far.

    Args:
        shape: Of what it reads: ids `[S]`, features of two axes, or samples `[n]`.
        ids: Whether that is ids.
    """
    if ids:
        return shape[0]
    return max(shape) // 2 if len(shape) == 2 else shape[0] // SAMPLES_A_POSITION


def pad_encoder(items: Sequence[np.ndarray], pad: int = 0) -> tuple[Tensor, Tensor]:
    """What encoders read, padded on the right to one length, and its mask.

    Args:
        items: int ids `[S]`; or float features or samples, of which the axes that differ are padded with zeros.
        pad: Id of padding.

    Returns:
        `[N, …]` int64 or float32, and int64 `[N, S]` (S: the axis that is padded; of equal features, the last).
    """
    shape = np.max([item.shape for item in items], axis=0)
    ids = items[0].dtype.kind == "i"
    out = np.full((len(items), *shape), pad if ids else 0, dtype=np.int64 if ids else np.float32)
    differing = [axis for axis in range(len(shape)) if len({item.shape[axis] for item in items}) > 1]
    axis = differing[0] if differing else len(shape) - 1
    mask = np.zeros((len(items), int(shape[axis])), dtype=np.int64)
    for row, item in enumerate(items):
        part: Any = (row, *map(slice, item.shape))
        out[part] = item
        mask[row, : item.shape[axis]] = 1
    return torch.from_numpy(out), torch.from_numpy(mask)


def open_encoder(
    path: str | Path,
    options: PairOptions,
    trust_remote_code: bool = False,
    tokenizer: Any = None,
    config: Mapping[str, Any] | None = None,
) -> PairEncoder:
    """The encoder of pairs of a model in a folder or on the Hub.

    Args:
        path: The model.
        options: How pairs are read.
        trust_remote_code: Run code that the folder brings along.
        tokenizer, config: Its tokenizer and raw config, where they have been loaded.

    Raises:
        CheckpointError: Config, tokenizer or feature extractor cannot be loaded.
        UsageError, DataError: As `PairEncoder`.
    """
    raw = load_config_json(path) if config is None else config
    tokenizer = tokenizer or load_tokenizer(path, trust_remote_code)
    extractor = load_extractor(path, trust_remote_code) if is_audio(raw) else None
    return PairEncoder(tokenizer, raw, options, _generation_config(path), extractor, str(path))


def _generation_config(path: str | Path) -> dict[str, Any]:
    """The generation config with the defaults of transformers; empty where there is none.

    Raises:
        CheckpointError: It is broken: transformers would go on without it, and with another prompt.
    """
    from transformers import GenerationConfig

    file = Path(path) / "generation_config.json"
    if file.exists():
        read_json(file)
    try:
        return dict(GenerationConfig.from_pretrained(path).to_dict())
    except OSError:
        return {}
    except Exception as error:  # of the checks of its values
        raise CheckpointError(
            f"its generation config cannot be read ({reason(error)})", where=path, fix=RESTORE
        ) from error
