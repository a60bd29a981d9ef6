"""The last fifteen minutes, small enough to keep always: what a diagnosis is made of once an objective breaks.

Per request class: 1-second blocks of the tail (they give the confidence intervals), coarser blocks of bands and latency counts, a
stratified reservoir of whole vectors, the slowest and the latest breaching requests with their spans.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inferscope.aggregate import bands as bands_
from inferscope.aggregate.blocks import ClassBlock, Seconds, SeriesBlock, Sparse, coarsen, dense_bands, pack_bands, sparse_of
from inferscope.aggregate.histogram import Layout, sparse_percentiles, value_at_index
from inferscope.aggregate.reservoir import Reservoir
from inferscope.clock import NS_PER_S, unix_offset_ns
from inferscope.pace import nothing, paced
from inferscope.types import BAND_COUNT, ClassKey, Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from inferscope.types import ClassWindow, Column, Distribution, LockSite, RequestRecord, Window

__all__ = ["SCHEMA", "Horizon", "record_json"]

SCHEMA: Final = 1
"""Version of the evidence document."""

BLOCK_NS: Final = 10 * NS_PER_S
_CLASS_BLOCK_BYTES: Final = 160 << 10
_SERIES_BLOCK_BYTES: Final = 1 << 20
_KEY_BITS: Final = 12
"""A stage's histogram has 3840 indices, which fit below 4096."""


def record_json(record: RequestRecord) -> dict[str, Any]:
    """A retained request as JSON: its fields, the spans as objects."""
    return {
        **{field.name: getattr(record, field.name) for field in dataclasses.fields(record)},
        "key": list(record.key),
        "vector": list(record.vector),
        "spans": [span._asdict() for span in record.spans],
        "trace": list(record.trace) if record.trace else None,
    }


