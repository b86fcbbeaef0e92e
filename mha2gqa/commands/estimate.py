"""`plan`: what a conversion would give and need, from the config and the tensor shapes alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from ..architectures import AttentionSpec, Geometry, find_spec, valid_groups
from ..architectures.wide import stored_heads
from ..checkpoints.hf_config import is_encoder_decoder, longest_context
from ..checkpoints.side_files import find_side_files
from ..config import PlanConfig
from ..config.convert import MOST_RECORDINGS
from ..config.keywords import PlanKeywords
from ..config.option import build
from ..config.signature import takes_options
from ..conversion.plan import Plan, plan_conversion, plan_modules
from ..conversion.recommended import convert_command
from ..conversion.result_tensors import result_shapes, result_tensors
from ..data.pairs import trained_on
from ..data.spans import ENCODER_TOKENS
from ..data.windows import LONGEST_WINDOW, calibration_window, default_window
from ..kv_cache import (
    decode_step_bytes,
    kv_bytes,
    kv_bytes_per_token,
    max_batch,
    sequence_cache,
    step_weight_bytes,
)
from ..verification.preflight import check_early, demand, settled, unchecked
from .calibration_price import calibration_price
from .describe import Description, describe
from .estimate_warnings import (
    budget_warnings,
    clip_warnings,
    context_warnings,
    fit_warnings,
    parallel_warnings,
    read_warnings,
)
from .estimate_wide import Form, wide_figures, wide_parallel_warnings
from .plan_result import PlanResult
from .training_price import training_price

__all__ = ["PlanResult", "plan", "suggested"]

DISK_BYTES_PER_SECOND = 500e6  # a plain SSD; stated beside the estimate


@takes_options(PlanConfig)
def plan(source: str | Path, **options: Unpack[PlanKeywords]) -> PlanResult:
    """Say what converting a model would give and need, reading no weights.

    Args:
        source: Checkpoint folder, folder with only a config, config file, or hub id.
        **options: See `PlanConfig`.

    Returns:
        Figures and warnings.

    Raises:
        UnsupportedModelError, UsageError, CheckpointError: As `convert` would.

    Example:
        >>> plan("llama-2-7b", groups=8).kv_bytes_per_token  # doctest: +SKIP
        {'before': 524288, 'after': 131072}
    """
    asked = build(PlanConfig, "plan", {"source": source} | options)  # type: ignore[operator]
    described = describe(source, asked.revision, asked.drop_extra)
    spec, geometries = _attention(described.written_as(None, asked.as_))
    before = max(g.num_kv_heads for g in geometries)
    possible = valid_groups(before, spec)
    groups = suggested(possible, before, asked.tp) if asked.groups is None else asked.groups
    model = described.written_as(stored_heads(groups, asked.wide), asked.as_)
    chosen = _planned(model, groups, asked.wide)
    not_checked = _check_early(source, described, model, chosen, asked.allow_unchecked)
    reach, usual = _reach(described.config)
    served = Served(asked.batch, asked.context or reach or usual, asked.gpu_memory, asked.bandwidth)
    price, training = _prices(model, chosen, asked)
    every = [_option(described.written_as(g, asked.as_), g, served) for g in possible]
    now, then = (next(o for o in every if o["groups"] == g) for g in (before, groups))
    if asked.wide > 1:
        then = _option(model, groups, served, asked.wide)
    first = geometries[0]
    return PlanResult(
        source=str(source),
        model_type=str(described.config["model_type"]),
        result_type=str(chosen.config["model_type"]),
        reexpression=model.found.summary if model.found else {},
        trust_remote_code=chosen.export is not None,
        groups=groups,
        layers=sum(not module.unchanged for module in chosen.modules),
        num_heads=first.num_heads,
        num_kv_heads={"before": before, "after": groups // asked.wide},
        head_dim=first.head_dim,
        valid_groups=possible,
        bytes=_both(now, then, "bytes"),
        parameters=_both(now, then, "parameters"),
        kv_bytes_per_token=_both(now, then, "kv_bytes_per_token"),
        options=every,
        decode=_decode(now, then, served),
        sequence=_sequence(described.config, chosen.config, served.context),
        conversion=_conversion(model, then["bytes"]),
        calibration=price,
        memory=training,
        exact=model.exact,
        warnings=[
            *(model.found.notes if model.found else ()),
            *chosen.warnings,
            *not_checked,
            *context_warnings(served.context, reach),
            *fit_warnings(price, asked),
            *budget_warnings(training, asked.uptrain_tokens),
            *clip_warnings(chosen),
            *read_warnings(chosen),
            *(
                wide_parallel_warnings(groups, asked.wide, asked.tp)
                or parallel_warnings(groups // asked.wide, first.num_heads, asked.tp, possible)
            ),
        ],
        recommended=convert_command(asked, groups, spec, described.config),
        wide=_wide(described, groups, asked.wide, asked.as_) if asked.wide > 1 else {},
    )


def _planned(model: Description, groups: int, wide: int = 1) -> Plan:
    """The conversion of a model to G plain or wide KV heads."""
    if wide == 1:
        return plan_conversion(model.config, model.shapes, groups)
    return plan_conversion(model.config, model.shapes, groups, method="joint", wide=wide)


def _wide(described: Description, groups: int, wide: int, as_: str) -> dict[str, Any]:
    """Wide heads beside GQA-G, and GQA-2G where the source has as many."""

    def form(heads: int, r: int = 1) -> Form:
        model = described.written_as(heads // r, as_)
        decided = _planned(model, heads, r)
        shapes = result_shapes(decided, dict(model.shapes))
        sizes = {name: model.nbytes(name, shape) for name, shape in shapes.items()}
        return Form(decided, sizes, sum(math.prod(shape) for shape in shapes.values()))

    forms = {"wide": form(groups, wide), "plain": form(groups)}
    before = max(g.num_kv_heads for g in _attention(described.written_as(None, as_))[1])
    if 2 * groups <= before and before % (2 * groups) == 0:
        forms["double"] = form(2 * groups)
    return wide_figures(forms)


def _reach(config: Mapping[str, Any]) -> tuple[int | None, int]:
    """Most tokens the decoder was built for, None where nothing limits it; and what to assume then."""
    return longest_context(config), ENCODER_TOKENS if is_encoder_decoder(config) else 4096


def _attention(model: Description) -> tuple[AttentionSpec, list[Geometry]]:
    """The model's entry in the table and its attention modules."""
    spec = find_spec(model.config)
    return spec, [geometry for _, geometry in plan_modules(spec, model.config, model.shapes)]


