"""Pure tensor algebra on heads: split, fuse, permute, pool, expand. The only reshapes of the project.

Letters: H query heads, K stored KV heads, G target KV heads, d head_dim, e value_dim, D hidden_size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .architectures.spec import AttentionSpec, Geometry

Grouping = Sequence[Sequence[int]]  # G tuples of source KV-head indices, equal in size, each head once


@dataclass(frozen=True)
class AttentionWeights:
    """One attention module, heads first, whatever its layout on disk.

    Args:
        q: `[H, d, D]`; k: `[K, d, D]`; v: `[K, e, D]`; o: `[H, D, e]` (the output block of each head).
        q_bias: `[H, d]`; k_bias: `[K, d]`; v_bias: `[K, e]`; o_bias: `[D]`; None where absent.
        kv_extras: Name -> `[K, …]`; query_extras: name -> `[H, …]`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    o_bias: Tensor | None = None
    kv_extras: Mapping[str, Tensor] = field(default_factory=dict)
    query_extras: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def num_heads(self) -> int:
        return self.q.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[0]

    def map(self, fn: Callable[[Tensor], Tensor]) -> AttentionWeights:
        """Apply `fn` to every tensor (a dtype or device move)."""

        def maybe(x: Tensor | None) -> Tensor | None:
            return None if x is None else fn(x)

        return AttentionWeights(
            fn(self.q),
            fn(self.k),
            fn(self.v),
            fn(self.o),
            maybe(self.q_bias),
            maybe(self.k_bias),
            maybe(self.v_bias),
            maybe(self.o_bias),
            {n: fn(x) for n, x in self.kv_extras.items()},
            {n: fn(x) for n, x in self.query_extras.items()},
        )


