"""Warnings of a conversion: what one without data is worth, suspicious losses, what merging could not use."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..architectures import AttentionSpec
from ..calibration import clip_bound
from ..checkpoints.hf_config import is_encoder_decoder
from ..data.pairs import SPAN_CORRUPTED, stock_type, trained_on
from ..errors import listed
from .plan import Plan
from .rewrite import ModuleConverter

ROUNDING = 5e-4  # nats that the dtype of a checkpoint costs a merge which loses nothing
UNIFORM_SHARE = 0.5  # of the loss of a uniform guess: trained models stay well below on text of their kind


def loss_warnings(losses: Mapping[str, float], vocabulary: int | None) -> list[str]:
    """Warnings from the losses of the stages.

    Args:
        losses: `original`, `merged`, `fitted`: nats per token on held-out calibration text.
        vocabulary: Size of the vocabulary, None where unknown.

    Returns:
        Sentences: the fit did not help, or the text is not of the kind that the model knows.

    Example:
        >>> loss_warnings({"original": 2.9, "merged": 3.4, "fitted": 3.1}, 32000)
        []
    """
    found = []
    original, merged, fitted = (losses.get(stage) for stage in ("original", "merged", "fitted"))
    exact = original is not None and merged is not None and merged - original < ROUNDING
    if merged is not None and fitted is not None and not exact and not fitted < merged:
        found.append(
            f"fitting did not lower the loss on held-out calibration text ({merged:.4f} merged, {fitted:.4f} fitted): "
            "give it more data (--calibration, --calibration-tokens), or leave it out (--no-refit --no-reconstruct)"
        )
    if original is not None and vocabulary and original > UNIFORM_SHARE * math.log(vocabulary):
        found.append(
            f"the original's own loss on the calibration text is {original:.4f} (a uniform guess over {vocabulary:,} "
            f"tokens: {math.log(vocabulary):.4f}): is it of the kind the model was trained on?"
        )
    return found


# Loss at half the KV heads, by method, where it was measured (a test holds them against docs/results).
DECODER = {
    "original": 3.310,
    "mean": 5.827,
    "first": 8.664,
    "random": 9.552,
    "joint": 4.687,
    "calibrated": 3.322,
}
T5 = {
    "original": 3.376,
    "mean": 5.844,
    "first": 5.388,
    "random": 8.177,
    "joint": 3.442,
    "calibrated": 3.392,
}
PAIRS = {"original": 0.086, "mean": 1.044, "joint": 0.906, "calibrated": 0.086}
_DATA = {
    "text": "--calibration TEXT of the kind the model was trained on (or --calibration generate)",
    "pairs": "--calibration pairs of its task (--source-column, --target-column)",
    "audio": "--calibration recordings with their transcripts (or alone, with --targets generate)",
}


def _nearest(plan: Plan) -> tuple[str, Mapping[str, float]]:
    """The model that was measured and is most like this one, and its losses."""
    if not is_encoder_decoder(plan.source):
        return "our 30M Llama", DECODER
    if stock_type(plan.source) in SPAN_CORRUPTED:
        return "our 6M T5", T5
    return "ANNalog (a Marian with 4M parameters that others trained)", PAIRS


def data_free_warnings(plan: Plan) -> list[str]:
    """What a conversion without data is worth, measured, and what does better.

    Args:
        plan: Of the conversion, made without calibration data and without statistics.

    Returns:
        One sentence; nothing where no head is shared, or wide ones hold all that they share.
    """
    if plan.num_kv_heads[0] == plan.groups:
        return []
    model, known = _nearest(plan)
    start = "converted without calibration data"
    if plan.method in known:
        others = [f"joint {known['joint']:.3f}"] if plan.method != "joint" else [f"mean {known['mean']:.3f}"]
        others += [f"joint with data {known['calibrated']:.3f}"] if "calibrated" in known else []
        start += (
            f": at half the KV heads that raised the loss of {model} from {known['original']:.3f} to "
            f"{known[plan.method]:.3f} ({', '.join(others)})"
        )
    if plan.spec.unread:
        return [
            f"converted without data, and not measured: {plan.spec.unread}; hold it against the original yourself"
        ]
    if plan.spec.uncalibrated:
        return [f"{start}; uptrain the result before using it"]
    return [f"{start}; give {_better(plan)}, or uptrain the result before using it"]


def _better(plan: Plan) -> str:
    if stock_type(plan.source) in SPAN_CORRUPTED:
        return "--calibration TEXT of the kind the model was trained on, or pairs of its task"
    return _DATA[trained_on(plan.source)]


def broken_warnings(odd: Sequence[str]) -> list[str]:
    """What to know of unchanged tensors that hold NaN or infinity."""
    if not odd:
        return []
    return [
        f"NaN or infinity in {listed(sorted(odd))}, as in the source: the model may give no usable output"
    ]


def dropped_warnings(names: Sequence[str]) -> list[str]:
    """Which tensors were left out as `drop_extra` asked."""
    return [f"left out, as asked: {listed(sorted(names))}"] if names else []


def merging_notes(converters: Sequence[ModuleConverter]) -> list[str]:
    """What merging could not use and why, once for all modules of which it is true."""
    found = Counter(note for r in converters if r.report for note in r.report["notes"])
    return [f"{note} ({count} of {len(converters)} modules)" for note, count in found.items()]


def clip_warnings(plan: Plan, converters: Sequence[ModuleConverter]) -> list[str]:
    """Where the model's bound on q, k and v acted on the calibration text, and what was merged how for that reason."""
    shares = [r.report["clipped"] for r in converters if r.report and "clipped" in r.report]
    if not shares:
        return []
    name = clip_name(plan.spec, plan.source)
    if any(share["q"] is None for share in shares):
        return [
            f"{name}: how often it changes q, k and v was not counted, and they keep the plain mean in every layer; "
            "--calibration TEXT counts it"
        ]
    bound = [share for share in shares if any(share.values())]
    if not bound:
        return [f"{name} never acts on the calibration text: full symmetries in all {len(shares)} layers"]
    keys, values = sum(bool(s["q"] or s["k"]) for s in bound), sum(bool(s["v"]) for s in bound)
    most = ", ".join(f"{part} {max(share[part] for share in bound):.2g}" for part in "qkv")
    return [
        f"{name} acts on the calibration text in {len(bound)} of {len(shares)} layers (largest shares of entries: {most}): "
        f"keys of {keys} and values of {values} keep the plain mean, the others have the full symmetries"
    ]


