"""Sums of one pass over the text (a few bytes a document), and the figures made of them."""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np

from ..config.option import declared
from ..config.pair_options import PairConfig
from ..data import Pair
from ..errors import CheckpointError
from ..kv_cache import kv_bytes_per_token, sequence_cache
from .batching import Batch
from .bootstrap import Interval, PairedTest, bootstrap, paired_test
from .context import context_warnings
from .evaluate_result import Agreement, EvaluateResult, ModelResult, PositionLoss, WorstDocument, exp
from .generation_metrics import Texts, bleu_tokenizer, compare_texts, normaliser
from .protocols import PAIRS, SPAN_CORRUPTION, Skipped, Window, describe_bos
from .scoring import TokenScores

if TYPE_CHECKING:
    from .entries import EvalModel
    from .setup import ResolvedConfig

WORST_TOKENS = 16  # documents shorter than this are not called worst


# --- sums ----------------------------------------------------------------------------------------------


class Positions:
    """Sums of a quantity by length of context."""

    def __init__(self) -> None:
        self.sums = np.zeros(1)  # by tokens of context
        self.counts = np.zeros(1, dtype=np.int64)

    def add(self, values: np.ndarray, context: np.ndarray) -> None:
        """Add `values [N]` predicted from `context [N]` tokens each."""
        sums = np.bincount(context, weights=values, minlength=len(self.sums))
        if len(sums) > len(self.sums):
            more = (0, len(sums) - len(self.sums))
            self.sums, self.counts = np.pad(self.sums, more), np.pad(self.counts, more)
        self.sums += sums
        self.counts += np.bincount(context, minlength=len(sums))

    @property
    def total(self) -> float:
        """Sum over all."""
        return float(self.sums.sum())

    def curve(self) -> list[PositionLoss]:
        """Means over contexts of 1, 2, 3-4, 5-8, 9-16, … tokens, where there are any."""
        means = []
        low, high = 1, 1
        while low < len(self.sums):
            part = slice(low, high + 1)
            tokens = int(self.counts[part].sum())
            if tokens:
                means.append(PositionLoss(low, high, tokens, float(self.sums[part].sum() / tokens)))
            low, high = high + 1, 2 * high
        return means


class Samples:
    """Growing columns, one entry per document or block: loss, tokens, bytes, words."""

    def __init__(self) -> None:
        self.columns = np.zeros((4, 1024))

    def add(self, windows: list[Window], losses: np.ndarray) -> None:
        """Add the summed loss `[len(windows)]` of each window to its unit."""
        units = np.array([w.unit for w in windows])
        while units.max() >= self.columns.shape[1]:
            self.columns = np.concatenate([self.columns, np.zeros_like(self.columns)], axis=1)
        amounts = np.array([(w.scored, w.bytes, w.words) for w in windows], dtype=np.float64).T
        for column, values in zip(self.columns, [losses, *amounts], strict=True):
            np.add.at(column, units, values)

    @property
    def nll(self) -> np.ndarray:
        return self.columns[0]

    @property
    def tokens(self) -> np.ndarray:
        return self.columns[1]

    @property
    def bytes(self) -> np.ndarray:
        return self.columns[2]

    @property
    def words(self) -> np.ndarray:
        return self.columns[3]


class Sources:
    """`file:line` of every unit, held as numbers."""

    def __init__(self) -> None:
        self.files: dict[str, int] = {}
        self.file, self.line = array("q"), array("q")

    def add(self, unit: int, source: str) -> None:
        """Note where `unit` comes from; units arrive in order."""
        name, _, line = source.rpartition(":")
        name, number = (name, int(line)) if name and line.isdigit() else (source, -1)
        index = self.files.setdefault(name, len(self.files))
        while len(self.file) < unit:  # documents too short to be scored
            self.file.append(-1)
            self.line.append(-1)
        if len(self.file) == unit:
            self.file.append(index)
            self.line.append(number)

    def __getitem__(self, unit: int) -> str:
        name = list(self.files)[self.file[unit]]
        return name if self.line[unit] < 0 else f"{name}:{self.line[unit]}"


