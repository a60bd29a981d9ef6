"""A recorder that counts whole arrays of requests: what `Aggregator` reads, at simulation speed."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from inferscope.aggregate.bands import bands_of
from inferscope.aggregate.histogram import REQUESTS, STAGES, indices_of
from inferscope.types import BAND_COUNT, Reason

if TYPE_CHECKING:
    from inferscope.types import IntArray

__all__ = ["ArrayRecorder"]


class ArrayRecorder:
    """One request class, fed by `feed`; keeps requests as the real recorder does.

    Args:
        columns: (kind, name) of the vectors' columns.
        edges_ns: Objective edges.
        seed: Of the reservoir.
    """

    def __init__(self, columns, edges_ns=(20_000_000,), seed=0, request="score", model=None, cls=None):
        self._columns = list(columns)
        self.edges_ns = tuple(edges_ns)
        self.key = (request, model, cls)
        self._random = np.random.default_rng(seed)
        self.sites: list[tuple[str, int, str, str | None, int, int, int]] = []
        request_, model_, cls_ = self.key
        self._series = [(0, "request", (request_, model_ or "", cls_ or ""), 3, 1000, REQUESTS.size)]
        self._series += [(i, kind, (name,), 2, 1, STAGES.size) for i, (kind, name) in enumerate(self._columns[2:], 1)]
        self._id = 0
        self.epochs = 0
        self.after_fork()

    def after_fork(self) -> None:
        self._histograms = [np.zeros(REQUESTS.size, np.int64)] + [np.zeros(STAGES.size, np.int64) for _ in self._columns[2:]]
        self._sums = [0] * len(self._histograms)
        self._class = dict.fromkeys(
            ("count", "errors", "items", "excluded", "late_spans", "truncated", "wall_ns", "cpu_ns", "cpu_wall_ns", "cpu_requests"), 0
        )
        self._violations = np.zeros(len(self.edges_ns), np.int64)
        self._bands = np.zeros(BAND_COUNT, np.int64)
        self._band_sums = np.zeros((BAND_COUNT, len(self._columns)), np.int64)
        self._seen = np.zeros(BAND_COUNT, np.int64)
        self._retained: list[tuple[Any, ...]] = []
        self._slowest: list[int] = []
        self._breaching = 2048

    def feed(self, start_ns: IntArray, wall_ns: IntArray, vectors: IntArray, *, errors: int = 0, profiled: int = 0) -> None:
        """Finish these requests; the first `profiled` of them had a capture tried on them."""
        self._class["count"] += len(wall_ns)
        self._class["items"] += len(wall_ns)
        self._class["errors"] += errors
        self._class["excluded"] += profiled
        self._class["wall_ns"] += int(wall_ns.sum())
        self._violations += [(wall_ns > edge).sum() for edge in self.edges_ns]
        for row in range(profiled):
            self._retain(start_ns[row], wall_ns[row], vectors[row], 0, Reason.PROFILED)
        start_ns, wall_ns, vectors = start_ns[profiled:], wall_ns[profiled:], vectors[profiled:]
        self._histograms[0] += np.bincount(indices_of(wall_ns, REQUESTS), minlength=REQUESTS.size)
        self._sums[0] += int(wall_ns.sum())
        for column, counts in enumerate(self._histograms[1:], 2):
            spent = vectors[:, column][vectors[:, column] > 0]
            counts += np.bincount(indices_of(spent, STAGES), minlength=STAGES.size)
            self._sums[column - 1] += int(spent.sum())
        bands = bands_of(wall_ns, self.edges_ns)
        self._bands += np.bincount(bands, minlength=BAND_COUNT)
        np.add.at(self._band_sums, bands, vectors)
        for row, band in enumerate(bands.tolist()):
            self._offer(row, band, start_ns, wall_ns, vectors)

    def _offer(self, row, band, start_ns, wall_ns, vectors) -> None:
        wall, reasons = int(wall_ns[row]), 0
        if self.edges_ns and wall > self.edges_ns[0] and self._breaching > 0:
            self._breaching -= 1
            reasons |= Reason.BREACH
        if len(self._slowest) < 32 or wall > self._slowest[0]:
            self._slowest = sorted([*self._slowest, wall])[-32:]
            reasons |= Reason.SLOWEST
        seen = self._seen[band] = self._seen[band] + 1
        if seen <= 64 or self._random.random() < 64 / seen:
            reasons |= Reason.RESERVOIR
        if reasons:
            self._retain(start_ns[row], wall, vectors[row], band, reasons)

    def _retain(self, start_ns, wall_ns, vector, band, reasons) -> None:
        self._id += 1
        span = struct.pack("<qqqIHBB", int(start_ns), int(start_ns + wall_ns), 0, 7, 2, 255, 0)
        packed = vector.astype(np.int64).tobytes()
        timing = self._id, 0, int(start_ns), int(wall_ns), band, reasons, 7
        self._retained.append((*timing, None, 1, None, None, None, None, False, packed, span, None, False))

    def columns(self):
        return self._columns

    def series(self):
        return self._series

    def read_counts(self, index, buffer):
        buffer[:] = self._histograms[index]
        return int(self._histograms[index].sum()), self._sums[index], 0

    def classes(self):
        return [(0, *self.key, 0, self.edges_ns)]

    def read_class(self, index):
        assert index == 0
        return {**self._class, "violations": tuple(int(value) for value in self._violations)}

    def read_bands(self, index):
        assert index == 0
        order = [band for band in range(BAND_COUNT) if self._bands[band]]
        ids = np.array(order, np.int32)
        return ids.tobytes(), self._bands[order].tobytes(), self._band_sums[order].tobytes()

    def drain(self):
        found, self._retained = self._retained, []
        return found

    def begin_epoch(self, *, breaching=2048, reservoir=64, slowest=32):
        self.epochs += 1
        self._breaching, self._slowest = breaching, []
        self._seen //= 2

    def lock_sites(self):
        return self.sites

    def counters(self):
        return {"late_spans": 0}
