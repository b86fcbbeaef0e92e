"""From sums to figures: losses, intervals, paired tests, agreement, worst documents."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError
from ..kv_cache import kv_bytes_per_token
from .bootstrap import Interval, PairedTest, bootstrap, paired_test
from .metrics import Sources
from .protocols import SPAN_CORRUPTION, describe_bos
from .result import Agreement, EvaluateResult, ModelResult, WorstDocument, exp
from .setup import Entry, Setup

WORST_TOKENS = 16  # documents shorter than this are not called worst


def summarise(setup: Setup, sources: Sources, documents: int) -> EvaluateResult:
    """The result of a finished run. (`setup.notices` may grow)."""
    config, entries = setup.config, setup.entries
    base = setup.reference or entries[0]
    same = setup.same_tokenizer
    if same and any(e.tally.sha256 != base.tally.sha256 for e in entries):
        setup.notices.append("the models' tokenizers split this text differently: compare bits per byte")
        same = False
    result = EvaluateResult(
        protocol=config.protocol,
        settings=_settings(setup),
        data=_data(setup, base, documents),
        models=[_model(entry, base, setup, same, sources) for entry in entries],
        comparison="tokens" if same else "bits_per_byte",
        notices=setup.notices,
    )
    scored = {model.bytes for model in result.models}
    if not same and len(scored) > 1:
        result.notices.append(
            f"not quite the same text: between {min(scored):,} and {max(scored):,} bytes were scored (a document's "
            "first token may have no context); --protocol rolling scores every byte"
        )
    if config.protocol == SPAN_CORRUPTION:
        result.notices.append(
            "bits/byte is the loss of the corrupted spans over the bytes of the whole text: it compares such models "
            "with each other only"
        )
    for entry, model in zip(entries, result.models, strict=True):
        if not math.isfinite(model.bits_per_byte):
            result.notices.append(f"{entry.name}: the loss is {model.bits_per_byte}")
    return result


def _settings(setup: Setup) -> dict[str, Any]:
    config = setup.config
    settings: dict[str, Any] = {"window": setup.window}
    if config.protocol == "window":
        settings["stride"] = setup.stride
    first = setup.entries[0]
    return settings | {
        "batch_size": config.batch_size,
        "max_tokens": config.max_tokens,
        "dtype": str(setup.dtype).removeprefix("torch."),
        "device": str(setup.device),
        "bos": describe_bos(first.tokenizer, config.protocol, first.bos),
    }


def _data(setup: Setup, base: Entry, documents: int) -> dict[str, Any]:
    data, units = setup.config.data, base.tally.units
    listed = data if isinstance(data, list | tuple) else [data]
    return {
        "paths": ["(in memory)"] if not isinstance(listed[0], str | Path) else [str(p) for p in listed],
        "documents": documents,
        "tokens": base.tally.tokens,
        "bytes": int(units.bytes.sum()),
        "words": int(units.words.sum()),
        "sha256": base.tally.sha256,
    }


def _model(entry: Entry, base: Entry, setup: Setup, same: bool, sources: Sources) -> ModelResult:
    tally, units = entry.tally, entry.tally.units
    nll, tokens = float(units.nll.sum()), tally.tokens
    size, words = int(units.bytes.sum()), int(units.words.sum())
    loss = nll / tokens
    try:
        kv_bytes: int | None = kv_bytes_per_token(entry.config)
    except CheckpointError as error:
        kv_bytes = None
        setup.notices.append(f"{entry.name}: KV bytes unknown ({error})")
    compared = entry is not base
    beside = compared and setup.reference is not None
    return ModelResult(
        path=entry.name,
        loss=loss if same else None,
        perplexity=exp(loss) if same else None,
        bits_per_byte=nll / math.log(2) / size if size else math.nan,
        tokens=tokens,
        kv_bytes_per_token=kv_bytes,
        byte_perplexity=exp(nll / size) if size else math.nan,
        word_perplexity=exp(nll / words) if words else math.nan,
        bytes=size,
        words=words,
        sha256=tally.sha256,
        parameters=entry.parameters,
        seconds=tally.seconds,
        tokens_per_second=tokens / tally.seconds if tally.seconds else math.nan,
        confidence=_interval(entry, same, setup.config.seed),
        paired=_paired(entry, base, same, setup) if compared else None,
        kl=tally.divergence.total / tokens if beside else None,
        top1_agreement=tally.agreed / tokens if beside else None,
        agreement=_agreement(entry, setup) if compared else None,
        positions=tally.positions.curve(),
        worst=_worst(entry, base, sources, setup.config.worst) if compared and same else [],
        tasks=entry.tasks,
    )


def _interval(entry: Entry, same: bool, seed: int) -> Interval | None:
    units = entry.tally.units
    if same:
        return bootstrap(units.nll, units.tokens, seed)
    return bootstrap(units.nll / math.log(2), units.bytes, seed)


def _paired(entry: Entry, base: Entry, same: bool, setup: Setup) -> PairedTest | None:
    own, other = entry.tally.units, base.tally.units
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


def _agreement(entry: Entry, setup: Setup) -> Agreement | None:
    if setup.reference is None:
        return None
    tally = entry.tally
    return Agreement(
        against=setup.reference.name,
        kl_positions=tally.divergence.curve(),
        attention_error=entry.attention_error,
    )


def _worst(entry: Entry, base: Entry, sources: Sources, count: int) -> list[WorstDocument]:
    tokens = entry.tally.units.tokens
    enough = tokens >= WORST_TOKENS
    enough = enough if enough.any() else tokens > 0
    index = np.flatnonzero(enough)
    loss, other = (e.tally.units.nll[index] / tokens[index] for e in (entry, base))
    with np.errstate(invalid="ignore"):
        order = np.argsort(-np.nan_to_num(loss - other, nan=-np.inf), kind="stable")[:count]
    return [
        WorstDocument(sources[int(index[i])], int(tokens[index[i]]), float(loss[i]), float(other[i]))
        for i in order
    ]
