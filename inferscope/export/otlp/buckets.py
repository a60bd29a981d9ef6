"""HDR counts to the buckets of OTLP histograms.

A slot of an HDR histogram becomes part of the exponential bucket that holds the slot's middle. At one fixed scale every process maps
alike, so that histograms of replicas add; there is no cap on the number of buckets and nothing is collapsed at the low end, because
both move percentiles by tens of percent. Exponential buckets are those of the OpenTelemetry data model: bucket i of scale s holds
(2**(i/2**s), 2**((i+1)/2**s)] seconds.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from inferscope.clock import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from inferscope.types import Distribution, FloatArray, IntArray

__all__ = [
    "SCALES",
    "Buckets",
    "combine",
    "explicit",
    "exponential",
    "exponential_index",
    "hdr_bounds",
    "merge",
    "objective_bounds",
    "quantile",
    "rescale",
]

SCALES: Final = range(3, 9)
"""Scales that are accepted: 3 (±4.3 %) to 8 (±0.14 %, the finest that Prometheus takes); 5 is ±1.1 %."""

_EMPTY: Final[IntArray] = np.zeros(0, dtype=np.int64)
_OBJECTIVE_STEPS: Final = (0.02, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 50.0)
_DEFAULT_OBJECTIVE_NS: Final = 20_000_000


@dataclass(frozen=True, slots=True)
class Buckets:
    """The point of one histogram series; seconds outside `counts`."""

    count: int
    total: float
    """Sum of all values in seconds."""
    offset: int
    """Index of the first exponential bucket; 0 for explicit buckets."""
    counts: IntArray
    zero_count: int = 0
    zero_threshold: float = 0.0
    """Values up to this are in `zero_count`."""
    scale: int | None = None
    """None for explicit buckets."""
    bounds: tuple[float, ...] = ()
    """Upper bounds of explicit buckets; the last count lies above all of them."""
    low: float | None = None
    high: float | None = None


@functools.lru_cache(maxsize=32)
def hdr_bounds(digits: int, lowest_ns: int, length: int) -> tuple[IntArray, IntArray]:
    """Lowest and highest value of each slot in HdrHistogram's index layout, in ns, each of shape (length,)."""
    magnitude = int(np.ceil(np.log2(2 * 10**digits)))
    half = 1 << (magnitude - 1)
    unit = max(lowest_ns, 1).bit_length() - 1
    index = np.arange(length, dtype=np.int64)
    bucket = (index >> (magnitude - 1)) - 1
    sub = np.where(bucket < 0, index & (half - 1), (index & (half - 1)) + half)
    shift = np.maximum(bucket, 0) + unit
    low: IntArray = np.asarray(sub << shift, dtype=np.int64)
    high: IntArray = low + np.left_shift(1, shift, dtype=np.int64) - 1
    low.setflags(write=False)
    high.setflags(write=False)
    return low, high


def exponential_index(seconds: FloatArray, scale: int) -> IntArray:
    """Exponential bucket of each positive value; exact on the powers of two, where rounding of a logarithm would be off by one."""
    factor = float(1 << scale)
    index = np.ceil(np.log2(seconds) * factor).astype(np.int64) - 1
    index += np.exp2((index + 1) / factor) < seconds
    index -= np.exp2(index / factor) >= seconds
    return index


@functools.lru_cache(maxsize=64)
def _grid(digits: int, lowest_ns: int, length: int, scale: int) -> tuple[IntArray, IntArray]:
    """First slot of each exponential bucket that any slot maps to, and the buckets' indexes; slot 0 is left out."""
    low, high = hdr_bounds(digits, lowest_ns, length)
    middle = (low[1:] + high[1:]) / 2 / NS_PER_S
    indexes, starts = np.unique(exponential_index(middle, scale), return_index=True)
    return starts.astype(np.int64) + 1, indexes


