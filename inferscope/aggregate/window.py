"""Snapshots of a recorder become windows: the difference of running totals between two ticks.

The recorder is never reset, so a tick costs a copy and a subtraction a series and loses nothing. Buffers are reused from tick to tick:
a window's counts hold until the next tick. A total that fell (a recorder that was emptied after a fork) starts again from zero.
"""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inferscope.clock import now_ns as _now_ns
from inferscope.pace import nothing
from inferscope.types import (
    BAND_COUNT,
    BandSums,
    ClassKey,
    ClassWindow,
    Column,
    Distribution,
    LockSite,
    Reason,
    RequestRecord,
    SpanRecord,
    Window,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Protocol

    from inferscope.types import IntArray

    class RecorderReader(Protocol):
        """What the aggregator reads of a recorder."""

        def columns(self) -> Sequence[tuple[str, str]]: ...
        def series(self) -> Sequence[tuple[int, str, tuple[str, ...], int, int, int]]: ...
        def read_counts(self, index: int, buffer: Any, /) -> tuple[int, int, int]: ...
        def classes(self) -> Sequence[tuple[int, str, str | None, str | None, int, tuple[int, ...]]]: ...
        def read_class(self, index: int, /) -> dict[str, Any]: ...
        def read_bands(self, index: int, /) -> tuple[bytes, bytes, bytes]: ...
        def drain(self) -> Sequence[tuple[Any, ...]]: ...
        def begin_epoch(self, *, breaching: int = ..., reservoir: int = ..., slowest: int = ...) -> None: ...
        def lock_sites(self) -> Sequence[tuple[str, int, str, str | None, int, int, int, str | None]]: ...
        def counters(self) -> dict[str, int]: ...


__all__ = ["EPOCH_NS", "Aggregator", "ClassTotals", "decode"]

EPOCH_NS: Final = 10_000_000_000
"""Retention budgets of the recorder are renewed this often."""
_SPAN: Final = struct.Struct("<qqqIHBB")
_WITH_SPANS: Final = Reason.BREACH | Reason.SLOWEST | Reason.PROFILED
_ROOT: Final = 255


@dataclass(frozen=True, slots=True)
class ClassTotals:
    """Running totals of one request class since the process started counting."""

    key: ClassKey
    edges_ns: tuple[int, ...]
    count: int
    errors: int
    items: int
    excluded: int
    late_spans: int
    truncated: int
    violations: tuple[int, ...]
    wall_ns: int
    cpu_ns: int
    """Thread CPU time, of which `cpu_wall_ns` is the wall time: of short requests one of each 64 is measured and counts 64 times."""
    cpu_wall_ns: int
    cpu_requests: int
    shed: int = 0
    cancelled: int = 0
    overdue: tuple[int, ...] = ()


class _Series:
    """Running totals of one series and its difference over the last tick; arrays are allocated once."""

    __slots__ = ("clamped", "count", "delta", "digits", "kind", "labels", "lowest_ns", "quiet", "sum_ns", "total", "window")

    def __init__(self, kind: str, labels: tuple[str, ...], digits: int, lowest_ns: int, size: int) -> None:
        self.kind, self.labels, self.digits, self.lowest_ns = kind, labels, digits, lowest_ns
        self.total: IntArray = np.zeros(size, np.int64)
        self.delta: IntArray = np.zeros(size, np.int64)
        self.count = self.sum_ns = self.clamped = 0
        self.quiet = Distribution(kind, labels, digits, lowest_ns, np.zeros(0, np.int64), 0, 0, 0)
        self.window = self.quiet

    def forget(self) -> None:
        self.total[:] = 0
        self.count = self.sum_ns = self.clamped = 0
        self.window = self.quiet

    def read(self, recorder: RecorderReader, index: int, scratch: IntArray) -> None:
        buffer = scratch[: len(self.total)]
        count, sum_ns, clamped = recorder.read_counts(index, buffer)
        if count < self.count:
            self.forget()
        if count == self.count:
            self.window = self.quiet  # shared and empty: a series at rest allocates nothing
            return
        np.subtract(buffer, self.total, out=self.delta)
        self.total[:] = buffer
        self.window = self._distribution(self.delta, count - self.count, sum_ns - self.sum_ns, clamped - self.clamped)
        self.count, self.sum_ns, self.clamped = count, sum_ns, clamped

    def cumulative(self) -> Distribution:
        return self._distribution(np.array(self.total), self.count, self.sum_ns, self.clamped)

    def _distribution(self, counts: IntArray, count: int, sum_ns: int, clamped: int) -> Distribution:
        return Distribution(self.kind, self.labels, self.digits, self.lowest_ns, counts, count, sum_ns, clamped)


class _Class:
    """Running totals of one request class."""

    __slots__ = ("band_counts", "band_sums", "edges_ns", "key", "series", "totals")

    def __init__(self, key: ClassKey, series: int, edges_ns: tuple[int, ...]) -> None:
        self.key, self.series, self.edges_ns = key, series, edges_ns
        self.forget()

    def forget(self) -> None:
        self.totals: ClassTotals | None = None
        self.band_counts: IntArray = np.zeros(BAND_COUNT, np.int64)
        self.band_sums: IntArray = np.zeros((BAND_COUNT, 16), np.int64)

    def read_bands(self, recorder: RecorderReader, index: int) -> BandSums:
        ids_, counts_, sums_ = recorder.read_bands(index)
        ids = np.frombuffer(ids_, np.int32).astype(np.int64)
        counts = np.frombuffer(counts_, np.int64)
        width = len(sums_) // 8 // len(ids) if len(ids) else 0
        sums = np.reshape(np.frombuffer(sums_, np.int64), (len(ids), width))
        if width > self.band_sums.shape[1]:
            self.band_sums = np.pad(self.band_sums, ((0, 0), (0, width - self.band_sums.shape[1])))
        grown = counts - self.band_counts[ids]
        times = sums - self.band_sums[ids, :width]
        if (grown < 0).any():
            self.band_counts[:] = 0
            self.band_sums[:] = 0
            grown, times = counts, sums
        self.band_counts[ids] = counts
        self.band_sums[ids, :width] = sums
        moved = (grown > 0) | times.any(axis=1)  # late device time moves between columns of a row whose count stands
        return BandSums(ids[moved], grown[moved], times[moved])


class Aggregator:
    """Reads one recorder tick by tick; used by one worker thread.

    Args:
        recorder: What is read.
        clock: Nanoseconds, monotonic.
        epoch_ns: How often the recorder's retention budgets are renewed.
    """

    def __init__(self, recorder: RecorderReader, clock: Callable[[], int] = _now_ns, *, epoch_ns: int = EPOCH_NS) -> None:
        self._recorder = recorder
        self._clock = clock
        self._epoch_ns = epoch_ns
        self._last_ns = self._epoch = clock()
        self.sampling: Mapping[str, int] = {}
        """Retention budgets other than the recorder's own: `breaching`, `reservoir`, `slowest`."""
        self._series: list[_Series] = []
        self._classes: list[_Class] = []
        self._columns: tuple[Column, ...] = ()
        self._waiting: list[tuple[Any, ...]] = []
        self._scratch: IntArray = np.zeros(0, np.int64)
        self._lock = threading.Lock()

    @property
    def columns(self) -> tuple[Column, ...]:
        """Owners of time as of the last tick, by column index."""
        return self._columns

    def reset(self) -> None:
        """Forget every total, because the recorder was emptied: call it in a forked child after `recorder.after_fork()`."""
        self._lock = threading.Lock()  # the old one may have been held by a thread that the child does not have
        self._series, self._classes, self._columns, self._waiting = [], [], (), []
        self._last_ns = self._epoch = self._clock()

    def tick(self, now_ns: int | None = None, breathe: Callable[[], object] | None = None) -> Window:
        """Everything since the previous tick.

        Args:
            now_ns: End of the window; the clock when left out.
            breathe: Called after each piece of work of some 20 us; lets request threads have the interpreter when it is time, as `Pace` does.

        Returns:
            The window; its arrays are valid until the next tick.
        """
        end_ns = self._clock() if now_ns is None else now_ns
        rest = breathe or nothing
        self._meet()
        rest()
        for index, series in enumerate(self._series):
            with self._lock:
                series.read(self._recorder, index, self._scratch)
            rest()
        windows: list[ClassWindow] = []
        for index, held in enumerate(self._classes):
            windows.append(self._class_window(index, held))
            rest()
        records = self._drain(rest)
        if end_ns - self._epoch >= self._epoch_ns:
            self._epoch = end_ns
            self._recorder.begin_epoch(**self.sampling)
        requests = {held.series for held in self._classes}
        start_ns, self._last_ns = self._last_ns, end_ns
        return Window(
            start_ns,
            end_ns,
            self._columns,
            tuple(windows),
            tuple(series.window for index, series in enumerate(self._series) if index not in requests),
            records,
            self._recorder.counters(),
        )

    def cumulative(self) -> tuple[Distribution, ...]:
        """Running totals of every series as of the last tick, requests included, in copies of their own; safe from any thread of ours."""
        held = self._series
        copies: list[Distribution] = []
        for series in held:
            with self._lock:
                copies.append(series.cumulative())
        return tuple(copies)

    def totals(self) -> tuple[ClassTotals, ...]:
        """Exact running counters of every request class as of the last tick."""
        return tuple(held.totals for held in self._classes if held.totals is not None)

    def lock_sites(self) -> tuple[LockSite, ...]:
        """Where the holds began that others waited for; running totals, read now."""
        return tuple(LockSite(*site) for site in self._recorder.lock_sites())

    def _meet(self) -> None:
        """Learn of new columns, series and classes; start over when the recorder was emptied."""
        recorder = self._recorder
        series, classes, columns = recorder.series(), recorder.classes(), recorder.columns()
        if _changed(self._series, series) or len(classes) < len(self._classes):
            self._series, self._classes = [], []
        if len(columns) != len(self._columns) or any(tuple(a) != tuple(b) for a, b in zip(columns, self._columns, strict=True)):
            self._columns = tuple(Column(*column) for column in columns)
        for _, kind, labels, digits, lowest_ns, size in series[len(self._series) :]:
            self._series.append(_Series(kind, tuple(labels), digits, lowest_ns, size))
            if size > len(self._scratch):
                self._scratch = np.zeros(size, np.int64)
        for _, request, model, cls, index, edges_ns in classes[len(self._classes) :]:
            self._classes.append(_Class(ClassKey(request, model, cls), index, tuple(edges_ns)))
        for held, entry in zip(self._classes, classes, strict=True):
            held.edges_ns = tuple(entry[5])

    def _class_window(self, index: int, held: _Class) -> ClassWindow:
        read = self._recorder.read_class(index)
        totals = ClassTotals(
            key=held.key,
            edges_ns=held.edges_ns,
            **{name: read.get(name, 0) for name in _TOTALS},
            violations=tuple(read["violations"]),
            overdue=tuple(read.get("overdue", (0,) * len(read["violations"]))),
        )
        before = held.totals
        if before is not None and totals.count < before.count:
            held.forget()
            before = None
        held.totals = totals
        # an objective that was added since has counted nothing before
        same = before is not None and before.edges_ns == totals.edges_ns
        earlier = before.violations if before is not None and same else (0,) * len(totals.violations)
        late = before.overdue if before is not None and same else (0,) * len(totals.overdue)
        return ClassWindow(
            held.key,
            held.edges_ns,
            totals.count - (before.count if before else 0),
            totals.errors - (before.errors if before else 0),
            totals.items - (before.items if before else 0),
            totals.excluded - (before.excluded if before else 0),
            tuple(max(now - then, 0) for now, then in zip(totals.violations, earlier, strict=True)),
            self._series[held.series].window,
            held.read_bands(self._recorder, index),
            totals.shed - (before.shed if before else 0),
            totals.cancelled - (before.cancelled if before else 0),
            tuple(max(now - then, 0) for now, then in zip(totals.overdue, late, strict=True)),
        )

    def _drain(self, rest: Callable[[], object]) -> tuple[RequestRecord, ...]:
        keys = [held.key for held in self._classes]
        records: list[RequestRecord] = []
        found: list[tuple[Any, ...]] = [*self._waiting, *self._recorder.drain()]
        self._waiting = []
        for retained in found:
            if retained[1] < len(keys):
                records.append(decode(retained, keys[int(retained[1])]))
            else:
                self._waiting.append(retained)  # its class was met after this tick began
            rest()
        return tuple(records)


_TOTALS: Final = (
    "count",
    "errors",
    "items",
    "excluded",
    "late_spans",
    "truncated",
    "wall_ns",
    "cpu_ns",
    "cpu_wall_ns",
    "cpu_requests",
    "shed",
    "cancelled",
)


def _changed(known: Sequence[_Series], found: Sequence[tuple[int, str, tuple[str, ...], int, int, int]]) -> bool:
    """Whether series that were known are gone or stand for something else."""
    return len(found) < len(known) or any(
        held.kind != entry[1] or held.labels != entry[2] for held, entry in zip(known, found, strict=False)
    )


def decode(retained: Sequence[Any], key: ClassKey) -> RequestRecord:
    """A recorder's packed record as a value.

    Spans are unpacked only for breaching, slowest and profiled requests: a reservoir's requests count by their vectors, and unpacking
    theirs would make garbage-collected objects by the thousand.

    Args:
        retained: The recorder's tuple: id, class index, start, wall, band, reasons, thread, size, items, error, cpu, voluntary and
            involuntary switches, truncated, vector, spans, trace, device incomplete.
        key: The class that the index means.
    """
    (
        id_,
        _,
        start_ns,
        wall_ns,
        band,
        reasons,
        thread_id,
        size,
        items,
        error,
        cpu_ns,
        voluntary,
        involuntary,
        truncated,
        vector,
        spans,
        trace,
        incomplete,
    ) = retained
    return RequestRecord(
        id_,
        key,
        start_ns,
        wall_ns,
        band,
        reasons,
        thread_id,
        size,
        items,
        error,
        cpu_ns,
        voluntary,
        involuntary,
        bool(truncated),
        struct.unpack(f"<{len(vector) // 8}q", vector),
        _spans(spans) if reasons & _WITH_SPANS else (),
        trace,
        bool(incomplete),
    )


def _spans(packed: bytes) -> tuple[SpanRecord, ...]:
    return tuple(
        SpanRecord(column, start, end, -1 if parent == _ROOT else parent, thread, flags, aux)
        for start, end, aux, thread, column, parent, flags in _SPAN.iter_unpack(packed)
    )
