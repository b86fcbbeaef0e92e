"""Merging against the exact symmetries of attention, for every position style and kind of bias."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mha2gqa.architectures import AttentionSpec
from mha2gqa.calibration import SecondMoments
from mha2gqa.heads import AttentionWeights, expand, neighbours, query_order, rotary_pair_index
from mha2gqa.merging import MERGERS, MergeContext
from mha2gqa.merging.module_objective import merge_objective

D, T = 24, 11
GROUPING = ((0, 4), (1, 3), (2, 5))


def rotate(x: Tensor, position: str, rotary: int) -> Tensor:
    """RoPE on `[heads, T, d]`."""
    first, second, _ = rotary_pair_index(position, rotary, x.shape[-1])
    angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * 0.7 ** torch.arange(len(first), dtype=x.dtype)
    turned = torch.complex(x[..., first], x[..., second]) * torch.polar(torch.ones_like(angle), angle)
    out = x.clone()
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


def rms(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    return x / x.square().mean(dims, keepdim=True).sqrt()


def attention(w: AttentionWeights, x: Tensor, spec: AttentionSpec, rotary: int, gains: tuple = ()) -> Tensor:
    """Causal attention of one module on `x [T, D]`, written out."""

    def project(weight: Tensor, bias: Tensor | None) -> Tensor:
        out = torch.einsum("hrd,td->htr", weight, x)
        return out if bias is None else out + bias[:, None]

    q, k, v = project(w.q, w.q_bias), project(w.k, w.k_bias), project(w.v, w.v_bias)
    if spec.key_symmetry == "phases":
        q = rms(q, (0, 2)) * w.query_extras["q_norm.weight"][:, None]
        k = rms(k, (0, 2)) * w.kv_extras["k_norm.weight"][:, None]
    if spec.key_symmetry == "plane_rotations":
        q, k = rms(q, (2,)) * gains[0], rms(k, (2,)) * gains[1]
    if rotary:
        q, k = rotate(q, spec.position, rotary), rotate(k, spec.position, rotary)
    repeat = len(q) // len(k)
    k, v = k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0)
    scores = q @ k.mT / q.shape[-1] ** 0.5
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf"))
    if "sinks" in w.query_extras:
        sinks = w.query_extras["sinks"][:, :, None].expand(-1, len(x), 1)
        mixed = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ v
    else:
        mixed = scores.softmax(-1) @ v
    out = torch.einsum("hte,hde->td", mixed, w.o)
    return out if w.o_bias is None else out + w.o_bias


def random_weights(
    heads: int = 6, queries: int = 1, d: int = 8, e: int = 8, biases: str = "", seed: int = 0
) -> AttentionWeights:
    gen = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64) / 3

    return AttentionWeights(
        draw(heads * queries, d, D),
        draw(heads, d, D),
        draw(heads, e, D),
        draw(heads * queries, D, e),
        draw(heads * queries, d) if "q" in biases else None,
        draw(heads, d) if "k" in biases else None,
        draw(heads, e) if "v" in biases else None,
        draw(D) if "o" in biases else None,
    )


def key_map(spec: AttentionSpec, rotary: int, d: int, gen: torch.Generator) -> tuple[Tensor, Tensor]:
    """A random allowed key map A `[d, d]`, and what undoes it in the query, A⁻ᵀ."""
    first, second, rest = rotary_pair_index(spec.position, rotary, d)
    a = torch.zeros(d, d, dtype=torch.float64)
    size = torch.rand(len(first), generator=gen, dtype=torch.float64) + 0.5
    if spec.key_symmetry in ("plane_rotations", "phases"):
        size = torch.ones_like(size)
    angle = torch.rand(len(first), generator=gen, dtype=torch.float64) * 6.28
    re, im = size * angle.cos(), size * angle.sin()
    a[first, first], a[first, second], a[second, first], a[second, second] = re, -im, im, re
    if rest:
        block = torch.randn(len(rest), len(rest), generator=gen, dtype=torch.float64)
        if spec.key_symmetry == "plane_rotations":
            block = torch.diag(block.diagonal().sign())
        a[torch.tensor(rest)[:, None], torch.tensor(rest)] = block
    return a, torch.linalg.inv(a).T


def symmetric_copies(
    w: AttentionWeights, spec: AttentionSpec, rotary: int, seed: int = 1
) -> AttentionWeights:
    """Make the heads of each group of GROUPING the first one's copies, up to a random allowed symmetry."""
    gen = torch.Generator().manual_seed(seed)
    repeat = w.num_heads // w.num_kv_heads
    w = w.map(torch.clone)
    for group in GROUPING:
        for h in group[1:]:
            a, undo = key_map(spec, rotary, w.k.shape[1], gen)
            b = torch.randn(w.v.shape[1], w.v.shape[1], generator=gen, dtype=torch.float64)
            if spec.value_symmetry == "orthogonal":
                b = torch.linalg.qr(b)[0]
            w.k[h], w.v[h] = a @ w.k[group[0]], b @ w.v[group[0]]
            if w.k_bias is not None:
                w.k_bias[h] = a @ w.k_bias[group[0]]
            if w.v_bias is not None:
                w.v_bias[h] = b @ w.v_bias[group[0]]
            mine = slice(h * repeat, (h + 1) * repeat)
            w.q[mine] = undo @ w.q[mine]
            if w.q_bias is not None:
                w.q_bias[mine] = w.q_bias[mine] @ undo.T
            w.o[mine] = w.o[mine] @ torch.linalg.inv(b)
    return w


