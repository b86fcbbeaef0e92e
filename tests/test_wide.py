"""Wide heads: the optimum of several channels, the exact cases, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_merging import D, T, random_weights
from torch import Tensor

from mha2gqa.architectures import AttentionSpec
from mha2gqa.calibration import SecondMoments
from mha2gqa.heads import AttentionWeights, neighbours, rotary_pair_index, wide_dims, widen
from mha2gqa.merging import MERGERS, MergeContext
from mha2gqa.merging.rotary import RotaryObjective
from mha2gqa.merging.subspace import LinearObjective

STYLES = [("half_split", 8), ("interleaved", 8), ("half_split", 4), ("interleaved", 4)]


def attention(w: AttentionWeights, x: Tensor, position: str, rotary: int, wide: int = 1) -> Tensor:
    """Causal attention written out; pair i of a head that is `wide` times as wide turns like pair i mod P."""

    def project(weight: Tensor, bias: Tensor | None) -> Tensor:
        out = torch.einsum("hrd,td->htr", weight, x)
        return out if bias is None else out + bias[:, None]

    def rotate(states: Tensor) -> Tensor:
        first, second, _ = rotary_pair_index(position, wide * rotary, states.shape[-1])
        turns = 0.7 ** (torch.arange(len(first)) % (rotary // 2)).double()
        angle = torch.arange(len(x), dtype=x.dtype)[:, None] * turns
        turned = torch.complex(states[..., first], states[..., second]) * torch.polar(
            torch.ones_like(angle), angle
        )
        out = states.clone()
        out[..., first], out[..., second] = turned.real, turned.imag
        return out

    q, k, v = project(w.q, w.q_bias), project(w.k, w.k_bias), project(w.v, w.v_bias)
    q, k = rotate(q), rotate(k)
    repeat = len(q) // len(k)
    k, v = k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0)
    scores = q @ k.mT / q.shape[-1] ** 0.5
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf"))
    out = torch.einsum("hte,hde->td", scores.softmax(-1) @ v, w.o)
    return out if w.o_bias is None else out + w.o_bias


def moments() -> SecondMoments:
    """Of some random input; moments of the attention-averaged input differ."""
    gen = torch.Generator().manual_seed(4)

    def second() -> Tensor:
        x = (
            torch.randn(400, D, generator=gen, dtype=torch.float64)
            @ torch.randn(D, D, generator=gen).double()
        )
        x = torch.cat([x + 0.5, x.new_ones(400, 1)], 1)
        return x.T @ x / 400

    return SecondMoments(second(), second(), None, 400)


def context(position: str, rotary: int, wide: int, text: bool = True) -> MergeContext:
    spec = AttentionSpec(position=position)  # type: ignore[arg-type]
    return MergeContext(spec, rotary, moments() if text else None, channels=wide, query_scale=wide**0.5)


@pytest.mark.parametrize(("position", "rotary"), STYLES)
@pytest.mark.parametrize("biases", ["", "qkvo"])
@pytest.mark.parametrize("queries", [1, 2])
def test_as_many_channels_as_members_lose_nothing(
    position: str, rotary: int, biases: str, queries: int
) -> None:
    weights, x = random_weights(6, queries, biases=biases), torch.randn(T, D, dtype=torch.float64)
    for grouping, wide in ((((0, 4), (1, 3), (2, 5)), 2), (((0, 4, 2), (1, 3, 5)), 3)):
        merged = MERGERS["joint"](weights, grouping, context(position, rotary, wide))
        new = merged.weights
        assert (new.k.shape[:2], new.v.shape[:2]) == ((len(grouping), 8 * wide), (len(grouping), 8 * wide))
        assert merged.relative_error == pytest.approx(0.0, abs=1e-10)
        same = attention(new, x, position, rotary, wide)
        torch.testing.assert_close(same, attention(weights, x, position, rotary), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("position", "rotary"), STYLES)
@pytest.mark.parametrize("wide", [2, 3, 6])
def test_heads_placed_as_channels_compute_the_same(position: str, rotary: int, wide: int) -> None:
    weights, x = random_weights(6, 2, biases="qkvo"), torch.randn(T, D, dtype=torch.float64)
    new = widen(weights, wide, position, rotary, wide**0.5)
    assert new.k.shape == (6 // wide, 8 * wide, D) and new.o.shape == (12, D, 8 * wide)
    before, after = attention(weights, x, position, rotary), attention(new, x, position, rotary, wide)
    torch.testing.assert_close(after, before, rtol=0, atol=1e-12)


def test_dims_of_channels_fill_the_wide_head_once() -> None:
    for position, rotary in STYLES:
        every = [wide_dims([dim], position, rotary, 8, 3) for dim in range(8)]
        assert sorted(i for places in every for i in places) == list(range(24))
    assert wide_dims([0, 4, 2], "half_split", 8, 8, 1) == [0, 4, 2]
    # channel s of pair j: real part at 4 s + j, imaginary part at 8 + 4 s + j
    assert wide_dims([1], "half_split", 8, 8, 2) == [1, 5]
    assert wide_dims([5], "half_split", 8, 8, 2) == [9, 13]


def lost(stacked: Tensor, moment: Tensor, rank: int) -> float:
    """Energy that the best `rank` functionals leave of `[rows, n]` under a moment, by a singular value decomposition."""
    root = torch.linalg.cholesky(moment).to(stacked.dtype)
    return float(torch.linalg.svdvals(stacked @ root)[rank:].square().sum())


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_rotary_channels_are_the_best_of_their_number(channels: int) -> None:
    gen = torch.Generator().manual_seed(1)
    planes = torch.randn(5, 3, D, generator=gen, dtype=torch.complex128)
    weights = torch.rand(5, 3, generator=gen, dtype=torch.float64)
    moment = moments().inputs[:-1, :-1]
    objective, group = RotaryObjective(planes, weights, moment, channels), (0, 1, 3, 4)
    members = list(group)
    best = sum(
        lost(weights[members, j].sqrt()[:, None] * planes[members, j], moment, channels) for j in range(3)
    )
    assert objective.cost(group) == pytest.approx(best / 2, rel=1e-9)
    solved = objective.solve(group)
    # what a member's query meets: map(q) · shared = Re(conj(q) Σ c_s κ_s), against its own Re(conj(q) κ)
    shared = torch.complex(*solved.rows.chunk(2)).unflatten(0, (channels, 3))
    left = 0.0
    for i, h in enumerate(members):
        turn = torch.complex(*solved.maps[i].chunk(2)[0].chunk(2, 1)).unflatten(0, (channels, 3))
        scalars = turn.diagonal(dim1=1, dim2=2)  # [S, P]
        error = planes[h] - (scalars[:, :, None] * shared).sum(0)
        left += float(
            sum(weights[h, j] * (error[j].conj() @ moment.to(error.dtype) @ error[j]).real for j in range(3))
        )
    assert left / 2 == pytest.approx(best / 2, rel=1e-6, abs=1e-9)
    assert float(solved.cost) == pytest.approx(best / 2, rel=1e-9)


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("keys", [False, True])
def test_linear_channels_are_the_best_of_their_number(channels: int, keys: bool) -> None:
    gen = torch.Generator().manual_seed(2)
    rows = torch.randn(5, 4, D, generator=gen, dtype=torch.float64)
    left = torch.randn(5, 4, 4, generator=gen, dtype=torch.float64)
    left = left @ left.mT + torch.eye(4) if keys else left
    moment, group = moments().inputs[:-1, :-1], (0, 2, 3, 4)
    undo = torch.linalg.inv(left) if keys else None
    objective, members = LinearObjective(left, rows, moment, undo, channels), list(group)
    best = lost((left @ rows)[members].flatten(0, 1), moment, 4 * channels)
    assert objective.cost(group) == pytest.approx(best, rel=1e-9)
    solved = objective.solve(group)
    # values are read through left @ …: the map takes their place; keys through the queries, which map @ q moves
    read = left[members] @ solved.maps.mT if keys else solved.maps
    error = (left @ rows)[members] - read @ solved.rows
    assert float(((error @ moment) * error).sum()) == pytest.approx(best, rel=1e-5)


def test_channels_are_as_strong_as_the_members_are() -> None:
    weights = random_weights(8)
    for wide in (1, 2, 4):
        new = MERGERS["joint"](weights, neighbours(8, 4 // wide), context("half_split", 8, wide)).weights
        for made, source in ((new.k, weights.k), (new.v, weights.v)):
            assert float(made.square().mean() / source.square().mean()) == pytest.approx(1.0, rel=0.3)


@pytest.mark.parametrize("text", [True, False])
def test_wider_heads_at_the_same_cache_lose_less(text: bool) -> None:
    weights = random_weights(8, biases="kv")
    errors = [
        MERGERS["joint"](
            weights, neighbours(8, 4 // wide), context("half_split", 8, wide, text)
        ).relative_error
        for wide in (1, 2, 4)
    ]
    assert errors[0] > errors[1] > errors[2] > 0  # type: ignore[operator]


def test_a_dead_head_makes_no_nan() -> None:
    weights = random_weights(6)
    weights = replace(weights, q=weights.q * (torch.arange(6) != 2)[:, None, None])
    for wide in (1, 2):
        new = MERGERS["joint"](weights, neighbours(6, 2), context("half_split", 8, wide)).weights
        assert all(bool(x.isfinite().all()) for x in (new.q, new.k, new.v, new.o))
