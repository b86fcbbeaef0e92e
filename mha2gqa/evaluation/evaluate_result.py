"""Models given to `evaluate`, and its result. Torch-free."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from .. import config
from ..errors import UsageError
from ..results import Result
from .bootstrap import Interval, PairedTest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory, to be evaluated without a folder.

    Args:
        name: What to call it.
        model: A model of transformers.
        tokenizer: Its tokenizer; None for the one of the folder it was loaded from, else of the first model.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None = None


ModelRef = str | Path | LoadedModel


@dataclass(frozen=True)
class EvaluateConfig(config.EvaluateConfig):
    """Every option of `evaluate`, with the models as they are opened."""

    @property
    def subjects(self) -> list[ModelRef]:
        """The models in order, but first of all the one to compare `against`."""
        listed = model_refs(self.models)
        if self.against is None:
            return listed
        (against,) = model_refs(self.against)
        same = [i for i, subject in enumerate(listed) if _key(subject) == _key(against)]
        first = listed.pop(same[0]) if same else against
        return [first, *listed]


def model_refs(models: Any) -> list[ModelRef]:
    """One or several models, as paths or `LoadedModel`s; models of transformers are named by their class.

    Raises:
        UsageError: Something else is among them.
    """
    several = isinstance(models, Sequence) and not isinstance(models, str)
    found: list[ModelRef] = []
    for model in models if several else [models]:
        if isinstance(model, str | Path | LoadedModel):
            found.append(model)
        elif hasattr(model, "config") and hasattr(model, "num_parameters"):
            name = type(model).__name__
            taken = sum(isinstance(ref, LoadedModel) for ref in found)
            found.append(LoadedModel(f"{name} {taken + 1}" if taken else name, model))
        else:
            raise UsageError(
                f"a {type(model).__name__} is not a model",
                where="models",
                fix="give folders, Hub ids, models of transformers or LoadedModel(name, model, tokenizer)",
            )
    return found


def model_name(subject: ModelRef) -> str:
    """What a model is called in results."""
    return subject.name if isinstance(subject, LoadedModel) else str(subject)


def _key(subject: ModelRef) -> str:
    """Equal for one folder however its path is spelled."""
    return model_name(subject) if isinstance(subject, LoadedModel) else os.path.normpath(subject)


@dataclass(frozen=True)
class PositionLoss:
    """Mean loss of the tokens predicted from `low` to `high` tokens of context (both included)."""

    low: int
    high: int
    tokens: int
    loss: float


@dataclass(frozen=True)
class WorstDocument:
    """A document on which a model lost most against the other, per token."""

    source: str
    tokens: int
    loss: float
    loss_against: float


@dataclass(frozen=True)
class Agreement:
    """Where a model and the original part.

    Args:
        against: The original.
        kl_positions: KL by context length; its `loss` is the KL.
        attention_error: Per attention module, |o - o'|² / |o|² of its output in the running models
            (deviations of earlier layers included), on the first few windows.
    """

    against: str
    kl_positions: list[PositionLoss] = field(default_factory=list)
    attention_error: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class GeneratedText:
    """What a model wrote for one example."""

    place: str
    reference: str
    text: str


@dataclass(frozen=True)
class Generation:
    """Metrics of generated text, in percent (BLEU and chrF in points); None where not asked for.

    Args:
        examples: How many were generated.
        wer, cer: Word and character error rate against the references, Whisper's normaliser applied to both.
        bleu, chrf: Of sacrebleu, against the references.
        exact_match: Percentage of texts equal to the first model's; None for that one.
        looped: How many transcripts fell into a loop, by Whisper's own sign: zlib makes them more than 2.4 times shorter.
        paired: By metric, tests against the first model on the same examples, resampled; `wer_without_loops` is of the
            examples that neither model loops on, where there are others.
        shown: The first few texts.
        retry_temperatures: At which texts that repeat themselves were written again; empty where they stay.
    """

    examples: int
    wer: float | None = None
    cer: float | None = None
    bleu: float | None = None
    chrf: float | None = None
    exact_match: float | None = None
    looped: int | None = None
    paired: dict[str, PairedTest] = field(default_factory=dict)
    shown: list[GeneratedText] = field(default_factory=list)
    retry_temperatures: tuple[float, ...] = ()


@dataclass
class ModelResult:
    """One model's figures. Loss is nats per token; None where models cannot be compared by it.

    Args:
        path: Folder, Hub id or name.
        loss, perplexity: Token-weighted; None when the models' tokenizers differ.
        bits_per_byte, byte_perplexity, word_perplexity: Of the scored text.
        tokens, bytes, words: What was scored.
        kv_bytes_per_token: From the config, in the stored dtype.
        kv_bytes_per_sequence: Of an encoder-decoder, `self` and `cross` at the model's own lengths, `context` and
            `source`; empty for a decoder.
        confidence: 95 % interval of the loss (of bits per byte when tokenizers differ).
        paired: Test against the first model (or `against`).
        kl: Mean KL(original || model), nats per token, where `against` was given.
        top1_agreement: Fraction of tokens where both rank the same token first, likewise.
        agreement: Where they part, likewise.
        positions: Loss by length of context.
        worst: Documents on which it lost most.
        tasks: lm-eval's metrics by task, if asked.
        generation: Metrics of generated text, if asked.
        sha256: Of the token ids it saw.
        parameters: Number of parameters.
        seconds, tokens_per_second: Of scoring, loading excluded.
    """

    path: str
    loss: float | None
    perplexity: float | None
    bits_per_byte: float
    tokens: int
    kv_bytes_per_token: int | None
    byte_perplexity: float
    word_perplexity: float
    bytes: int
    words: int
    sha256: str
    parameters: int
    seconds: float
    tokens_per_second: float
    confidence: Interval | None = None
    paired: PairedTest | None = None
    kl: float | None = None
    top1_agreement: float | None = None
    agreement: Agreement | None = None
    positions: list[PositionLoss] = field(default_factory=list)
    worst: list[WorstDocument] = field(default_factory=list)
    tasks: dict[str, dict[str, float]] = field(default_factory=dict)
    generation: Generation | None = None
    kv_bytes_per_sequence: dict[str, int] = field(default_factory=dict)


@dataclass
class EvaluateResult(Result):
    """What `evaluate` found.

    Args:
        protocol: Name of the protocol; it belongs beside every figure.
        settings: Window, stride, batch size, dtype, device, BOS policy, token limit; `pairs`: options that say how
            these were read, as far as they were given.
        data: Paths, files, documents, tokens, bytes, words, the SHA-256 of the token ids, and `skipped`: empty
            rows, documents with nothing to score, tokens after the last whole block.
        models: One entry per model.
        comparison: `tokens`, or `bits_per_byte` when tokenizers differ (then only that is comparable).
        warnings: What the reader must know.
    """

    command: ClassVar[str] = "evaluate"
    renamed: ClassVar[dict[str, str]] = {"notices": "warnings"}
    table: ClassVar[str] = "models"
    protocol: str
    settings: dict[str, Any]
    data: dict[str, Any]
    models: list[ModelResult]
    comparison: Literal["tokens", "bits_per_byte"] = "tokens"
    warnings: list[str] = field(default_factory=list)


def exp(value: float) -> float:
    """`e ** value`, inf where it overflows."""
    return math.exp(value) if value < 709 else value if math.isnan(value) else math.inf
