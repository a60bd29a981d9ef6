"""HdrHistogram's index layout in numpy: where a value lies, what an index stands for, and percentiles of counts.

The layout is HdrHistogram's (https://hdrhistogram.github.io/HdrHistogram, class `AbstractHistogram`): a value keeps its leading
`half_magnitude + 1` bits; the first bucket is linear, each further one covers an octave with half as many indices. Ranks are those of the
`hdrhistogram` package: the percentile is the highest value equivalent to the one that holds rank `int(100 q * n / 100 + 0.5)`, at least 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inferscope.types import Distribution

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from inferscope.types import IntArray

__all__ = [
    "HIGHEST_NS",
    "REQUESTS",
    "STAGES",
    "Layout",
    "above",
    "bucket_mean_ns",
    "index_of",
    "indices_of",
    "layout",
    "longest_ns",
    "mean_ns",
    "merge",
    "percentiles",
    "sparse_percentiles",
    "value_at_index",
]

HIGHEST_NS: Final = 60_000_000_000
"""Longer durations are clamped to this and counted."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How values map to indices for one precision.

    Args:
        digits: Significant decimal digits that are kept, 1 to 5.
        lowest_ns: Lowest value that is told from 0; rounded down to a power of two.
    """

    digits: int
    lowest_ns: int

    @property
    def half_magnitude(self) -> int:
        """log2 of the indices in each octave."""
        return int(2 * 10**self.digits - 1).bit_length() - 1

    @property
    def unit_magnitude(self) -> int:
        """log2 of the lowest bucket's resolution."""
        return self.lowest_ns.bit_length() - 1

    @property
    def size(self) -> int:
        """Indices needed up to `HIGHEST_NS`: 18432 for requests, 3840 for stages."""
        buckets, untrackable = 1, 1 << (self.half_magnitude + 1 + self.unit_magnitude)
        while untrackable <= HIGHEST_NS:
            untrackable <<= 1
            buckets += 1
        return (buckets + 1) << self.half_magnitude


REQUESTS: Final = Layout(3, 1000)
STAGES: Final = Layout(2, 1)


@dataclass(frozen=True, slots=True)
class _Values:
    lowest: IntArray
    median: IntArray
    highest: IntArray


def layout(distribution: Distribution) -> Layout:
    """The layout that a distribution's counts are in."""
    return Layout(distribution.digits, distribution.lowest_ns)


def index_of(value_ns: int, within: Layout) -> int:
    """Index of a value; negative ones count as 0, those above 60 s as 60 s."""
    value = min(max(value_ns, 0), HIGHEST_NS)
    half, unit = within.half_magnitude, within.unit_magnitude
    mask = ((2 << half) - 1) << unit
    bucket = (value | mask).bit_length() - unit - half - 1
    return ((bucket + 1) << half) + (value >> (bucket + unit)) - (1 << half)


def indices_of(values_ns: IntArray, within: Layout) -> IntArray:
    """`index_of` for an array of values, shape (n,)."""
    values = np.minimum(np.maximum(np.asarray(values_ns, dtype=np.int64), 0), HIGHEST_NS)
    half, unit = within.half_magnitude, within.unit_magnitude
    mask = ((2 << half) - 1) << unit
    # frexp's exponent is the bit length: exact, because 60 s in ns has far fewer than 53 bits
    bucket = np.frexp((values | mask).astype(np.float64))[1].astype(np.int64) - (unit + half + 1)
    return ((bucket + 1) << half) + (values >> (bucket + unit)) - (1 << half)


def value_at_index(index: int, within: Layout) -> tuple[int, int, int]:
    """Lowest, median and highest value equivalent to those counted at an index, ns."""
    half, unit = within.half_magnitude, within.unit_magnitude
    bucket = (index >> half) - 1
    sub = (index & ((1 << half) - 1)) + (1 << half)
    if bucket < 0:
        bucket, sub = 0, sub - (1 << half)
    lowest = sub << (bucket + unit)
    width = 1 << (bucket + unit)
    return lowest, lowest + (width >> 1), lowest + width - 1


