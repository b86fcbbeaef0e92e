"""What one architecture is, as data: names, layouts, symmetries. No tensor is touched here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import CheckpointError, UsageError

Position = Literal["half_split", "interleaved", "none", "alibi", "relative", "unknown"]
KeySymmetry = Literal["planes", "plane_rotations", "phases", "linear", "none"]
ValueSymmetry = Literal["linear", "orthogonal", "none"]
Permutable = Literal["layer", "model", "never"]
Layout = Literal["separate", "blocks", "per_head", "per_group"]

# A projection of another tower never belongs to the text decoder (vision.layers.0.self_attn.k_proj …).
OTHER_TOWERS = ("vision", "visual", "audio", "image", "speech", "encoder", "speaker", "codec", "mtp")


@dataclass(frozen=True)
class HeadExtra:
    """A tensor beside the projections that has one slice per head.

    Args:
        name: Name inside the attention module, such as `k_norm.weight`.
        per: Whether the slices belong to KV heads (pooled) or to query heads (permuted).
        axis: The axis that is `heads * slice` long.
        pool: How slices of a group become one (`kv` extras only).
    """

    name: str
    per: Literal["kv", "query"]
    axis: int = 0
    pool: Literal["mean", "first"] = "mean"


@dataclass(frozen=True)
class AttentionSpec:
    """How an architecture stores its attention and what may change without changing its function.

    The defaults describe Llama; an entry of the table states only what differs.

    Args:
        modules: Kind of attention (`self`, `cross`) and the path of its module below an optional prefix.
        q, k, v, o: Projection names inside the module; for a fused layout `q == k == v`.
        layout: How q, k and v rows lie in the stored tensor(s); see `heads.split`.
        transposed: True where weights are stored `[in, out]` (GPT-2's Conv1D).
        extras: Further tensors with one slice per head.
        position: How positions enter; decides which rows of a key form a plane.
        rotary_keys: Config keys that may hold the rotary fraction or count, first found wins.
        rotary_default: Fraction of `head_dim` that is rotary if no key is present.
        key_symmetry: What may be done to keys and undone in queries (DESIGN: calibrated merging):
            `planes` one complex scalar per plane, `plane_rotations` unit scalars only,
            `phases` unit scalars under a full-width norm, `linear` any invertible map, `none`.
        value_symmetry: What may be done to values and undone in the output projection.
        permutable: Whether heads may be re-ordered: per layer, in all layers alike, or never.
        heads_key, kv_heads_keys, head_dim_key, layers_key: Config keys; every one of `kv_heads_keys`
            that applies receives G (a dotted key descends).
        config_path: Keys that lead to the text model's own config (`("text_config",)`).
        excluded: A tensor whose prefix holds one of these words belongs to another tower.
        note: One line the user should read before converting.
    """

    modules: tuple[tuple[str, str], ...] = (("self", "layers.{layer}.self_attn"),)
    q: str = "q_proj"
    k: str = "k_proj"
    v: str = "v_proj"
    o: str = "o_proj"
    layout: Layout = "separate"
    transposed: bool = False
    extras: tuple[HeadExtra, ...] = ()
    position: Position = "half_split"
    rotary_keys: tuple[str, ...] = ("partial_rotary_factor", "rotary_pct")
    rotary_default: float = 1.0
    key_symmetry: KeySymmetry = "planes"
    value_symmetry: ValueSymmetry = "linear"
    permutable: Permutable = "layer"
    heads_key: str = "num_attention_heads"
    kv_heads_keys: tuple[str, ...] = ("num_key_value_heads",)
    head_dim_key: str = "head_dim"
    layers_key: str = "num_hidden_layers"
    config_path: tuple[str, ...] = ()
    excluded: tuple[str, ...] = OTHER_TOWERS
    note: str = ""

    def text_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The part of `config` (raw JSON) that describes the attention to convert."""
        for key in self.config_path:
            config = config.get(key) or {}
        return config


@dataclass(frozen=True)
class AttentionSite:
    """One attention module of a checkpoint: where its tensors are.

    Args:
        path: Module path as on disk, `model.layers.3.self_attn`.
        layer: Its layer index.
        kind: `self` or `cross`.
        names: Role -> tensor name. Roles are `q.weight`, `k.bias`, … (`qkv.weight` where fused),
            and an extra's own name.
    """

    path: str
    layer: int
    kind: str
    names: Mapping[str, str] = field(hash=False)


@dataclass(frozen=True)
class Geometry:
    """Head counts and widths of one attention module, read and never assumed.

    Args:
        num_heads: Query heads H.
        num_kv_heads: Key/value heads K stored now.
        head_dim: Width d of a query and key head.
        value_dim: Width of a value head (equal to `head_dim` almost everywhere).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int


def find_sites(spec: AttentionSpec, names: Iterable[str]) -> list[AttentionSite]:
    """Locate every attention module of `spec` among tensor names, in layer order.

    Args:
        spec: The architecture.
        names: All tensor names of the checkpoint, or of a model's state dict.

    Returns:
        The sites; a layer without attention (hybrids) simply has none.
    """
    fused = spec.layout != "separate"
    projections = {spec.q: "qkv"} if fused else {spec.q: "q", spec.k: "k", spec.v: "v"}
    roles = {
        f"{module}.{leaf}": f"{role}.{leaf}"
        for module, role in {**projections, spec.o: "o"}.items()
        for leaf in ("weight", "bias")
    }
    roles |= {extra.name: extra.name for extra in spec.extras}
    inside = "|".join(re.escape(name) for name in sorted(roles, key=len, reverse=True))
    found: dict[tuple[int, str, str], dict[str, str]] = {}
    all_names = list(names)
    for kind, template in spec.modules:
        path = re.escape(template).replace(re.escape("{layer}"), r"(?P<layer>\d+)")
        pattern = re.compile(rf"^(?P<path>(?P<prefix>(?:[^.]+\.)*?){path})\.(?P<inside>{inside})$")
        for name in all_names:
            match = pattern.match(name)
            if match is None or any(word in match["prefix"] for word in spec.excluded):
                continue
            key = (int(match.groupdict().get("layer") or 0), kind, match["path"])
            found.setdefault(key, {})[roles[match["inside"]]] = name
    needed = ("qkv.weight", "o.weight") if fused else ("q.weight", "k.weight", "v.weight", "o.weight")
    sites = []
    for (layer, kind, path), site_names in sorted(found.items()):
        missing = [role for role in needed if role not in site_names]
        if missing:
            raise CheckpointError(
                f"no tensor for {', '.join(missing)}",
                where=path,
                fix="the checkpoint is incomplete; download it again",
            )
        sites.append(AttentionSite(path, layer, kind, site_names))
    return sites


def lookup(config: Mapping[str, Any], key: str) -> Any:
    """Value of a dotted key in raw JSON, or None."""
    node: Any = config
    for part in key.split("."):
        if not isinstance(node, Mapping):
            return None
        node = node.get(part)
    return node


def geometry(
    spec: AttentionSpec, config: Mapping[str, Any], site: AttentionSite, shapes: Mapping[str, Sequence[int]]
) -> Geometry:
    """Head counts of one site from its tensors, checked against the config.

    Args:
        spec: The architecture.
        config: The whole raw config.
        site: The attention module.
        shapes: Shape of every tensor of the site by tensor name.

    Returns:
        The geometry.

    Raises:
        CheckpointError: The tensors and the config disagree (a config edited by hand, usually).
    """
    text = spec.text_config(config)
    num_heads = lookup(text, spec.heads_key)
    if not isinstance(num_heads, int) or num_heads < 1:
        raise CheckpointError(
            f"no usable {spec.heads_key}", where="config.json", fix="it must hold the number of query heads"
        )
    rows = -1 if spec.transposed else 0
    head_dim = lookup(text, spec.head_dim_key)
    declared = next((lookup(text, key) for key in spec.kv_heads_keys if lookup(text, key)), None)
    o_in = shapes[site.names["o.weight"]][0 if spec.transposed else -1]
    if spec.layout != "separate":
        head_dim = head_dim or o_in // num_heads
        total = shapes[site.names["qkv.weight"]][rows]
        kv_rows = total - num_heads * head_dim
        kv_heads, rest = divmod(kv_rows, 2 * head_dim)
        value_dim = head_dim
        k_rows = kv_rows // 2
    else:
        q_rows = shapes[site.names["q.weight"]][rows]
        k_rows = shapes[site.names["k.weight"]][rows]
        head_dim = head_dim or q_rows // num_heads
        kv_heads, rest = divmod(k_rows, head_dim)
        value_dim = o_in // num_heads
        if q_rows != num_heads * head_dim:
            raise CheckpointError(
                f"{site.names['q.weight']} has {q_rows} rows, the config asks for "
                f"{num_heads} heads x {head_dim}",
                where=site.path,
                fix="config and tensors must belong together",
            )
        if shapes[site.names["v.weight"]][rows] != kv_heads * value_dim:
            raise CheckpointError(
                "v_proj and k_proj hold different numbers of heads",
                where=site.path,
                fix="config and tensors must belong together",
            )
    if rest or kv_heads < 1 or num_heads % max(kv_heads, 1):
        raise CheckpointError(
            f"{k_rows} key rows do not make whole heads of {head_dim}",
            where=site.path,
            fix="config and tensors must belong together",
        )
    if declared is not None and declared != kv_heads:
        raise CheckpointError(
            f"config says {declared} KV heads, k_proj has {k_rows} rows = "
            f"{kv_heads} heads x head_dim {head_dim}",
            where=site.path,
            fix="restore the config that came with these tensors and run convert",
        )
    return Geometry(num_heads, kv_heads, head_dim, value_dim)


def valid_groups(num_kv_heads: int) -> list[int]:
    """Every G that divides the current number of KV heads, ascending."""
    return [g for g in range(1, num_kv_heads + 1) if num_kv_heads % g == 0]


def check_groups(groups: object, num_kv_heads: int) -> int:
    """`groups` as an int that divides `num_kv_heads`.

    Raises:
        UsageError: It is no positive divisor; the message lists the valid values.
    """
    allowed = ", ".join(map(str, valid_groups(num_kv_heads)))
    if isinstance(groups, bool) or not isinstance(groups, int):
        raise UsageError(f"{groups!r} is not a whole number", where="--groups", fix=f"try one of {allowed}")
    if groups < 1:
        raise UsageError(f"{groups} KV heads are not possible", where="--groups", fix=f"try one of {allowed}")
    if groups > num_kv_heads:
        raise UsageError(
            f"the model has {num_kv_heads} KV heads, {groups} would be more",
            where="--groups",
            fix=f"try one of {allowed}",
        )
    if num_kv_heads % groups:
        raise UsageError(
            f"{groups} does not divide the {num_kv_heads} KV heads",
            where="--groups",
            fix=f"try one of {allowed}",
        )
    return groups


def rotary_dim(spec: AttentionSpec, config: Mapping[str, Any], head_dim: int) -> int:
    """How many leading dims of a head are rotary (0 where positions enter otherwise)."""
    if spec.position not in ("half_split", "interleaved"):
        return 0
    text = spec.text_config(config)
    for key in spec.rotary_keys:
        for holder in (text.get("rope_parameters"), text):
            value = holder.get(key) if isinstance(holder, Mapping) else None
            if value is not None:
                return int(value) if isinstance(value, int) and value > 1 else int(head_dim * value)
    return int(head_dim * spec.rotary_default)
