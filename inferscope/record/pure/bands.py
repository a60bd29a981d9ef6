"""Latency bands: 8 an octave from 1.024 us up, and one more row for each objective edge, so that tails add up across processes."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["EDGE_ROW", "BandTable", "band_of", "row_of"]

EDGE_ROW: Final = 216
"""Row of the first edge; rows below are the bands themselves."""


def band_of(ns: int) -> int:
    """The band of a duration: 0 below 1.024 us, then 8 bands to each doubling, at most 215."""
    if ns < 1024:
        return 0
    bits = ns.bit_length()
    return min((bits - 11) * 8 + ((ns >> (bits - 4)) & 7), EDGE_ROW - 1)


def row_of(ns: int, edges: tuple[int, ...]) -> int:
    """The row of a duration: its band, or `EDGE_ROW + i` when the i-th edge lies in the same band and below it (the largest such)."""
    band = band_of(ns)
    for index in range(len(edges) - 1, -1, -1):
        if ns > edges[index]:
            return EDGE_ROW + index if band_of(edges[index]) == band else band
    return band


class _Row:
    """Requests of one row and their time by column."""

    __slots__ = ("count", "sums")

    def __init__(self, columns: int) -> None:
        self.count = 0
        self.sums = [0] * columns


class BandTable:
    """Requests and exclusive time by row; running totals.

    Args:
        columns: Width of an exclusive vector.
    """

    __slots__ = ("_columns", "_rows")

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._rows: dict[int, _Row] = {}

    def add(self, row: int, vector: Sequence[int]) -> None:
        """Add one request's vector to a row."""
        entry = self._rows.get(row)
        if entry is None:
            entry = self._rows.setdefault(row, _Row(self._columns))
        sums = entry.sums
        for column, ns in enumerate(vector):
            if ns:
                sums[column] += ns
        entry.count += 1

    def move(self, row: int, source: int, target: int, ns: int) -> None:
        """Move time between two columns of a row."""
        entry = self._rows.get(row)
        if entry is not None:
            entry.sums[source] -= ns
            entry.sums[target] += ns

    def fold_edges(self, edges: tuple[int, ...]) -> None:
        """Return the rows of edges that no longer hold to the bands they were cut from."""
        for index, edge in enumerate(edges):
            entry = self._rows.pop(EDGE_ROW + index, None)
            if entry is not None:
                base = self._rows.setdefault(band_of(edge), _Row(self._columns))
                base.count += entry.count
                base.sums = [a + b for a, b in zip(base.sums, entry.sums, strict=True)]

    def read(self, edges: tuple[int, ...], columns: int) -> tuple[bytes, bytes, bytes]:
        """The rows that hold requests, in the order of the latency they stand for.

        Args:
            edges: Edges in force, ascending: an edge's row comes right after the band it cuts.
            columns: How many columns to give.

        Returns:
            Row ids as int32, counts as int64, sums as int64 (rows by columns).
        """

        def latency(row: int) -> tuple[int, int]:
            return (row, 0) if row < EDGE_ROW else (band_of(edges[row - EDGE_ROW]), row)

        rows = sorted((row for row in tuple(self._rows) if row < EDGE_ROW + len(edges)), key=latency)
        ids, counts, sums = array("i"), array("q"), array("q")
        for row in rows:
            entry = self._rows[row]
            if entry.count:
                ids.append(row)
                counts.append(entry.count)
                sums.extend(entry.sums[:columns])
        return ids.tobytes(), counts.tobytes(), sums.tobytes()
