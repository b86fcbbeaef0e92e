"""Prefixes that training tools put before tensor names, and how to remove them."""

from __future__ import annotations

from collections.abc import Collection

PREFIXES = {
    "module.": "of DistributedDataParallel: save model.module.state_dict()",
    "_orig_mod.": "of torch.compile: save model._orig_mod.state_dict()",
    "base_model.model.": "of PEFT: save the model that merge_and_unload() returns",
    "_forward_module.": "of Lightning: save the state dict of the module inside",
}


def prefix_of(names: Collection[str]) -> str | None:
    """The prefix that all names have in common, or None.

    Example:
        >>> prefix_of(["module.lm_head.weight", "module.model.norm.weight"])
        'module.'
    """
    return next((p for p in PREFIXES if names and all(name.startswith(p) for name in names)), None)
