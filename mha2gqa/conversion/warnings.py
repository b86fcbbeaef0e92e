"""What a calibrated conversion should say of the losses that it measured on held-out text."""

from __future__ import annotations

import math
from collections.abc import Mapping

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
    if merged is not None and fitted is not None and not fitted < merged:
        found.append(
            f"fitting did not lower the loss on held-out calibration text ({merged:.4f} merged, {fitted:.4f} fitted): "
            "give it more text (--calibration-tokens), or leave it out (--no-refit --no-reconstruct)"
        )
    if original is not None and vocabulary and original > UNIFORM_SHARE * math.log(vocabulary):
        found.append(
            f"the original's own loss on the calibration text is {original:.4f} (a uniform guess over {vocabulary:,} "
            f"tokens: {math.log(vocabulary):.4f}): is this text of the kind the model was trained on?"
        )
    return found
