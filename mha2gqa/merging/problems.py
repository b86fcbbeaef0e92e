"""What it costs heads to share, and the best shared head, for each freedom an architecture grants.

Every problem is about K source heads that are linear functions of the input x̂ = [x; 1] (`rows_h @ x̂`) and
a second-moment matrix of x̂. All work happens on Gram matrices between heads, so that any group's
optimum and cost follow from a small eigenproblem, without an inverse of a moment.

Letters: K heads, m heads of one group, R dims of a head, n = D + 1 inputs, P planes. Real, float64.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

Group = Sequence[int]


class Problem(Protocol):
    """One projection's sharing problem."""

    @property
    def energy(self) -> float:
        """Total energy of all heads: what a cost is a part of."""

    def pairs(self) -> Tensor:
        """`[K, K]` cost of each pair sharing one head; zero diagonal."""

    def cost(self, group: Group) -> float:
        """Energy that one shared head cannot express for `group`."""

    def solve(self, group: Group) -> tuple[Tensor, Tensor]:
        """The shared head `[R, n]` and, per member, its map `[m, R, R]`.

        Maps act on query rows (`map @ q`) for keys, and on output columns (`frame @ map`) for values.
        """


def costs_only(problem: Problem) -> Problem:
    """A copy that can only tell costs: its Grams on the processor, which solves many small ones fastest."""
    light = copy.copy(problem)
    for name, x in vars(problem).items():
        if isinstance(x, Tensor):
            kept = name in ("gram", "weights", "rotatable")
            object.__setattr__(light, name, x.cpu() if kept else x.new_empty(0))
    return light


def _select(gram: Tensor, group: Group) -> Tensor:
    """Rows and columns of `group` in the last two axes of a Gram `[…, K, K]`."""
    index = torch.as_tensor(list(group), device=gram.device)
    return gram[..., index, :][..., :, index]


def _block(gram: Tensor, group: Group) -> Tensor:
    """`[K, R, K, R]` Gram of heads -> the group's `[m R, m R]` matrix."""
    index = torch.as_tensor(list(group), device=gram.device)
    size = len(index) * gram.shape[1]
    return gram[index][:, :, index].reshape(size, size)


def _head_gram(rows: Tensor, moment: Tensor) -> Tensor:
    """`[K, R, n]` under `[n, n]` -> `[K, R, K, R]`."""
    flat = rows.flatten(0, 1)
    gram = flat @ moment @ flat.T
    return ((gram + gram.T) / 2).view(*rows.shape[:2], *rows.shape[:2])


