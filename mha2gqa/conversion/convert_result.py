"""What `convert` did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..results import Check, Result


@dataclass
class ConvertResult(Result):
    """What `convert` did.

    Args:
        source: Folder or hub id, as given.
        output: The folder written.
        num_kv_heads: `{"before": K, "after": G}`; of wide heads as they are stored, G / R.
        method: Merging method used.
        reexpression: `{"source_type": …, "target_type": …}` where the result has another architecture than
            the source; empty where it has the same.
        attention: Kinds of decoder attention whose heads are shared.
        layers: Per attention module: path, grouping, relative error, norm ratios, notes.
        verification: The checks made on the finished folder.
        warnings: What the user should know.
        calibration: Text, tokens, losses on held-out calibration text, seconds per stage; empty without.
        kv_bytes_per_token: `{"before": …, "after": …}`.
        groups: G, the number of KV heads of the source's width whose cache the result has.
        wide: R, how many times as wide the result's KV heads are; 1 for plain ones.
        head_dim: `{"before": d, "after": R d}`.
        recommended: A command to copy.
    """

    command: ClassVar[str] = "convert"
    table: ClassVar[str] = "layers"
    source: str
    output: str
    num_kv_heads: dict[str, int]
    method: str
    reexpression: dict[str, str] = field(default_factory=dict)
    attention: list[str] = field(default_factory=list)
    layers: list[dict[str, Any]] = field(default_factory=list)
    verification: list[Check] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    calibration: dict[str, Any] = field(default_factory=dict)
    kv_bytes_per_token: dict[str, int] = field(default_factory=dict)
    groups: int = 0
    wide: int = 1
    head_dim: dict[str, int] = field(default_factory=dict)
    recommended: str = ""
