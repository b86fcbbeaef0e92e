"""DeepSpeed configurations that are accepted: those whose runs were compared with a single process."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from ..errors import UsageError, quoted
from .json_settings import read_settings

FSDP_OFFLOAD = "--set fsdp=true --set 'fsdp_config={\"cpu_offload\": true}'"
_FIX = "give its config as a JSON file, such as examples/deepspeed_zero3.json"


def check_deepspeed(config: Any, teacher_dtype: str | None) -> None:
    """Refuse what DeepSpeed could do and nobody has proven: weights of a wrong run look like those of a right one.

    Args:
        config: TrainingArguments' `deepspeed`: a mapping, JSON, or the path of a JSON file.
        teacher_dtype: Of the run.

    Raises:
        UsageError: The config holds no settings, asks for offload, or the teacher is in 8 bits; or the package is missing.
        CheckpointError: It is a file, and cannot be read.
    """
    settings = read_settings(config, "deepspeed", _FIX)
    zero = settings.get("zero_optimization", {})
    if not isinstance(zero, Mapping):
        raise UsageError(
            f"must hold settings, not {quoted(zero)}", where="deepspeed zero_optimization", fix=_FIX
        )
    for name in ("offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_params"):
        if _offloads(zero.get(name)):
            raise UsageError(
                "not possible: offload is proven with FSDP2 only",
                where=f"deepspeed {name}",
                fix=f"use {FSDP_OFFLOAD}",
            )
    if teacher_dtype is not None:
        raise UsageError(
            "not possible with deepspeed", where=f"teacher_dtype {teacher_dtype}", fix="use --set fsdp=true"
        )
    if find_spec("deepspeed") is None:
        raise UsageError("needs the package deepspeed", where="deepspeed", fix="pip install deepspeed")


def _offloads(asked: Any) -> bool:
    """Whether a setting of ZeRO moves anything off the card: yes, or a device that is none of `none`."""
    if isinstance(asked, Mapping):
        return str(asked.get("device", "none")).lower() != "none"
    return bool(asked)
