"""What is supported, what is written as another architecture, what is refused and why: the data behind `mha2gqa archs`."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from .arch_conversions import ARCH_CONVERSIONS
from .exported import EXPORTED, STOCK
from .refusals import REFUSED
from .registry import BY_FLAGS, SUPPORTED
from .wrappers import TEXT_PARTS, WRAPPERS

_PROVEN = Path(__file__).with_name("proven.json")


@cache
def proofs() -> dict[str, Any]:
    """How each architecture was proven, and with which transformers: written by the proofs themselves."""
    return json.loads(_PROVEN.read_text(encoding="utf-8"))


def supported_types() -> list[str]:
    """Every model type that converts, text models that exist only inside others left out."""
    inside = TEXT_PARTS.keys() - WRAPPERS.keys()
    own = EXPORTED.keys() - STOCK.keys()  # written by us
    return sorted((SUPPORTED.keys() | BY_FLAGS.keys() | WRAPPERS.keys()) - inside - own)


def list_architectures() -> dict[str, list[dict[str, str]]]:
    """All architectures by what becomes of them.

    Returns:
        `supported` (`model_type`; `proven`: `forward` where a pico model was built with the real class,
        converted and run, `meta` where names and shapes were held against the class; `code` where the
        result travels with modelling code), `reexpressed` (`model_type`, `as`; `groups` it can reach, `any` or
        `1`; `option` that `convert` needs; `when`: what must hold of the model; `proven`: `forward` where a pico
        model of the source's own class was written so, converted and run, `layout` where that class is not
        in transformers and a model was laid out by hand as its code does), `refused` (`model_type`,
        `reason`); each sorted by model type.

    Example:
        >>> [a for a in list_architectures()["refused"] if a["model_type"] == "mamba"][0]["reason"][:13]
        'a state-space'
    """
    kinds = {name: kind for kind in ("forward", "meta") for name in proofs()[kind]}
    supported = []
    for name in supported_types():
        entry = {"model_type": name, "proven": kinds.get(name, "no")}
        if name in STOCK:
            entry["code"] = f"gqa_{name}"
        supported.append(entry)
    refused = [{"model_type": name, "reason": REFUSED[name]} for name in sorted(REFUSED)]
    return {"supported": supported, "reexpressed": reexpressed_rows(), "refused": refused}


def reexpressed_rows() -> list[dict[str, str]]:
    """Every route to another architecture."""
    return [
        {
            "model_type": name,
            "as": route.target,
            "groups": "1" if route.only_mqa else "any",
            "option": "--as auto" if route.auto else f"--as {route.target}",
            "when": route.when,
            "proven": "forward" if f"{name} -> {route.target}" in proofs()["reexpressed"] else "layout",
        }
        for name in sorted(ARCH_CONVERSIONS)
        for route in ARCH_CONVERSIONS[name]
    ]
