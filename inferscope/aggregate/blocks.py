"""Additive stretches of history: what one class, or all series together, did between two instants.

A horizon is a list of blocks. The newest last ten seconds each; when the list takes more memory than it may, old neighbours are joined,
so that precision in time is spent where the question is asked: at the onset, which is recent.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from inferscope.types import BAND_COUNT, BandSums

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from inferscope.types import IntArray

__all__ = ["ClassBlock", "Seconds", "SeriesBlock", "Sparse", "add_sparse", "coarsen", "pack_bands", "sparse_of"]


@dataclass(frozen=True, slots=True)
class Sparse:
    """Occupied indices, ascending, and their counts."""

    keys: NDArray[np.uint32]
    counts: NDArray[np.uint32]

    @property
    def nbytes(self) -> int:
        """Memory of the arrays."""
        return self.keys.nbytes + self.counts.nbytes


def sparse_of(counts: IntArray, offset: int = 0) -> Sparse:
    """The occupied indices of dense counts, shifted by `offset`."""
    keys = np.flatnonzero(counts > 0)
    return Sparse((keys + offset).astype(np.uint32), counts[keys].astype(np.uint32))


def add_sparse(parts: Sequence[Sparse]) -> Sparse:
    """Add counts index by index."""
    if len(parts) == 1:
        return parts[0]
    keys, places = np.unique(np.concatenate([part.keys for part in parts]) if parts else np.zeros(0, np.uint32), return_inverse=True)
    counts = np.zeros(len(keys), np.uint32)
    if parts:
        np.add.at(counts, places, np.concatenate([part.counts for part in parts]))
    return Sparse(keys.astype(np.uint32), counts)


@dataclass(frozen=True, slots=True)
class ClassBlock:
    """One request class between two instants."""

    start_ns: int
    end_ns: int
    count: int
    errors: int
    items: int
    excluded: int
    violations: tuple[int, ...]
    latency: Sparse
    bands: NDArray[np.uint8]
    """Rows that occur, unordered, shape (n,)."""
    band_counts: IntArray
    columns: NDArray[np.uint8]
    """Columns that occur, ascending, shape (m,)."""
    sums: IntArray
    """Nanoseconds, shape (n, m)."""

    @property
    def nbytes(self) -> int:
        """Memory of the arrays."""
        return self.latency.nbytes + self.bands.nbytes + self.band_counts.nbytes + self.columns.nbytes + self.sums.nbytes

    def join(self, later: ClassBlock) -> ClassBlock:
        """Both together."""
        parts = [dense_bands(self), dense_bands(later)]
        width = max(sums.shape[1] for _, sums in parts)
        counts = np.zeros(BAND_COUNT, np.int64)
        total = np.zeros((BAND_COUNT, width), np.int64)
        for part_counts, sums in parts:
            counts += part_counts
            total[:, : sums.shape[1]] += sums
        bands, band_counts, columns, sums = _compact(counts, total)
        longer, shorter = sorted((self.violations, later.violations), key=len, reverse=True)
        return ClassBlock(
            min(self.start_ns, later.start_ns),
            max(self.end_ns, later.end_ns),
            self.count + later.count,
            self.errors + later.errors,
            self.items + later.items,
            self.excluded + later.excluded,
            tuple(value + (shorter[position] if position < len(shorter) else 0) for position, value in enumerate(longer)),
            add_sparse([self.latency, later.latency]),
            bands,
            band_counts,
            columns,
            sums,
        )


def dense_bands(block: ClassBlock) -> tuple[IntArray, IntArray]:
    """Counts of all 220 rows and their sums, as wide as the block's highest column."""
    counts = np.zeros(BAND_COUNT, np.int64)
    counts[block.bands] = block.band_counts
    sums = np.zeros((BAND_COUNT, int(block.columns[-1]) + 1 if len(block.columns) else 0), np.int64)
    sums[np.ix_(block.bands, block.columns)] = block.sums
    return counts, sums


def _compact(counts: IntArray, sums: IntArray) -> tuple[NDArray[np.uint8], IntArray, NDArray[np.uint8], IntArray]:
    rows = np.flatnonzero((counts != 0) | sums.any(axis=1))
    columns = np.flatnonzero(sums.any(axis=0))
    return rows.astype(np.uint8), counts[rows], columns.astype(np.uint8), sums[np.ix_(rows, columns)]


def pack_bands(sums: BandSums) -> tuple[NDArray[np.uint8], IntArray, NDArray[np.uint8], IntArray]:
    """Rows, counts, columns and sums of a window without its empty columns."""
    columns = np.flatnonzero(sums.sums.any(axis=0))
    return sums.bands.astype(np.uint8), sums.counts.astype(np.int64), columns.astype(np.uint8), sums.sums[:, columns].astype(np.int64)