def _weights_norm(rows: Tensor) -> Tensor:
    """Root mean square over heads of the Frobenius norm of `[m, R, n]`."""
    return rows.flatten(1).square().sum(1).mean().sqrt()


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Quotient, 1 where the denominator is zero: a dead head stays dead instead of becoming NaN."""
    safe = denominator > 0
    return torch.where(safe, numerator / torch.where(safe, denominator, 1.0), 1.0)


@dataclass(frozen=True)
class LinearProblem:
    """Heads related by any invertible map: values, and keys that are not rotated.

    The error of head h is measured after `left_h`: E|left_h (rows_h x̂ - map_h shared x̂)|². Stacking
    all members gives a rank-R problem whose optimum is spanned by the top R eigenvectors.

    Args:
        left: `[K, R, R]`, T_h of a thin QR of the output blocks, or a square root of E[q qᵀ].
        rows: `[K, R, n]`.
        moment: `[n, n]`.
        undo: `[K, R, R]` or None. Keys need the inverse of `left` to hand the map to the queries
            (`map = Uᵀ undo`); values hand U itself to the frame Q_h of the QR.
    """

    left: Tensor
    rows: Tensor
    moment: Tensor
    undo: Tensor | None = None
    gram: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "gram", _head_gram(self.left @ self.rows, self.moment))

    @property
    def energy(self) -> float:
        return float(torch.einsum("hrhr->", self.gram))

    def pairs(self) -> Tensor:
        heads, width = self.gram.shape[:2]
        out = self.gram.new_zeros(heads, heads)
        for h in range(heads - 1):
            others = torch.arange(h + 1, heads, device=out.device)
            stack = torch.stack([_block(self.gram, (h, int(g))) for g in others])
            out[h, h + 1 :] = torch.linalg.eigvalsh(stack)[:, :width].clamp_min(0).sum(1)
        return out + out.T

    def cost(self, group: Group) -> float:
        spectrum = torch.linalg.eigvalsh(_block(self.gram, group))
        return float(spectrum[: -self.gram.shape[1]].clamp_min(0).sum())

    def solve(self, group: Group) -> tuple[Tensor, Tensor]:
        width = self.gram.shape[1]
        members = list(group)
        spectrum, vectors = torch.linalg.eigh(_block(self.gram, group))
        energy = spectrum[-width:].clamp_min(0)
        top = vectors[:, -width:].reshape(len(members), width, width)  # U_h
        shared = torch.einsum("hij,hin->jn", top, self.left[members] @ self.rows[members])
        # An optimiser that continues from here is not invariant to the basis. Each direction's energy is
        # spread evenly (as a logarithm) over both sides, the whole is as strong as a member was, and all is
        # turned to where the first member had it. Unbalanced, some keys would be 1e-5 and queries 1e5 strong.
        spread = _ratio(torch.ones_like(energy), (energy + 1e-8 * energy.mean()).pow(0.25))
        rows = self.rows[members]
        member = ((rows @ self.moment) * rows).sum() / len(members)
        spread = spread * _ratio(member, (spread.square() * energy).sum()).sqrt()
        shared, top = shared * spread[:, None], top / spread
        turn = _polar(rows[0] @ shared.mT)
        shared, top = turn @ shared, top @ turn.mT
        return shared, top if self.undo is None else top.mT @ self.undo[members]


@dataclass(frozen=True)
class PlaneProblem:
    """Rotary keys: one complex scalar per head and plane, moved into the queries.

    Minimises Σ_h ω_h E|κ_h x̂ - c_h κ̄ x̂|² in each plane: the top eigenvector of an m x m Gram.

    Args:
        planes: complex `[K, P, n]`, the functionals κ.
        weights: `[K, P]`, query energy ω.
        moment: `[n, n]`.
    """

    planes: Tensor
    weights: Tensor
    moment: Tensor
    gram: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "gram", _plane_gram(self.planes, self.weights, self.moment))

    @property
    def energy(self) -> float:
        # A plane's logit is Re(conj(q) k): half of |q|² |k|² on average over phases.
        return float(torch.einsum("phh->", self.gram).real) / 2

    def pairs(self) -> Tensor:
        diagonal = torch.diagonal(self.gram, dim1=1, dim2=2).real
        mean = (diagonal[:, :, None] + diagonal[:, None, :]) / 2
        spread = (diagonal[:, :, None] - diagonal[:, None, :]) / 2
        low = mean - (spread.square() + self.gram.abs().square()).sqrt()
        return low.clamp_min(0).sum(0).fill_diagonal_(0) / 2

    def cost(self, group: Group) -> float:
        spectrum = torch.linalg.eigvalsh(_select(self.gram, group))
        return float(spectrum[:, :-1].clamp_min(0).sum()) / 2

    def solve(self, group: Group) -> tuple[Tensor, Tensor]:
        members = list(group)
        planes, root = self.planes[members], self.weights[members].sqrt()  # [m, P, n], [m, P]
        top = torch.linalg.eigh(_select(self.gram, group)).eigenvectors[:, :, -1].T  # [m, P]
        # An eigenvector's phase is arbitrary; fixing it keeps results equal across machines.
        first = top.gather(0, top.abs().argmax(0, keepdim=True))
        top = top * (first.conj() / first.abs())
        shared = torch.einsum("hp,hpn->pn", top.conj() * root, planes)
        turn = top * torch.where(root > 0, 1 / root.clamp_min(torch.finfo(root.dtype).tiny), 0.0)
        norm = planes.abs().square().sum(2).mean(0).sqrt()
        scale = _ratio(norm, shared.abs().square().sum(1).sqrt())  # balance, plane by plane
        return _stack_planes(shared * scale[:, None]), turn_matrices(turn / scale)


@dataclass(frozen=True)
class UnitPlaneProblem:
    """Keys behind a norm: only unit scalars per plane; sign flips where even a rotation is too much.

    Args:
        planes: complex `[K, P, n]`; a dim that has no partner is a plane with zero imaginary part.
        weights: `[K, P]`.
        moment: `[n, n]`.
        rotatable: `[P]` bool; False allows c = +1 or -1 only.
        single: The planes are single dims (rotatable must be all False).
    """

    planes: Tensor
    weights: Tensor
    moment: Tensor
    rotatable: Tensor
    single: bool = False
    gram: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "gram", _plane_gram(self.planes, self.weights, self.moment))

    @property
    def energy(self) -> float:
        return float(torch.einsum("phh->", self.gram).real) / 2

    def pairs(self) -> Tensor:
        diagonal = torch.diagonal(self.gram, dim1=1, dim2=2).real  # ω_h |κ_h|²
        root = self.weights.T.sqrt()
        a, b = root[:, :, None], root[:, None, :]
        overlap = torch.where(self.rotatable[:, None, None], self.gram.abs(), self.gram.real.abs())
        total = a * a + b * b
        norm = a * a * diagonal[:, :, None] + b * b * diagonal[:, None, :] + 2 * a * b * overlap
        kept = torch.where(total > 0, norm / torch.where(total > 0, total, 1.0), 0.0)
        cost = (diagonal[:, :, None] + diagonal[:, None, :] - kept).clamp_min(0)
        return cost.sum(0).fill_diagonal_(0) / 2

    def _phases(self, group: Group) -> tuple[Tensor, Tensor]:
        """Unit scalars `[P, m]` and the weighted Gram `[P, m, m]` of √ω·√ω they align."""
        root = self.weights[list(group)].T.sqrt()  # [P, m]
        gram = _select(self.gram, group) * root[:, :, None] * root[:, None, :]
        gram = torch.where(self.rotatable[:, None, None], gram, gram.real.to(gram.dtype))
        turn = _unit(torch.linalg.eigh(gram).eigenvectors[:, :, -1], self.rotatable)
        for _ in range(50):
            last, turn = turn, _unit((gram @ turn[:, :, None])[:, :, 0], self.rotatable)
            if torch.allclose(last, turn, rtol=0, atol=1e-12):
                break
        return turn * _unit(turn[:, :1], self.rotatable).conj(), gram  # the first member stays as it is

    def cost(self, group: Group) -> float:
        turn, gram = self._phases(group)
        total = self.weights[list(group)].sum(0)
        kept = torch.einsum("ph,phg,pg->p", turn.conj(), gram, turn).real / total.clamp_min(1e-300)
        own = torch.diagonal(_select(self.gram, group), dim1=1, dim2=2).real.sum(1)
        return float((own - kept).clamp_min(0).sum()) / 2

    def solve(self, group: Group) -> tuple[Tensor, Tensor]:
        members = list(group)
        turn = self._phases(group)[0].T  # [m, P]
        weights = self.weights[members]
        share = torch.where(weights.sum(0) > 0, weights, 1.0)
        share = share / share.sum(0)
        shared = torch.einsum("hp,hpn->pn", turn.conj() * share, self.planes[members])
        own = _energy(self.planes[members], self.moment)
        scale = _ratio((share * own).sum(0).sqrt(), _energy(shared, self.moment).sqrt())
        shared = shared * scale[:, None]  # averaging shrinks; the norm is put back
        if self.single:
            return shared.real, torch.diag_embed(turn.real)
        return _stack_planes(shared), turn_matrices(turn)


@dataclass(frozen=True)
class OrthogonalProblem:
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
        """Rotations `[m, R, R]` towards the mean, the members' energies `[m]` and the mean's energy."""
        members = torch.as_tensor(list(group), device=self.gram.device)
        gram = self.gram[members][:, :, members]  # [m, R, m, R] = E[v_h v_gᵀ]
        weights = self._weights(group)
        turn = _polar(gram[0].transpose(0, 1))  # everyone towards the first member
        kept = gram.new_zeros(())
        for _ in range(100):
            cross = torch.einsum("g,gai,gihj->haj", weights, turn, gram)  # E[mean v_hᵀ]
            last, kept = kept, torch.einsum("h,hij,hij->", weights, turn, cross)
            if kept - last <= 1e-12 * kept.abs():
                break
            turn = _polar(cross)
        cross = torch.einsum("g,gai,gihj->haj", weights, turn, gram)
        mean = torch.einsum("h,hij,hij->", weights, turn, cross)
        return turn, torch.einsum("hihi->h", gram), mean

    def pairs(self) -> Tensor:
        heads = self.gram.shape[0]
        own = torch.einsum("hihi->h", self.gram)
        nuclear = torch.stack(
            [torch.linalg.svdvals(self.gram[h].transpose(0, 1)).sum(1) for h in range(heads)]
        )  # [K, K]: the best E[v_h · R v_g]
        a, b = self.weights[:, None], self.weights[None, :]
        total = (a + b).clamp_min(1e-300)
        return (a * b / total * (own[:, None] + own[None, :] - 2 * nuclear)).clamp_min(0).fill_diagonal_(0)

    def cost(self, group: Group) -> float:
        _, own, mean = self._rotations(group)
        raw = self.weights[list(group)].sum()
        return float(((self._weights(group) * own).sum() - mean).clamp_min(0) * raw)

    def solve(self, group: Group) -> tuple[Tensor, Tensor]:
        turn, own, mean = self._rotations(group)
        weights = self._weights(group)
        shared = torch.einsum("h,hij,hjn->in", weights, turn, self.rows[list(group)])
        scale = _ratio((weights * own).sum().sqrt(), mean.clamp_min(0).sqrt())
        return shared * scale, turn.mT


@dataclass(frozen=True)
class MeanProblem:
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

    def pairs(self) -> Tensor:
        own = self.gram.diagonal()
        return ((own[:, None] + own[None, :]) / 2 - self.gram).clamp_min(0).fill_diagonal_(0)

    def cost(self, group: Group) -> float:
        gram = _select(self.gram, group)
        return max(0.0, float(gram.trace() - gram.mean() * len(gram)))

    def solve(self, group: Group) -> tuple[Tensor, Tensor]:
        rows = self.rows[list(group)]
        eye = torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
        return rows.mean(0), eye.repeat(len(rows), 1, 1)


def _polar(x: Tensor) -> Tensor:
    """The orthogonal matrices nearest to `[…, R, R]`."""
    u, _, v = torch.linalg.svd(x)
    return u @ v


def turn_matrices(turn: Tensor) -> Tensor:
    """Multiplication of query planes by conj(turn), complex `[m, P]`, as real `[m, 2P, 2P]` matrices.

    Planes are laid out as all real parts, then all imaginary parts.
    """
    re, im = torch.diag_embed(turn.real), torch.diag_embed(turn.imag)
    return torch.cat([torch.cat([re, im], 2), torch.cat([-im, re], 2)], 1)


def _stack_planes(planes: Tensor) -> Tensor:
    """Complex `[P, n]` -> real `[2P, n]`: real parts, then imaginary parts."""
    return torch.cat([planes.real, planes.imag])


def _plane_gram(planes: Tensor, weights: Tensor, moment: Tensor) -> Tensor:
    """Hermitian `[P, K, K]` Gram of √ω κ."""
    scaled = (planes * weights.sqrt()[:, :, None]).transpose(0, 1)  # [P, K, n]
    moved = torch.complex(scaled.real @ moment, scaled.imag @ moment)
    gram = moved @ scaled.mH
    return (gram + gram.mH) / 2


def _energy(planes: Tensor, moment: Tensor) -> Tensor:
    """E|κ x̂|² of complex functionals `[…, n]`."""
    return sum(((x @ moment) * x).sum(-1) for x in (planes.real, planes.imag)).clamp_min(0)  # type: ignore[union-attr]


def _unit(x: Tensor, rotatable: Tensor) -> Tensor:
    """Unit phases of `[P, m]` (signs where a plane may not rotate); 1 where x is zero."""
    size = x.abs()
    phase = torch.where(size > 0, x / torch.where(size > 0, size, 1.0), 1.0)
    sign = torch.where(x.real < 0, -1.0, 1.0).to(x.dtype)
    return torch.where(rotatable[:, None], phase, sign)
