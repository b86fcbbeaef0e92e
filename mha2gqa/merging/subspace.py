"""The cost of sharing heads and the best shared head, for each symmetry an architecture has.

Every problem is about K source heads that are linear functions of the input x̂ = [x; 1] (`rows_h @ x̂`) and
a second-moment matrix of x̂. All work happens on Gram matrices between heads, so that any group's
optimum and cost follow from a small eigenproblem, without an inverse of a moment.

Letters: K heads, m heads of one group, R dims of a head, n = D + 1 inputs, P rotary pairs, S channels (how many times
as wide as its members a shared head is; 1 but for wide heads). Real, float64.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

Group = Sequence[int]
# Computes a figure of every item, in their order.
Each = Callable[[Callable[[Any], float], Sequence[Any]], Sequence[float]]
SWEEPS = 30  # of Procrustes rotations, at most
SMALL = 256  # up to this width a processor solves eigenproblems faster than a GPU
SETTLED = 1e-5  # a sweep that gains less of the heads' energy is the last


def one_by_one(call: Callable[[Any], Any], items: Sequence[Any]) -> Sequence[Any]:
    """What `call` says of every item, computed here and now."""
    return [call(item) for item in items]


class Shared(NamedTuple):
    """The best shared head of a group.

    Args:
        rows: `[S R, n]`; S = 1, more for wide heads.
        maps: One per member: `[m, S R, R]` for keys, where they act on query rows (`map @ q`), and
            `[m, R, S R]` for values, where they act on output columns (`frame @ map`).
        cost: `[]`, energy that it cannot express.
    """

    rows: Tensor
    maps: Tensor
    cost: Tensor


class SubspaceObjective(Protocol):
    """One projection's sharing problem."""

    @property
    def energy(self) -> float:
        """Total energy of all heads: what a cost is a part of."""

    def pairs(self, each: Each = one_by_one) -> Tensor:
        """`[K, K]` cost of each pair sharing one head; zero diagonal.

        Args:
            each: Who computes the costs where every pair is a problem of its own.
        """

    def cost(self, group: Group) -> float:
        """Energy that one shared head cannot express for `group`."""

    def solve(self, group: Group) -> Shared:
        """The shared head, the way to it of each member, and its cost."""


def costs_only(objective: SubspaceObjective) -> SubspaceObjective:
    """A copy that can only tell costs: its Grams on the processor, which solves many small ones fastest."""
    light = copy.copy(objective)
    for name, x in vars(objective).items():
        if isinstance(x, Tensor):
            kept = name in ("gram", "weights", "rotatable")
            object.__setattr__(light, name, x.cpu() if kept else x.new_empty(0))
    return light


def select(gram: Tensor, group: Group) -> Tensor:
    """Rows and columns of `group` in the last two axes of a Gram `[…, K, K]`."""
    index = torch.as_tensor(list(group), device=gram.device)
    return gram[..., index, :][..., :, index]


def _block(gram: Tensor, group: Group) -> Tensor:
    """`[K, R, K, R]` Gram of heads -> the group's `[m R, m R]` matrix."""
    index = torch.as_tensor(list(group), device=gram.device)
    size = len(index) * gram.shape[1]
    return gram[index[:, None], :, index].transpose(1, 2).reshape(size, size)  # [m, m, R, R] -> [m, R, m, R]


def _head_gram(rows: Tensor, moment: Tensor) -> Tensor:
    """`[K, R, n]` under `[n, n]` -> `[K, R, K, R]`."""
    flat = rows.flatten(0, 1)
    gram = flat @ moment @ flat.T
    return ((gram + gram.T) / 2).view(*rows.shape[:2], *rows.shape[:2])


