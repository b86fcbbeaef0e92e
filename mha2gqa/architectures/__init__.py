"""The table of architectures: how each stores its attention, and what may be done to it."""

from ..checkpoints.hf_config import lookup
from .listing import list_architectures
from .locate import config_changes, find_attention_modules, geometry, kv_heads_before, plan_groups
from .registry import check_read, find_spec
from .spec import (
    AttentionModule,
    AttentionSpec,
    Geometry,
    PerHeadParameter,
    Target,
    Variant,
    check_groups,
    rotary_dim,
    valid_groups,
)
from .wide import check_wide, query_scale, wide_changes

__all__ = [
    "AttentionModule",
    "AttentionSpec",
    "Geometry",
    "PerHeadParameter",
    "Target",
    "Variant",
    "check_groups",
    "check_read",
    "check_wide",
    "config_changes",
    "find_attention_modules",
    "find_spec",
    "geometry",
    "kv_heads_before",
    "list_architectures",
    "lookup",
    "plan_groups",
    "query_scale",
    "rotary_dim",
    "valid_groups",
    "wide_changes",
]
