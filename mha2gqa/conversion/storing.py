"""A fitted module as its checkpoint stores it: names, fused projections and transposes of the files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from .. import heads
from ..architectures import AttentionSpec
from .plan import ModulePlan, Plan
from .rewrite import role_template


def result_spec(spec: AttentionSpec, plan: Plan) -> AttentionSpec:
    """The spec of the converted model: another fused layout, for some targets."""
    module = plan.modules[0]
    target = spec.target(module.geometry.num_heads, plan.num_kv_heads[1])
    return spec if target is None else replace(spec, layout=target.layout)


def as_stored(
    spec: AttentionSpec,
    live: Plan,
    module: ModulePlan,
    state: Mapping[str, Tensor],
    roles: Mapping[str, str],
) -> dict[str, Tensor]:
    """The tensors of one attention module of a fitted model, by the roles of its checkpoint.

    Args:
        spec: The checkpoint's.
        live: The conversion of the model in memory.
        module: The module there.
        state: The fitted model's tensors by name, at least this module's.
        roles: Role -> name of the module's tensors on disk.
    """
    names = {role: name for role, name in module.names.items() if name in state}
    own = result_spec(live.spec, live)
    weights = heads.split(own, module.result, {role: state[name] for role, name in names.items()})
    # A class may call what belongs to heads, and the norms, otherwise than the files do; both know them in one order.
    mine, theirs = (
        [extra.name for extra in described.per_head if extra.name in set(map(role_template, present))]
        for described, present in ((own, names), (spec, roles))
    )
    stored = dict(zip(mine, theirs, strict=True))
    weights = replace(
        weights,
        kv_extras={stored.get(n, n): x for n, x in weights.kv_extras.items()},
        query_extras={stored.get(n, n): x for n, x in weights.query_extras.items()},
    )
    norms = dict(zip(live.spec.qk_norm, spec.qk_norm, strict=True))
    split = [(*role.rpartition("."), name) for role, name in names.items()]
    shared = {f"{norms[norm]}.{leaf}": state[name] for norm, _, leaf, name in split if norm in norms}
    return heads.unsplit(spec, weights) | shared
