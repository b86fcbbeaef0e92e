"""Quality gates: a limit, a measured value, and whether it holds. Works on results and on their JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import GateError, UsageError
from .result import EvaluateConfig, EvaluateResult, Subject


def check_limits(
    models: int,
    against: bool,
    *,
    max_ppl_ratio: float | None = None,
    min_agreement: float | None = None,
    fail_if_worse: bool = False,
) -> None:
    """Refuse gates that could not be judged, or that nothing could pass or fail, before anything is scored.

    Args:
        models: How many models are scored, the reference included.
        against: Whether agreement is measured.
        max_ppl_ratio, min_agreement, fail_if_worse: As `measure_gates`.

    Raises:
        UsageError: Which gate, and what it needs.
    """
    check_ratio(max_ppl_ratio, "--max-ppl-ratio")
    if min_agreement is not None and not 0 <= min_agreement <= 1:
        raise UsageError(
            "is no share of the tokens",
            where=f"--min-agreement {min_agreement:g}",
            fix="give 0 to 1, as 0.98",
        )
    if models < 2 and (fail_if_worse or max_ppl_ratio is not None or min_agreement is not None):
        raise UsageError("a gate needs two models", where="evaluate", fix="give the original first")
    if min_agreement is not None and not against:
        raise UsageError(
            "agreement was not measured", where="--min-agreement", fix="name the original with --against"
        )


def check_ratio(limit: float | None, name: str) -> None:
    """Refuse a limit on the ratio of perplexities that nothing could pass or fail.

    Args:
        limit: None is no limit.
        name: What the user calls it.
    """
    if limit is not None and not 0 < limit < math.inf:
        raise UsageError(
            "is no ratio of perplexities",
            where=f"{name} {limit:g}",
            fix="give a positive number such as 1.02",
        )


def check_wanted(models: Sequence[Subject], against: Subject | None, **limits: Any) -> None:
    """`check_limits` for models as `evaluate` takes them."""
    check_limits(len(EvaluateConfig(models, (), against=against).subjects), against is not None, **limits)


def measure_gates(
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
        UsageError: As `check_limits`.
    """
    wanted = (max_ppl_ratio, min_agreement, fail_if_worse or None)
    if all(limit is None for limit in wanted):
        return []
    measured = all(row.get("top1_agreement") is not None for row in models[1:])
    check_limits(
        len(models),
        measured,
        max_ppl_ratio=max_ppl_ratio,
        min_agreement=min_agreement,
        fail_if_worse=fail_if_worse,
    )
    reference: Mapping[str, Any] = models[0]
    gates: list[dict[str, Any]] = []
    for row in models[1:]:
        ratio = perplexity_ratio(row, reference)
        if max_ppl_ratio is not None:
            gates.append(_gate("max_ppl_ratio", row, max_ppl_ratio, ratio, below=True))
        if fail_if_worse:
            gates.append(_gate("fail_if_worse", row, 1.0, ratio, below=True))
        if min_agreement is not None:
            value = float(row["top1_agreement"])
            gates.append(_gate("min_agreement", row, min_agreement, value, below=False))
    return gates


def perplexity_ratio(row: Mapping[str, Any], reference: Mapping[str, Any]) -> float:
    """Perplexity of `row` over the reference's; infinite where a loss is not finite.

    A model with another tokenizer is compared by bits per byte, expressed as the perplexity it would
    have on the reference's tokens.
    """
    same = row.get("tokens") == reference.get("tokens") and None not in (
        row.get("loss"),
        reference.get("loss"),
    )
    key = "loss" if same else "bits_per_byte"
    ours, theirs = (float(r.get(key, math.nan)) for r in (row, reference))
    if not (math.isfinite(ours) and math.isfinite(theirs)):
        return math.inf
    if same:
        return math.exp(min(ours - theirs, 700.0))
    bytes_per_token = float(reference["bytes"]) / float(reference["tokens"])
    return math.exp(min((ours - theirs) * math.log(2) * bytes_per_token, 700.0))


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


def check_gates(result: EvaluateResult, **limits: Any) -> None:
    """Stop a pipeline whose model lost too much.

    Args:
        result: Of `evaluate`; its first model is the original.
        **limits: Of `measure_gates`: `max_ppl_ratio`, `min_agreement`, `fail_if_worse`.

    Raises:
        GateError: A model fails.
        UsageError: The result has nothing to judge by.

    Example:
        >>> check_gates(evaluate([original, converted], "valid.jsonl"), max_ppl_ratio=1.02)
    """
    require(measure_gates(result.to_dict()["models"], **limits))
