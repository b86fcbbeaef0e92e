"""Which way a model is written as another architecture: decided from config and tensor names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..architectures.arch_conversions import ARCH_CONVERSIONS, Route
from ..architectures.explain import refuse_quantised
from ..architectures.registry import SUPPORTED_TYPES
from ..checkpoints.config_spelling import both_spellings
from ..errors import UnsupportedModelError, UsageError
from . import bigcode, gptj, neox, remote
from .tensor_map import ArchConversion

_ROUTES: dict[tuple[str, str], Callable[[Mapping[str, Any], Iterable[str]], ArchConversion]] = {
    ("gpt_neox", "phi"): neox.gpt_neox,
    ("gpt_neox", "nemotron"): neox.gpt_neox,
    ("gptj", "phi"): gptj.gptj,
    ("codegen", "phi"): gptj.codegen,
    ("gpt2", "gpt_bigcode"): bigcode.gpt2,
    ("gpt-sw3", "gpt_bigcode"): bigcode.gpt2,
    ("opt", "gpt_bigcode"): bigcode.opt,
    ("falcon", "falcon"): bigcode.falcon,
    ("baichuan", "llama"): remote.baichuan,
    ("deepseek", "qwen2_moe"): remote.deepseek,
    ("internlm", "llama"): remote.internlm,
    ("internlm2", "llama"): remote.internlm2,
    ("qwen", "qwen2"): remote.qwen,
}


def plan(
    config: Mapping[str, Any], names: Iterable[str], groups: int | None = None, as_: str | None = "auto"
) -> ArchConversion | None:
    """How a checkpoint is written as another architecture, or None if it stays what it is.

    Args:
        config: Raw config of the source.
        names: All its tensor names.
        groups: KV heads to reach: some targets hold all or one, nothing between. None leaves it open.
        as_: `auto` (or None), `none`, or a model type; the source's own type stands for none, too, where no
            route leads from it to itself.

    Raises:
        UsageError: `as_` is not a route from this architecture, or none to `groups` KV heads.
        UnsupportedModelError: This very model does not fit the target.
        CheckpointError: Tensors are missing, or left over.
    """
    names = list(names)
    refuse_quantised(config, names)
    model_type = str(config.get("model_type"))
    routes = ARCH_CONVERSIONS.get(model_type, ())
    heads = config.get("num_attention_heads", config.get("n_head"))
    if as_ == "none":
        return None
    possible = [r for r in routes if not r.only_mqa or groups in (None, 1, heads)]
    if as_ in (None, "auto"):
        # What can stay what it is does so unless one KV head is asked for.
        needed = [r for r in possible if not r.only_mqa or groups == 1 or model_type not in SUPPORTED_TYPES]
        return _first_fitting(config, names, [r for r in needed if r.auto])
    chosen = [r for r in routes if r.target == as_]
    if not chosen:
        if as_ == model_type:
            return None
        known = ", ".join(sorted({r.target for r in routes}))
        raise UsageError(
            f"{model_type} cannot be written as {as_}",
            where="--as",
            fix=f"it can be written as {known}" if known else "leave it out",
        )
    if chosen[0] not in possible:
        raise UsageError(
            f"{as_} holds all KV heads or one", where="--groups", fix="use --groups 1, or --as auto"
        )
    found = _written_as(chosen[0].target, config, names)
    if found.target_type != as_:
        raise UsageError(
            f"this {model_type} can only be written as {found.target_type}", where="--as", fix="use --as auto"
        )
    return found


def _written_as(target: str, config: Mapping[str, Any], names: Iterable[str]) -> ArchConversion:
    """The conversion to `target`, its config readable by older classes of that type, too."""
    found = _ROUTES[str(config["model_type"]), target](config, names)
    return replace(found, config=both_spellings(found.config))


def _first_fitting(
    config: Mapping[str, Any], names: Iterable[str], routes: Iterable[Route]
) -> ArchConversion | None:
    """The first route that takes this model; one that only reaches all or one KV head may pass."""
    for route in routes:
        try:
            return _written_as(route.target, config, names)
        except UnsupportedModelError:
            if not route.only_mqa:
                raise
    return None