def _weights_norm(rows: Tensor) -> Tensor:
    """Root mean square over heads of the Frobenius norm of `[m, R, n]`."""
    return rows.flatten(1).square().sum(1).mean().sqrt()


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Quotient, 1 where the denominator is zero: a dead head stays dead instead of becoming NaN."""
    safe = denominator > 0
    return torch.where(safe, numerator / torch.where(safe, denominator, 1.0), 1.0)


@dataclass(frozen=True)
class LinearObjective:
    """Heads related by any invertible map: values, and keys that are not rotated.

    The error of head h is measured after `left_h`: E|left_h (rows_h x̂ - map_h shared x̂)|². Stacking
    all members gives a problem of rank S R whose optimum is spanned by the top S R eigenvectors.

    Args:
        left: `[K, R, R]`, T_h of a thin QR of the output blocks, or a square root of E[q qᵀ].
        rows: `[K, R, n]`.
        moment: `[n, n]`.
        undo: `[K, R, R]` or None. Keys need the inverse of `left` to hand the map to the queries
            (`map = Uᵀ undo`); values hand U itself to the frame Q_h of the QR.
        channels: S.
    """

    left: Tensor
    rows: Tensor
    moment: Tensor
    undo: Tensor | None = None
    channels: int = 1
    gram: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "gram", _head_gram(self.left @ self.rows, self.moment))

    @property
    def energy(self) -> float:
        return float(torch.einsum("hrhr->", self.gram))

    def pairs(self, each: Each = one_by_one) -> Tensor:
        heads, width = self.gram.shape[:2]
        pairs = [(h, g) for h in range(heads) for g in range(h + 1, heads)]

        def lost(pair: Group) -> float:
            return float(torch.linalg.eigvalsh(_block(self.gram, pair))[:width].clamp_min(0).sum())

        first, second = torch.triu_indices(heads, heads, 1)
        out = self.gram.new_zeros(heads, heads)
        out[first, second] = torch.tensor(each(lost, pairs), dtype=out.dtype, device=out.device)
        return out + out.T

    def cost(self, group: Group) -> float:
        spectrum = torch.linalg.eigvalsh(_block(self.gram, group))
        return float(spectrum[: -self.gram.shape[1] * self.channels].clamp_min(0).sum())

    def solve(self, group: Group) -> Shared:
        width = self.gram.shape[1]
        wide = width * self.channels
        members = list(group)
        spectrum, vectors = spectra(_block(self.gram, group))
        energy, cost = spectrum[-wide:].clamp_min(0), spectrum[:-wide].clamp_min(0).sum()
        top = vectors[:, -wide:].reshape(len(members), width, wide)  # U_h
        shared = torch.einsum("hij,hin->jn", top, self.left[members] @ self.rows[members])
        rows = self.rows[members]
        # An optimiser that continues from here is not invariant to basis and scale. Values are fitted best
        # where strong and weak directions stay apart, energy on their side, and as strong as members were.
        if self.undo is None:
            scale = ratio(_weights_norm(rows) * math.sqrt(self.channels), shared.norm())
            return Shared(shared * scale, top / scale, cost)
        # Keys: each direction's energy is spread evenly (as a logarithm) over both sides. Unbalanced, some
        # keys would be 1e-5 and queries 1e5 strong. All is turned to where the first member (of S: the first S)
        # had it.
        spread = ratio(torch.ones_like(energy), (energy + 1e-8 * energy.mean()).pow(0.25))
        member = ((rows @ self.moment) * rows).sum() / len(members)
        spread = spread * ratio(self.channels * member, (spread.square() * energy).sum()).sqrt()
        shared, top = shared * spread[:, None], top / spread
        turn = _polar(rows[: self.channels].flatten(0, 1) @ shared.mT)
        return Shared(turn @ shared, (top @ turn.mT).mT @ self.undo[members], cost)


@dataclass(frozen=True)
class OrthogonalObjective:
    """Values behind a norm, or the Procrustes baseline: orthogonal maps, then a mean with its norm put back.

    Args:
        rows: `[K, R, n]`.
        moment: `[n, n]`.
        weights: `[K]`, how much each head counts.
    """

    rows: Tensor
    moment: Tensor
    weights: Tensor
    gram: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "gram", _head_gram(self.rows, self.moment))

    @property
    def energy(self) -> float:
        return float(torch.einsum("h,hrhr->", self.weights, self.gram))

    def _weights(self, group: Group) -> Tensor:
        weights = self.weights[list(group)]
        return weights / weights.sum() if weights.sum() > 0 else torch.full_like(weights, 1 / len(weights))

    def _rotations(self, group: Group) -> tuple[Tensor, Tensor, Tensor]:
        """Rotations `[m, R, R]` towards the mean, the members' mean energy and the mean's energy.

        Members are turned one after the other, each towards the mean of all others as they are by then:
        a fifth of the polar problems that turning all at once takes. A processor solves those fastest.
        """
        members = torch.as_tensor(list(group), device=self.gram.device)
        gram = self.gram[members][:, :, members].cpu()  # [m, R, m, R] = E[v_h v_gᵀ]
        weights = self._weights(group).cpu()
        own = weights @ torch.einsum("hihi->h", gram)
        turn = _polar(gram[0].transpose(0, 1))  # everyone towards the first member
        cross = torch.einsum("g,gai,gihj->haj", weights, turn, gram)  # [m, R, R], E[mean v_hᵀ]
        mean = torch.einsum("h,hij,hij->", weights, turn, cross)
        for _ in range(SWEEPS):
            for h, weight in enumerate(weights):
                new = _polar(cross[h] - weight * turn[h] @ gram[h, :, h])
                cross += weight * torch.einsum("ai,ihj->haj", new - turn[h], gram[h])
                turn[h] = new
            last, mean = mean, torch.einsum("h,hij,hij->", weights, turn, cross)
            if mean - last <= SETTLED * own:
                break
        turn = turn[0].T @ turn  # the first member stays as it is
        return turn.to(self.gram.device), own, mean

    def pairs(self, each: Each = one_by_one) -> Tensor:
        heads = self.gram.shape[0]
        own = torch.einsum("hihi->h", self.gram)
        a, b = torch.triu_indices(heads, heads, 1, device=own.device)
        nuclear = own.new_zeros(heads, heads)  # the best E[v_h · R v_g]
        nuclear[a, b] = torch.linalg.svdvals(self.gram.transpose(1, 2)[a, b]).sum(1)
        nuclear = nuclear + nuclear.T
        a, b = self.weights[:, None], self.weights[None, :]
        total = (a + b).clamp_min(1e-300)
        return (a * b / total * (own[:, None] + own[None, :] - 2 * nuclear)).clamp_min(0).fill_diagonal_(0)

    def cost(self, group: Group) -> float:
        _, own, mean = self._rotations(group)
        return float((own - mean).clamp_min(0) * self.weights[list(group)].sum())

    def solve(self, group: Group) -> Shared:
        turn, own, mean = self._rotations(group)
        shared = torch.einsum("h,hij,hjn->in", self._weights(group), turn, self.rows[list(group)])
        scale = ratio(own.sqrt(), mean.clamp_min(0).sqrt()).to(shared.device)
        cost = (own - mean).clamp_min(0).to(shared.device) * self.weights[list(group)].sum()
        return Shared(shared * scale, turn.mT, cost)


@dataclass(frozen=True)
class MeanObjective:
    """No symmetry at all: the plain mean.

    Args:
        rows: `[K, R, n]`.
        moment: `[n, n]`.
    """

    rows: Tensor
    moment: Tensor
    gram: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        overlap = (self.rows @ self.moment).flatten(1) @ self.rows.flatten(1).T
        object.__setattr__(self, "gram", (overlap + overlap.T) / 2)

    @property
    def energy(self) -> float:
        return float(self.gram.trace())

    def pairs(self, each: Each = one_by_one) -> Tensor:
        own = self.gram.diagonal()
        return ((own[:, None] + own[None, :]) / 2 - self.gram).clamp_min(0).fill_diagonal_(0)

    def _cost(self, group: Group) -> Tensor:
        gram = select(self.gram, group)
        return (gram.trace() - gram.mean() * len(gram)).clamp_min(0)

    def cost(self, group: Group) -> float:
        return float(self._cost(group))

    def solve(self, group: Group) -> Shared:
        rows = self.rows[list(group)]
        eye = torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
        return Shared(rows.mean(0), eye.repeat(len(rows), 1, 1), self._cost(group))


def _home(x: Tensor) -> Tensor:
    """`x` where matrices of its width are decomposed fastest: GPU solvers take milliseconds for any size."""
    return x.cpu() if x.shape[-1] <= SMALL else x


def spectra(x: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, ascending, and eigenvectors of Hermitian `[…, R, R]`, on its device."""
    values, vectors = torch.linalg.eigh(_home(x))
    return values.to(x.device), vectors.to(x.device)


def _polar(x: Tensor) -> Tensor:
    """The orthogonal matrices nearest to `[…, R, R]`."""
    u, _, v = torch.linalg.svd(_home(x))
    return (u @ v).to(x.device)
