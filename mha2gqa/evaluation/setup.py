"""Checks before any model is loaded: which models, text and window, and whether the comparison is fair."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..architectures import check_read
from ..checkpoints.hf_config import (
    is_encoder_decoder,
    longest_context,
    stored_dtype,
)
from ..checkpoints.in_memory_model import require_language_model
from ..checkpoints.loading import (
    resolve_device,
    resolve_dtype,
)
from ..data import Document, PairOptions, PairSource, TextSource
from ..data.memory import Replayed
from ..data.seq2seq import is_audio
from ..data.spans import sentinel_ids
from ..data.windows import LONGEST_WINDOW, default_window
from ..errors import DataError, UsageError, no_effect, quoted
from .entries import EvalModel, open_entries, raw_config, tokenizer_of
from .evaluate_result import EvaluateConfig, LoadedModel, ModelRef, model_name
from .generation_metrics import AUTO, EXACT, choose_metrics, named_metrics
from .lm_eval import check_tasks
from .protocols import PAIRS, PROTOCOLS, SEQ2SEQ, SPAN_CORRUPTION

CHECKED_PAIRS = 10_000  # looked at beforehand, at most
TEXT_ONLY = ("window", "stride", "text_column", "bos")  # options that pairs have no use for
PROBE_DOCUMENTS, PROBE_CHARACTERS = 20, 20_000  # text on which tokenizers are compared beforehand


@dataclass
class ResolvedConfig:
    """Options resolved against the models.

    Args:
        config: As asked.
        text: What is scored.
        entries: The models, first the one the others are compared with.
        reference: The original to measure agreement with, or None.
        window, stride: Resolved.
        dtype, device: Resolved; the same for every model loaded here.
        same_tokenizer: False when only bits per byte can be compared.
        warnings: What the reader must know.
        metrics: Of generated text.
    """

    config: EvaluateConfig
    text: TextSource | PairSource
    entries: list[EvalModel]
    reference: EvalModel | None
    window: int
    stride: int
    dtype: torch.dtype
    device: torch.device
    same_tokenizer: bool
    warnings: list[str]
    metrics: tuple[str, ...] = ()

    def read(self) -> Iterator[Any]:
        """The documents or pairs, from the start."""
        return iter(self.text)


def prepare(config: EvaluateConfig) -> ResolvedConfig:
    """Resolve and check the options; loads configs and tokenizers only.

    Raises:
        UsageError: They cannot be met.
    """
    if config.protocol not in PROTOCOLS:
        raise UsageError(
            "no such protocol", where=f"--protocol {config.protocol}", fix=f"try {', '.join(PROTOCOLS)}"
        )
    if not config.subjects:
        raise UsageError("no model was named", where="evaluate")
    for subject in config.subjects:
        if isinstance(subject, LoadedModel):
            require_language_model(f"LoadedModel {quoted(subject.name)}", subject.model, offloaded=True)
    for name, value in (("batch-size", config.batch_size), ("max-tokens", config.max_tokens)):
        if value is not None and value < 1:
            raise UsageError("must be at least 1", where=f"--{name} {value}")
    if isinstance(config.data, Iterator):
        config = replace(config, data=Replayed(config.data))
    check_tasks(config.tasks)
    warnings: list[str] = []
    text, config = _open_data(config, warnings)
    if isinstance(text, TextSource):  # pairs are never read from a pipe
        _check_readable_again(text, config)
    entries = open_entries(config)
    for entry in entries:
        _check_kind(entry, config.protocol)
    if isinstance(text, PairSource) and entries[0].encoder is not None:
        entries[0].encoder.check(itertools.islice(text, CHECKED_PAIRS))
    metrics = _metrics(config, entries[0])
    if EXACT in config.metrics and len(entries) < 2:
        warnings.append(f"{EXACT} compares texts with the first model's, and only one model is given")
    if config.retry_temperatures and isinstance(text, PairSource):
        tried = ", ".join(f"{t:g}" for t in config.retry_temperatures)
        warnings.append(f"texts that repeat themselves were written again at temperature {tried}")
    reference = None if config.against is None else entries[0]
    window = _window(config, entries, warnings)
    stride = _stride(config, window, warnings)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device, stored_dtype(entries[0].config))
    warnings += _as_they_are(config)
    same = all(_same_tokenizer(entries[0], entry, text) for entry in entries[1:])
    if not same:
        _check_fair(config, reference)
        warnings.append("the models' tokenizers differ: only bits per byte can be compared")
    return ResolvedConfig(
        config=config,
        text=text,
        entries=entries,
        reference=reference,
        window=window,
        stride=stride,
        dtype=dtype,
        device=device,
        same_tokenizer=same,
        warnings=warnings,
        metrics=metrics,
    )


def _as_they_are(config: EvaluateConfig) -> list[str]:
    """Warnings of models in memory, which keep their dtype and device whatever was asked."""
    found = []
    for subject in config.subjects:
        if not isinstance(subject, LoadedModel):
            continue
        own = next(subject.model.parameters())
        if config.dtype != "auto" and resolve_dtype(config.dtype) != own.dtype:
            found.append(f"{subject.name} is in memory and stays {own.dtype}: --dtype has no effect")
        if config.device != "auto" and resolve_device(config.device) != own.device:
            found.append(f"{subject.name} is in memory and stays on {own.device}: --device has no effect")
    return found


def _open_data(config: EvaluateConfig, warnings: list[str]) -> tuple[TextSource | PairSource, EvaluateConfig]:
    """The text or the pairs, and the protocol for what the models are.

    Encoder-decoders are scored on pairs. One pretrained on corrupted spans is scored so where the data is text.
    """
    asked = config.protocol != EvaluateConfig.protocol
    kinds = [raw_config(subject) for subject in config.subjects]
    for subject, kind in zip(config.subjects, kinds, strict=True):
        check_read(kind, model_name(subject))
        _check_same_inputs(model_name(config.subjects[0]), kinds[0], model_name(subject), kind)
    if asked and config.protocol != PAIRS:
        return _text(config, warnings, rows=config.protocol == "wikitext2"), config
    if not all(map(is_encoder_decoder, kinds)):
        if asked:
            text = PairOptions.of(config).open(config.data, is_audio(kinds[0]), config.max_examples)
            return text, config  # refused below, with the name of the model
        return _text(config, warnings), config
    options = PairOptions.of(config)
    options.check_used(generates=bool(config.metrics))
    pairs = options.open(config.data, is_audio(kinds[0]), config.max_examples)
    if asked or pairs.audio or pairs.fits() or not _sentinels(config):
        if not asked:
            warnings.append(f"encoder-decoder: scored by {PAIRS}")
        warnings += _without_effect(config)
        return pairs, replace(config, protocol=PAIRS)
    warnings.append(f"encoder-decoder: scored by {SPAN_CORRUPTION}")
    return _text(config, warnings), replace(config, protocol=SPAN_CORRUPTION)


def _without_effect(config: EvaluateConfig) -> list[str]:
    """A warning of options about text, where pairs are read."""
    given = [name for name in TEXT_ONLY if getattr(config, name) != getattr(EvaluateConfig, name)]
    flags = [f"--{name.replace('_', '-')}" for name in given]
    return [f"pairs are read, no text: {no_effect(flags)}"] if flags else []


def _text(config: EvaluateConfig, warnings: list[str], rows: bool = False) -> TextSource:
    """The text, with a warning of options about pairs."""
    warnings += PairOptions.of(config).without_effect()
    return TextSource(config.data, config.text_column, rows=rows)


def _check_same_inputs(first: str, raw: Mapping[str, Any], name: str, other: Mapping[str, Any]) -> None:
    """Refuse to compare a model that reads recordings with one that reads text.

    Raises:
        UsageError: One does and the other does not.
    """
    if is_audio(raw) != is_audio(other):
        kinds = "reads recordings, and {} text" if is_audio(other) else "reads text, and {} recordings"
        raise UsageError(
            f"{kinds.format(first)}: no data suits both", where=name, fix="evaluate them one at a time"
        )


def _sentinels(config: EvaluateConfig) -> bool:
    """Whether the first model's tokenizer has the sentinels of corrupted spans."""
    return bool(sentinel_ids(tokenizer_of(config.subjects[0], config, None)))