def suggested(possible: list[int], before: int, tp: int) -> int:
    """The G to propose: a quarter of the heads, or the smallest that `tp` ranks can share out evenly."""
    even = [g for g in possible if g % tp == 0] or possible
    target = max(before / 4, tp)
    return min(even, key=lambda g: (abs(math.log(g / target)), -g))


def _check_early(
    source: str | Path, described: Description, model: Description, decided: Plan, allow_unchecked: bool
) -> list[str]:
    """Ask what `convert` asks before its work: the files beside the weights, and the class of the result.

    Returns:
        Warnings.

    Raises:
        CheckpointError, UnsupportedModelError: As `convert`.
    """
    if not model.exact:  # shapes from the class itself
        return []
    folder = Path(source)
    sides = find_side_files(folder, described.config).warnings() if folder.is_dir() else []
    tensors = result_tensors(decided, dict(model.shapes), model.dtypes)
    checks = settled(check_early(decided.config, decided.source, tensors), decided.config, allow_unchecked)
    demand(checks, decided.config, source, allow_unchecked)
    return [*sides, *(f"cannot be checked: {what}" for what in unchecked(checks, decided.config))]


@dataclass(frozen=True)
class Served:
    """How the result is served.

    Args:
        batch, context: Sequences, and tokens of each.
        gpu_memory: Bytes of one device.
        bandwidth: Of its memory, bytes per second.
    """

    batch: int
    context: int
    gpu_memory: int
    bandwidth: int


