"""What one architecture is, as data: names, layouts, symmetries. No tensor is touched here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..checkpoints.hf_config import lookup
from ..errors import CheckpointError, UsageError, quoted

Position = Literal["half_split", "interleaved", "none", "alibi", "relative", "unknown"]
KeySymmetry = Literal["planes", "plane_rotations", "phases", "linear", "none"]
ValueSymmetry = Literal["linear", "orthogonal", "none"]
Permutable = Literal["layer", "model", "never"]
Layout = Literal["separate", "blocks", "per_head", "per_group"]


@dataclass(frozen=True)
class PerHeadParameter:
    """A tensor beside the projections that has one slice per head.

    Args:
        name: Name inside the attention module, such as `k_norm.weight`; a name with `{head}` stands for
            one tensor per head (`k_layernorm.norms.{head}.weight`).
        per: Whether the slices belong to KV heads (pooled) or to query heads (permuted).
        axis: The axis that is `heads * slice` long.
        reads_kv: Whether axis 1 runs over the KV heads too, as inputs: those are summed over a group.
        kind: The kind of attention that has it, None for every kind. Elsewhere such a tensor is none of ours.
    """

    name: str
    per: Literal["kv", "query"]
    axis: int = 0
    reads_kv: bool = False
    kind: str | None = None


@dataclass(frozen=True)
class Variant:
    """Config keys of one kind of layer, for architectures whose layers differ.

    A layer has the variant whose declared counts its tensors fit (see `geometry`).

    Args:
        heads_key, kv_heads_key, head_dim_key: Where the config declares them.
        kind: The kind of attention it applies to.
    """

    heads_key: str = "num_attention_heads"
    kv_heads_key: str = "num_key_value_heads"
    head_dim_key: str = "head_dim"
    kind: str = "self"


@dataclass(frozen=True)
class Target:
    """What else changes once K/V heads are shared, where the KV-head count alone does not say it.

    Args:
        layout: Fused layout of the result.
        config: Further config keys and the values they receive.
        note: What the user should know about the result.
        kv_heads_key: Key that receives G, where the source has none that counts.
    """

    layout: Layout
    config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    note: str = ""
    kv_heads_key: str = ""


@dataclass(frozen=True)
class Rule:
    """What a key of the config changes in an entry of the table.

    Args:
        key: A (dotted) key of the text model's config.
        equals: The value it must have; None stands for any value that is set and not false.
        change: Fields of the spec and their values.
        refusal: Why such a model cannot be converted; empty where it can.
    """

    key: str
    equals: Any = None
    change: Mapping[str, Any] = field(default_factory=dict, hash=False)
    refusal: str = ""

    def holds(self, text: Mapping[str, Any]) -> bool:
        """Whether it applies to this (text) config."""
        value = lookup(text, self.key)
        return bool(value) if self.equals is None else value == self.equals


@dataclass(frozen=True)
class AttentionSpec:
    """How an architecture stores its attention and what may change without changing its function.

    The defaults describe Llama; an entry of the table states only what differs.

    Args:
        modules: Kind of attention (`self`, `cross`) and the path of its module below one of `prefixes`.
        prefixes: All that may stand before a module path. Matching is exact: a tower that is not named
            here (vision, audio, a drafter) stays as it is.
        q, k, v, o: Projection names inside the module; for a fused layout `q == k == v`.
        layout: How q, k and v rows lie in the stored tensor(s); see `heads.split`.
        transposed: True where weights are stored `[in, out]` (GPT-2's Conv1D).
        gated_query: True where each query head is followed by as many rows of an output gate.
        keys_as_values: Whether a layer without a value projection uses its keys as values.
        extras: Further tensors with one slice per head.
        qk_norm: Names of the norms of q and k whose weights all heads share (read by merging methods).
        position: How positions enter; decides which rows of a key form a plane.
        rotary_keys: Config keys that may hold the rotary fraction or count, first found wins.
        rotary_default: Fraction of `head_dim` that is rotary if no key is present.
        key_symmetry: What may be done to keys and undone in queries (DESIGN: calibrated merging):
            `planes` one complex scalar per plane, `plane_rotations` unit scalars only, where the gains of
            the norms in `qk_norm` are equal within the plane, `phases` unit scalars under a full-width
            norm, `linear` any invertible map, `none`.
        value_symmetry: What may be done to values and undone in the output projection.
        clip_key: Config key of a bound on the entries of queries, keys and values, where one is set.
        unclipped: Key and value symmetry of modules whose entries stay within that bound.
        permutable: Whether heads may be re-ordered: per layer, in all layers alike, or never.
        permutable_cross: The same of cross-attention, where it differs from self-attention.
        heads_key, kv_heads_keys, head_dim_key, layers_key: Config keys; every one of `kv_heads_keys`
            that applies receives G (a dotted key descends). `heads_key` may hold one number per layer.
        variants: Where layers differ: one entry per kind of layer instead of the three keys above.
        kv_multiples: How many times the declared KV heads a layer may hold; the ratio is kept.
        min_groups: Smallest G the class can run.
        config_path: Keys that lead to the text model's own config (`("text_config",)`).
        text_type: Its model type, which supplies the defaults of keys that the config leaves out.
        mqa, gqa: What changes beside the KV-head keys when an MHA source gets G = 1 or G > 1.
        refused_gqa: Why G > 1 is impossible; empty where it is possible.
        wide: Whether the stock class takes `head_dim` and longrope's factors for each rotary pair from the config,
            so that KV heads may be fewer and as much wider (`--wide`).
        scale_key: Config key that fixes the scale of attention logits, whatever the head dim is; empty where that is
            the square root of the head dim.
        memory: How modules are named in memory, where transformers renames tensors when it loads them.
        note: One line the user should read before converting.
        uncalibrated: Why layers cannot be run on text one by one, and so not calibrated; empty where they can.
        unread: Why there is no data that the model could be calibrated, uptrained and scored on; empty where there is.
    """

    modules: tuple[tuple[str, str], ...] = (("self", "layers.{layer}.self_attn"),)
    prefixes: tuple[str, ...] = ("model.", "")
    q: str = "q_proj"
    k: str = "k_proj"
    v: str = "v_proj"
    o: str = "o_proj"
    layout: Layout = "separate"
    transposed: bool = False
    gated_query: bool = False
    keys_as_values: bool = False
    per_head: tuple[PerHeadParameter, ...] = ()
    qk_norm: tuple[str, ...] = ()
    position: Position = "half_split"
    rotary_keys: tuple[str, ...] = ("partial_rotary_factor", "rotary_pct")
    rotary_default: float = 1.0
    key_symmetry: KeySymmetry = "planes"
    value_symmetry: ValueSymmetry = "linear"
    clip_key: str = ""
    unclipped: tuple[KeySymmetry, ValueSymmetry] = ("none", "none")
    permutable: Permutable = "layer"
    permutable_cross: Permutable | None = None
    heads_key: str = "num_attention_heads"
    kv_heads_keys: tuple[str, ...] = ("num_key_value_heads",)
    head_dim_key: str = "head_dim"
    layers_key: str = "num_hidden_layers"
    variants: tuple[Variant, ...] = ()
    kv_multiples: tuple[int, ...] = (1,)
    min_groups: int = 1
    config_path: tuple[str, ...] = ()
    text_type: str = ""
    mqa: Target | None = None
    gqa: Target | None = None
    refused_gqa: str = ""
    wide: bool = False
    scale_key: str = ""
    memory: AttentionSpec | None = None
    note: str = ""
    uncalibrated: str = ""
    unread: str = ""

    def text_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The part of `config` (raw JSON) that describes the attention to convert."""
        for key in self.config_path:
            inner = config.get(key)
            config = inner if isinstance(inner, Mapping) else {}
        return config

    def permutable_of(self, kind: str) -> Permutable:
        """Whether the heads of one kind of attention may be re-ordered."""
        return self.permutable_cross if kind == "cross" and self.permutable_cross else self.permutable

    def within_bound(self, keys: bool, values: bool) -> AttentionSpec:
        """The spec of a module where the bound of `clip_key` is known not to act.

        Args:
            keys: It never acts on queries and keys.
            values: It never acts on values.
        """
        key_symmetry, value_symmetry = self.unclipped
        return replace(
            self,
            key_symmetry=key_symmetry if keys else self.key_symmetry,
            value_symmetry=value_symmetry if values else self.value_symmetry,
        )

    def in_memory(self) -> AttentionSpec:
        """The spec for a state dict of the live model."""
        if self.memory is None:
            return self
        return replace(
            self.memory,
            config_path=self.config_path,
            text_type=self.text_type,
            wide=self.wide,
            scale_key=self.scale_key,
        )

    def target(self, num_heads: int, groups: int) -> Target | None:
        """What changes beside the KV-head keys when this source gets `groups` KV heads."""
        if groups == num_heads:
            return None
        return self.mqa if groups == 1 else self.gqa


def clipped(key: str, spec: AttentionSpec) -> Rule:
    """The rule of an architecture that bounds the entries of q, k and v: no symmetry where the bound acts.

    Args:
        key: Config key of the bound.
        spec: The architecture without it.
    """
    change = {"clip_key": key, "unclipped": (spec.key_symmetry, spec.value_symmetry)}
    return Rule(key, change=change | {"key_symmetry": "none", "value_symmetry": "none"})


@dataclass(frozen=True)
class AttentionModule:
    """One attention module of a checkpoint: where its tensors are.

    Args:
        path: Module path as on disk, `model.layers.3.self_attn`.
        layer: Its layer index.
        kind: `self` or `cross`.
        names: Role -> tensor name. Roles are `q.weight`, `k.bias`, … (`qkv.weight` where fused),
            and an extra's own name (with its head number where there is one tensor per head).
    """

    path: str
    layer: int
    kind: str
    names: Mapping[str, str] = field(hash=False)

    @property
    def block(self) -> str:
        """Path of the layer around it, up to the layer's number."""
        parts = self.path.split(".")
        return ".".join(parts[: parts.index(str(self.layer)) + 1])


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


def valid_groups(num_kv_heads: int, spec: AttentionSpec | None = None) -> list[int]:
    """Every G the architecture can hold that divides the current number of KV heads, ascending."""
    least = 1 if spec is None else spec.min_groups
    divisors = [g for g in range(1, num_kv_heads + 1) if num_kv_heads % g == 0 and g % least == 0]
    if spec is not None and spec.refused_gqa:
        return [g for g in divisors if g in (1, num_kv_heads)]
    return divisors


def check_groups(groups: object, num_kv_heads: int, spec: AttentionSpec | None = None) -> int:
    """`groups` as an int that divides `num_kv_heads` and that the architecture can hold.

    Raises:
        UsageError: It is not such a number; the message lists the valid values.
    """
    allowed = valid_groups(num_kv_heads, spec)
    fix = f"try one of {', '.join(map(str, allowed))}"

    def refuse(what: str) -> UsageError:
        return UsageError(what, where="--groups", fix=fix)

    if isinstance(groups, bool) or not isinstance(groups, int):
        raise refuse(f"{quoted(groups)} is not a whole number")
    if groups < 1:
        raise refuse(f"{quoted(groups)} KV heads are not possible")
    if groups > num_kv_heads:
        raise refuse(f"the model has {num_kv_heads} KV heads, {quoted(groups)} would be more")
    if num_kv_heads % groups:
        raise refuse(f"{groups} does not divide the {num_kv_heads} KV heads")
    if groups not in allowed:
        why = spec.refused_gqa if spec is not None else ""
        raise refuse(
            why or f"this architecture needs a multiple of {spec.min_groups if spec else 1} KV heads"
        )
    return groups


def rotary_dim(spec: AttentionSpec, config: Mapping[str, Any], head_dim: int, layer: int = 0) -> int:
    """How many leading dims of a head are rotary (0 where positions enter otherwise): pairs, so an even number.

    Args:
        spec: The architecture.
        config: The whole raw config.
        head_dim: Width d of a key head.
        layer: Layer index; `rope_parameters` may hold one entry per type of layer.
    """
    stated = stated_rotary_dim(spec, config, head_dim, layer)
    return stated + stated % 2  # classes have a frequency for each pair that has begun


def stated_rotary_dim(spec: AttentionSpec, config: Mapping[str, Any], head_dim: int, layer: int = 0) -> int:
    """`rotary_dim` as the config says it, which may be odd."""
    if spec.position not in ("half_split", "interleaved"):
        return 0
    text = spec.text_config(config)
    rope = text.get("rope_parameters")
    types = text.get("layer_types")
    kind = types[layer] if isinstance(types, list) and layer < len(types) else None
    if isinstance(rope, Mapping) and isinstance(kind, str) and kind in rope:
        rope = rope[kind]
    for key in spec.rotary_keys:
        for holder in (rope, text):
            value = holder.get(key) if isinstance(holder, Mapping) else None
            if value is not None:
                return _rotary_width(key, value, head_dim)
    return int(head_dim * spec.rotary_default)


def _rotary_width(key: str, value: Any, head_dim: int) -> int:
    """A count of rotary dims, or a fraction of the head, as a width."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= head_dim:
        raise CheckpointError(
            f"{key} is {quoted(value)}",
            where="config.json",
            fix="it must be a fraction of a head, or a number of its dims",
        )
    return value if isinstance(value, int) and value > 1 else int(head_dim * value)
