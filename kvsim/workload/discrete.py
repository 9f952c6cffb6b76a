"""Discrete: an exact distribution of whole numbers (tokens, turns), and the shapes it comes in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_erf = np.frompyfunc(math.erf, 1, 1)


@dataclass(frozen=True, slots=True, eq=False)
class Discrete:
    """A distribution over low, low + 1, ..., high as a table: nothing about it needs drawing.

    cdf float64 [high - low + 1], never falling, its last entry 1: cdf[i] = P(X <= low + i).
    """

    low: int
    cdf: np.ndarray

    @property
    def high(self) -> int:
        return self.low + len(self.cdf) - 1

    def at(self, ranks: np.ndarray) -> np.ndarray:
        """The values int64 at ranks in [0, 1), by inverse transform: uniform ranks give draws."""
        return self.low + np.searchsorted(self.cdf, ranks, side="right")

    def up_to(self, values: np.ndarray) -> np.ndarray:
        """P(X <= value) for whole values, those outside low..high included."""
        padded = np.concatenate(([0.0], self.cdf))
        return padded[np.clip(np.asarray(values) - self.low + 1, 0, len(self.cdf))]

    def pmf(self) -> np.ndarray:
        return np.diff(self.cdf, prepend=0.0)

    def mean(self) -> float:
        return self.low + float(np.sum(1.0 - self.cdf))

    def std(self) -> float:
        offsets = np.arange(len(self.cdf)) + self.low - self.mean()
        return math.sqrt(float(self.pmf() @ offsets**2))

    def quantile(self, probability: float) -> int:
        """The smallest value that at least `probability` of the mass lies at or below."""
        return self.low + int(np.searchsorted(self.cdf, probability - 1e-12, side="left"))


def fixed(value: int) -> Discrete:
    return Discrete(value, np.ones(1))


def uniform(low: int, high: int) -> Discrete:
    """Every whole number from low to high, both included, equally likely."""
    num_values = high - low + 1
    return Discrete(low, np.arange(1, num_values + 1) / num_values)


def geometric(mean: float, high: int) -> Discrete:
    """1, 2, ... with `mean` (>= 1), cut at `high`: what is beyond falls on high."""
    if mean == 1:
        return fixed(1)
    cdf = -np.expm1(np.arange(1, high + 1) * math.log1p(-1.0 / mean))
    return _closed(1, cdf)


def lognormal(mu: float, sigma: float, *, low: int, high: int) -> Discrete:
    """exp(Normal(mu, sigma)) rounded to whole numbers and clipped to low..high."""
    return lognormal_mixture([1.0], [mu], [sigma], low=low, high=high)


def lognormal_mu(mean: float, sigma: float) -> float:
    """The mu of the (unclipped) lognormal with this mean and this sigma of its logarithm."""
    return math.log(mean) - sigma**2 / 2


def lognormal_mixture(
    weights: Sequence[float],
    mus: Sequence[float],
    sigmas: Sequence[float],
    *,
    low: int,
    high: int,
) -> Discrete:
    """With probability weights[k] exp(Normal(mus[k], sigmas[k])); rounded, clipped to low..high.

    The weights are scaled to add up to 1. What clipping moves falls on low and on high.
    """
    edges = np.log(np.arange(low, high + 1) + 0.5)
    shares = np.asarray(weights, float) / np.sum(weights)
    cdf = np.zeros(len(edges))
    for share, mu, sigma in zip(shares, mus, sigmas, strict=True):
        cdf += share * normal_cdf((edges - mu) / sigma)
    return _closed(low, cdf)


def from_quantiles(probabilities: Sequence[float], values: Sequence[float]) -> Discrete:
    """The distribution through these quantiles, straight between them, rounded to whole numbers.

    Both never fall; probabilities run from 0 to 1. A value given for several probabilities is an
    atom, a probability given for several values a gap.
    """
    low, high = math.floor(values[0] + 0.5), math.floor(values[-1] + 0.5)
    return _closed(low, np.interp(np.arange(low, high + 1) + 0.5, values, probabilities))


def normal_cdf(z: np.ndarray) -> np.ndarray:
    """P(a standard normal <= z), float64 in z's shape."""
    return 0.5 * (1.0 + _erf(z / math.sqrt(2.0)).astype(float))


def _closed(low: int, cdf: np.ndarray) -> Discrete:
    cdf[-1] = 1.0
    return Discrete(low, cdf)