def result_clip_warnings(plan: Plan, converters: Sequence[ModuleConverter]) -> list[str]:
    """Where the bound acts in the result although it never did in the original."""
    new: list[float] = []
    for report in (r.report for r in converters if r.report and "clipped_result" in r.report):
        before = report.get("clipped") or {}
        new += [] if any(before.values()) else [max(report["clipped_result"].values())]
    if not new:
        return []
    return [
        f"{clip_name(plan.spec, plan.source)} acts in {len(new)} layers of the result (on up to {max(new):.2g} of q, k or v) where "
        "it never did in the original: the losses of the result include that"
    ]


def clip_name(spec: AttentionSpec, config: Mapping[str, Any]) -> str:
    """The bound on q, k and v as a config says it."""
    return f"{spec.clip_key.rpartition('.')[2]} {clip_bound(spec, config):g}"


def pooling_warnings(converters: Sequence[ModuleConverter]) -> list[str]:
    """How much of a key head's norm mean pooling keeps, where that is little."""
    ratios = [r.report["norm_ratio"]["k"] for r in converters if r.report and r.plan.method == "mean"]
    if ratios and min(ratios) < 0.6:
        return [
            f"pooled keys keep only {min(ratios):.2f} to {max(ratios):.2f} of a head's norm: the heads of a group "
            "are nearly unrelated and cancel; calibrated merging (--calibration TEXT) or --method joint loses far less"
        ]
    return []
