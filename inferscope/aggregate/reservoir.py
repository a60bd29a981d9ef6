"""Whole request vectors, a fixed number a latency band, with weights that say how many requests each stands for.

The recorder already samples: a retained request of a tick stands for (requests of its band in that tick) / (retained ones). Of those a
priority sample is kept (Duffield, Lund, Thorup, "Priority sampling for estimation of arbitrary subset sums", 2007): priority = weight /
uniform, the k largest stay, and each stands for max(weight, largest priority that was dropped). Weights are then scaled so that a band's
sum to the requests it held, which is known exactly.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inferscope.aggregate.bands import BASE_BANDS, bounds_ns
from inferscope.types import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from inferscope.types import BandSums, RequestRecord

__all__ = ["Reservoir"]

_NARROW_NS: Final = 1 << 32
_FIRST_ROWS: Final = 8
_COLUMN_STEP: Final = 4


class _Band:
    """Rows of one band: parallel arrays that grow to the limit."""

    __slots__ = ("dropped", "dropped_before", "priority", "start_ns", "used", "vectors", "wall_ns", "weight")

    def __init__(self, narrow: bool, columns: int) -> None:  # noqa: FBT001 - private
        self.used = 0
        self.dropped = self.dropped_before = 0.0
        self.priority = np.zeros(_FIRST_ROWS)
        self.weight = np.zeros(_FIRST_ROWS)
        self.start_ns = np.zeros(_FIRST_ROWS, np.int64)
        self.wall_ns = np.zeros(_FIRST_ROWS, np.int64)
        # a request below 4.29 s has no part that needs more than 32 bits: half the memory, and still exact
        self.vectors: NDArray[Any] = np.zeros((_FIRST_ROWS, columns), np.uint32 if narrow else np.int64)

    @property
    def nbytes(self) -> int:
        return self.priority.nbytes + self.weight.nbytes + self.start_ns.nbytes + self.wall_ns.nbytes + self.vectors.nbytes

    def resize(self, rows: int, columns: int) -> None:
        """Reallocate; rows in use and columns stay."""
        kept = min(self.used, rows)
        for name in ("priority", "weight", "start_ns", "wall_ns"):
            old = getattr(self, name)
            new = np.zeros(rows, old.dtype)
            new[:kept] = old[:kept]
            setattr(self, name, new)
        vectors = np.zeros((rows, columns), self.vectors.dtype)
        vectors[:kept, : self.vectors.shape[1]] = self.vectors[:kept]
        self.vectors = vectors

    def keep(self, rows: NDArray[Any]) -> None:
        """Drop all rows but these indices."""
        for name in ("priority", "weight", "start_ns", "wall_ns", "vectors"):
            held = getattr(self, name)
            held[: len(rows)] = held[rows]
        self.used = len(rows)

    def place(self, limit: int, priority: float) -> int:
        """The row for a new entry, or -1 when its priority is too low."""
        if self.used < limit:
            if self.used == len(self.priority):
                self.resize(min(2 * self.used, limit), self.vectors.shape[1])
            self.used += 1
            return self.used - 1
        row = int(np.argmin(self.priority[: self.used]))
        lowest = float(self.priority[row])
        self.dropped = max(self.dropped, min(lowest, priority))
        return row if priority > lowest else -1


class Reservoir:
    """Stratified sample of one request class over the last `horizon_ns`.

    Args:
        edges_ns: Ascending objective edges of the class.
        per_band: Vectors kept a band at most.
        horizon_ns: Entries that began earlier than this before the newest window are dropped.
        limit_bytes: When the arrays would take more, `per_band` is halved: the estimate gets coarser, memory does not grow.
        seed: Of the sampling.
    """

    def __init__(
        self,
        edges_ns: Sequence[int] = (),
        *,
        per_band: int = 64,
        horizon_ns: int = 900_000_000_000,
        limit_bytes: int = 224 << 10,
        seed: int = 0,
    ) -> None:
        self.per_band = per_band
        self._edges = tuple(edges_ns)
        self._horizon_ns = horizon_ns
        self._limit_bytes = limit_bytes
        self._random = random.Random(seed)  # noqa: S311 - sampling, not secrets
        self._bands: dict[int, _Band] = {}
        self._pending: dict[int, int] = {}
        self._slots: dict[int, int] = {}
        self._width = _COLUMN_STEP
        self._swept = 0
        self._turned = 0

    @property
    def nbytes(self) -> int:
        """Memory of the arrays."""
        return sum(band.nbytes for band in self._bands.values())

    def __len__(self) -> int:
        return sum(band.used for band in self._bands.values())

    def add(self, records: Iterable[RequestRecord], sums: BandSums, now_ns: int, breathe: Callable[[], object] | None = None) -> None:
        """Take the requests of one window.

        Args:
            records: Retained requests of this class; those kept only for being the slowest, and profiled ones, are passed over.
            sums: The window's band sums, which say how many requests the records stand for.
            now_ns: End of the window.
            breathe: Called between slices of work; see `Aggregator.tick`.
        """
        found: dict[int, list[RequestRecord]] = {}
        for record in records:
            if record.reasons & (Reason.RESERVOIR | Reason.BREACH) and not record.profiled:
                found.setdefault(record.band, []).append(record)
        for band, count in zip(sums.bands.tolist(), sums.counts.tolist(), strict=True):
            self._pending[band] = self._pending.get(band, 0) + count
        for band, kept in found.items():
            # requests of earlier windows that left no record in this band are stood for by these
            weight = max(self._pending.pop(band, 0) / len(kept), 1.0)
            for record in kept:
                self._insert(band, record, weight)
                if breathe is not None:
                    breathe()
        self._expire(now_ns)
        while self.nbytes > self._limit_bytes and self.per_band > 1:
            self._shrink()

    def entries(self, from_ns: int, to_ns: int, requests: Mapping[int, int], columns: int) -> Iterator[dict[str, Any]]:
        """Rows of evidence, by band.

        Args:
            from_ns: Requests that ended by then are left out.
            to_ns: As well as those that ended later.
            requests: Requests by band in that time, which the weights of a band add up to.
            columns: Length of the vectors.
        """
        order = list(self._slots)
        for id_, band in self._bands.items():
            total = requests.get(id_, 0)
            ends = band.start_ns[: band.used] + band.wall_ns[: band.used]
            rows = np.flatnonzero((ends > from_ns) & (ends <= to_ns))
            if not len(rows) or not total:
                continue
            shares = np.maximum(band.weight[rows], max(band.dropped, band.dropped_before))
            weights = (shares * (total / shares.sum())).tolist()
            vectors = np.zeros((len(rows), max(columns, max(order, default=0) + 1)), np.int64)
            known = order[: band.vectors.shape[1]]  # a band without a request since a column appeared has no room for it
            vectors[:, known] = band.vectors[rows, : len(known)]
            for row, weight, vector in zip(rows.tolist(), weights, vectors[:, :columns].tolist(), strict=True):
                yield {
                    "wall_ns": int(band.wall_ns[row]),
                    "start_ns": int(band.start_ns[row]),
                    "band": id_,
                    "weight": weight,
                    "vector": vector,
                }

    def _insert(self, id_: int, record: RequestRecord, weight: float) -> None:
        band = self._bands.get(id_)
        if band is None:
            high = bounds_ns(id_, self._edges)[1] if id_ < BASE_BANDS or id_ - BASE_BANDS < len(self._edges) else _NARROW_NS
            band = self._bands[id_] = _Band(high < _NARROW_NS, self._width)
        priority = weight / (1.0 - self._random.random())
        row = band.place(self.per_band, priority)
        if row < 0:
            return
        band.priority[row], band.weight[row] = priority, weight
        band.start_ns[row], band.wall_ns[row] = record.start_ns, record.wall_ns
        slots = [(self._slot(column), value) for column, value in enumerate(record.vector) if value]
        if band.vectors.shape[1] < self._width:
            band.resize(len(band.priority), self._width)
        band.vectors[row] = 0
        for slot, value in slots:
            band.vectors[row, slot] = value

    def _slot(self, column: int) -> int:
        """Where a column is kept: only those that this class ever used take room."""
        slot = self._slots.setdefault(column, len(self._slots))
        if slot >= self._width:
            self._width += _COLUMN_STEP
        return slot

    def _expire(self, now_ns: int) -> None:
        if now_ns - self._swept < self._horizon_ns // 90:
            return
        self._swept = now_ns
        oldest = now_ns - self._horizon_ns
        turn = now_ns - self._turned >= self._horizon_ns // 2
        if turn:
            self._turned = now_ns
        for id_ in list(self._bands):
            band = self._bands[id_]
            rows = np.flatnonzero(band.start_ns[: band.used] >= oldest)
            if turn:  # what was dropped long ago says nothing about what is kept now
                band.dropped, band.dropped_before = 0.0, band.dropped
            if not len(rows):
                del self._bands[id_]
            elif len(rows) < band.used:
                band.keep(rows)

    def _shrink(self) -> None:
        self.per_band //= 2
        for band in self._bands.values():
            if band.used > self.per_band:
                order = np.argsort(band.priority[: band.used])
                band.dropped = max(band.dropped, float(band.priority[order[-self.per_band - 1]]))
                band.keep(np.sort(order[-self.per_band :]))
            if len(band.priority) > self.per_band:
                band.resize(max(self.per_band, 1), band.vectors.shape[1])