def _edges(distribution: Distribution, occupied: IntArray) -> tuple[float | None, float | None]:
    if not occupied.size:
        return None, None
    low, high = hdr_bounds(distribution.digits, distribution.lowest_ns, len(distribution.counts))
    return int(low[occupied[0]]) / NS_PER_S, int(high[occupied[-1]]) / NS_PER_S


def exponential(distribution: Distribution, scale: int) -> Buckets:
    """Map a distribution at `scale`.

    The first slot (0 ns, or up to 511 ns for series that start at 1 us) is the zero bucket. `count` is the sum of the counts that were
    read, never the separate total, because a writer may have been between the two.
    """
    counts = distribution.counts
    starts, indexes = _grid(distribution.digits, distribution.lowest_ns, len(counts), scale)
    occupied = counts.nonzero()[0]
    low, high = _edges(distribution, occupied)
    zero = int(counts[0])
    top = hdr_bounds(distribution.digits, distribution.lowest_ns, len(counts))[1]
    sums = np.add.reduceat(counts, starts)
    filled = sums.nonzero()[0]
    offset, dense = 0, _EMPTY
    if filled.size:
        offset = int(indexes[filled[0]])
        dense = np.zeros(int(indexes[filled[-1]]) - offset + 1, dtype=np.int64)
        dense[indexes[filled] - offset] = sums[filled]
    return Buckets(
        count=zero + int(dense.sum()),
        total=distribution.sum_ns / NS_PER_S,
        offset=offset,
        counts=dense,
        zero_count=zero,
        zero_threshold=int(top[0]) / NS_PER_S,
        scale=scale,
        low=low,
        high=high,
    )


def objective_bounds(threshold_ns: int | None) -> tuple[float, ...]:
    """Explicit bounds in seconds around an objective, which is itself one of them; without one, around 20 ms."""
    base = threshold_ns or _DEFAULT_OBJECTIVE_NS
    return tuple(base * step / NS_PER_S for step in _OBJECTIVE_STEPS)


def explicit(distribution: Distribution, bounds: Sequence[float]) -> Buckets:
    """Map a distribution to explicit buckets: the fallback for backends without exponential histograms.

    A slot that straddles a bound goes where its middle lies, an error of at most one slot (0.1 % of the bound with 3 digits); the exact
    number above an objective is a counter of its own.
    """
    counts = distribution.counts
    low, high = hdr_bounds(distribution.digits, distribution.lowest_ns, len(counts))
    occupied = counts.nonzero()[0]
    middle = (low[occupied] + high[occupied]) / 2 / NS_PER_S
    place = np.searchsorted(np.asarray(bounds, dtype=np.float64), middle, side="left")
    dense = np.zeros(len(bounds) + 1, dtype=np.int64)
    np.add.at(dense, place, counts[occupied])
    smallest, largest = _edges(distribution, occupied)
    return Buckets(
        count=int(dense.sum()),
        total=distribution.sum_ns / NS_PER_S,
        offset=0,
        counts=dense,
        bounds=tuple(bounds),
        low=smallest,
        high=largest,
    )


def combine(first: Buckets, second: Buckets, sign: int = 1) -> Buckets:
    """Add (`sign` 1) or take away (`sign` -1) two points of the same scale or the same bounds, exactly.

    Raises:
        ValueError: The points differ in scale or bounds.
    """
    if first.scale != second.scale or first.bounds != second.bounds:
        raise ValueError("buckets of different scales or bounds do not add")
    offset, counts = first.offset, first.counts
    if second.counts.size:
        start = min(first.offset, second.offset) if counts.size else second.offset
        stop = max(first.offset + len(first.counts) if counts.size else start, second.offset + len(second.counts))
        dense = np.zeros(stop - start, dtype=np.int64)
        if counts.size:
            dense[first.offset - start : first.offset - start + len(counts)] = counts
        dense[second.offset - start : second.offset - start + len(second.counts)] += sign * second.counts
        offset, counts = start, dense
    if first.scale is not None:
        offset, counts = _trim(offset, counts)
    lows = [value for value in (first.low, second.low) if value is not None]
    highs = [value for value in (first.high, second.high) if value is not None]
    return Buckets(
        count=first.count + sign * second.count,
        total=first.total + sign * second.total,
        offset=offset,
        counts=counts,
        zero_count=first.zero_count + sign * second.zero_count,
        zero_threshold=max(first.zero_threshold, second.zero_threshold),
        scale=first.scale,
        bounds=first.bounds,
        # A difference has lost the extremes of its window.
        low=min(lows) if lows and sign > 0 else None,
        high=max(highs) if highs and sign > 0 else None,
    )