def view_heads(x: Tensor, num_heads: int, axis: int = 0) -> Tensor:
    """`[…, heads * n, …]` as `[heads, …, n, …]`: head index first, the rest in place.

    Example:
        >>> view_heads(torch.arange(6).view(6, 1), 3).shape
        torch.Size([3, 2, 1])
    """
    axis %= x.dim()
    shape = (*x.shape[:axis], num_heads, x.shape[axis] // num_heads, *x.shape[axis + 1 :])
    return x.reshape(shape).movedim(axis, 0)


def join_heads(x: Tensor, axis: int = 0) -> Tensor:
    """Inverse of `view_heads`: `[heads, …, n, …]` back to `[…, heads * n, …]`."""
    axis %= x.dim() - 1
    moved = x.movedim(0, axis)
    return moved.reshape(*moved.shape[:axis], -1, *moved.shape[axis + 2 :]).contiguous()


# --- fused layouts: [rows, …] <-> q [H*d, …], k [K*d, …], v [K*d, …] -----------------------------------


def _concatenate(parts: Sequence[Tensor], axis: int) -> Tensor:
    """`torch.cat`, which on the meta device (where shapes are found) loads a second's worth of torch."""
    shape, begin = list(parts[0].shape), 0
    shape[axis] = sum(part.shape[axis] for part in parts)
    whole = parts[0].new_empty(shape)
    for part in parts:
        whole.narrow(axis, begin, part.shape[axis]).copy_(part)
        begin += part.shape[axis]
    return whole


def _split_blocks(x: Tensor, g: Geometry) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = x.split([g.num_heads * g.head_dim, g.num_kv_heads * g.head_dim, g.num_kv_heads * g.value_dim])
    return q, k, v


def _fuse_blocks(q: Tensor, k: Tensor, v: Tensor, g: Geometry) -> Tensor:
    return _concatenate([q, k, v], 0)


def _split_per_group(x: Tensor, g: Geometry) -> tuple[Tensor, Tensor, Tensor]:
    per = g.num_heads // g.num_kv_heads * g.head_dim  # query rows of one group
    blocks = view_heads(x, g.num_kv_heads)  # [K, per + 2d, …]
    q, k, v = blocks.split([per, g.head_dim, g.value_dim], dim=1)
    return join_heads(q), join_heads(k), join_heads(v)


def _fuse_per_group(q: Tensor, k: Tensor, v: Tensor, g: Geometry) -> Tensor:
    return join_heads(_concatenate([view_heads(x, g.num_kv_heads) for x in (q, k, v)], 1))


_LAYOUTS = {
    "blocks": (_split_blocks, _fuse_blocks),  # [q of all heads; k of all; v of all]
    "per_group": (_split_per_group, _fuse_per_group),  # (group, [its queries, k, v])
    "per_head": (_split_per_group, _fuse_per_group),  # (head, [q, k, v]): per_group with K = H
}


def split_fused(layout: str, x: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of a fused QKV tensor `[(H + 2K) d, …]` as q, k, v rows."""
    rows = (geometry.num_heads + geometry.num_kv_heads) * geometry.head_dim
    assert x.shape[0] == rows + geometry.num_kv_heads * geometry.value_dim, (tuple(x.shape), geometry)
    return _LAYOUTS[layout][0](x, geometry)


def fuse(layout: str, q: Tensor, k: Tensor, v: Tensor, geometry: Geometry) -> Tensor:
    """Inverse of `split_fused`; `geometry` is that of the result."""
    return _LAYOUTS[layout][1](q, k, v, geometry)


# --- a module's tensors <-> AttentionWeights -----------------------------------------------------------


def _split_extras(
    spec: AttentionSpec, g: Geometry, tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Extras by name, head index first: those of the KV heads and those of the query heads."""
    found: dict[str, dict[str, Tensor]] = {"kv": {}, "query": {}}
    for extra in spec.per_head:
        count = g.num_kv_heads if extra.per == "kv" else g.num_heads
        if "{head}" in extra.name:
            parts = [extra.name.format(head=h) for h in range(count)]
            if parts[0] in tensors:
                found[extra.per][extra.name] = torch.stack([tensors[name] for name in parts])
        elif extra.name in tensors:
            x = view_heads(tensors[extra.name], count, extra.axis)
            if extra.reads_kv:  # [K, n, K * d] -> [K, n, K, d]
                x = x.reshape(*x.shape[:-1], g.num_kv_heads, -1)
            found[extra.per][extra.name] = x
    return found["kv"], found["query"]


def _unsplit_extras(spec: AttentionSpec, weights: AttentionWeights) -> dict[str, Tensor]:
    """Inverse of `_split_extras`."""
    by_name = {extra.name: extra for extra in spec.per_head}
    out: dict[str, Tensor] = {}
    for name, x in {**weights.kv_extras, **weights.query_extras}.items():
        extra = by_name[name]
        if "{head}" in name:
            out |= {name.format(head=h): part.contiguous() for h, part in enumerate(x)}
        else:
            out[name] = join_heads(x.flatten(-2) if extra.reads_kv else x, extra.axis)
    return out


def split(spec: AttentionSpec, geometry: Geometry, tensors: Mapping[str, Tensor]) -> AttentionWeights:
    """Tensors of one attention module, by role, as `AttentionWeights`.

    Args:
        spec: The architecture.
        geometry: Head counts of the module.
        tensors: Role (`q.weight`, `qkv.bias`, `k_norm.weight`, …) -> tensor as stored.

    Returns:
        Views where possible, in the stored dtype.
    """
    g = geometry
    turn = (lambda x: x.t()) if spec.transposed else (lambda x: x)
    rows: dict[str, Tensor] = {}
    for leaf in ("weight", "bias"):
        turned = turn if leaf == "weight" else (lambda x: x)
        if spec.layout == "separate":
            rows |= {f"{p}.{leaf}": turned(tensors[f"{p}.{leaf}"]) for p in "qkv" if f"{p}.{leaf}" in tensors}
        elif f"qkv.{leaf}" in tensors:
            parts = split_fused(spec.layout, turned(tensors[f"qkv.{leaf}"]), g)
            rows |= {f"{p}.{leaf}": part for p, part in zip("qkv", parts, strict=True)}
    if spec.keys_as_values and "v.weight" not in rows:
        rows |= {name.replace("k", "v", 1): x for name, x in rows.items() if name.startswith("k.")}
    heads = {"q": g.num_heads, "k": g.num_kv_heads, "v": g.num_kv_heads}
    views = {name: view_heads(x, heads[name[0]]) for name, x in rows.items()}
    gates: dict[str, Tensor] = {}
    if spec.gated_query:  # each query head's rows are [q; gate]
        for leaf in ("weight", "bias"):
            if f"q.{leaf}" in views:
                views[f"q.{leaf}"], gates[f"gate.{leaf}"] = views[f"q.{leaf}"].split(g.head_dim, dim=1)
    kv_extras, query_extras = _split_extras(spec, g, tensors)
    return AttentionWeights(
        views["q.weight"],
        views["k.weight"],
        views["v.weight"],
        view_heads(turn(tensors["o.weight"]), g.num_heads, axis=1),
        views.get("q.bias"),
        views.get("k.bias"),
        views.get("v.bias"),
        tensors.get("o.bias"),
        kv_extras,
        query_extras | gates,
    )


def unsplit(spec: AttentionSpec, weights: AttentionWeights) -> dict[str, Tensor]:
    """Inverse of `split`: role -> contiguous tensor as stored (shared heads: in the target layout).

    Where keys serve as values (`keys_as_values`) the values come out too: a role the module does not have.
    """
    w = weights
    target = spec.target(w.num_heads, w.num_kv_heads)
    layout = spec.layout if target is None else target.layout
    if spec.gated_query:
        w = _with_gates(w)
    turn = (lambda x: x.t().contiguous()) if spec.transposed else (lambda x: x)
    rows = {
        f"{p}.{leaf}": join_heads(x)
        for p, leaf, x in (
            ("q", "weight", w.q),
            ("k", "weight", w.k),
            ("v", "weight", w.v),
            ("q", "bias", w.q_bias),
            ("k", "bias", w.k_bias),
            ("v", "bias", w.v_bias),
        )
        if x is not None
    }
    out: dict[str, Tensor] = {}
    geometry = Geometry(w.num_heads, w.num_kv_heads, w.k.shape[1], w.v.shape[1])
    for leaf in ("weight", "bias"):
        turned = turn if leaf == "weight" else (lambda x: x)
        if layout == "separate":
            out |= {f"{p}.{leaf}": turned(rows[f"{p}.{leaf}"]) for p in "qkv" if f"{p}.{leaf}" in rows}
        elif f"k.{leaf}" in rows:
            out[f"qkv.{leaf}"] = turned(
                fuse(layout, rows[f"q.{leaf}"], rows[f"k.{leaf}"], rows[f"v.{leaf}"], geometry)
            )
    out["o.weight"] = turn(join_heads(w.o, axis=1))
    if w.o_bias is not None:
        out["o.bias"] = w.o_bias
    return out | _unsplit_extras(spec, w)


def _with_gates(weights: AttentionWeights) -> AttentionWeights:
    """Query rows with their gate rows behind them, as stored where `spec.gated_query`."""
    per_head = dict(weights.query_extras)

    def gated(q: Tensor | None, leaf: str) -> Tensor | None:
        return None if q is None else _concatenate([q, per_head.pop(f"gate.{leaf}")], 1)

    q, bias = gated(weights.q, "weight"), gated(weights.q_bias, "bias")
    assert q is not None
    return replace(weights, q=q, q_bias=bias, query_extras=per_head)


# --- groups --------------------------------------------------------------------------------------------


def neighbours(num_kv_heads: int, groups: int) -> tuple[tuple[int, ...], ...]:
    """The grouping of the GQA paper: consecutive heads share.

    Example:
        >>> neighbours(4, 2)
        ((0, 1), (2, 3))
    """
    size = num_kv_heads // groups
    return tuple(tuple(range(g * size, (g + 1) * size)) for g in range(groups))


def query_order(grouping: Grouping, queries_per_kv: int) -> list[int]:
    """Source index of each query head once its KV heads are grouped: whole query blocks move."""
    return [h * queries_per_kv + i for group in grouping for h in group for i in range(queries_per_kv)]


def permute_queries(weights: AttentionWeights, order: Sequence[int]) -> AttentionWeights:
    """Re-order query heads, their output blocks and every per-query extra alike."""
    if list(order) == list(range(weights.num_heads)):
        return weights
    index = torch.as_tensor(order, device=weights.q.device)
    return replace(
        weights,
        q=weights.q[index],
        o=weights.o[index],
        q_bias=None if weights.q_bias is None else weights.q_bias[index],
        query_extras={n: x[index] for n, x in weights.query_extras.items()},
    )


def pool(x: Tensor, grouping: Grouping, how: str = "mean") -> Tensor:
    """Mean (or first) over each group: `[K, …]` -> `[G, …]`, in the dtype of `x`.

    Accumulates in float64: identical heads give the identical head back, bit for bit, at any group
    size (in float32 they do not for sizes 3, 5, 6, 7).
    """
    if how == "first":
        return x.index_select(0, torch.tensor([group[0] for group in grouping], device=x.device))
    pooled = x.new_empty(len(grouping), *x.shape[1:])
    total = x.new_empty(x.shape[1:], dtype=torch.float64)
    for g, (first, *others) in enumerate(grouping):  # a head at a time: what is added up stays in the cache
        total.copy_(x[first])
        for head in others:
            total += x[head]
        pooled[g] = total.div_(1 + len(others))
    return pooled


def pool_per_head(
    spec: AttentionSpec, per_head: Mapping[str, Tensor], grouping: Grouping, how: str = "mean"
) -> dict[str, Tensor]:
    """Tensors with one slice per KV head, pooled; those that also read the KV heads sum over them."""
    reading = {extra.name for extra in spec.per_head if extra.reads_kv}
    out = {name: pool(x, grouping, how) for name, x in per_head.items()}
    for name in reading & out.keys():  # [G, n, K, d]: inputs of one group now carry the same value
        inputs = out[name].movedim(-2, 0)
        size = inputs.shape[0] // len(grouping)
        out[name] = (pool(inputs, grouping).to(torch.float64) * size).to(inputs.dtype).movedim(0, -2)
    return out


def expand(
    weights: AttentionWeights, num_kv_heads: int, spec: AttentionSpec | None = None
) -> AttentionWeights:
    """Repeat-interleave K/V heads up to `num_kv_heads`: the MHA form of a GQA module."""
    n = num_kv_heads // weights.num_kv_heads
    reading = {extra.name for extra in spec.per_head if extra.reads_kv} if spec else set()

    def extra(name: str, x: Tensor) -> Tensor:
        x = x.repeat_interleave(n, 0)
        return x.repeat_interleave(n, -2) / n if name in reading else x

    def repeat(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.repeat_interleave(n, 0)

    return replace(
        weights,
        k=weights.k.repeat_interleave(n, 0),
        v=weights.v.repeat_interleave(n, 0),
        k_bias=repeat(weights.k_bias),
        v_bias=repeat(weights.v_bias),
        kv_extras={name: extra(name, x) for name, x in weights.kv_extras.items()},
    )


# --- rotary pairs --------------------------------------------------------------------------------------


def rotary_pair_index(position: str, rotary: int, head_dim: int) -> tuple[list[int], list[int], list[int]]:
    """Dims of a head by what RoPE does to them.

    Args:
        position: `half_split` pairs dim j with j + rotary/2; `interleaved` pairs 2j with 2j + 1.
        rotary: Number of leading rotary dims.
        head_dim: Width d.

    Returns:
        `(first, second, rest)`: rotary pair j is `first[j]` and `second[j]`; `rest` is not rotated.
    """
    half = rotary // 2
    if position == "interleaved":
        first, second = list(range(0, rotary, 2)), list(range(1, rotary, 2))
    else:
        first, second = list(range(half)), list(range(half, 2 * half))
    return first, second, list(range(2 * half, head_dim))


def wide_dims(dims: Sequence[int], position: str, rotary: int, head_dim: int, channels: int) -> list[int]:
    """Where dims of a head lie in a head `channels` times as wide, whose rotary frequencies repeat.

    Channel s of rotary pair j of P is rotary pair `s P + j` there; channel s of the k-th of n dims that are not
    rotated is the `s n + k`-th of those.

    Args:
        dims: Dims of the narrow head.
        position, rotary, head_dim: Of the narrow head, as `rotary_pair_index` takes them.
        channels: How many times as wide.

    Returns:
        First dims of pairs, then second ones, then the rest, each channel by channel; `dims` themselves for one
        channel.

    Example:
        >>> wide_dims([0, 1, 2, 3], "half_split", 4, 4, 2)
        [0, 1, 2, 3, 4, 5, 6, 7]
        >>> wide_dims([0, 2], "half_split", 4, 4, 2)
        [0, 2, 4, 6]
    """
    if channels == 1:
        return list(dims)
    narrow = rotary_pair_index(position, rotary, head_dim)
    wide = rotary_pair_index(position, channels * rotary, channels * head_dim)
    out = []
    for before, after in zip(narrow, wide, strict=True):
        known = {dim: i for i, dim in enumerate(before)}
        which = [known[dim] for dim in dims if dim in known]
        out += [after[s * len(before) + i] for s in range(channels) for i in which]
    return out


def widen(
    weights: AttentionWeights, wide: int, position: str, rotary: int, query_scale: float = 1.0
) -> AttentionWeights:
    """The same attention with `wide` neighbouring KV heads as the channels of one that is as much wider.

    A query head reads its own channel and has zeros in the others, so that logits stay what they are once the
    class's scale is made up for. GQA-G becomes G / wide heads that hold the same cache.

    Args:
        weights: G KV heads; `wide` divides G.
        wide: R.
        position, rotary: Of the narrow heads, as `rotary_pair_index` takes them.
        query_scale: What queries are multiplied by.
    """
    heads, width = weights.num_kv_heads, weights.k.shape[1]
    place = [wide_dims([dim], position, rotary, width, wide) for dim in range(width)]  # [d][s]
    rows = [[place[dim][s] for dim in range(width)] for s in range(wide)]
    values = [list(range(s * weights.v.shape[1], (s + 1) * weights.v.shape[1])) for s in range(wide)]

    def joined(
        x: Tensor | None, where: Sequence[Sequence[int]]
    ) -> Tensor | None:  # [K, d, …] -> [K/R, R d, …]
        if x is None:
            return None
        out = x.new_zeros(heads // wide, wide * x.shape[1], *x.shape[2:])
        for s, dims in enumerate(where):
            out[:, dims] = x[s::wide]
        return out

    def spread(x: Tensor | None, where: Sequence[Sequence[int]]) -> Tensor | None:  # [H, d, …] -> [H, R d, …]
        if x is None:
            return None
        out = x.new_zeros(x.shape[0], wide * x.shape[1], *x.shape[2:])
        for h in range(x.shape[0]):
            out[h, where[h // (x.shape[0] // heads) % wide]] = x[h]
        return out

    def scaled(x: Tensor | None) -> Tensor | None:
        return None if x is None else x * query_scale

    assert not weights.kv_extras, "no architecture with further tensors of KV heads can be widened"
    q, k, v, o = (
        scaled(spread(weights.q, rows)),
        joined(weights.k, rows),
        joined(weights.v, values),
        spread(weights.o.transpose(1, 2), values),
    )
    assert q is not None and k is not None and v is not None and o is not None
    return replace(
        weights,
        q=q,
        k=k,
        v=v,
        o=o.transpose(1, 2),
        q_bias=scaled(spread(weights.q_bias, rows)),
        k_bias=joined(weights.k_bias, rows),
        v_bias=joined(weights.v_bias, values),
    )


def interleaved_to_half_split(x: Tensor, rotary: int) -> Tensor:
    """Re-order the rotary rows of `[heads, d, …]` from (2j, 2j+1) pairs to (j, j + rotary/2) pairs."""
    order = [*range(0, rotary, 2), *range(1, rotary, 2), *range(rotary, x.shape[1])]
    return x[:, order]


def codegen_part(part: int, x: Tensor) -> Tensor:
    """q, v or k (0, 1, 2: in this order) of CodeGen's `[4 blocks * 3 parts * rows, …]` -> `[4 * rows, …]`."""
    return x.unflatten(0, (4, 3, -1))[:, part].flatten(0, 1)