class MetricSums:
    """All sums of one model over one pass."""

    def __init__(self) -> None:
        self.samples = Samples()
        self.positions = Positions()
        self.divergence = Positions()
        self.agreed = 0
        self.sha256 = ""
        self.seconds = 0.0

    def add(self, batch: Batch, nll: np.ndarray) -> None:
        """Add the losses `[N]` of a batch."""
        values = nll.astype(np.float64)
        starts = np.cumsum([0, *(w.scored for w in batch.windows)])[:-1]
        self.samples.add(list(batch.windows), np.add.reduceat(values, starts))
        self.positions.add(values, batch.context)

    def add_comparison(self, batch: Batch, scores: TokenScores) -> None:
        """Add the agreement of a batch with the reference model."""
        assert scores.divergence is not None and scores.agreement is not None
        self.divergence.add(scores.divergence.numpy().astype(np.float64), batch.context)
        self.agreed += int(scores.agreement.sum())

    @property
    def tokens(self) -> int:
        """Tokens scored."""
        return int(self.samples.tokens.sum())


# --- figures -------------------------------------------------------------------------------------------


def summarise(setup: ResolvedConfig, sources: Sources, documents: int, skipped: Skipped) -> EvaluateResult:
    """The result of a finished run. (`setup.warnings` may grow)."""
    config, entries = setup.config, setup.entries
    base = setup.reference or entries[0]
    same = setup.same_tokenizer
    if same and any(e.sums.sha256 != base.sums.sha256 for e in entries):
        setup.warnings.append("the models' tokenizers split this text differently: compare bits per byte")
        same = False
    result = EvaluateResult(
        protocol=config.protocol,
        settings=_settings(setup),
        data=_data(setup, base, documents, skipped),
        models=[_model(entry, base, setup, same, sources) for entry in entries],
        comparison="tokens" if same else "bits_per_byte",
        warnings=[
            *setup.warnings,
            *setup.text.warnings,
            *_said(skipped),
            *_encoded(entries),
            *context_warnings(base.name, base.sums.positions.curve()),
        ],
    )
    scored = {model.bytes for model in result.models}
    if not same and len(scored) > 1:
        result.warnings.append(
            f"not quite the same text: between {min(scored):,} and {max(scored):,} bytes were scored (a document's "
            "first token may have no context); --protocol rolling scores every byte"
        )
    if config.protocol == SPAN_CORRUPTION:
        result.warnings.append(
            "bits/byte is the loss of the corrupted spans over the bytes of the whole text: it compares such models "
            "with each other only"
        )
    add_generation(result, setup)
    for entry, model in zip(entries, result.models, strict=True):
        if not math.isfinite(model.bits_per_byte):
            result.warnings.append(f"{entry.name}: the loss is {model.bits_per_byte}")
    return result


def _settings(setup: ResolvedConfig) -> dict[str, Any]:
    config = setup.config
    pairs = config.protocol == PAIRS  # which have lengths and prompts of their own
    settings: dict[str, Any] = {"window": None if pairs else setup.window}
    if config.protocol == "window":
        settings["stride"] = setup.stride
    if pairs:
        read = ((name, getattr(config, name), item.default) for name, item in declared(PairConfig).items())
        settings["pairs"] = {name: value for name, value, default in read if value != default}
    first = setup.entries[0]
    return settings | {
        "batch_size": config.batch_size,
        "max_tokens": config.max_tokens,
        "dtype": str(setup.dtype).removeprefix("torch."),
        "device": str(setup.device),
        "bos": None if pairs else describe_bos(first.tokenizer, config.protocol, first.bos),
    }


def _data(setup: ResolvedConfig, base: EvalModel, documents: int, skipped: Skipped) -> dict[str, Any]:
    units = base.sums.samples
    return {
        "paths": setup.text.names,
        "files": len(setup.text.files),
        "documents": documents,
        "tokens": base.sums.tokens,
        "bytes": int(units.bytes.sum()),
        "words": int(units.words.sum()),
        "sha256": base.sums.sha256,
        "skipped": {
            "empty_rows": skipped.empty,
            "short_documents": skipped.short,
            "tokens_after_last_block": skipped.rest,
        },
    }


def _said(skipped: Skipped) -> list[str]:
    """What was not scored, in words."""
    parts = [
        f"{count:,} {name}{'' if count == 1 else 's'}"
        for count, name in (
            (skipped.empty, "empty row"),
            (skipped.short, "document of at most one token"),
            (skipped.rest, "token"),
        )
        if count
    ]
    if not parts:
        return []
    rest = " after the last whole block" if skipped.rest else ""
    return [f"not scored: {', '.join(parts)}{rest}"]


def _encoded(entries: list[EvalModel]) -> list[str]:
    """What was done to pairs on their way to a model; the last one has read all of them."""
    encoder = entries[-1].encoder
    return [] if encoder is None else encoder.report()


