"""`plan --wide`: what wide heads cost and where they pay, beside GQA-G and GQA-2G, from shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..checkpoints.hf_config import text_config
from ..conversion.plan import Plan
from ..kv_cache import kv_bytes, kv_bytes_per_token, step_weight_bytes

BATCHES, CONTEXTS = (1, 8, 64), (1024, 8192, 65_536, 262_144)


class Form(NamedTuple):
    """One way to hold a cache.

    Args:
        plan: The conversion.
        sizes: Bytes of every tensor of its result by name.
        parameters: Numbers in them.
    """

    plan: Plan
    sizes: Mapping[str, int]
    parameters: int


def wide_figures(forms: Mapping[str, Form]) -> dict[str, Any]:
    """A result with wide heads beside plain ones of the same cache, and of twice the cache.

    Args:
        forms: `wide` (G / R heads that are R times as wide), `plain` (GQA-G) and, where the source has as many heads,
            `double` (GQA-2G).

    Returns:
        `wide`, `num_kv_heads`, `head_dim`; of each form `weight_bytes`, `parameters`, `matmul_flops_per_token` and
        `attention_flops_per_cached_token`; `pays_above_cached_tokens`, over the batch, against GQA-2G (None where
        never, or without it); and `steps`, the bytes that a decode step moves by batch and context.
    """
    wide = forms["wide"].plan
    return {
        "wide": wide.wide,
        "num_kv_heads": wide.num_kv_heads[1],
        "head_dim": wide.modules[0].result.head_dim,
        "weight_bytes": {name: sum(form.sizes.values()) for name, form in forms.items()},
        "parameters": {name: form.parameters for name, form in forms.items()},
        "matmul_flops_per_token": {name: _matmul_flops(form) for name, form in forms.items()},
        "attention_flops_per_cached_token": {name: _attention_flops(form) for name, form in forms.items()},
        "pays_above_cached_tokens": _pays_above(forms),
        "steps": [_step(forms, batch, context) for batch in BATCHES for context in CONTEXTS],
    }


def wide_parallel_warnings(groups: int, wide: int, tp: int) -> list[str]:
    """What tensor parallelism makes of wide heads."""
    if wide == 1 or tp <= groups // wide:
        return []
    times = wide / max(1, groups / tp)
    return [
        f"--tp {tp} is more than the {groups // wide} wide KV heads: every rank holds a whole one, {times:g} times the "
        f"cache of GQA-{groups} there, whose heads are shared out"
    ]


def _matmul_flops(form: Form) -> int:
    """Multiplications and additions of one token with all matrices; one that is only looked up costs nothing."""
    text = text_config(form.plan.config)
    vocabulary, hidden = text.get("vocab_size"), text.get("hidden_size")
    untied = any(name.endswith("lm_head.weight") for name in form.sizes)
    if untied and isinstance(vocabulary, int) and isinstance(hidden, int):
        return 2 * (form.parameters - vocabulary * hidden)
    return 2 * form.parameters


def _attention_flops(form: Form) -> int:
    """Scores and mixing of one query token with one cached token, in all layers."""
    results = [module.result for module in form.plan.modules]
    return sum(2 * g.num_heads * (g.head_dim + g.value_dim) for g in results)


def _pays_above(forms: Mapping[str, Form]) -> int | None:
    """Cached tokens over the batch beyond which a step moves fewer bytes than with GQA-2G."""
    if "double" not in forms:
        return None
    wide, double = forms["wide"], forms["double"]
    saved = kv_bytes_per_token(double.plan.config) - kv_bytes_per_token(wide.plan.config)
    more = sum(wide.sizes.values()) - sum(double.sizes.values())
    return max(0, -(-more // saved)) if saved > 0 else None


def _step(forms: Mapping[str, Form], batch: int, context: int) -> dict[str, Any]:
    """Bytes that one decode step moves: the weights that are read once, and the caches."""
    moved = {
        f"{name}_bytes": step_weight_bytes(form.plan.config, form.sizes, batch)
        + kv_bytes(form.plan.config, context=context, batch=batch)
        for name, form in forms.items()
    }
    return {"batch": batch, "context": context, **moved}
