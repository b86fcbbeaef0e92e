"""The table of architectures: how each stores its attention, and what may be done to it."""

from .spec import (
    AttentionSite,
    AttentionSpec,
    Geometry,
    HeadExtra,
    check_groups,
    find_sites,
    geometry,
    rotary_dim,
    valid_groups,
)
from .table import find_spec

__all__ = [
    "AttentionSite",
    "AttentionSpec",
    "Geometry",
    "HeadExtra",
    "check_groups",
    "find_sites",
    "find_spec",
    "geometry",
    "rotary_dim",
    "valid_groups",
]
