"""The models of an evaluation: configs, tokenizers and encoders of pairs, before any weight is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoints.hf_config import is_encoder_decoder, known_config, load_config_json
from ..checkpoints.loading import load_tokenizer
from ..data import PairOptions
from ..data.audio import KeptFeatures
from ..data.extractors import load_extractor
from ..data.seq2seq import PairEncoder, is_audio, open_encoder
from ..errors import UsageError
from .evaluate_result import EvaluateConfig, LoadedModel, ModelRef, model_name
from .lm_eval import TaskScores
from .metrics import MetricSums
from .protocols import PAIRS, choose_bos

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class EvalModel:
    """A model to score: what is known before it is loaded, and its sums afterwards."""

    subject: ModelRef
    config: Mapping[str, Any]
    tokenizer: PreTrainedTokenizerBase
    bos: int | None
    sums: MetricSums = field(default_factory=MetricSums)
    parameters: int = 0
    attention_error: dict[str, float] = field(default_factory=dict)
    tasks: TaskScores = field(default_factory=dict)
    encoder: PairEncoder | None = None
    texts: list[str] = field(default_factory=list)

    @cached_property
    def known(self) -> Any:
        """The config with the defaults of its class."""
        return known_config(self.config)

    @property
    def name(self) -> str:
        """What results call it."""
        return model_name(self.subject)


def raw_config(subject: ModelRef) -> dict[str, Any]:
    """The raw config of a model."""
    return subject.model.config.to_dict() if isinstance(subject, LoadedModel) else load_config_json(subject)


def open_entries(config: EvaluateConfig) -> list[EvalModel]:
    """The models with their configs and tokenizers."""
    found: list[EvalModel] = []
    for subject in config.subjects:
        tokenizer = tokenizer_of(subject, config, found[0].tokenizer if found else None)
        bos = choose_bos(tokenizer, config.protocol, config.bos)
        entry = EvalModel(subject, raw_config(subject), tokenizer, bos)
        if config.protocol == PAIRS and is_encoder_decoder(entry.config):
            entry.encoder = _pair_encoder(entry, config)
            _share_features(entry.encoder, [e.encoder for e in found if e.encoder is not None])
        found.append(entry)
    return found


def tokenizer_of(
    subject: ModelRef, config: EvaluateConfig, other: PreTrainedTokenizerBase | None
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, or another model's where it is not known.

    Raises:
        UsageError: There is none.
    """
    if not isinstance(subject, LoadedModel):
        return load_tokenizer(subject, config.trust_remote_code)
    given: Any = subject.tokenizer
    folder = subject.model.name_or_path
    if given is not None:
        return getattr(given, "tokenizer", given)  # a processor has one
    if folder and Path(folder).is_dir():
        return load_tokenizer(folder)
    if other is None:
        raise UsageError(
            "its tokenizer is not known",
            where=model_name(subject),
            fix="give LoadedModel(name, model, tokenizer), or a model with a folder first",
        )
    return other


def _pair_encoder(entry: EvalModel, config: EvaluateConfig) -> PairEncoder:
    options, subject = PairOptions.of(config), entry.subject
    if not isinstance(subject, LoadedModel):
        return open_encoder(subject, options, config.trust_remote_code, entry.tokenizer)
    extractor = getattr(subject.tokenizer, "feature_extractor", None)
    folder = subject.model.name_or_path
    if extractor is None and is_audio(entry.config) and folder and Path(folder).is_dir():
        extractor = load_extractor(folder)
    generation = subject.model.generation_config
    settings = {} if generation is None else generation.to_dict()
    return PairEncoder(entry.tokenizer, entry.config, options, settings, extractor, entry.name)


def _share_features(encoder: PairEncoder, others: Sequence[PairEncoder]) -> None:
    """Let models with the same feature extractor make the features of a recording once, for texts and scores."""
    if not encoder.audio:
        return
    settings = encoder.extractor.to_json_string()
    same = (e for e in others if e.extractor.to_json_string() == settings)
    first = next(same, None)
    encoder.kept = KeptFeatures() if first is None else first.kept
