"""Where the attention of a checkpoint is: tensor names, head counts, and the config keys to edit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..checkpoints.hf_config import class_default, lookup
from ..errors import CheckpointError, quoted
from .spec import AttentionModule, AttentionSpec, Geometry, Variant, check_groups

PER_LAYER = "_per_layer"  # ends the names of keys that hold one number for each layer
_WEIGHTS = ("q.weight", "k.weight", "v.weight", "o.weight", "qkv.weight")


def _role_pattern(spec: AttentionSpec) -> tuple[re.Pattern[str], dict[str, str]]:
    """Pattern of a tensor name inside the attention module, and role of each projection's name."""
    fused = spec.layout != "separate"
    projections = {spec.q: "qkv"} if fused else {spec.q: "q", spec.k: "k", spec.v: "v"}
    roles = {
        f"{module}.{leaf}": f"{role}.{leaf}"
        for module, role in {**projections, spec.o: "o"}.items()
        for leaf in ("weight", "bias")
    }
    roles |= {extra.name: extra.name for extra in spec.per_head}
    roles |= {f"{norm}.{leaf}": f"{norm}.{leaf}" for norm in spec.qk_norm for leaf in ("weight", "bias")}
    parts = [re.escape(n).replace(re.escape("{head}"), r"\d+") for n in sorted(roles, key=len, reverse=True)]
    return re.compile("|".join(parts)), roles


def find_attention_modules(spec: AttentionSpec, names: Iterable[str]) -> list[AttentionModule]:
    """Locate every attention module of `spec` among tensor names, in layer order.

    Args:
        spec: The architecture.
        names: All tensor names of the checkpoint, or of a model's state dict.

    Returns:
        The modules; a layer without attention (hybrids) simply has none, and neither has a layer that
        reuses the keys and values of another.

    Raises:
        CheckpointError: A projection is missing, or two towers claim the same layer.
    """
    inside, roles = _role_pattern(spec)
    only_in = {extra.name: extra.kind for extra in spec.per_head if extra.kind}
    prefix = "|".join(re.escape(p) for p in sorted(spec.prefixes, key=len, reverse=True))
    alternatives = []
    for i, (_, template) in enumerate(spec.modules):
        path = re.escape(template).replace(re.escape("{layer}"), rf"(?P<layer{i}>\d+)")
        alternatives.append(f"(?P<m{i}>{path})")
    pattern = re.compile(rf"(?P<path>(?:{prefix})(?:{'|'.join(alternatives)}))\.(?P<inside>.+)")
    found: dict[tuple[int, int, str], dict[str, str]] = {}  # (layer, template, path) -> role -> name
    for name in names:
        match = pattern.fullmatch(name)
        if match is None or not inside.fullmatch(match["inside"]):
            continue
        which = next(i for i in range(len(spec.modules)) if match[f"m{i}"] is not None)
        layer = int(match.groupdict().get(f"layer{which}") or 0)
        role = roles.get(match["inside"], match["inside"])
        kind = spec.modules[which][0]
        if only_in.get(role, kind) != kind:
            continue
        found.setdefault((layer, which, match["path"]), {})[role] = name
    return _checked_sites(spec, found)


def _checked_sites(
    spec: AttentionSpec, found: Mapping[tuple[int, int, str], Mapping[str, str]]
) -> list[AttentionModule]:
    fused = spec.layout != "separate"
    needed = ("qkv.weight", "o.weight") if fused else ("q.weight", "k.weight", "v.weight", "o.weight")
    modules: dict[tuple[int, int], AttentionModule] = {}
    for (layer, which, path), names in sorted(found.items()):
        missing = [role for role in needed if role not in names]
        if missing == ["k.weight", "v.weight"] and spec.permutable == "never":
            continue  # reuses the keys and values of an earlier layer
        if missing == ["v.weight"] and spec.keys_as_values:
            missing = []
        if missing:
            raise CheckpointError(
                f"no tensor for {', '.join(missing)}",
                where=path,
                fix="the checkpoint is incomplete; download it again",
            )
        if (layer, which) in modules:
            raise CheckpointError(
                f"both {modules[layer, which].path} and {path} look like layer {layer} of the text model",
                fix="keep one of them in the checkpoint",
            )
        modules[layer, which] = AttentionModule(path, layer, spec.modules[which][0], names)
    return list(modules.values())


