"""Warnings of `plan`: contexts beyond the model's, uneven tensor parallelism, layers that do not fit, bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..config import PlanConfig
from ..conversion.plan import Plan
from ..conversion.result_tensors import end_to_end_refusal
from ..conversion.warnings import clip_name
from ..errors import listed


def context_warnings(context: int, reach: int | None) -> list[str]:
    """What to know where the cache is asked for more tokens than the model takes."""
    if reach is None or context <= reach:
        return []
    return [f"--context {context:,} is longer than the {reach:,} tokens the model was built for"]


def parallel_warnings(groups: int, num_heads: int, tp: int, possible: Sequence[int]) -> list[str]:
    """What tensor parallelism makes of G KV heads on `tp` ranks, and which numbers can be shared out evenly.

    Args:
        groups: KV heads G of the result.
        num_heads: Query heads H.
        tp: Tensor-parallel ranks.
        possible: Every G that the model can have.
    """
    if tp <= 1:
        return []
    if num_heads % tp:
        ranks = [str(n) for n in range(2, num_heads + 1) if num_heads % n == 0]
        return [f"{num_heads} query heads cannot be split over --tp {tp} ranks; {listed(ranks, 12)} can"]
    even = [str(g) for g in possible if g % tp == 0]
    if groups < tp:
        copies = f"{tp // groups} times" if tp % groups == 0 else "more than once"
        same = f": G = {tp} costs the same cache per rank" if str(tp) in even else ""
        return [f"--tp {tp} stores each of {groups} KV heads {copies}{same}"]
    if groups % tp:
        choice = f"choose G = {listed(even, 12)}" if even else "no G of this model can be"
        return [f"{groups} KV heads cannot be split evenly over --tp {tp} ranks: {choice}"]
    return []


def fit_warnings(price: Mapping[str, Any], asked: PlanConfig) -> list[str]:
    """Settings of the fits that have no effect, and what to do where a device does not hold what they ask for."""
    fit = asked.fitting
    if not price:
        return ["nothing is calibrated: --fit and --effort have no effect"] if fit is not None else []
    unread = [] if fit is None else [f"--fit {sentence}" for sentence in fit.unread()]
    return [*unread, *_layer_warnings(price, asked.gpu_memory), *_whole_warnings(price, asked.gpu_memory)]


def _whole_warnings(price: Mapping[str, Any], gpu_memory: float) -> list[str]:
    """What `convert` would refuse: training all layers together on a device that does not hold that."""
    distillation = price["distillation"]
    if not distillation or distillation["fits"]:
        return []
    return [str(end_to_end_refusal(distillation["device_bytes"], gpu_memory, "a device"))]


def _layer_warnings(price: Mapping[str, Any], gpu_memory: float) -> list[str]:
    """What to do where a device does not hold the fits of a layer."""
    if price["regression"]["fits"]:
        return []
    need = price["regression"]["device_bytes"]
    other = (
        "--no-reconstruct fits" if price["closed_form"]["fits"] else "--no-reconstruct does not fit either"
    )
    return [
        f"fitting a layer needs about {need / 1e9:.0f} GB of the {gpu_memory / 1e9:.0f} GB of a device: give a smaller "
        f"--fit batch_tokens, or more processes; {other}"
    ]


def budget_warnings(training: Mapping[str, Any], tokens: int) -> list[str]:
    """What to know where a budget of uptraining is asked for that has no price."""
    if not training["unpriced"] or tokens == PlanConfig.uptrain_tokens:
        return []
    return [
        f"--uptrain-tokens {tokens:,} has no effect: the speed of uptraining an encoder-decoder is not known"
    ]


def clip_warnings(decided: Plan) -> list[str]:
    """What merging depends on where the model bounds the entries of q, k and v."""
    spec = decided.spec
    if not spec.clip_key or decided.num_kv_heads[0] == decided.num_kv_heads[1]:
        return []
    return [
        f"{clip_name(spec, decided.source)} bounds q, k and v: calibration counts how often it acts, and heads are merged with "
        "the full symmetries in the layers where it never does; elsewhere, and without text, by the plain mean"
    ]


def read_warnings(decided: Plan) -> list[str]:
    """What to know of a model that cannot be calibrated, uptrained and scored here."""
    if not decided.spec.unread:
        return []
    return [f"no calibration, uptraining or evaluation: {decided.spec.unread}"]