def _metrics(config: EvaluateConfig, first: EvalModel) -> tuple[str, ...]:
    """The metrics of generated text.

    Raises:
        UsageError: They are asked for, and there are no pairs.
    """
    if not config.metrics:
        return ()
    if config.protocol != PAIRS:
        raise UsageError(
            "texts are generated from pairs only",
            where=f"--metrics {','.join(config.metrics)}",
            fix="evaluate an encoder-decoder on source and target, or on audio and text",
        )
    return choose_metrics(config.metrics, is_audio(first.config))


def measured_metrics(subjects: Sequence[ModelRef], names: Sequence[str]) -> tuple[str, ...]:
    """The metrics that an evaluation of these models will measure, `auto` resolved by what the first one reads."""
    return named_metrics(names, AUTO in names and is_audio(raw_config(subjects[0])))


def _check_readable_again(text: TextSource, config: EvaluateConfig) -> None:
    """Refuse a pipe where the text is read once for each model: the second would get what is left of it.

    Raises:
        DataError: It is one, and there are several models.
    """
    if len(config.subjects) > 1 and not text.can_be_reread:
        raise DataError(
            "a pipe can be read only once, the text is read for each model",
            where=", ".join(text.names),
            fix="write the text to a file first",
        )


def context_length(config: Mapping[str, Any]) -> int | None:
    """Most tokens a model was built for, from its raw config; None where nothing limits it."""
    return None if is_encoder_decoder(config) else longest_context(config)


