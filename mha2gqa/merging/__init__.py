"""How heads that share become one: a registry of functions with one signature."""

from .base import MergeContext, Merged, MergeFunction
from .joint import align, joint
from .mean import first, mean, random

MERGERS: dict[str, MergeFunction] = {
    "mean": mean,
    "first": first,
    "random": random,
    "align": align,
    "joint": joint,
}

__all__ = ["MERGERS", "MergeContext", "MergeFunction", "Merged"]
