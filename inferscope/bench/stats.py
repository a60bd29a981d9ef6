"""What a sample of latencies can say, and how surely: exact bounds, quantiles with intervals, resampling by blocks.

Requests of one service are not independent: a stall hits all that are under way. So intervals come from blocks of time, resampled
whole; the order-statistic interval, which supposes independence, stands in where there are too few blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferscope.types import FloatArray, IntArray

__all__ = [
    "LEAST_BLOCKS",
    "Estimate",
    "binomial_cdf",
    "block_weights",
    "estimate",
    "needed",
    "observed",
    "order_interval",
    "proportion_bounds",
    "resampled_quantiles",
    "student_quantile",
]

LEAST_BLOCKS: Final = 20
"""Fewer blocks say too little about how much blocks differ."""
REPLICATES: Final = 2000
_GRID: Final = 1024


def _beta(a: float, b: float, x: float) -> float:
    """Regularised incomplete beta function I_x(a, b), by Lentz's continued fraction (Numerical Recipes, 3rd edition, 6.4)."""
    if x <= 0.0 or x >= 1.0:
        return float(x >= 1.0)
    if x > (a + 1.0) / (a + b + 2.0):
        return 1.0 - _beta(b, a, 1.0 - x)
    tiny = 1e-300
    c, d = 1.0, 1.0 / (1.0 - (a + b) * x / (a + 1.0) or tiny)
    total = d
    for step in range(1, 20_000):
        even = step * (b - step) * x / ((a + 2 * step - 1) * (a + 2 * step))
        odd = -(a + step) * (a + b + step) * x / ((a + 2 * step) * (a + 2 * step + 1))
        for term in (even, odd):
            d = 1.0 / (1.0 + term * d or tiny)
            c = 1.0 + term / c or tiny
            total *= c * d
        if abs(c * d - 1.0) < 1e-13:
            break
    front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(front) * total / a


def binomial_cdf(k: float, n: float, p: float) -> float:
    """P(X <= k) of a binomial variable with n trials of probability p; n and k may be fractions (effective counts)."""
    if k < 0:
        return 0.0
    return 1.0 if k >= n else _beta(n - k, k + 1, 1.0 - p)