def layer_value(text: Mapping[str, Any], key: str, layer: int) -> Any:
    """A config value for one layer: its own entry of `per_layer_config`, of a list, or the value for all."""
    for name, own in per_layer(text).items():
        if int(name) == layer and key in own:
            return own[key]
    value = lookup(text, key)
    if isinstance(value, list) and key.endswith(PER_LAYER):
        return value[layer] if layer < len(value) else None
    return value


def per_layer(text: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """`per_layer_config` of a raw config: layer number -> its own keys.

    Raises:
        CheckpointError: It is there and is something else.
    """
    found = text.get("per_layer_config") or {}
    usable = isinstance(found, Mapping) and all(
        name.isdecimal() and len(name) < 10 and isinstance(own, Mapping) for name, own in found.items()
    )
    if not usable:
        raise CheckpointError(
            f"per_layer_config is {quoted(found)}",
            where="config.json",
            fix="it must map layer numbers to their own keys",
        )
    return found


def _declared_heads(spec: AttentionSpec, text: Mapping[str, Any], key: str, layer: int) -> int:
    """Query heads of a layer."""
    value = layer_value(text, key, layer)
    if value is None and spec.text_type:
        value = class_default(spec.text_type, key)
    found = _count(value, key)
    if found is None:
        raise CheckpointError(f"no {key}", where="config.json", fix="it must hold the number of query heads")
    return found


def _count(value: Any, key: str) -> int | None:
    """A number of heads, or a width, as the config states it; None where it does not.

    Raises:
        CheckpointError: What is there is not such a number.
    """
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    kind = "a list, one number for all layers is needed" if isinstance(value, list) else quoted(value)
    raise CheckpointError(
        f"{key} is {kind}", where="config.json", fix="restore the config that came with these tensors"
    )


def _variants(spec: AttentionSpec, kind: str) -> tuple[Variant, ...]:
    own = tuple(v for v in spec.variants if v.kind == kind)
    kv_heads_key = spec.kv_heads_keys[0] if spec.kv_heads_keys else ""
    return own or (Variant(spec.heads_key, kv_heads_key, spec.head_dim_key, kind),)


def geometry(
    spec: AttentionSpec,
    config: Mapping[str, Any],
    module: AttentionModule,
    shapes: Mapping[str, Sequence[int]],
) -> Geometry:
    """Head counts of one module from its tensors, checked against the config.

    Args:
        spec: The architecture.
        config: The whole raw config.
        module: The attention module.
        shapes: Shape of every tensor of the module by tensor name.

    Returns:
        The geometry.

    Raises:
        CheckpointError: The tensors and the config disagree (a config edited by hand, usually).
    """
    text = spec.text_config(config)
    errors: list[CheckpointError] = []
    fits: set[Geometry] = set()
    variants = _variants(spec, module.kind)
    for variant in variants:
        try:
            fits.add(_geometry(spec, text, module, shapes, variant))
        except CheckpointError as error:
            errors.append(error)
    if len(fits) > 1:
        raise CheckpointError(
            "its tensors fit several kinds of layer of this architecture", where=module.path
        )
    if not fits:
        raise errors[0]
    return fits.pop()


def _geometry(
    spec: AttentionSpec,
    text: Mapping[str, Any],
    module: AttentionModule,
    shapes: Mapping[str, Sequence[int]],
    variant: Variant,
) -> Geometry:
    """Geometry under the config keys of one variant."""

    def disagree(
        what: str, fix: str = "config and tensors must belong together", where: str = module.path
    ) -> CheckpointError:
        return CheckpointError(what, where=where, fix=fix)

    for role, name in module.names.items():
        if role in _WEIGHTS and len(shapes[name]) != 2:
            raise disagree(f"has shape {quoted(list(shapes[name]))}, a matrix is needed", where=name)
    num_heads = _declared_heads(spec, text, variant.heads_key, module.layer)
    rows = -1 if spec.transposed else 0
    head_dim = _count(layer_value(text, variant.head_dim_key, module.layer), variant.head_dim_key)
    o_in = shapes[module.names["o.weight"]][0 if spec.transposed else -1]
    if o_in < num_heads or o_in % num_heads:
        raise disagree(
            f"takes {o_in} numbers, not a multiple of {quoted(num_heads)} heads",
            where=module.names["o.weight"],
        )
    if spec.layout != "separate":
        head_dim = head_dim or o_in // num_heads
        kv_rows = shapes[module.names["qkv.weight"]][rows] - num_heads * head_dim
        k_rows, value_dim = kv_rows // 2, head_dim
        whole = kv_rows % (2 * head_dim) == 0
    else:
        per_head = 2 if spec.gated_query else 1
        q_rows = shapes[module.names["q.weight"]][rows]
        k_rows = shapes[module.names["k.weight"]][rows]
        head_dim = head_dim or max(1, q_rows // (num_heads * per_head))
        value_dim = o_in // num_heads
        whole = k_rows % head_dim == 0
        if q_rows != num_heads * head_dim * per_head:
            raise disagree(
                f"{module.names['q.weight']} has {q_rows} rows, the config asks for "
                f"{num_heads} heads x {head_dim * per_head}"
            )
    kv_heads = k_rows // head_dim
    declared = _count(layer_value(text, variant.kv_heads_key, module.layer), variant.kv_heads_key)
    if declared is not None and (not whole or kv_heads not in [declared * m for m in spec.kv_multiples]):
        raise disagree(
            f"config says {declared} KV heads = {declared * head_dim} key rows, the tensor has {k_rows} rows = "
            f"{k_rows / head_dim:g} heads x head_dim {head_dim}",
            fix="restore the config that came with these tensors and run convert",
            where=module.names.get("k.weight") or module.names["qkv.weight"],
        )
    if not whole or kv_heads < 1 or num_heads % kv_heads:
        raise disagree(f"{k_rows} key rows do not make whole heads of {head_dim}")
    v_name = module.names.get("v.weight")  # none where keys serve as values
    if v_name is not None and shapes[v_name][rows] != kv_heads * value_dim:
        raise disagree(f"expected {kv_heads} heads x {value_dim} = {kv_heads * value_dim} rows", where=v_name)
    return Geometry(num_heads, kv_heads, head_dim, value_dim)


def kv_heads_before(spec: AttentionSpec, config: Mapping[str, Any], geometries: Sequence[Geometry]) -> int:
    """The number of KV heads that `groups` is measured against: the most any layer has, or the declared one."""
    most = max(g.num_kv_heads for g in geometries)
    if spec.kv_multiples == (1,):
        return most
    return _count(lookup(spec.text_config(config), spec.kv_heads_keys[0]), spec.kv_heads_keys[0]) or most


def plan_groups(
    spec: AttentionSpec, config: Mapping[str, Any], geometries: Sequence[Geometry], groups: object
) -> list[int]:
    """KV heads each attention module gets, in the order of `geometries`.

    Where layers hold different numbers of KV heads, a layer that already holds `groups` or fewer keeps
    them; where the architecture ties one number to the other, the ratio is kept.

    Raises:
        UsageError: `groups` is impossible; the message lists the valid values.
    """
    most = kv_heads_before(spec, config, geometries)
    wanted = check_groups(groups, most, spec)
    if spec.kv_multiples != (1,):
        return [g.num_kv_heads * wanted // most for g in geometries]
    targets = [min(wanted, g.num_kv_heads) for g in geometries]
    for have, get in zip((g.num_kv_heads for g in geometries), targets, strict=True):
        check_groups(get, have, spec)
    return targets


def config_changes(
    spec: AttentionSpec, config: Mapping[str, Any], num_heads: int, groups: int
) -> dict[tuple[str, ...], Any]:
    """Config keys to write for G = `groups`, as paths from the root of config.json.

    Args:
        spec: The architecture.
        config: The whole raw config of the source.
        num_heads: Query heads of the (first) attention module.
        groups: KV heads asked for.

    Returns:
        Path -> new value; a key that is absent from the source is to be added.

    Example:
        >>> config_changes(AttentionSpec(), {"num_key_value_heads": 8}, 8, 2)
        {('num_key_value_heads',): 2}
    """
    text = spec.text_config(config)
    keys = tuple(dict.fromkeys(v.kv_heads_key for v in spec.variants)) or spec.kv_heads_keys
    changes: dict[str, Any] = {}
    for i, key in enumerate(keys):
        now = lookup(text, key)
        if now is not None or i == 0:
            changes[key] = min(groups, now) if isinstance(now, int) else groups
    for name, own in per_layer(text).items():
        for key in keys:
            if isinstance(own.get(key), int):
                changes[f"per_layer_config.{name}.{key}"] = min(groups, own[key])
    if isinstance(text.get("pretraining_tp"), int) and text["pretraining_tp"] > 1:
        changes["pretraining_tp"] = 1  # it slices projections by a fixed count
    target = spec.target(num_heads, groups)
    if target is not None:
        changes |= target.config
        if target.kv_heads_key:
            changes[target.kv_heads_key] = groups
    return {(*spec.config_path, *key.split(".")): value for key, value in changes.items()}