@dataclass(frozen=True, slots=True)
class SeriesBlock:
    """Every series but the requests' between two instants; a key is series * 4096 + histogram index."""

    start_ns: int
    end_ns: int
    histogram: Sparse
    series: NDArray[np.uint16]
    """Series that counted something, ascending, shape (n,)."""
    totals: IntArray
    """Their counts and nanoseconds, shape (n, 2)."""
    sites: dict[int, tuple[int, int]]
    """Lock sites at the end of the block: id to running waits and nanoseconds waited; shared while nothing changes."""

    @property
    def nbytes(self) -> int:
        """Memory of the arrays."""
        return self.histogram.nbytes + self.series.nbytes + self.totals.nbytes

    def join(self, later: SeriesBlock) -> SeriesBlock:
        """Both together."""
        series, places = np.unique(np.concatenate([self.series, later.series]), return_inverse=True)
        totals = np.zeros((len(series), 2), np.int64)
        np.add.at(totals, places, np.concatenate([self.totals, later.totals]))
        return SeriesBlock(
            min(self.start_ns, later.start_ns),
            max(self.end_ns, later.end_ns),
            add_sparse([self.histogram, later.histogram]),
            series,
            totals,
            later.sites,
        )


class Seconds:
    """Tail sums by second, only of seconds with requests: parallel arrays, oldest first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.head: IntArray = np.zeros((64, 3), np.int64)  # start, requests, requests above the first edge
        self.sums: IntArray = np.zeros((64, 4), np.int64)

    def add(self, start_ns: int, second_ns: int, count: int, tail_count: int, tail_sums: IntArray) -> None:
        """Add a window to its second, or begin the next when `second_ns` are over."""
        last = self.used - 1
        if last < 0 or start_ns - self.head[last, 0] >= second_ns:
            last = self._room(start_ns)
        if len(tail_sums) > self.sums.shape[1] and tail_sums.any():
            self.sums = np.pad(self.sums, ((0, 0), (0, len(tail_sums) - self.sums.shape[1])))
        width = min(len(tail_sums), self.sums.shape[1])
        self.head[last, 1:] += (count, tail_count)
        self.sums[last, :width] += tail_sums[:width]

    def _room(self, start_ns: int) -> int:
        if self.used == len(self.head):
            if self.used >= 2 * self.limit:
                keep = self.used - self.limit
                self.head[: self.limit], self.sums[: self.limit] = np.array(self.head[keep:]), np.array(self.sums[keep:])
                self.head[self.limit :], self.sums[self.limit :] = 0, 0
                self.used = self.limit
            else:
                grown = min(2 * self.used, 2 * self.limit)
                self.head, self.sums = (np.pad(held, ((0, grown - self.used), (0, 0))) for held in (self.head, self.sums))
        self.head[self.used, 0] = start_ns
        self.used += 1
        return self.used - 1

    def json(self, from_ns: int, to_ns: int, columns: int) -> list[dict[str, Any]]:
        """Seconds that began between two instants, as evidence has them."""
        starts = self.head[: self.used, 0]
        rows = np.flatnonzero((starts >= from_ns) & (starts < to_ns))
        sums = np.zeros((len(rows), max(columns, self.sums.shape[1])), np.int64)
        sums[:, : self.sums.shape[1]] = self.sums[rows]
        return [
            {"t_ns": start, "count": count, "tail_count": tail_count, "tail_sums": row}
            for (start, count, tail_count), row in zip(self.head[rows].tolist(), sums[:, :columns].tolist(), strict=True)
        ]


class _Block(Protocol):
    @property
    def start_ns(self) -> int: ...
    @property
    def end_ns(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def join(self, later: Any, /) -> Any: ...


_B = TypeVar("_B", bound=_Block)


def coarsen(blocks: list[_B], limit_bytes: int, now_ns: int) -> None:
    """Join neighbours until the blocks fit: first those whose joint length is small against their age.

    Args:
        blocks: Oldest first; changed in place.
        limit_bytes: Room for their arrays.
        now_ns: What age counts from.
    """
    while len(blocks) > 2 and sum(block.nbytes for block in blocks) > limit_bytes:
        costs = [(b.end_ns - a.start_ns) / (now_ns - b.end_ns + 1_000_000_000) for a, b in pairwise(blocks)]
        place = costs.index(min(costs))
        blocks[place : place + 2] = [blocks[place].join(blocks[place + 1])]
