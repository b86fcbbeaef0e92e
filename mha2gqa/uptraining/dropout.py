"""Dropout of a model that is loaded already."""

from __future__ import annotations

from torch import nn


def set_dropout(model: nn.Module, probability: float) -> float:
    """Set every dropout probability of a model: its dropout layers, and those attention keeps as a number.

    Adapters keep theirs.

    Args:
        model: Any transformers model; its config stays as it is.
        probability: 0 to 1.

    Returns:
        The largest probability that was set before.
    """
    before = 0.0
    for path, module in model.named_modules():
        if "lora_dropout" in path:
            continue
        names = ["p"] if isinstance(module, nn.Dropout) else [n for n in vars(module) if "dropout" in n]
        for name in names:
            value = getattr(module, name)
            if isinstance(value, float | int) and not isinstance(value, bool):
                before = max(before, float(value))
                setattr(module, name, probability)
    return before