def add_generation(result: EvaluateResult, setup: ResolvedConfig) -> None:
    """Add the metrics of generated text to a result; the first model's texts are what others are held against."""
    base = setup.reference or setup.entries[0]
    if not setup.metrics or base.encoder is None:
        return
    pairs = [pair for pair in setup.text if isinstance(pair, Pair)]
    texts = Texts(
        [pair.place for pair in pairs],
        [pair.target or "" for pair in pairs],
        setup.metrics,
        normaliser(base.encoder),
        bleu_tokenizer(base.encoder.options.target_language),
        base.encoder.options.retry_temperatures,
    )
    for entry, model in zip(setup.entries, result.models, strict=True):
        original = None if entry is base else base.texts
        model.generation = compare_texts(texts, entry.texts, original, base.name, setup.config.seed)


def _model(
    entry: EvalModel, base: EvalModel, setup: ResolvedConfig, same: bool, sources: Sources
) -> ModelResult:
    sums, units = entry.sums, entry.sums.samples
    nll, tokens = float(units.nll.sum()), sums.tokens
    size, words = int(units.bytes.sum()), int(units.words.sum())
    loss = nll / tokens
    cache: dict[str, int] = {}
    try:
        kv_bytes: int | None = kv_bytes_per_token(entry.config)
        cache = sequence_cache(entry.config)
    except CheckpointError as error:
        kv_bytes = None
        setup.warnings.append(f"{entry.name}: KV bytes unknown ({error})")
    compared = entry is not base
    beside = compared and setup.reference is not None
    return ModelResult(
        path=entry.name,
        loss=loss if same else None,
        perplexity=exp(loss) if same else None,
        bits_per_byte=nll / math.log(2) / size if size else math.nan,
        tokens=tokens,
        kv_bytes_per_token=kv_bytes,
        kv_bytes_per_sequence=cache,
        byte_perplexity=exp(nll / size) if size else math.nan,
        word_perplexity=exp(nll / words) if words else math.nan,
        bytes=size,
        words=words,
        sha256=sums.sha256,
        parameters=entry.parameters,
        seconds=sums.seconds,
        tokens_per_second=tokens / sums.seconds if sums.seconds else math.nan,
        confidence=_interval(entry, same, setup.config.seed),
        paired=_paired(entry, base, same, setup) if compared else None,
        kl=sums.divergence.total / tokens if beside else None,
        top1_agreement=sums.agreed / tokens if beside else None,
        agreement=_agreement(entry, setup) if compared else None,
        positions=sums.positions.curve(),
        worst=_worst(entry, base, sources, setup.config.worst) if compared and same else [],
        tasks=entry.tasks,
    )


def _interval(entry: EvalModel, same: bool, seed: int) -> Interval | None:
    units = entry.sums.samples
    if same:
        return bootstrap(units.nll, units.tokens, seed)
    return bootstrap(units.nll / math.log(2), units.bytes, seed)


def _paired(entry: EvalModel, base: EvalModel, same: bool, setup: ResolvedConfig) -> PairedTest | None:
    own, other = entry.sums.samples, base.sums.samples
    columns = (own, other)
    length = min(len(units.nll) for units in columns)
    nll, other_nll = (units.nll[:length] for units in columns)
    if same:
        weight = own.tokens[:length]
    elif np.array_equal(own.bytes[:length], other.bytes[:length]):  # the same text, document by document
        weight = own.bytes[:length]
        nll, other_nll = nll / math.log(2), other_nll / math.log(2)
    else:
        return None
    return paired_test(nll, other_nll, weight, against=base.name, seed=setup.config.seed)


def _agreement(entry: EvalModel, setup: ResolvedConfig) -> Agreement | None:
    if setup.reference is None:
        return None
    sums = entry.sums
    return Agreement(
        against=setup.reference.name,
        kl_positions=sums.divergence.curve(),
        attention_error=entry.attention_error,
    )


def _worst(entry: EvalModel, base: EvalModel, sources: Sources, count: int) -> list[WorstDocument]:
    tokens = entry.sums.samples.tokens
    enough = tokens >= WORST_TOKENS
    enough = enough if enough.any() else tokens > 0
    index = np.flatnonzero(enough)
    loss, other = (e.sums.samples.nll[index] / tokens[index] for e in (entry, base))
    with np.errstate(invalid="ignore"):
        order = np.argsort(-np.nan_to_num(loss - other, nan=-np.inf), kind="stable")[:count]
    return [
        WorstDocument(sources[int(index[i])], int(tokens[index[i]]), float(loss[i]), float(other[i]))
        for i in order
    ]
