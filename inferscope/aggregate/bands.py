"""Latency bands: time by band and column, with an exact edge on each objective.

Eight bands an octave from 1.024 us keep the error of a tail share at 0.12 points; sums add over windows, processes and replicas.
A request above an objective's edge that lies inside its band is kept in a row of its own (216 + index of the edge), so that "above the
objective" is exact however coarse the bands are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from inferscope.types import BAND_COUNT, BODY, BandSums

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from inferscope.types import FloatArray, IntArray

__all__ = [
    "BASE_BANDS",
    "above_edge",
    "band_of",
    "bands_of",
    "body",
    "bounds_ns",
    "empty",
    "merge",
    "order_keys",
    "tail",
]

BASE_BANDS: Final = 216
"""27 octaves of 8; rows from here on belong to edges."""


def _base_of(value_ns: int) -> int:
    if value_ns < 1024:
        return 0
    bits = value_ns.bit_length()
    return min((bits - 11) * 8 + ((value_ns >> (bits - 4)) & 7), BASE_BANDS - 1)


def band_of(wall_ns: int, edges_ns: Sequence[int] = ()) -> int:
    """Band of a latency.

    Args:
        wall_ns: Latency, ns.
        edges_ns: Ascending objective edges, at most 4; a latency above an edge of its own band goes to the row of the largest such edge.
    """
    base = _base_of(wall_ns)
    row = base
    for position, edge in enumerate(edges_ns):
        if wall_ns > edge and _base_of(edge) == base:
            row = BASE_BANDS + position
    return row


def bands_of(wall_ns: IntArray, edges_ns: Sequence[int] = ()) -> IntArray:
    """`band_of` for an array of latencies, shape (n,)."""
    values = np.asarray(wall_ns, dtype=np.int64)
    bits = np.frexp(np.maximum(values, 1024).astype(np.float64))[1].astype(np.int64)
    base = np.minimum((bits - 11) * 8 + ((values >> (bits - 4)) & 7), BASE_BANDS - 1)
    base = np.where(values < 1024, 0, base)
    rows: IntArray = np.array(base)
    for position, edge in enumerate(edges_ns):
        rows = np.where((values > edge) & (base == _base_of(edge)), BASE_BANDS + position, rows)
    return rows


def bounds_ns(band: int, edges_ns: Sequence[int] = ()) -> tuple[int, int]:
    """Lowest and highest latency that a row can hold, both included; the top band has no end and gives 2**63 - 1."""
    base = _base_of(edges_ns[band - BASE_BANDS]) if band >= BASE_BANDS else band
    octave, eighth = divmod(base, 8)
    lowest = ((8 + eighth) << (octave + 7)) if base else 0
    highest = ((9 + eighth) << (octave + 7)) - 1 if base < BASE_BANDS - 1 else (1 << 63) - 1
    inside = sorted(edge for edge in edges_ns if lowest <= edge <= highest)
    if band >= BASE_BANDS:
        lowest = edges_ns[band - BASE_BANDS] + 1
    higher = [edge for edge in inside if edge >= lowest]
    return lowest, min([highest, *higher])


def order_keys(edges_ns: Sequence[int]) -> IntArray:
    """Sort key of every row, shape (220,): ascending by the latency it holds, an edge's row right after its band."""
    keys = np.arange(BAND_COUNT, dtype=np.int64) * 8
    for position in range(BAND_COUNT - BASE_BANDS):
        base = _base_of(edges_ns[position]) if position < len(edges_ns) else BASE_BANDS + position
        keys[BASE_BANDS + position] = base * 8 + 1 + position
    return keys


def empty(columns: int = 0) -> BandSums:
    """No request at all."""
    return BandSums(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, columns), np.int64))


def merge(parts: Iterable[BandSums], edges_ns: Sequence[int] = ()) -> BandSums:
    """Add band sums; missing columns count as 0.

    Args:
        parts: Sums over the same columns in the same order; later ones may have more.
        edges_ns: The edges that all parts were recorded with; they place the edge rows.
    """
    held = list(parts)
    width = max((part.sums.shape[1] for part in held), default=0)
    counts = np.zeros(BAND_COUNT, np.int64)
    sums = np.zeros((BAND_COUNT, width), np.int64)
    for part in held:
        counts[part.bands] += part.counts
        sums[part.bands, : part.sums.shape[1]] += part.sums
    occupied = np.flatnonzero(counts)
    occupied = occupied[np.argsort(order_keys(edges_ns)[occupied], kind="stable")]
    return BandSums(occupied, counts[occupied], sums[occupied])


def above_edge(bands: NDArray[np.int64], edges_ns: Sequence[int], edge: int = 0) -> NDArray[np.bool_]:
    """Which rows hold nothing but latencies above an edge.

    Args:
        bands: Row ids, shape (n,).
        edges_ns: Ascending edges of the class.
        edge: Which of them.
    """
    keys = order_keys(edges_ns)
    # the row of the edge itself and everything after it: a latency equal to the edge stays in the row before
    above: NDArray[np.bool_] = keys[bands] >= keys[BASE_BANDS + edge]
    return above


def tail(sums: BandSums, edges_ns: Sequence[int], edge: int = 0) -> tuple[int, IntArray]:
    """Requests above an edge and their nanoseconds by column, shape (columns,); exact."""
    rows = above_edge(sums.bands, edges_ns, edge)
    return int(sums.counts[rows].sum()), sums.sums[rows].sum(axis=0)


def body(sums: BandSums, between: tuple[float, float] = BODY) -> tuple[float, FloatArray]:
    """Requests between two quantiles and their nanoseconds by column; a band that is cut counts in proportion.

    Args:
        sums: Band sums, ascending by latency.
        between: Lower and upper quantile.
    """
    total = int(sums.counts.sum())
    ends = np.cumsum(sums.counts, dtype=np.float64)
    starts = ends - sums.counts
    low, high = between[0] * total, between[1] * total
    shares = np.maximum(np.minimum(ends, high) - np.maximum(starts, low), 0.0) / np.maximum(sums.counts, 1)
    return float((shares * sums.counts).sum()), shares @ sums.sums.astype(np.float64)
