"""Confidence intervals by bootstrap over documents, and a paired test of two models on the same documents."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

CLUSTERS = 500  # more units than this are first summed into so many random clusters
RESAMPLES = 1000


@dataclass(frozen=True)
class Interval:
    """A confidence interval.

    Args:
        low, high: Its ends.
        level: Coverage aimed at.
    """

    low: float
    high: float
    level: float = 0.95


@dataclass(frozen=True)
class PairedTest:
    """Two models compared unit by unit on the same text.

    Args:
        against: The other model.
        difference: Loss minus the other's loss: nats per token, or bits per byte when the tokenizers differ.
        standard_error: Of the difference, units resampled.
        low, high: 95 % bootstrap interval of the difference.
        p_value: Of no difference, by random sign flips of whole units (two-sided).
        units: Number of documents (or blocks) compared.
    """

    against: str
    difference: float
    standard_error: float
    low: float
    high: float
    p_value: float
    units: int


def _clusters(columns: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Sum units `[c, n]` into at most `CLUSTERS` random clusters: same variance, bounded work."""
    n = columns.shape[1]
    if n <= CLUSTERS:
        return columns
    label = generator.permutation(n) % CLUSTERS
    return np.stack([np.bincount(label, weights=column, minlength=CLUSTERS) for column in columns])


def _resampled_ratios(columns: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """`sum(columns[0]) / sum(columns[1])` of every resample of the units."""
    numerator, weight = columns
    n = len(numerator)
    drawn = generator.integers(0, n, size=(RESAMPLES, n), dtype=np.int32)
    above, below = numerator[drawn].sum(axis=1), weight[drawn].sum(axis=1)
    return np.divide(above, below, out=np.full(RESAMPLES, np.nan), where=below > 0)


def bootstrap(nll: np.ndarray, weight: np.ndarray, seed: int = 0) -> Interval | None:
    """95 % percentile interval of `sum(nll) / sum(weight)`, units resampled.

    Args:
        nll: float64 `[n]`, summed loss of each document.
        weight: float64 `[n]`, its tokens (or bytes).
        seed: Of the resampling.

    Returns:
        None for fewer than two units, or where a loss is not finite.
    """
    used = weight > 0
    columns = np.stack([nll[used], weight[used]])
    if columns.shape[1] < 2 or not np.isfinite(columns).all():
        return None
    generator = np.random.default_rng(seed)
    columns = _clusters(columns, generator)
    low, high = np.nanquantile(_resampled_ratios(columns, generator), [0.025, 0.975])
    return Interval(float(low), float(high))


def paired_test(
    nll: np.ndarray, other: np.ndarray, weight: np.ndarray, *, against: str, seed: int = 0
) -> PairedTest | None:
    """Compare two models on the same units.

    The difference of a unit has far less noise than either loss, since hard documents are hard for both.

    Args:
        nll, other: float64 `[n]`, summed loss of each unit for the model and for the one it is compared to.
        weight: float64 `[n]`, tokens (or bytes) of each unit.
        against: Name of the other model.
        seed: Of the resampling.

    Returns:
        None for fewer than two units, or where a loss is not finite.
    """
    used = weight > 0
    columns = np.stack([nll[used] - other[used], weight[used]])
    n = columns.shape[1]
    if n < 2 or not np.isfinite(columns).all():
        return None
    difference = columns[0].sum() / columns[1].sum()
    residual = columns[0] - difference * columns[1]
    standard_error = np.sqrt(n / (n - 1) * np.square(residual).sum()) / columns[1].sum()
    generator = np.random.default_rng(seed)
    columns = _clusters(columns, generator)
    low, high = np.nanquantile(_resampled_ratios(columns, generator), [0.025, 0.975])
    signs = generator.integers(0, 2, size=(RESAMPLES, columns.shape[1]), dtype=np.int8) * 2 - 1
    flipped = np.abs(signs @ columns[0])
    observed = abs(columns[0].sum())
    beyond = int((flipped >= observed * (1 - 1e-12)).sum())
    p_value = (1 + beyond) / (1 + RESAMPLES)
    return PairedTest(against, float(difference), float(standard_error), float(low), float(high), p_value, n)
