"""Quality gates: a limit, a measured value, and whether it holds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import GateError, UsageError


def check_gates(
    models: Sequence[Mapping[str, Any]],
    *,
    max_ppl_ratio: float | None = None,
    min_agreement: float | None = None,
    fail_if_worse: bool = False,
) -> list[dict[str, Any]]:
    """Hold every model after the first against limits; the first is the reference.

    Args:
        models: `evaluate`'s `models[]`.
        max_ppl_ratio: Largest perplexity over the reference's; see `perplexity_ratio`.
        min_agreement: Smallest share of tokens whose most likely continuation is the reference's.
        fail_if_worse: The loss must not be above the reference's.

    Returns:
        One entry for each gate and model: `gate, model, limit, value, ok`.

    Raises:
        UsageError: A gate that cannot be evaluated on these models.
    """
    wanted = (max_ppl_ratio, min_agreement, fail_if_worse or None)
    if all(limit is None for limit in wanted):
        return []
    if len(models) < 2:
        raise UsageError("a gate needs two models", where="evaluate", fix="give the original first")
    reference, gates = models[0], []
    for row in models[1:]:
        if max_ppl_ratio is not None:
            gates.append(
                _gate("max_ppl_ratio", row, max_ppl_ratio, perplexity_ratio(row, reference), below=True)
            )
        if fail_if_worse:
            gates.append(_gate("fail_if_worse", row, 1.0, perplexity_ratio(row, reference), below=True))
        if min_agreement is not None:
            value = row.get("top1_agreement")
            if value is None:
                raise UsageError("needs --against ORIGINAL", where="--min-agreement")
            gates.append(_gate("min_agreement", row, min_agreement, value, below=False))
    return gates


def perplexity_ratio(row: Mapping[str, Any], reference: Mapping[str, Any]) -> float:
    """Perplexity of `row` over the reference's; infinite where a loss is not finite.

    A model that counts other tokens than the reference is compared by bits per byte, expressed as the
    perplexity it would have on the reference's tokens.
    """
    same_tokens = row.get("tokens") == reference.get("tokens")
    key = "loss" if same_tokens else "bits_per_byte"
    ours, theirs = (float(r.get(key, math.nan)) for r in (row, reference))
    if not (math.isfinite(ours) and math.isfinite(theirs)):
        return math.inf
    if same_tokens:
        return math.exp(min(ours - theirs, 700.0))
    return math.exp(min((ours - theirs) * float(reference["loss"]) / theirs, 700.0))


def _gate(name: str, row: Mapping[str, Any], limit: float, value: float, below: bool) -> dict[str, Any]:
    ok = value <= limit if below else value >= limit
    shown = round(value, 6) if math.isfinite(value) else str(value)
    return {"gate": name, "model": row.get("path"), "limit": limit, "value": shown, "ok": bool(ok)}


def require(gates: Sequence[Mapping[str, Any]]) -> None:
    """Raise for the gates that do not hold.

    Raises:
        GateError: Exit code 3, with every failed gate in one line.
    """
    failed = [gate for gate in gates if not gate["ok"]]
    if failed:
        words = "; ".join(f"{g['model']}: {g['gate']} {g['value']} against {g['limit']}" for g in failed)
        raise GateError(words, where="quality gate", fix="uptrain longer, or choose a larger G")