def _check_kind(entry: EvalModel, protocol: str) -> None:
    """A protocol scores either decoders or encoder-decoders."""
    encoder_decoder = is_encoder_decoder(entry.config)
    if encoder_decoder != (protocol in SEQ2SEQ):
        fitting = [name for name in PROTOCOLS if (name in SEQ2SEQ) == encoder_decoder]
        kind = "an encoder-decoder" if encoder_decoder else "a decoder"
        raise UsageError(
            f"protocol {protocol} does not fit {kind}",
            where=entry.name,
            fix=f"try --protocol {', '.join(fitting)}" if fitting else "evaluate a decoder",
        )


def _window(config: EvaluateConfig, entries: list[EvalModel], warnings: list[str]) -> int:
    if config.protocol == PAIRS:
        return LONGEST_WINDOW  # of batches: pairs have lengths of their own
    asked = config.window
    least = 2 if config.protocol == "wikitext2" else 1
    if asked is not None and asked < least:
        raise UsageError("too short to score anything", where=f"--window {asked}")
    contexts = {e.name: n for e in entries if (n := context_length(e.config)) is not None}
    if not contexts:
        return default_window(entries[0].config) if asked is None else asked
    shortest = min(contexts, key=lambda name: contexts[name])
    limit = contexts[shortest]
    if asked is not None and asked > limit:
        raise UsageError(
            f"longer than the context of {shortest}",
            where=f"--window {asked}",
            fix=f"use at most {limit}",
        )
    if asked is not None:
        return asked
    if config.protocol != "rolling" and limit >= LONGEST_WINDOW:
        return LONGEST_WINDOW
    warnings.append(f"window {limit}, the context of {shortest}")
    return limit


def _stride(config: EvaluateConfig, window: int, warnings: list[str]) -> int:
    if config.protocol != "window":
        if config.stride is not None and config.protocol != PAIRS:
            warnings.append(f"--stride {config.stride} is ignored: protocol {config.protocol} has none")
        return window
    if config.stride is None:
        return max(1, window // 2)
    if not 1 <= config.stride <= window:
        raise UsageError(
            f"must be between 1 and the window of {window}, or tokens would be left out",
            where=f"--stride {config.stride}",
        )
    return config.stride


def _same_tokenizer(a: EvalModel, b: EvalModel, text: TextSource | PairSource) -> bool:
    """Whether two tokenizers give the same ids, as far as their vocabularies and a probe tell."""
    first, second = ({i: t for t, i in e.tokenizer.get_vocab().items()} for e in (a, b))
    if any(second.get(i, token) != token for i, token in first.items()):
        return False
    if a.bos != b.bos or a.tokenizer.eos_token_id != b.tokenizer.eos_token_id:
        return False
    texts = [_probe(d)[:PROBE_CHARACTERS] for d in itertools.islice(text, PROBE_DOCUMENTS)]
    ids = [e.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] for e in (a, b)]
    return ids[0] == ids[1]


def _probe(item: Any) -> str:
    if isinstance(item, Document):
        return item.text
    return f"{item.source if isinstance(item.source, str) else ''} {item.target or ''}"


def _check_fair(config: EvaluateConfig, reference: EvalModel | None) -> None:
    if reference is not None:
        raise UsageError(
            "the models' tokenizers differ, so predictions cannot be compared token by token",
            where=f"--against {reference.name}",
            fix="leave --against out and compare bits per byte",
        )
    if config.max_tokens is not None:
        raise UsageError(
            "the models' tokenizers differ, so the same number of tokens is not the same text",
            where="--max-tokens",
            fix="limit the text instead",
        )