@lru_cache(maxsize=8)
def _values(within: Layout, size: int) -> _Values:
    index = np.arange(size, dtype=np.int64)
    half, unit = within.half_magnitude, within.unit_magnitude
    bucket = np.maximum((index >> half) - 1, 0)
    sub = np.where(index < (1 << half), index, (index & ((1 << half) - 1)) + (1 << half))
    width: IntArray = np.ones(size, np.int64) << (bucket + unit)
    lowest: IntArray = sub * width
    return _Values(lowest, lowest + (width >> 1), lowest + width - 1)


def _rank(quantile: float, total: int) -> int:
    return max(1, int(min(quantile * 100.0, 100.0) * total / 100 + 0.5))  # this order of operations, so that ties round as in the package


def percentiles(distribution: Distribution, quantiles: Sequence[float]) -> list[float | None]:
    """Values at quantiles, ns.

    Args:
        distribution: Counts of a window or running totals.
        quantiles: Each in [0, 1]; 0 gives the lowest value equivalent to the smallest recorded one, as HdrHistogram does.

    Returns:
        One value a quantile; all None when nothing was counted.
    """
    counts = distribution.counts
    occupied = np.flatnonzero(counts)
    return sparse_percentiles(occupied, counts[occupied], layout(distribution), quantiles)


def sparse_percentiles(indices: NDArray[Any], counts: NDArray[Any], within: Layout, quantiles: Sequence[float]) -> list[float | None]:
    """`percentiles` of occupied indices (ascending) and their counts, both of shape (n,)."""
    if not len(counts):
        return [None] * len(quantiles)
    seen = np.cumsum(counts, dtype=np.int64)
    values: list[float | None] = []
    for quantile in quantiles:
        position = int(np.searchsorted(seen, _rank(quantile, int(seen[-1]))))
        lowest, _, highest = value_at_index(int(indices[min(position, len(indices) - 1)]), within)
        values.append(float(highest if quantile else lowest))
    return values


def mean_ns(distribution: Distribution) -> float | None:
    """Exact mean, from the running sum and not from the buckets; None when nothing was counted."""
    return distribution.sum_ns / distribution.count if distribution.count else None


def longest_ns(distribution: Distribution) -> int | None:
    """Highest value equivalent to the longest counted one; None when nothing was counted."""
    occupied = np.flatnonzero(distribution.counts)
    return value_at_index(int(occupied[-1]), layout(distribution))[2] if len(occupied) else None


def above(distribution: Distribution, threshold_ns: int) -> int:
    """How many counted values lie surely above a threshold: those whose bucket starts above it."""
    first = index_of(threshold_ns, layout(distribution)) + 1
    return int(distribution.counts[first:].sum())


def merge(distributions: Iterable[Distribution]) -> Distribution:
    """Add distributions of one layout; kind and labels are the first one's.

    Raises:
        ValueError: There is nothing to add, or the layouts differ.
    """
    parts = list(distributions)
    if not parts:
        raise ValueError("no distribution to merge")
    first = parts[0]
    if any(layout(part) != layout(first) for part in parts):
        raise ValueError("distributions of different layouts cannot be merged")
    counts = np.zeros(max(len(part.counts) for part in parts), dtype=np.int64)
    for part in parts:
        counts[: len(part.counts)] += part.counts
    return Distribution(
        first.kind,
        first.labels,
        first.digits,
        first.lowest_ns,
        counts,
        sum(part.count for part in parts),
        sum(part.sum_ns for part in parts),
        sum(part.clamped for part in parts),
    )


def bucket_mean_ns(distribution: Distribution) -> float | None:
    """Mean of the buckets' middles, as the `hdrhistogram` package answers; for counts whose exact sum is unknown."""
    total = int(distribution.counts.sum())
    if not total:
        return None
    middles = _values(layout(distribution), len(distribution.counts)).median
    return float(np.dot(distribution.counts.astype(np.float64), middles.astype(np.float64)) / total)
