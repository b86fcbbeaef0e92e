"""`plan`: what a conversion would give and need, from the config and the tensor shapes alone."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from ..architectures import AttentionSpec, Geometry, find_spec, valid_groups
from ..architectures.wide import stored_heads
from ..checkpoints.hf_config import is_encoder_decoder, longest_context
from ..checkpoints.side_files import find_side_files
from ..config import ConvertConfig, PlanConfig
from ..config.convert import MOST_RECORDINGS
from ..config.given import require_path
from ..config.option import declared
from ..config.reconstruct import Effort, ReconstructConfig
from ..config.signature import names_in_python
from ..conversion.plan import Plan, plan_conversion, plan_modules
from ..conversion.result_tensors import result_shapes, result_tensors
from ..data.pairs import trained_on
from ..data.spans import ENCODER_TOKENS
from ..errors import UsageError
from ..kv_cache import (
    decode_step_bytes,
    kv_bytes,
    kv_bytes_per_token,
    max_batch,
    sequence_cache,
    step_weight_bytes,
)
from ..results import Result
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
from .training_price import training_price

DISK_BYTES_PER_SECOND = 500e6  # a plain SSD; stated beside the estimate
H100_BANDWIDTH = 3.35e12  # bytes/s of an H100 SXM, NVIDIA's data sheet
_CALIBRATION = {
    "text": "--calibration TEXT.jsonl",
    "pairs": "--calibration PAIRS.jsonl",
    "audio": "--calibration RECORDINGS --targets generate",
}


@dataclass
class PlanResult(Result):
    """What `plan` found.

    Args:
        source: As given.
        model_type: From the config.
        result_type: Model type of the result: another where the source is written as another or its result travels
            with modelling code.
        reexpression: `{"source_type": …, "target_type": …}` where the result is re-expressed; else empty.
        trust_remote_code: Whether loading the result in transformers needs `trust_remote_code=True`.
        groups: The G that the figures `after` are for.
        layers: Attention modules that change.
        num_heads: Query heads.
        num_kv_heads: `{"before": K, "after": G}`.
        head_dim: Width of a head.
        valid_groups: Every G that is possible.
        bytes: Of all tensors, `before` and `after`.
        parameters: Counts `before` and `after`.
        kv_bytes_per_token: `before` and `after`.
        options: For each valid G: size of the checkpoint and of the cache, and the result's model type.
        decode: KV bytes and the tokens/s that memory bandwidth allows, at `batch` × `context`.
        sequence: What one sequence of an encoder-decoder caches `before` and `after`: see `kv_cache.sequence_cache`.
        conversion: `disk_bytes`, `memory_bytes`, `seconds` (estimates).
        calibration: What calibrating and fitting comes to, see `calibration_price`, and how many `recordings` of a speech
            model; empty where nothing changes.
        memory: What each parameter set of `uptrain` comes to, see `training_price`.
        exact: False where shapes come from the config and not from the files.
        warnings: What to know before converting.
        recommended: A command to copy.
        wide: What wide heads cost and where they pay (see `wide_figures`); empty without.
    """

    command: ClassVar[str] = "plan"
    table: ClassVar[str] = "options"
    source: str
    model_type: str
    result_type: str
    reexpression: dict[str, str]
    trust_remote_code: bool
    groups: int
    layers: int
    num_heads: int
    num_kv_heads: dict[str, int]
    head_dim: int
    valid_groups: list[int]
    bytes: dict[str, int]
    parameters: dict[str, int]
    kv_bytes_per_token: dict[str, int]
    options: list[dict[str, Any]]
    decode: dict[str, Any]
    conversion: dict[str, float]
    calibration: dict[str, Any]
    memory: dict[str, Any]
    exact: bool
    warnings: list[str] = field(default_factory=list)
    recommended: str = ""
    wide: dict[str, Any] = field(default_factory=dict)
    sequence: dict[str, dict[str, int]] = field(default_factory=dict)


@names_in_python(PlanConfig)
def plan(
    source: str | Path,
    *,
    groups: int | None = None,
    wide: int = 1,
    as_: str = "auto",
    tp: int = 1,
    batch: int = 1,
    context: int | None = None,
    gpu_memory: float = 80e9,
    gpus: int = 1,
    calibration_tokens: int = PlanConfig.calibration_tokens,
    effort: Effort | None = None,
    fit: ReconstructConfig | Mapping[str, Any] | None = None,
    uptrain_tokens: int = PlanConfig.uptrain_tokens,
    bandwidth: float = H100_BANDWIDTH,
    revision: str | None = None,
    drop_extra: Sequence[str] = (),
    allow_unchecked: bool = False,
) -> PlanResult:
    """Say what converting a model would give and need, reading no weights.

    Args:
        source: Checkpoint folder, folder with only a config, config file, or hub id.
        groups: KV heads G; by default a quarter of the current number.
        wide: R of wide heads: G / R KV heads that are R times as wide, with the cache of G.
        as_: As `convert` has it: which architecture the result is written in.
        tp: Tensor-parallel ranks the result will be served on.
        batch, context: Sequences and tokens of the decoding situation; context defaults to the model's.
        gpu_memory: Bytes of one device.
        gpus: Devices that share calibration.
        calibration_tokens: Tokens of calibration text.
        effort, fit: As `convert` has them: how hard the fits try, which is priced.
        uptrain_tokens: Budget of uptraining.
        bandwidth: Its memory bandwidth, bytes/s.
        revision: On the Hub.
        drop_extra: As `convert` has it: names or globs of tensors to leave out.
        allow_unchecked: As `convert` has it.

    Returns:
        Figures and warnings.

    Raises:
        UnsupportedModelError, UsageError, CheckpointError: As `convert` would.
    """
    require_path("source", source)
    for name, value in (("context", context), ("gpu-memory", gpu_memory), ("bandwidth", bandwidth)):
        if value is not None and value <= 0:
            raise UsageError("must be more than 0", where=f"--{name} {value:g}")
    asked = PlanConfig(
        source,
        revision=revision,
        drop_extra=tuple(drop_extra),
        allow_unchecked=allow_unchecked,
        calibration_tokens=calibration_tokens,
        effort=effort,
        fit=fit,
    )
    described = describe(source, revision, drop_extra)
    spec, geometries = _attention(described.written_as(None, as_))
    before, num_heads = max(g.num_kv_heads for g in geometries), geometries[0].num_heads
    possible = valid_groups(before, spec)
    wanted = suggested(possible, before, tp) if groups is None else groups
    model = described.written_as(stored_heads(wanted, wide), as_)
    chosen = _planned(model, wanted, wide)
    not_checked = _check_early(source, described, model, chosen, allow_unchecked)
    reach, usual = _reach(described.config)
    context = context or reach or usual
    price = _calibration(model, chosen, gpu_memory, gpus, calibration_tokens, asked.fitting)
    training = training_price(model, chosen, gpu_memory=gpu_memory, tokens=uptrain_tokens)
    if spec.unread:
        price, training = {}, {"unpriced": "", "sets": {}}
    options = [_option(described.written_as(g, as_), g, batch, context, gpu_memory) for g in possible]
    now, then = (next(o for o in options if o["groups"] == g) for g in (before, wanted))
    if wide > 1:
        then = _option(model, wanted, batch, context, gpu_memory, wide)
    return PlanResult(
        source=str(source),
        model_type=str(described.config["model_type"]),
        result_type=str(chosen.config["model_type"]),
        reexpression=model.found.summary if model.found else {},
        trust_remote_code=chosen.export is not None,
        groups=wanted,
        layers=sum(not module.unchanged for module in chosen.modules),
        num_heads=num_heads,
        num_kv_heads={"before": before, "after": wanted // wide},
        head_dim=geometries[0].head_dim,
        valid_groups=possible,
        bytes={"before": now["bytes"], "after": then["bytes"]},
        parameters={"before": now["parameters"], "after": then["parameters"]},
        kv_bytes_per_token={"before": now["kv_bytes_per_token"], "after": then["kv_bytes_per_token"]},
        options=options,
        decode=_decode(now, then, batch, context, bandwidth, gpu_memory),
        sequence=_sequence(described.config, chosen.config, context),
        conversion=_conversion(model, then["bytes"]),
        calibration=price,
        memory=training,
        exact=model.exact,
        warnings=[
            *(model.found.notes if model.found else ()),
            *chosen.warnings,
            *not_checked,
            *context_warnings(context, reach),
            *fit_warnings(price, gpu_memory),
            *budget_warnings(training, uptrain_tokens),
            *clip_warnings(chosen),
            *read_warnings(chosen),
            *(
                wide_parallel_warnings(wanted, wide, tp)
                or parallel_warnings(wanted // wide, num_heads, tp, possible)
            ),
        ],
        recommended=_recommended(asked, wanted, wide, as_, described.config, spec),
        wide=_wide(described, wanted, wide, as_) if wide > 1 else {},
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


def _recommended(
    asked: PlanConfig, groups: int, wide: int, as_: str, config: Mapping[str, Any], spec: AttentionSpec
) -> str:
    """The command to copy: with data of the kind that the model was trained on, where that can be read, and what was asked."""
    source = str(asked.source)
    words = ["mha2gqa", "convert", source, f"{Path(source).name}-gqa{groups}", "--groups", str(groups)]
    words += ["--wide", str(wide)] if wide > 1 else []
    words += [] if spec.unread or spec.uncalibrated else _CALIBRATION[trained_on(config)].split()
    words += [] if as_ == "auto" else ["--as", as_]
    changed, options = asked.changed(), declared(ConvertConfig)
    words += [options["allow_unchecked"].flags[0]] if asked.allow_unchecked else []
    for name in ("revision", "drop_extra", "calibration_tokens", "effort"):
        values = changed.get(name, ())
        for value in values if isinstance(values, tuple) else (values,):
            words += [options[name].flags[0], str(value)]
    for key, value in asked.fit.changed().items() if isinstance(asked.fit, ReconstructConfig) else ():
        words += ["--fit", f"{key}={json.dumps(value) if isinstance(value, (bool, tuple)) else value}"]
    return shlex.join(words)


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


def _option(
    model: Description, groups: int, batch: int, context: int, gpu_memory: float, wide: int = 1
) -> dict[str, Any]:
    decided = _planned(model, groups, wide)
    shapes = result_shapes(decided, dict(model.shapes))
    stored = {name: model.nbytes(name, shape) for name, shape in shapes.items()}
    nbytes = sum(stored.values())
    config = decided.config
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
        "max_batch": max_batch(config, memory_bytes=gpu_memory, context=context, weight_bytes=nbytes),
    }


def _decode(
    now: Mapping[str, Any],
    then: Mapping[str, Any],
    batch: int,
    context: int,
    bandwidth: float,
    gpu_memory: float,
) -> dict[str, Any]:
    """The situation `batch` × `context`, before and after; the ceiling is bytes a step must move / bandwidth."""
    keys = ("kv_bytes", "step_bytes", "max_batch")
    found: dict[str, Any] = {"batch": batch, "context": context}
    found |= {"bandwidth": bandwidth, "gpu_memory": gpu_memory}
    found |= {key: {"before": now[key], "after": then[key]} for key in keys}
    found["tokens_per_second_ceiling"] = {
        when: round(batch * bandwidth / option["step_bytes"], 1)
        for when, option in (("before", now), ("after", then))
    }
    return found


def _sequence(before: Mapping[str, Any], after: Mapping[str, Any], context: int) -> dict[str, dict[str, int]]:
    """Self- and cross-attention's share of a sequence's cache; empty for a decoder."""
    if not is_encoder_decoder(before):
        return {}
    configs = (("before", before), ("after", after))
    return {when: sequence_cache(config, context=context) for when, config in configs}


def _conversion(model: Description, after: int) -> dict[str, float]:
    """Disk, memory and time of a conversion without calibration: it streams."""
    return {
        "disk_bytes": after,
        "memory_bytes": model.largest + 64 * 2**20,
        "seconds": round((model.total + after) / DISK_BYTES_PER_SECOND, 1),
    }


def _calibration(
    model: Description,
    decided: Plan,
    gpu_memory: float,
    gpus: int,
    tokens: int,
    fit: ReconstructConfig | None,
) -> dict[str, Any]:
    """The price of calibrating and fitting."""
    if decided.spec.uncalibrated or all(module.unchanged for module in decided.modules):
        return {}
    itemsize = max(round(model.total / max(1, sum(map(math.prod, model.shapes.values())))), 1)
    recordings = min(MOST_RECORDINGS, tokens) if trained_on(model.config) == "audio" else 0
    if recordings:  # each has a token at least; what is computed are the encoder's positions
        tokens = recordings * sequence_cache(model.config)["source"]
    price = calibration_price(
        model.shapes,
        result_shapes(decided, dict(model.shapes)),
        decided,
        gpu_memory=gpu_memory,
        gpus=gpus,
        tokens=tokens,
        fit=fit,
        itemsize=itemsize,
    )
    return price | ({"recordings": recordings} if recordings else {})
