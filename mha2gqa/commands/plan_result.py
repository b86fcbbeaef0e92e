"""What `plan` found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..results import Result


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
