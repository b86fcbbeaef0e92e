"""Second moments of what attention reads: one pass over text, sums in float64, no activation kept.

For each attention module, with x̂ = [x; 1] the input of keys and values: E[x̂ x̂ᵀ], where a token counts
half by itself and half by the attention it receives; the same of the attention-averaged input
x̃_h = Σ_t a_h,t x̂_t, summed over heads without forming it per head (Σ_h (P_h X)ᵀ(P_h X) = Xᵀ (Σ_h P_hᵀ P_h) X);
and E[q qᵀ] of the queries as attention uses them.
"""

from .clipping import clip_bound, counted_clips, find_clip
from .collect import (
    Batch,
    Progress,
    attention_instances,
    batches,
    check_finite_moments,
    collect,
    data_digest,
    model_device,
    moment_rows,
    moment_warnings,
    run,
)
from .hooks import IMPLEMENTATION, mark_padding, observing
from .second_moments import SecondMoments, Statistics, fingerprint, load_statistics, module_key, writable

__all__ = [
    "IMPLEMENTATION",
    "Batch",
    "Progress",
    "SecondMoments",
    "Statistics",
    "attention_instances",
    "batches",
    "check_finite_moments",
    "clip_bound",
    "collect",
    "counted_clips",
    "data_digest",
    "find_clip",
    "fingerprint",
    "load_statistics",
    "mark_padding",
    "model_device",
    "module_key",
    "moment_rows",
    "moment_warnings",
    "observing",
    "run",
    "writable",
]