def _option(model: Description, groups: int, served: Served, wide: int = 1) -> dict[str, Any]:
    """What a model is with G KV heads: a row of `options`."""
    decided = _planned(model, groups, wide)
    shapes = result_shapes(decided, dict(model.shapes))
    stored = {name: model.nbytes(name, shape) for name, shape in shapes.items()}
    nbytes = sum(stored.values())
    config, batch, context = decided.config, served.batch, served.context
    read = step_weight_bytes(config, stored, batch)
    return {
        "groups": groups,
        "model_type": config["model_type"],
        "group_size": decided.num_kv_heads[0] // decided.num_kv_heads[1],
        "bytes": nbytes,
        "parameters": sum(math.prod(shape) for shape in shapes.values()),
        "kv_bytes_per_token": kv_bytes_per_token(config),
        "kv_bytes": kv_bytes(config, context=context, batch=batch),
        "step_bytes": decode_step_bytes(config, batch=batch, context=context, weight_bytes=read),
        "max_batch": max_batch(config, memory_bytes=served.gpu_memory, context=context, weight_bytes=nbytes),
    }


def _both(now: Mapping[str, Any], then: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A figure of two options, before and after."""
    return {"before": now[key], "after": then[key]}


def _decode(now: Mapping[str, Any], then: Mapping[str, Any], served: Served) -> dict[str, Any]:
    """How the result is served, before and after; the ceiling is bandwidth / bytes that a step must move."""
    ceiling = {
        when: round(served.batch * served.bandwidth / option["step_bytes"], 1)
        for when, option in (("before", now), ("after", then))
    }
    return {
        "batch": served.batch,
        "context": served.context,
        "bandwidth": served.bandwidth,
        "gpu_memory": served.gpu_memory,
        **{key: _both(now, then, key) for key in ("kv_bytes", "step_bytes", "max_batch")},
        "tokens_per_second_ceiling": ceiling,
    }


def _sequence(before: Mapping[str, Any], after: Mapping[str, Any], context: int) -> dict[str, dict[str, int]]:
    """Self- and cross-attention's share of a sequence's cache; empty without cross-attention."""
    configs = (("before", before), ("after", after))
    found = {when: sequence_cache(config, context=context) for when, config in configs}
    return found if all(found.values()) else {}


def _conversion(model: Description, after: int) -> dict[str, float]:
    """Disk, memory and time of a conversion without calibration: it streams."""
    return {
        "disk_bytes": after,
        "memory_bytes": model.largest + 64 * 2**20,
        "seconds": round((model.total + after) / DISK_BYTES_PER_SECOND, 1),
    }


def _prices(model: Description, decided: Plan, asked: PlanConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """The price of calibrating and fitting, and that of uptraining."""
    if decided.spec.unread:
        return {}, {"unpriced": "", "sets": {}}
    training = training_price(
        model,
        decided,
        gpu_memory=asked.gpu_memory,
        tokens=asked.uptrain_tokens,
        window=min(default_window(model.config), longest_context(model.config) or LONGEST_WINDOW),
    )
    return _calibration(model, decided, asked), training


def _calibration(model: Description, decided: Plan, asked: PlanConfig) -> dict[str, Any]:
    """The price of calibrating and fitting; empty where nothing can be calibrated."""
    if decided.spec.uncalibrated or all(module.unchanged for module in decided.modules):
        return {}
    itemsize = max(round(model.total / max(1, sum(map(math.prod, model.shapes.values())))), 1)
    tokens = asked.calibration_tokens
    recordings = min(MOST_RECORDINGS, tokens) if trained_on(model.config) == "audio" else 0
    if recordings:  # each has a token at least; what is computed are the encoder's positions
        tokens = recordings * sequence_cache(model.config)["source"]
    price = calibration_price(
        model.shapes,
        result_shapes(decided, dict(model.shapes)),
        decided,
        gpu_memory=asked.gpu_memory,
        gpus=asked.gpus,
        tokens=tokens,
        window=calibration_window(model.config, tokens),
        fit=asked.fitting,
        itemsize=itemsize,
    )
    return price | ({"recordings": recordings} if recordings else {})