def student_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t, for probabilities of at least one half."""
    low, high = 0.0, 1e4
    for _ in range(80):
        middle = (low + high) / 2
        above = 0.5 * _beta(degrees / 2, 0.5, degrees / (degrees + middle * middle))
        low, high = (middle, high) if 1.0 - above < probability else (low, middle)
    return (low + high) / 2


def proportion_bounds(k: float, n: float, level: float = 0.95) -> tuple[float, float]:
    """Exact interval of a proportion (Clopper and Pearson, 1934) from k of n independent trials."""
    if n == 0:
        return 0.0, 1.0
    half = (1.0 - level) / 2

    def bisect(count: float, tail: float) -> float:
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if binomial_cdf(count, n, middle) > tail else (low, middle)
        return (low + high) / 2

    return (0.0 if k == 0 else bisect(k - 1, 1.0 - half)), (1.0 if k == n else bisect(k, half))


def needed(quantile: float, level: float = 0.95) -> int:
    """Least number of requests with which an upper limit of the quantile exists at all: n with quantile^n <= (1 - level) / 2."""
    return math.ceil(math.log((1.0 - level) / 2) / math.log(quantile) - 1e-9)


def observed(ordered: FloatArray, quantile: float) -> float:
    """The observed value at a quantile of an ascending sample: the ceil(n·q)-th, no interpolation."""
    return float(ordered[max(math.ceil(ordered.size * quantile - 1e-9) - 1, 0)])


def order_interval(ordered: FloatArray, quantile: float, level: float = 0.95) -> tuple[float, float] | None:
    """Distribution-free interval of a quantile from two order statistics, for independent requests; None when there are too few."""
    n, half = int(ordered.size), (1.0 - level) / 2
    if n < needed(quantile, level):
        return None

    def rank(tail: float) -> int:
        """Least k with P(X <= k) >= tail."""
        low, high = -1, n
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if binomial_cdf(middle, n, quantile) >= tail else (middle, high)
        return high

    return float(ordered[max(rank(half) - 1, 0)]), float(ordered[min(rank(1.0 - half), n - 1)])


def block_weights(blocks: int, seed: int, replicates: int = REPLICATES) -> FloatArray:
    """How often each block was drawn in each resample, shape (replicates, blocks)."""
    drawn = np.random.default_rng(seed).multinomial(blocks, [1.0 / blocks] * blocks, size=replicates)
    return drawn.astype(np.float64)


def resampled_quantiles(blocks: Sequence[FloatArray], quantile: float, weights: FloatArray) -> FloatArray:
    """The quantile of the pooled requests in each resample of whole blocks.

    Args:
        blocks: latencies of each block; all together at least one.
        quantile: in (0, 1).
        weights: how often each block counts, shape (replicates, blocks).

    Returns:
        One value for each replicate, to a resolution of 1/1024 of the range of ranks that the replicates reach.
    """
    pooled = np.sort(np.concatenate(blocks))
    ordered = [np.sort(block) for block in blocks]
    total = weights @ np.array([block.size for block in blocks], dtype=np.float64)
    total = np.maximum(total, 1.0)
    reach = 4.0 / math.sqrt(pooled.size) + 0.5 * min(quantile, 1 - quantile)
    while True:
        first = int(pooled.size * max(quantile - reach, 0.0))
        last = max(min(math.ceil(pooled.size * min(quantile + reach, 1.0)), pooled.size) - 1, first)
        grid = pooled[np.unique(np.linspace(first, last, _GRID).astype(np.int64))]
        below = np.stack([np.searchsorted(block, grid, side="right") for block in ordered], axis=1).astype(np.float64)
        position, found = _first_enough(weights, below, quantile * total - 1e-9)
        if (found and (first == 0 or (position > 0).all())) or (first == 0 and last == pooled.size - 1):
            return np.asarray(grid[position], dtype=np.float64)
        reach *= 2.0


def _first_enough(weights: FloatArray, below: FloatArray, goal: FloatArray) -> tuple[IntArray, bool]:
    """By bisection, the first row of `below` (grid, blocks) at which each replicate's weighted sum reaches its goal; whether all do."""
    last = below.shape[0] - 1
    low, high = np.full(goal.size, -1, dtype=np.int64), np.full(goal.size, last, dtype=np.int64)
    while (high - low).max() > 1:
        middle = (low + high + 1) // 2
        enough = np.einsum("rb,rb->r", weights, below[middle]) >= goal
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return high, bool((weights @ below[-1] >= goal).all())


@dataclass(frozen=True, slots=True)
class Estimate:
    """A quantile with its interval, in the unit of the sample; `value` is None when `needed` requests were not there."""

    value: float | None
    low: float | None
    high: float | None
    method: str
    needed: int


def estimate(
    latency: FloatArray, at_ns: IntArray, quantile: float, *, seed: int = 0, level: float = 0.95, blocks: int | None = None
) -> Estimate:
    """A quantile of latencies and its interval.

    Args:
        latency: shape (requests,).
        at_ns: when each request was due, shape (requests,).
        quantile: in (0, 1).
        seed: of the resampling.
        level: of the interval.
        blocks: into how many equal spans of time the requests are cut; default one a second.

    Returns:
        With at least 20 blocks of requests the interval covers both that of resampled blocks and that of order statistics (blocks
        alone are too few in the far tail), else it is that of order statistics, which supposes independent requests.
    """
    least = needed(quantile, level)
    ordered = np.sort(latency)
    interval = order_interval(ordered, quantile, level)
    if interval is None:
        return Estimate(None, None, None, f"n/a, needs ≥ {least} requests", least)
    width_ns = 1e9 if blocks is None else (int(at_ns.max()) - int(at_ns.min()) + 1) / blocks
    where = ((at_ns - at_ns.min()) / width_ns).astype(np.int64)
    numbers = np.unique(where)
    if numbers.size < LEAST_BLOCKS:
        return Estimate(observed(ordered, quantile), *interval, "order statistics, requests taken as independent", least)
    cut = [latency[where == number] for number in numbers]
    replicates = resampled_quantiles(cut, quantile, block_weights(len(cut), seed))
    low, high = (float(value) for value in np.quantile(replicates, ((1 - level) / 2, (1 + level) / 2)))
    return Estimate(
        observed(ordered, quantile), min(low, interval[0]), max(high, interval[1]), f"{len(cut)} blocks of {width_ns / 1e9:.3g} s", least
    )
