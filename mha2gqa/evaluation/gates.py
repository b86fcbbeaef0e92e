"""Quality gates: a limit, a measured value, and whether it holds. Works on results and on their JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import GateError, UsageError
from .evaluate_result import EvaluateResult, exp

Row = Mapping[str, Any]  # one of `evaluate`'s `models[]`


@dataclass(frozen=True)
class _Gate:
    """How a limit is judged.

    Args:
        option: What the user calls it.
        measure: Value of a model, given its row and the reference's; None where it was not measured.
        at_least: Whether the value must not be below the limit (else not above).
        valid: Which limits make sense, and `range` says so.
        needs: What measures the value, where not every evaluation does.
    """

    option: str
    measure: Callable[[Row, Row], float | None]
    valid: Callable[[float], bool]
    range: str
    at_least: bool = False
    needs: str = ""


def _generated(name: str, sign: int) -> Callable[[Row, Row], float | None]:
    def measure(row: Row, reference: Row) -> float | None:
        ours, theirs = ((r.get("generation") or {}).get(name) for r in (row, reference))
        return None if ours is None or theirs is None else sign * (float(ours) - float(theirs))

    return measure


def _positive(limit: float) -> bool:
    return 0 < limit < math.inf


def _not_negative(limit: float) -> bool:
    return 0 <= limit < math.inf


GATES = {
    "max_ppl_ratio": _Gate(
        "--max-ppl-ratio", lambda row, base: perplexity_ratio(row, base), _positive, "> 0, such as 1.02"
    ),
    "fail_if_worse": _Gate(
        "--fail-if-worse", lambda row, base: perplexity_ratio(row, base), _positive, "> 0"
    ),
    "min_agreement": _Gate(
        "--min-agreement",
        lambda row, base: row.get("top1_agreement"),
        lambda limit: 0 <= limit <= 1,
        "between 0 and 1, such as 0.98",
        at_least=True,
        needs="name the original with --against",
    ),
    "max_wer_delta": _Gate(
        "--max-wer-delta",
        _generated("wer", 1),
        _not_negative,
        "percentage points >= 0, such as 1",
        needs="score transcripts with --metrics wer",
    ),
    "max_bleu_drop": _Gate(
        "--max-bleu-drop",
        _generated("bleu", -1),
        _not_negative,
        "BLEU points >= 0, such as 0.5",
        needs="score translations with --metrics bleu",
    ),
}


def check_limits(
    models: int,
    against: bool,
    *,
    max_ppl_ratio: float | None = None,
    min_agreement: float | None = None,
    fail_if_worse: bool = False,
    max_wer_delta: float | None = None,
    max_bleu_drop: float | None = None,
    metrics: Sequence[str] = (),
    where: str | None = None,
) -> dict[str, float]:
    """Refuse gates that could not be judged, or that nothing could pass or fail, before anything is scored.

    Args:
        models: How many models are scored, the reference included.
        against: Whether agreement is measured.
        max_ppl_ratio, min_agreement, fail_if_worse, max_wer_delta, max_bleu_drop: As `measure_gates`.
        metrics: Which metrics of generated text are measured.
        where: What the user calls the limit, where it is not an option.

    Returns:
        The limits that were set, by name.

    Raises:
        UsageError: Which gate, and what it needs.
    """
    given = {
        "max_ppl_ratio": max_ppl_ratio,
        "fail_if_worse": 1.0 if fail_if_worse else None,
        "min_agreement": min_agreement,
        "max_wer_delta": max_wer_delta,
        "max_bleu_drop": max_bleu_drop,
    }
    limits = {name: limit for name, limit in given.items() if limit is not None}
    measured = {
        "min_agreement": against,
        "max_wer_delta": "wer" in metrics,
        "max_bleu_drop": "bleu" in metrics,
    }
    for name, limit in limits.items():
        gate = GATES[name]
        shown = where or gate.option
        if not gate.valid(limit):
            raise UsageError(f"must be {gate.range}", where=f"{shown} {limit:g}")
        if models < 2:
            raise UsageError("a gate needs two models", where=shown, fix="give the original first")
        if not measured.get(name, True):
            needs = (
                gate.needs if where is None else gate.needs.replace("--", "evaluate.")
            )  # as recipes have it
            raise UsageError("needs a figure that is not measured", where=shown, fix=needs)
    return limits


def measure_gates(
    models: Sequence[Row],
    *,
    max_ppl_ratio: float | None = None,
    min_agreement: float | None = None,
    fail_if_worse: bool = False,
    max_wer_delta: float | None = None,
    max_bleu_drop: float | None = None,
) -> list[dict[str, Any]]:
    """Hold every model after the first against limits; the first is the reference.

    Args:
        models: `evaluate`'s `models[]`.
        max_ppl_ratio: Largest perplexity over the reference's; see `perplexity_ratio`.
        min_agreement: Smallest share of tokens whose most likely continuation is the reference's.
        fail_if_worse: The loss must not be above the reference's.
        max_wer_delta: Most that the word error rate may be above the reference's, in percentage points.
        max_bleu_drop: Most that BLEU may be below the reference's, in points.

    Returns:
        One entry for each gate and model: `gate, model, limit, value, ok`.

    Raises:
        UsageError: As `check_limits`.
    """
    agreement = all(row.get("top1_agreement") is not None for row in models[1:])
    generated = [{k for k, v in (row.get("generation") or {}).items() if v is not None} for row in models]
    limits = check_limits(
        len(models),
        agreement,
        max_ppl_ratio=max_ppl_ratio,
        min_agreement=min_agreement,
        fail_if_worse=fail_if_worse,
        max_wer_delta=max_wer_delta,
        max_bleu_drop=max_bleu_drop,
        metrics=sorted(set.intersection(*generated)) if generated else (),
    )
    return [_judged(name, limit, row, models[0]) for row in models[1:] for name, limit in limits.items()]


def _judged(name: str, limit: float, row: Row, reference: Row) -> dict[str, Any]:
    gate = GATES[name]
    found = gate.measure(row, reference)
    value = math.nan if found is None else float(found)
    ok = value >= limit if gate.at_least else value <= limit  # NaN passes neither
    shown = round(value, 6) + 0.0 if math.isfinite(value) else str(value)
    return {"gate": name, "model": row.get("path"), "limit": limit, "value": shown, "ok": ok}


def perplexity_ratio(row: Row, reference: Row) -> float:
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
        return exp(ours - theirs)
    bytes_per_token = float(reference["bytes"]) / float(reference["tokens"])
    return exp((ours - theirs) * math.log(2) * bytes_per_token)


def require(gates: Sequence[Mapping[str, Any]]) -> None:
    """Raise for the gates that do not hold.

    Raises:
        GateError: Exit code 3, with every failed gate in one line.
    """
    failed = [gate for gate in gates if not gate["ok"]]
    if failed:
        parts = "; ".join(f"{g['model']}: {g['gate']} {g['value']} against {g['limit']}" for g in failed)
        raise GateError(parts, where="quality gate", fix="uptrain longer, or choose a larger G")


def check_gates(
    result: EvaluateResult,
    *,
    max_ppl_ratio: float | None = None,
    min_agreement: float | None = None,
    fail_if_worse: bool = False,
    max_wer_delta: float | None = None,
    max_bleu_drop: float | None = None,
) -> None:
    """Stop a pipeline whose model lost too much.

    Args:
        result: Of `evaluate`; its first model is the original.
        max_ppl_ratio, min_agreement, fail_if_worse, max_wer_delta, max_bleu_drop: As `measure_gates`.

    Raises:
        GateError: A model fails.
        UsageError: The result lacks a figure that a gate needs.

    Example:
        >>> check_gates(evaluate([original, converted], "valid.jsonl"), max_ppl_ratio=1.02)
    """
    require(
        measure_gates(
            result.to_dict()["models"],
            max_ppl_ratio=max_ppl_ratio,
            min_agreement=min_agreement,
            fail_if_worse=fail_if_worse,
            max_wer_delta=max_wer_delta,
            max_bleu_drop=max_bleu_drop,
        )
    )