def error(w: AttentionWeights, merged: AttentionWeights, spec: AttentionSpec, rotary: int, gains=()) -> float:
    x = torch.randn(T, D, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    want, have = attention(w, x, spec, rotary, gains), attention(merged, x, spec, rotary, gains)
    return float((want - have).norm() / want.norm())


CASES = {
    "half_split": (AttentionSpec(), 8, {}),
    "interleaved": (AttentionSpec(position="interleaved"), 8, {}),
    "partial": (AttentionSpec(), 4, {}),
    "partial interleaved, every bias": (AttentionSpec(position="interleaved"), 4, {"biases": "qkvo"}),
    "q k v biases, none on the output": (AttentionSpec(), 8, {"biases": "qkv"}),
    "every bias": (AttentionSpec(), 8, {"biases": "qkvo"}),
    "no positions": (AttentionSpec(position="none", key_symmetry="linear"), 0, {"biases": "qkvo"}),
    "alibi": (AttentionSpec(position="alibi", key_symmetry="linear"), 0, {}),
    "narrow values": (AttentionSpec(), 8, {"e": 5}),
    "wide heads": (AttentionSpec(), 8, {"d": 10, "e": 10}),
    "three queries a head": (AttentionSpec(), 8, {"queries": 3, "biases": "qkvo"}),
    "orthogonal values": (AttentionSpec(value_symmetry="orthogonal"), 8, {}),
    "per-head norm": (AttentionSpec(key_symmetry="plane_rotations"), 8, {}),
    "per-head norm, partial": (AttentionSpec(key_symmetry="plane_rotations"), 4, {}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("method", ["joint", "align"])
def test_symmetric_copies_merge_without_loss(name: str, method: str) -> None:
    spec, rotary, sizes = CASES[name]
    if method == "align":  # rotations only: test it on copies that differ by rotations
        spec = replace(spec, value_symmetry="orthogonal")
        if spec.key_symmetry == "planes" and rotary == sizes.get("d", 8):
            spec = replace(spec, key_symmetry="plane_rotations")
        elif spec.key_symmetry != "plane_rotations":
            pytest.skip("copies by general maps are beyond rotations")
    plane = torch.rand(rotary // 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64) + 0.5
    pair = plane.repeat(2) if spec.position != "interleaved" else plane.repeat_interleave(2)
    gain = torch.cat([pair, torch.ones(sizes.get("d", 8) - rotary, dtype=torch.float64)])
    gains = (gain, gain.flip(0)[gain.argsort().argsort().argsort()] * 0 + gain * 1.5)
    w = symmetric_copies(random_weights(**sizes), spec, rotary)
    if spec.key_symmetry != "plane_rotations":
        gains = ()
    context = MergeContext(spec, rotary, gains=gains)
    merged = MERGERS[method](w, GROUPING, context)
    assert merged.weights.k.shape[0] == 3
    assert merged.relative_error is not None and merged.relative_error < 1e-10
    assert error(w, merged.weights, spec, rotary, gains) < 1e-9
    single = MERGERS[method](w.map(lambda x: x.float()), GROUPING, context)
    back = single.weights.map(lambda x: x.double())
    assert single.weights.k.dtype == torch.float32
    assert error(w, back, spec, rotary, gains) < 1e-5
    assert error(w, MERGERS["mean"](w, GROUPING, context).weights, spec, rotary, gains) > 0.05


def test_full_width_norm_keeps_symmetric_copies() -> None:
    spec = AttentionSpec(key_symmetry="phases")
    w = symmetric_copies(random_weights(), spec, 8)
    gen = torch.Generator().manual_seed(3)
    per_plane = (torch.rand(6, 4, generator=gen, dtype=torch.float64) + 0.5).repeat(1, 2)
    k_gain, q_gain = per_plane.clone(), per_plane.flip(0).clone()
    for group in GROUPING:
        for i, h in enumerate(group[1:], 2):  # a copy whose amplitude sits in the gains
            k_gain[h], q_gain[h] = k_gain[group[0]] * i, q_gain[h] / i
    w = replace(w, kv_extras={"k_norm.weight": k_gain}, query_extras={"q_norm.weight": q_gain})
    for method in ("joint", "align"):
        merged = MERGERS[method](w, GROUPING, MergeContext(spec, 8))
        limit = 1e-9 if method == "joint" else 1.0  # align has no amplitudes
        assert error(w, merged.weights, spec, 8) < limit
        assert merged.weights.kv_extras["k_norm.weight"].shape == (3, 8)


def full_norm_weights(**sizes: int) -> AttentionWeights:
    """Heads behind full-width norms whose gains differ in every dim, some of them negative."""
    w = random_weights(**sizes)
    gen = torch.Generator().manual_seed(3)

    def gains(x: Tensor) -> Tensor:
        sign = torch.where(torch.rand(x.shape[:2], generator=gen) < 0.2, -1.0, 1.0)
        return (torch.rand(x.shape[:2], generator=gen, dtype=torch.float64) + 0.5) * sign

    return replace(w, kv_extras={"k_norm.weight": gains(w.k)}, query_extras={"q_norm.weight": gains(w.q)})


def turn_pairs(x: Tensor, scalar: Tensor) -> Tensor:
    """Rotary pairs (half-split, 8 dims) of `[heads, 8, …]` times complex scalars `[heads, 4]`."""
    turned = torch.complex(x[:, :4], x[:, 4:]) * scalar.view(*scalar.shape, *[1] * (x.dim() - 2))
    return torch.cat([turned.real, turned.imag], 1)


@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("method", ["joint", "align"])
def test_full_width_norm_keeps_identical_heads(method: str, queries: int) -> None:
    spec, w = AttentionSpec(key_symmetry="phases"), full_norm_weights(queries=queries)
    for group in GROUPING:
        for h in group[1:]:
            for x in (w.k, w.v, w.kv_extras["k_norm.weight"]):
                x[h] = x[group[0]]
    merged = MERGERS[method](w, GROUPING, MergeContext(spec, 8))
    assert merged.relative_error is not None and merged.relative_error < 1e-10
    assert error(w, merged.weights, spec, 8) < 1e-9


def test_full_width_norm_keeps_copies_whose_key_gains_differ_inside_a_pair() -> None:
    """Effective keys that are complex multiples of each other, each behind gains of its own.

    The norm reads the rows without their gains, so the members' statistics differ; their mean is a quadratic
    form of the shared key that two gains and a common turn represent. Queries turn along for nothing where
    their own two gains are equal.
    """
    spec, w = AttentionSpec(key_symmetry="phases"), full_norm_weights()
    gen = torch.Generator().manual_seed(4)
    k_gain, q_gain = w.kv_extras["k_norm.weight"], w.query_extras["q_norm.weight"]
    q_gain[:, 4:] = q_gain[:, :4]
    for first, *others in GROUPING:
        for h in others:
            size = torch.rand(1, 4, generator=gen, dtype=torch.float64) + 0.5
            angle = 6.28 * torch.rand(1, 4, generator=gen, dtype=torch.float64)
            effective = turn_pairs((k_gain[first, :, None] * w.k[first])[None], torch.polar(size, angle))[0]
            w.k[h], w.v[h] = effective / k_gain[h, :, None], w.v[first]
    merged = MERGERS["joint"](w, GROUPING, MergeContext(spec, 8))
    assert error(w, merged.weights, spec, 8) < 1e-9
    assert error(w, MERGERS["mean"](w, GROUPING, MergeContext(spec, 8)).weights, spec, 8) > 0.05


def test_full_width_norm_is_right_in_the_mean_where_no_turn_is_exact() -> None:
    spec, w = AttentionSpec(key_symmetry="phases"), full_norm_weights()
    merged = MERGERS["joint"](w, GROUPING, MergeContext(spec, 8)).weights
    for source, made, gains in ((w.q, merged.q, "q_norm"), (w.k, merged.k, "k_norm")):
        assert float(made.square().mean()) == pytest.approx(float(source.square().mean()), rel=1e-9), gains


@pytest.mark.parametrize("method", ["joint", "align", "mean", "first"])
def test_as_many_groups_as_heads_changes_no_bit(method: str) -> None:
    w = random_weights(biases="qkvo").map(lambda x: x.to(torch.bfloat16))
    merged = MERGERS[method](w, neighbours(6, 6), MergeContext(AttentionSpec(), 8)).weights
    for name in ("q", "k", "v", "o", "q_bias", "k_bias", "v_bias", "o_bias"):
        assert torch.equal(getattr(w, name), getattr(merged, name)), name


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_joint_is_best_in_the_output_of_random_heads(groups: int) -> None:
    spec = AttentionSpec()
    context = MergeContext(spec, 8)
    for seed in range(4):
        w = random_weights(seed=seed)
        merged = {m: MERGERS[m](w, neighbours(6, groups), context).weights for m in MERGERS}
        errors = {m: error(w, weights, spec, 8) for m, weights in merged.items()}
        assert min(errors, key=errors.__getitem__) == "joint", (seed, errors)


@pytest.mark.parametrize("position", ["half_split", "none"])
def test_merged_queries_are_the_best_for_the_merged_keys(position: str) -> None:
    """With the shared keys given, least squares over *any* linear map of the input gives the merged queries.

    The objective is the error of the logits, plane by plane (positions turn planes against each other and
    average over phases), between independent tokens. So a refit of the queries in this metric has nothing
    to do but to follow inputs that drift.
    """
    spec = AttentionSpec(position=position, key_symmetry="planes" if position == "half_split" else "linear")
    w, grouping = random_weights(), GROUPING
    merged = MERGERS["joint"](w, grouping, MergeContext(spec, 8 if position == "half_split" else 0)).weights
    order = query_order(grouping, 1)
    first, second, _ = rotary_pair_index(spec.position, 8 if position == "half_split" else 0, 8)
    for i, h in enumerate(order):
        q, k, made, shared = w.q[h], w.k[h], merged.q[i], merged.k[i // 2]  # [d, D]
        if first:
            q, k, made, shared = (torch.complex(x[first], x[second]) for x in (q, k, made, shared))
            for j in range(len(first)):  # conj(q'_j) k'_j onto conj(q_j) k_j, both [D, D]
                wanted = torch.outer(k[j], q[j].conj())
                best = torch.linalg.lstsq(shared[j][:, None], wanted).solution[0].conj()
                torch.testing.assert_close(made[j], best)
        else:
            best = torch.linalg.lstsq(shared.T, k.T @ q).solution
            torch.testing.assert_close(made, best, rtol=1e-3, atol=1e-4)


def polar(x: Tensor) -> Tensor:
    u, _, v = torch.linalg.svd(x)
    return u @ v


@pytest.mark.parametrize("group", [(0, 3), (1, 2, 4), (0, 1, 2, 3, 4, 5)])
def test_procrustes_rotations_reach_the_optimum(group: tuple[int, ...]) -> None:
    """No turn of one member helps any more, and patient turning of all at once gets no further."""
    w = random_weights()
    objective = merge_objective(w, MergeContext(AttentionSpec(), 8), "orthogonal").values
    gram = torch.einsum("hin,gjn->higj", w.v[list(group)], w.v[list(group)])
    turn = polar(gram[0].transpose(0, 1))
    for _ in range(3000):
        turn = polar(torch.einsum("gai,gihj->haj", turn, gram))
    mean = torch.einsum("hij,hjn->in", turn, w.v[list(group)]) / len(group)
    patient = float(w.v[list(group)].square().sum() - len(group) * mean.square().sum())
    assert objective.cost(group) <= patient * 1.01
    maps, cost = objective.solve(group)[1:]
    turned = torch.einsum("hji,hjn->hin", maps, w.v[list(group)])  # maps are the rotations, transposed
    assert float((turned - turned.mean(0)).square().sum()) == pytest.approx(float(cost), rel=1e-9)
    assert float(cost) == pytest.approx(objective.cost(group), rel=1e-12)
    torch.testing.assert_close(maps[0], torch.eye(8, dtype=torch.float64))
    others = turned.sum(0, keepdim=True) - turned
    slack = torch.linalg.svdvals(others @ turned.mT).sum(1) - torch.einsum("hin,hin->h", others, turned)
    assert float(slack.max()) < 1e-3 * float(turned.square().sum())


def test_values_are_the_best_of_that_rank() -> None:
    """Eckart-Young: no rank-d shared value is closer in the output metric."""
    w = random_weights()
    objective = merge_objective(w, MergeContext(AttentionSpec(), 8))
    group = (0, 2, 5)
    stacked = torch.cat([w.o[h] @ w.v[h] for h in group])
    best = torch.linalg.svdvals(stacked)[8:].square().sum()
    assert objective.values.cost(group) == pytest.approx(float(best), rel=1e-9)
    rows, maps, _ = objective.values.solve(group)
    made = torch.cat([objective.frame[h] @ maps[i] @ rows[:, :-1] for i, h in enumerate(group)])
    assert float((stacked - made).square().sum()) == pytest.approx(float(best), rel=1e-9)
    assert float(rows.norm()) == pytest.approx(
        float(w.v[list(group)].flatten(1).norm(dim=1).square().mean().sqrt())
    )


@pytest.mark.parametrize("part", ["q", "k", "v", "o", "everything"])
@pytest.mark.parametrize(
    "name", ["half_split", "every bias", "no positions", "orthogonal values", "per-head norm"]
)
def test_dead_heads_do_no_harm(part: str, name: str) -> None:
    spec, rotary, sizes = CASES[name]
    w = random_weights(**sizes)
    for p in "qkvo" if part == "everything" else part:
        getattr(w, p)[1:4] = 0
        if p != "o" and getattr(w, f"{p}_bias") is not None:
            getattr(w, f"{p}_bias")[1:4] = 0
    for method in ("joint", "align"):
        for groups in (1, 2, 3):
            merged = MERGERS[method](w, neighbours(6, groups), MergeContext(spec, rotary))
            tensors = [merged.weights.q, merged.weights.k, merged.weights.v, merged.weights.o]
            assert all(bool(x.isfinite().all()) for x in tensors)
            assert merged.relative_error is not None and merged.relative_error == merged.relative_error
    lossless = MERGERS["joint"](w, ((0, 1), (2, 4), (3, 5)), MergeContext(spec, rotary)).weights
    if part == "everything" and spec == AttentionSpec():
        assert error(w, lossless, spec, rotary) < 1e-9


@pytest.mark.parametrize("name", ["half_split", "every bias", "no positions", "orthogonal values"])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_singular_moments_do_no_harm(rank: int, name: str) -> None:
    """Text of a token or two fills no moment: copies still merge without loss, others without NaN."""
    spec, rotary, sizes = CASES[name]
    seen = torch.randn(rank, D + 1, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    seen[:, -1] = 1
    moment = seen.T @ seen / max(rank, 1)
    moment[-1, -1] = 1
    w = symmetric_copies(random_weights(**sizes), spec, rotary)
    context = MergeContext(spec, rotary, SecondMoments(moment, moment, None, rank))
    merged = MERGERS["joint"](w, GROUPING, context)
    assert merged.relative_error is not None and merged.relative_error < 1e-6
    if rank:
        assert error(w, merged.weights, spec, rotary) < 1e-6
    for method in ("joint", "align"):
        for groups in (1, 2, 3):
            other = MERGERS[method](random_weights(**sizes), neighbours(6, groups), context)
            tensors = [getattr(other.weights, part) for part in ("q", "k", "v", "o")]
            assert all(bool(x.isfinite().all()) for x in tensors)
            assert other.relative_error is not None and 0 <= other.relative_error <= 1.001


def test_constant_keys_stay_invisible() -> None:
    """Keys that do not depend on the input leave attention uniform, before and after."""
    spec, w = AttentionSpec(position="none", key_symmetry="linear"), random_weights(biases="qkvo")
    w.k[:] = 0
    for group in GROUPING:
        w.v[group[1]], w.v_bias[group[1]] = w.v[group[0]], w.v_bias[group[0]]
    for method in ("joint", "align"):
        merged = MERGERS[method](w, GROUPING, MergeContext(spec, 0)).weights
        assert error(w, merged, spec, 0) < 1e-9


def test_sinks_forbid_folding() -> None:
    """With attention sinks the weights do not sum to one, so a value's constant part is not constant."""
    spec = AttentionSpec()
    w = symmetric_copies(random_weights(biases="qkvo"), spec, 8)
    w = replace(w, query_extras={"sinks": torch.arange(6, dtype=torch.float64)[:, None]})
    merged = MERGERS["joint"](w, GROUPING, MergeContext(spec, 8)).weights
    assert torch.equal(merged.o_bias, w.o_bias)
    assert merged.query_extras["sinks"].flatten().tolist() == [float(i) for i in query_order(GROUPING, 1)]
    assert error(w, merged, spec, 8) < 1e-9


def test_constant_values_fold_into_the_output_bias() -> None:
    """Heads that differ by a constant share without loss where the output has a bias."""
    w = random_weights(biases="vo")
    for group in GROUPING:
        w.v[group[1]], w.o[group[1]] = w.v[group[0]], w.o[group[0]]
    w.q[:], w.k[:] = w.q[:1], w.k[:1]
    assert not torch.allclose(w.v_bias[0], w.v_bias[4])
    merged = MERGERS["joint"](w, GROUPING, MergeContext(AttentionSpec(), 8)).weights
    assert error(w, merged, AttentionSpec(), 8) < 1e-9


def test_unknown_positions_fall_back_to_the_mean_and_say_so() -> None:
    w = random_weights()
    merged = MERGERS["joint"](w, GROUPING, MergeContext(AttentionSpec(position="unknown"), 8))
    assert any("unknown" in note for note in merged.notes)
    assert torch.equal(
        merged.weights.k, MERGERS["mean"](w, GROUPING, MergeContext(AttentionSpec(), 8)).weights.k
    )


def test_unequal_gains_allow_sign_flips_only() -> None:
    spec = AttentionSpec(key_symmetry="plane_rotations")
    gains = (torch.rand(8) + 0.5, torch.ones(8))
    w = random_weights()
    for group in GROUPING:
        w.k[group[1]], w.q[group[1]] = -w.k[group[0]], -w.q[group[1]]
        w.v[group[1]] = w.v[group[0]]
    merged = MERGERS["joint"](w, GROUPING, MergeContext(spec, 8, gains=gains))
    assert error(w, merged.weights, spec, 8, gains) < 1e-9
    assert any("sign flips" in note for note in merged.notes)


def test_merged_heads_expand_to_the_same_function() -> None:
    w, spec = random_weights(queries=2, biases="qkvo"), AttentionSpec()
    merged = MERGERS["joint"](w, GROUPING, MergeContext(spec, 8)).weights
    assert error(expand(merged, 6), merged, spec, 8) < 1e-12


@pytest.mark.parametrize("name", CASES)
def test_pair_costs_equal_group_costs_of_two(name: str) -> None:
    spec, rotary, sizes = CASES[name]
    objective = merge_objective(random_weights(**sizes), MergeContext(spec, rotary))
    pairs, light = objective.pairs(), objective.costs_only().pairs()
    assert objective.costs_only().cost((0, 3, 4)) == objective.cost((0, 3, 4))
    for a in range(6):
        for b in range(a):
            assert float(light[a, b]) == float(pairs[a, b])
            assert float(pairs[a, b]) == pytest.approx(objective.cost((a, b)), rel=1e-6, abs=1e-9)


def test_merged_linear_keys_are_as_trainable_as_their_members() -> None:
    """No direction is left to the queries or the keys alone: steps of one size suit both, and every dim."""
    w = random_weights(biases="qk")
    spectrum = torch.logspace(0, -4, 8, dtype=torch.float64)
    w = replace(w, q=w.q * spectrum[:, None], k=w.k * spectrum.flip(0)[:, None], k_bias=w.k_bias * 50)
    spec = AttentionSpec(position="none", key_symmetry="linear")
    merged = MERGERS["joint"](w, neighbours(6, 2), MergeContext(spec, 0)).weights
    for x in (merged.q, merged.k):
        by_dim = x.square().mean((0, 2)).sqrt()
        assert by_dim.max() / by_dim.min() < 30, by_dim  # was 1e8
    ratio = merged.k.square().sum() / 2 / (w.k.square().sum() / 6)
    assert float(ratio) == pytest.approx(1, abs=0.1)
    assert float(merged.k_bias.abs().max()) < 1e-9  # a constant key is invisible, but costs precision
    copies = expand(merged, 6)
    again = MERGERS["joint"](copies, neighbours(6, 2), MergeContext(spec, 0)).weights
    x = torch.randn(T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        attention(expand(again, 6), x, spec, 0), attention(copies, x, spec, 0), rtol=1e-9, atol=1e-9
    )


def test_shared_values_keep_strong_and_weak_directions_apart_with_the_energy_on_their_side() -> None:
    """Rows of v are orthogonal, columns of o over all heads too and equally strong; v is as strong as its members."""
    for spec in (AttentionSpec(), AttentionSpec(position="none", key_symmetry="linear")):
        w = random_weights()
        merged = MERGERS["joint"](w, neighbours(6, 1), MergeContext(spec, 8)).weights
        inner, outer = merged.v[0] @ merged.v[0].T, torch.einsum("hde,hdf->ef", merged.o, merged.o)
        for gram in (inner, outer):
            assert float((gram - gram.diagonal().diag()).abs().max()) < 1e-9 * float(gram.abs().max())
        torch.testing.assert_close(outer.diagonal(), outer.diagonal().mean().expand(8), rtol=1e-9, atol=0)
        assert float(merged.v.square().sum()) == pytest.approx(float(w.v.square().sum() / 6), rel=1e-9)