class _History:
    """One request class."""

    def __init__(self, window: ClassWindow, seconds: int, slowest: int, breaching: int, seed: int) -> None:
        self.key, self.edges_ns = window.key, window.edges_ns
        self.layout = Layout(window.latency.digits, window.latency.lowest_ns)
        self.seconds = Seconds(seconds)
        self.blocks: list[ClassBlock] = []
        self.open: ClassBlock | None = None
        self.reservoir = Reservoir(window.edges_ns, horizon_ns=seconds * NS_PER_S, seed=seed)
        self.slowest_limit = slowest
        self.slowest: list[tuple[int, int, RequestRecord]] = []
        self.breaching: deque[RequestRecord] = deque(maxlen=breaching)

    @property
    def nbytes(self) -> int:
        held = sum(block.nbytes for block in self.blocks) + (self.open.nbytes if self.open else 0)
        return held + self.reservoir.nbytes

    def add(
        self,
        window: ClassWindow,
        start_ns: int,
        end_ns: int,
        records: Sequence[RequestRecord],
        horizon_ns: int,
        breathe: Callable[[], object] | None,
    ) -> None:
        if window.count or len(window.bands.bands):
            rest = breathe or nothing
            packed = pack_bands(window.bands)
            rest()
            block = ClassBlock(
                start_ns,
                end_ns,
                window.count,
                window.errors,
                window.items,
                window.excluded,
                window.violations,
                sparse_of(window.latency.counts),
                *packed,
            )
            rest()
            self.open = block if self.open is None else self.open.join(block)
            rest()
            count = int(window.bands.counts.sum())
            tail = bands_.tail(window.bands, self.edges_ns) if self.edges_ns else (0, np.zeros(0, np.int64))
            self.seconds.add(start_ns, NS_PER_S * 19 // 20, count, *tail)  # a tick may come a little early
            rest()
        self.reservoir.add(records, window.bands, end_ns, breathe)
        self._exemplars(records, end_ns - horizon_ns)
        if self.open is not None and end_ns - self.open.start_ns >= BLOCK_NS * 99 // 100:
            self.blocks.append(self.open)
            self.open = None
            while self.blocks and self.blocks[0].end_ns < end_ns - horizon_ns:
                del self.blocks[0]
            coarsen(self.blocks, _CLASS_BLOCK_BYTES, end_ns)

    def _exemplars(self, records: Sequence[RequestRecord], oldest_ns: int) -> None:
        if self.slowest and any(entry[2].start_ns < oldest_ns for entry in self.slowest):
            self.slowest = [entry for entry in self.slowest if entry[2].start_ns >= oldest_ns]
            heapq.heapify(self.slowest)
        for record in records:
            if record.profiled:
                continue
            if record.reasons & Reason.BREACH:
                self.breaching.append(record)
            if record.spans or record.reasons & Reason.SLOWEST:
                entry = (record.wall_ns, record.id, record)
                if len(self.slowest) < self.slowest_limit:
                    heapq.heappush(self.slowest, entry)
                elif entry > self.slowest[0]:
                    heapq.heapreplace(self.slowest, entry)

    def within(self, from_ns: int, to_ns: int, rest: Callable[[], object]) -> ClassBlock | None:
        """All blocks that overlap the time, joined."""
        joined: ClassBlock | None = None
        for block in [*self.blocks, *([self.open] if self.open else [])]:
            if block.end_ns > from_ns and block.start_ns < to_ns:
                joined = block if joined is None else joined.join(block)
                rest()
        return joined

    def json(self, block: ClassBlock, columns: int, to_ns: int, rest: Callable[[], object]) -> dict[str, Any]:
        counts, sums = dense_bands(block)
        wide = np.zeros((BAND_COUNT, max(columns, sums.shape[1])), np.int64)
        wide[:, : sums.shape[1]] = sums
        rows = np.flatnonzero((counts != 0) | wide.any(axis=1))
        rows = rows[np.argsort(bands_.order_keys(self.edges_ns)[rows], kind="stable")]
        requests = dict(zip(rows.tolist(), counts[rows].tolist(), strict=True))
        rest()
        return {
            **self.key._asdict(),
            "edges_ns": list(self.edges_ns),
            "count": block.count,
            "errors": block.errors,
            "excluded": block.excluded,
            "items": block.items,
            "violations": list(block.violations),
            "latency": {
                "digits": self.layout.digits,
                "lowest_ns": self.layout.lowest_ns,
                "index": block.latency.keys.tolist(),
                "count": block.latency.counts.tolist(),
            },
            "bands": {"ids": rows.tolist(), "counts": counts[rows].tolist(), "sums": wide[rows, :columns].tolist()},
            "blocks": self.seconds.json(block.start_ns, block.end_ns, columns),
            "reservoir": list(paced(self.reservoir.entries(block.start_ns, to_ns, requests, columns), rest)),
            "slowest": list(paced((record_json(record) for record in self._slowest_within(block.start_ns, to_ns)), rest)),
        }

    def _slowest_within(self, from_ns: int, to_ns: int) -> list[RequestRecord]:
        found = {entry[1]: entry[2] for entry in self.slowest}
        found.update((record.id, record) for record in self.breaching)
        inside = [record for record in found.values() if from_ns < record.start_ns + record.wall_ns <= to_ns]
        return sorted(inside, key=lambda record: -record.wall_ns)[: self.slowest_limit]


class Horizon:
    """History of all classes and series; fed by the worker once a tick.

    Args:
        seconds: How far back it reaches.
        slowest: Slowest requests kept a class.
        breaching: Latest breaching requests kept a class.
        seed: Of the reservoirs' sampling.
    """

    def __init__(self, seconds: int = 900, *, slowest: int = 32, breaching: int = 128, seed: int = 0) -> None:
        self._seconds, self._slowest, self._breaching, self._seed = seconds, slowest, breaching, seed
        self._horizon_ns = seconds * NS_PER_S
        self.reset()

    def reset(self) -> None:
        """Forget everything; for a forked child."""
        self._classes: dict[ClassKey, _History] = {}
        self._columns: tuple[Column, ...] = ()
        self._series: dict[tuple[str, tuple[str, ...]], int] = {}
        self._layouts: list[Layout] = []
        self._blocks: list[SeriesBlock] = []
        self._open: SeriesBlock | None = None
        self._sites: dict[int, tuple[int, int]] = {}
        self._lock_sites: tuple[LockSite, ...] = ()
        self._counters: Mapping[str, int] = {}
        self._first_ns: int | None = None
        self._last_ns = 0

    def nbytes(self, key: ClassKey) -> int:
        """Memory of a class's bands, latency counts and reservoir."""
        return self._classes[key].nbytes if key in self._classes else 0

    @property
    def classes(self) -> tuple[ClassKey, ...]:
        """Request classes seen so far."""
        return tuple(self._classes)

    def breaching(self, key: ClassKey) -> tuple[RequestRecord, ...]:
        """The latest requests of a class above its first edge, oldest first."""
        return tuple(self._classes[key].breaching) if key in self._classes else ()

    def add(self, window: Window, lock_sites: Sequence[LockSite] = (), breathe: Callable[[], object] | None = None) -> None:
        """Take one tick.

        Args:
            window: What the aggregator saw; nothing of it is kept by reference but the records.
            lock_sites: The recorder's running totals at the end of the window.
            breathe: Called between slices of work; see `Aggregator.tick`.
        """
        self._columns = window.columns
        self._counters = window.counters
        self._first_ns = max(window.start_ns if self._first_ns is None else self._first_ns, window.end_ns - self._horizon_ns)
        self._last_ns = window.end_ns
        records: dict[ClassKey, list[RequestRecord]] = {}
        for record in window.records:
            records.setdefault(record.key, []).append(record)
        for held in window.classes:
            history = self._classes.get(held.key)
            if history is None or history.edges_ns != held.edges_ns:  # with other edges, rows 216 and up mean something else
                history = self._classes[held.key] = _History(held, self._seconds, self._slowest, self._breaching, self._seed)
            history.add(held, window.start_ns, window.end_ns, records.get(held.key, ()), self._horizon_ns, breathe)
            if breathe is not None:
                breathe()
        self._add_series(window, lock_sites)

    def evidence(
        self,
        select: ClassKey | str | None,
        from_ns: int,
        to_ns: int,
        *,
        slot: int = 0,
        pid: int = 0,
        instance_id: str = "",
        breathe: Callable[[], object] | None = None,
    ) -> dict[str, Any]:
        """What happened between two instants, as the JSON document that a diagnosis reads.

        The time is widened to whole blocks, so that every number of a class covers the same requests, and cut to
        what the horizon knows; `from_ns` and `to_ns` in the document say what it became.
        `copies`, `gc`, `device`, `process` and `status` are the caller's to fill.

        Args:
            select: One class, every class of a request name, or None for all.
            from_ns: Begin, monotonic.
            to_ns: End, monotonic.
            slot: Written as it is, like the next two.
            pid: The process.
            instance_id: `service.instance.id`.
            breathe: Called between slices of work; see `Aggregator.tick`.
        """
        rest = breathe or nothing
        columns = len(self._columns)
        chosen = [(history, history.within(from_ns, to_ns, rest)) for history in self._classes.values() if _selected(history.key, select)]
        found = [(history, block) for history, block in chosen if block is not None]
        return {
            "schema": SCHEMA,
            "slot": slot,
            "pid": pid,
            "instance_id": instance_id,
            "from_ns": max(min([from_ns, *(block.start_ns for _, block in found)]), self._first_ns or 0),
            "to_ns": min(max([to_ns, *(block.end_ns for _, block in found)]), self._last_ns),
            "unix_offset_ns": unix_offset_ns(),
            "columns": [list(column) for column in self._columns],
            "classes": [history.json(block, columns, max(to_ns, block.end_ns), rest) for history, block in found],
            "series": list(paced(self._series_json(from_ns, to_ns, rest), rest)),
            "locks": self._locks_json(from_ns),
            "counters": dict(self._counters),
            "copies": [],
            "gc": [],
            "device": {"busy": None, "source": None},
            "process": {},
            "status": {},
        }

    def _add_series(self, window: Window, lock_sites: Sequence[LockSite]) -> None:
        active = sorted(((self._series_id(held), held) for held in window.series if held.count), key=lambda pair: pair[0])
        self._lock_sites = tuple(lock_sites) or self._lock_sites
        sites = {site.site_id: (site.waits, site.wait_ns) for site in lock_sites}
        if sites and sites != self._sites:
            self._sites = sites
        block = SeriesBlock(
            window.start_ns,
            window.end_ns,
            _stack([sparse_of(held.counts, id_ << _KEY_BITS) for id_, held in active]),
            np.array([id_ for id_, _ in active], np.uint16),
            np.reshape(np.array([(held.count, held.sum_ns) for _, held in active], np.int64), (-1, 2)),
            self._sites,
        )
        self._open = block if self._open is None else self._open.join(block)
        if window.end_ns - self._open.start_ns >= BLOCK_NS * 99 // 100:
            self._blocks.append(self._open)
            self._open = None
            while self._blocks and self._blocks[0].end_ns < window.end_ns - self._horizon_ns:
                del self._blocks[0]
            coarsen(self._blocks, _SERIES_BLOCK_BYTES, window.end_ns)

    def _series_id(self, held: Distribution) -> int:
        name = (held.kind, held.labels)
        if name not in self._series:
            self._series[name] = len(self._layouts)
            self._layouts.append(Layout(held.digits, held.lowest_ns))
        return self._series[name]

    def _series_json(self, from_ns: int, to_ns: int, rest: Callable[[], object]) -> Iterator[dict[str, Any]]:
        joined: SeriesBlock | None = None
        for block in [*self._blocks, *([self._open] if self._open else [])]:
            if block.end_ns > from_ns and block.start_ns < to_ns:
                joined = block if joined is None else joined.join(block)
                rest()
        if joined is None:
            return
        totals = dict(zip(joined.series.tolist(), joined.totals.tolist(), strict=True))
        bounds = np.searchsorted(joined.histogram.keys, np.arange(len(self._layouts) + 1, dtype=np.int64) << _KEY_BITS)
        for (kind, labels), id_ in self._series.items():
            rows = slice(int(bounds[id_]), int(bounds[id_ + 1]))
            indices = joined.histogram.keys[rows].astype(np.int64) - (id_ << _KEY_BITS)
            if id_ not in totals or not len(indices):
                continue
            within = self._layouts[id_]
            p50, p99 = sparse_percentiles(indices, joined.histogram.counts[rows], within, (0.5, 0.99))
            yield {
                "kind": kind,
                "labels": list(labels),
                "count": totals[id_][0],
                "sum_ns": totals[id_][1],
                "p50_ns": p50,
                "p99_ns": p99,
                "max_ns": value_at_index(int(indices[-1]), within)[2],
            }

    def _locks_json(self, from_ns: int) -> list[dict[str, Any]]:
        """Waits since the horizon began; the longest hold is the process's."""
        before: dict[int, tuple[int, int]] = {}
        for block in self._blocks:
            if block.end_ns <= from_ns:
                before = block.sites
        rows: list[dict[str, Any]] = []
        for site in self._lock_sites:
            waits, wait_ns = before.get(site.site_id, (0, 0))
            if site.waits > waits:
                changed = dataclasses.replace(site, waits=site.waits - waits, wait_ns=site.wait_ns - wait_ns)
                rows.append(dataclasses.asdict(changed))
        return rows


def _selected(key: ClassKey, select: ClassKey | str | None) -> bool:
    return select is None or (key == select if isinstance(select, ClassKey) else key.request == select)


def _stack(parts: Sequence[Sparse]) -> Sparse:
    """Parts whose keys already ascend, end to end."""
    if not parts:
        return Sparse(np.zeros(0, np.uint32), np.zeros(0, np.uint32))
    return Sparse(np.concatenate([part.keys for part in parts]), np.concatenate([part.counts for part in parts]))
