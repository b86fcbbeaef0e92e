"""Merge objectives of keys in rotary pairs: one complex scalar per head and pair.

Letters as in `subspace`: K heads, m heads of one group, P rotary pairs (planes), n = D + 1 inputs. Complex, float64.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .subspace import Each, Group, Shared, one_by_one, ratio, select, spectra


@dataclass(frozen=True)
class _KeyPlanes:
    """What both problems start from.

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
        # A pair's part of the logit is Re(conj(q) k): half of |q|² |k|² on average over phases.
        return float(torch.einsum("phh->", self.gram).real) / 2


@dataclass(frozen=True)
class RotaryObjective(_KeyPlanes):
    """Rotary keys: one complex scalar per head, rotary pair and channel, moved into the queries.

    Minimises Σ_h ω_h E|κ_h x̂ - Σ_s c_hs κ̄_s x̂|² in each pair: the top eigenvectors of an m x m Gram.

    Args:
        channels: Functionals that the shared head keeps of each pair.
    """

    channels: int = 1

    def pairs(self, each: Each = one_by_one) -> Tensor:
        diagonal = torch.diagonal(self.gram, dim1=1, dim2=2).real
        mean = (diagonal[:, :, None] + diagonal[:, None, :]) / 2
        spread = (diagonal[:, :, None] - diagonal[:, None, :]) / 2
        low = mean - (spread.square() + self.gram.abs().square()).sqrt()
        return low.clamp_min(0).sum(0).fill_diagonal_(0) / 2

    def cost(self, group: Group) -> float:
        spectrum = torch.linalg.eigvalsh(select(self.gram, group))
        return float(spectrum[:, : -self.channels].clamp_min(0).sum()) / 2

    def solve(self, group: Group) -> Shared:
        members = list(group)
        planes, root = self.planes[members], self.weights[members].sqrt()  # [m, P, n], [m, P]
        spectrum, vectors = spectra(select(self.gram, group))
        top = vectors[:, :, -self.channels :].flip(2).permute(1, 2, 0)  # [m, S, P], the strongest first
        # An eigenvector's phase is arbitrary; fixing it keeps results equal across machines.
        first = top.gather(0, top.abs().argmax(0, keepdim=True))
        top = top * (first.conj() / first.abs())
        shared = torch.einsum("hsp,hpn->spn", top.conj() * root[:, None], planes)
        turn = top * torch.where(root > 0, 1 / root.clamp_min(torch.finfo(root.dtype).tiny), 0.0)[:, None]
        norm = (self.channels * planes.abs().square().sum(2).mean(0)).sqrt()
        scale = ratio(norm, shared.abs().square().sum(2).sum(0).sqrt())  # balance, plane by plane
        cost = spectrum[:, : -self.channels].clamp_min(0).sum() / 2
        return Shared(
            _stack_planes((shared * scale[:, None]).flatten(0, 1)), turn_matrices(turn / scale), cost
        )


@dataclass(frozen=True)
class UnitRotaryObjective(_KeyPlanes):
    """Keys behind a norm: only unit scalars per pair; sign flips where even a rotation is too much.

    A dim that has no partner is a pair with zero imaginary part.

    Args:
        rotatable: `[P]` bool; False allows c = +1 or -1 only.
        single: The planes are single dims (rotatable must be all False).
    """

    rotatable: Tensor
    single: bool = False

    def pairs(self, each: Each = one_by_one) -> Tensor:
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
        gram = select(self.gram, group) * root[:, :, None] * root[:, None, :]
        gram = torch.where(self.rotatable[:, None, None], gram, gram.real.to(gram.dtype))
        turn = _unit(spectra(gram)[1][:, :, -1], self.rotatable)
        for _ in range(50):
            last, turn = turn, _unit((gram @ turn[:, :, None])[:, :, 0], self.rotatable)
            if torch.allclose(last, turn, rtol=0, atol=1e-12):
                break
        return turn * _unit(turn[:, :1], self.rotatable).conj(), gram  # the first member stays as it is

    def cost(self, group: Group) -> float:
        return float(self._cost(group, *self._phases(group)))

    def _cost(self, group: Group, turn: Tensor, gram: Tensor) -> Tensor:
        total = self.weights[list(group)].sum(0)
        kept = torch.einsum("ph,phg,pg->p", turn.conj(), gram, turn).real / total.clamp_min(1e-300)
        own = torch.diagonal(select(self.gram, group), dim1=1, dim2=2).real.sum(1)
        return (own - kept).clamp_min(0).sum() / 2

    def solve(self, group: Group) -> Shared:
        members = list(group)
        turn, gram = self._phases(group)
        cost = self._cost(group, turn, gram)
        turn = turn.T  # [m, P]
        weights = self.weights[members]
        share = torch.where(weights.sum(0) > 0, weights, 1.0)
        share = share / share.sum(0)
        shared = torch.einsum("hp,hpn->pn", turn.conj() * share, self.planes[members])
        own = _energy(self.planes[members], self.moment)
        scale = ratio((share * own).sum(0).sqrt(), _energy(shared, self.moment).sqrt())
        shared = shared * scale[:, None]  # averaging shrinks; the norm is put back
        if self.single:
            return Shared(shared.real, torch.diag_embed(turn.real), cost)
        return Shared(_stack_planes(shared), turn_matrices(turn[:, None]), cost)


def turn_matrices(turn: Tensor) -> Tensor:
    """Multiplication of query planes by conj(turn), complex `[m, S, P]`, as real `[m, 2 S P, 2P]` matrices.

    Planes are laid out as all real parts (channel by channel), then all imaginary parts.
    """
    re, im = (torch.diag_embed(part).flatten(1, 2) for part in (turn.real, turn.imag))
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