def _trim(offset: int, counts: IntArray) -> tuple[int, IntArray]:
    filled = counts.nonzero()[0]
    if not filled.size:
        return 0, _EMPTY
    return offset + int(filled[0]), counts[int(filled[0]) : int(filled[-1]) + 1]


def rescale(buckets: Buckets, scale: int) -> Buckets:
    """An exponential point at a coarser scale, exactly: 2**n buckets become one, whatever is in them.

    Raises:
        ValueError: The point is not exponential or is coarser already.
    """
    if buckets.scale is None or buckets.scale < scale:
        raise ValueError(f"buckets of scale {buckets.scale} have no form at scale {scale}")
    shift = buckets.scale - scale
    if not shift or not buckets.counts.size:
        return replace(buckets, scale=scale)
    indexes = (np.arange(len(buckets.counts), dtype=np.int64) + buckets.offset) >> shift
    counts = np.bincount(indexes - indexes[0], weights=buckets.counts).astype(np.int64)
    return replace(buckets, scale=scale, offset=int(indexes[0]), counts=counts)


def merge(items: Iterable[Buckets]) -> Buckets:
    """The points of windows or replicas together; at different scales, at the coarsest of them.

    Raises:
        ValueError: There is nothing to add, or the points have different explicit bounds.
    """
    points = list(items)
    if not points:
        raise ValueError("no points to merge")
    scales = {item.scale for item in points}
    if len(scales) > 1 and None not in scales:
        coarsest = min(scale for scale in scales if scale is not None)
        points = [rescale(item, coarsest) for item in points]
    merged = points[0]
    for item in points[1:]:
        merged = combine(merged, item)
    return merged


def quantile(buckets: Buckets, q: float) -> float | None:
    """Quantile in seconds as Prometheus computes it: interpolated inside the bucket that holds the rank, exponentially for exponential
    buckets and linearly for explicit ones, and not outside the smallest and the largest value where those are known; None when empty.
    """
    if not buckets.count:
        return None
    rank = q * buckets.count
    if buckets.scale is None:
        value = _explicit_quantile(buckets, rank)
    elif rank <= buckets.zero_count:
        value = 0.0
    else:
        value = _exponential_quantile(buckets, rank)
    low = buckets.low if buckets.low is not None else 0.0
    high = buckets.high if buckets.high is not None else value
    return min(max(value, low), high)


def _exponential_quantile(buckets: Buckets, rank: float) -> float:
    reached = np.cumsum(buckets.counts) + buckets.zero_count
    index = min(int(np.searchsorted(reached, rank)), len(reached) - 1)
    inside = 1.0 - float(reached[index] - rank) / float(buckets.counts[index]) if buckets.counts[index] else 1.0
    return float(2.0 ** ((buckets.offset + index + min(inside, 1.0)) / 2.0 ** (buckets.scale or 0)))


def _explicit_quantile(buckets: Buckets, rank: float) -> float:
    reached = np.cumsum(buckets.counts)
    index = int(np.searchsorted(reached, rank))
    if index >= len(buckets.bounds):
        return buckets.bounds[-1]
    lower = buckets.bounds[index - 1] if index else 0.0
    inside = 1.0 - float(reached[index] - rank) / float(buckets.counts[index])
    return lower + (buckets.bounds[index] - lower) * inside
