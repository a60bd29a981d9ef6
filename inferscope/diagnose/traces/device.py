"""The device's side of a trace: what ran when, what the device waited for in between, copies beside kernels, and waiting for other ranks."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

import numpy as np

from inferscope.diagnose.traces import work
from inferscope.diagnose.traces.values import Idle, Kernel, MatrixWork, Overlap, Roofline

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inferscope.diagnose.traces.values import Collective
    from inferscope.types import FloatArray, IntArray

__all__ = ["COPY", "KERNEL", "OTHER", "Launches", "Timeline", "Worked", "collective_wait_ms"]

KERNEL, COPY, OTHER = range(3)
_SHORT_US: Final = 10.0
_RESOLUTION_US: Final = 0.01
"""Times of a trace that counts from 1970 are exact to some nanoseconds: a shorter gap is none."""


class Worked:
    """Operators with recorded shapes: external id, operations, bytes, as plain arrays."""

    def __init__(self) -> None:
        self.id = array("q")
        self.flops = array("f")
        self.bytes = array("f")
        self.types: dict[str, float] = {}
        """Operations by type of the first operand."""

    def add(self, id_: int, done: work.Work) -> None:
        """Take one call."""
        self.id.append(id_)
        self.flops.append(done.flops)
        self.bytes.append(done.bytes)
        self.types[done.type] = self.types.get(done.type, 0.0) + done.flops


class Launches:
    """Runtime calls that put work on a device, and calls that wait for it, by thread.

    Args:
        correlations: Of launching calls, shape (n,).
        starts: When they were called, us, shape (n,).
        threads: Numbers of their threads, shape (n,).
        waits: (starts, ends) of each thread's calls that wait for the device, ascending.
    """

    def __init__(
        self, correlations: IntArray, starts: FloatArray, threads: IntArray, waits: Sequence[tuple[FloatArray, FloatArray]]
    ) -> None:
        order = np.argsort(correlations, kind="stable")
        self._correlations = correlations[order]
        self._starts = starts[order]
        self._threads = threads[order]
        self._waits = waits

    def find(self, correlations: IntArray) -> tuple[FloatArray, IntArray]:
        """When each piece of device work was launched (NaN when unknown), and by which thread."""
        if not len(self._correlations):
            return np.full(len(correlations), np.nan), np.zeros(len(correlations), np.int64)
        place = np.minimum(np.searchsorted(self._correlations, correlations), len(self._correlations) - 1)
        known = (self._correlations[place] == correlations) & (correlations > 0)
        return np.where(known, self._starts[place], np.nan), self._threads[place]

    def waited(self, threads: IntArray, low: FloatArray, high: FloatArray) -> FloatArray:
        """Time within [low, high] that each thread waited for the device, us."""
        found = np.zeros(len(low))
        for number, (starts, ends) in enumerate(self._waits):
            mine = threads == number
            if len(starts) and mine.any():
                moments, totals = _cumulated(starts, ends)
                found[mine] = np.interp(high[mine], moments, totals) - np.interp(low[mine], moments, totals)
        return found


def _cumulated(starts: FloatArray, ends: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Breakpoints of the time spent in non-overlapping intervals up to each moment."""
    moments = np.stack([starts, ends], axis=1).ravel()
    totals = np.cumsum(np.stack([np.zeros(len(starts)), ends - starts], axis=1).ravel())
    return np.maximum.accumulate(moments) if len(moments) else moments, totals


class Timeline:
    """Device work as plain arrays."""

    def __init__(self) -> None:
        self.start = array("d")
        self.duration = array("f")
        self.name = array("I")
        self.kind = array("B")
        self.correlation = array("q")
        self.external = array("q")
        self.place = array("H")
        self._places: dict[tuple[int, int], int] = {}

    def add(self, start: float, duration: float, name: int, kind: int, ids: tuple[int, int], place: tuple[int, int]) -> None:
        """Take one event; `ids` are correlation and external id, `place` is (device, stream)."""
        self.start.append(start)
        self.duration.append(duration)
        self.name.append(name)
        self.kind.append(kind)
        self.correlation.append(ids[0])
        self.external.append(ids[1])
        self.place.append(min(self._places.setdefault(place, len(self._places)), 0xFFFF))

    def __len__(self) -> int:
        return len(self.start)

    def arrays(self) -> tuple[FloatArray, FloatArray, IntArray]:
        """Starts and ends (us) and kinds, in the order of the file."""
        starts, durations = np.frombuffer(self.start), np.frombuffer(self.duration, np.float32)
        return starts, starts + durations, np.frombuffer(self.kind, np.uint8).astype(np.int64)

    def busiest(self) -> IntArray:
        """Indices of the device with most work, by start."""
        starts, ends, _ = self.arrays()
        devices = np.array([device for device, _ in self._places], dtype=np.int64)[np.frombuffer(self.place, np.uint16)]
        sums = {int(device): float((ends - starts)[devices == device].sum()) for device in np.unique(devices)}
        chosen = np.flatnonzero(devices == max(sums, key=lambda device: sums[device]))
        return chosen[np.argsort(starts[chosen], kind="stable")]

    def busy(self) -> float | None:
        """Busy fraction between the first and the last event, all devices together."""
        if not len(self):
            return None
        starts, ends, _ = self.arrays()
        length = float(ends.max() - starts.min())
        return _union(starts, ends) / length if length > 0 else 1.0

    def idle(self, launches: Launches) -> Idle | None:
        """What the busiest device waited for between its pieces of work."""
        if not len(self):
            return None
        starts, ends, _ = self.arrays()
        chosen = self.busiest()
        before = np.maximum.accumulate(ends[chosen])[:-1]
        after = starts[chosen][1:]
        gaps = np.flatnonzero(after - before > _RESOLUTION_US)
        if not len(gaps):
            return None
        begin, end = before[gaps], after[gaps]
        called, threads = launches.find(np.frombuffer(self.correlation, np.int64)[chosen][1:][gaps])
        known = ~np.isnan(called)
        late = np.minimum(np.maximum(np.where(known, called, begin), begin), end)
        waited = np.minimum(launches.waited(threads, begin, late), late - begin)
        lengths = end - begin
        return Idle(
            gaps=len(gaps),
            median_us=float(np.median(lengths)),
            host_ms=float((late - begin - waited)[known].sum()) / 1e3,
            sync_ms=float(waited[known].sum()) / 1e3,
            launch_ms=float((end - late)[known].sum()) / 1e3,
            unknown_ms=float(lengths[~known].sum()) / 1e3,
        )

    def overlap(self) -> Overlap | None:
        """Copies beside kernels on the busiest device."""
        if not len(self):
            return None
        starts, ends, kinds = self.arrays()
        chosen = self.busiest()
        starts, ends, kinds = starts[chosen], ends[chosen], kinds[chosen]
        copies, kernels = (_union(starts[kinds == kind], ends[kinds == kind]) for kind in (COPY, KERNEL))
        either = kinds != OTHER
        both = copies + kernels - _union(starts[either], ends[either])
        return Overlap(
            copies / 1e3, kernels / 1e3, max(0.0, both) / 1e3, len(np.unique(np.frombuffer(self.place, np.uint16)[chosen][either]))
        )

    def kernels(self, names: Sequence[str]) -> tuple[Kernel, ...]:
        """Kernels by name, by descending time."""
        _, _, kinds = self.arrays()
        mine = kinds == KERNEL
        numbers = np.frombuffer(self.name, np.uint32)[mine].astype(np.int64)
        calls = np.bincount(numbers)
        sums = np.bincount(numbers, weights=np.frombuffer(self.duration, np.float32)[mine])
        used: list[int] = np.flatnonzero(calls).tolist()
        rows = [Kernel(names[number], int(calls[number]), float(sums[number]) / 1e3) for number in used]
        return tuple(sorted(rows, key=lambda row: (-row.self_ms, row.name)))

    def small(self) -> float | None:
        """Fraction of the kernels that are short."""
        _, _, kinds = self.arrays()
        lengths = np.frombuffer(self.duration, np.float32)[kinds == KERNEL]
        return float((lengths < _SHORT_US).mean()) if len(lengths) else None

    def stage_times(self, launched: Mapping[str, Sequence[IntArray]]) -> dict[str, float]:
        """Device time (ms) of what each stage launched."""
        own, lengths = np.frombuffer(self.correlation, np.int64), np.frombuffer(self.duration, np.float32)
        found = {
            label: float(lengths[np.isin(own, np.concatenate(parts))].sum(dtype=np.float64)) / 1e3
            for label, parts in launched.items()
            if len(own)
        }
        return {label: ms for label, ms in found.items() if ms > 0}

    def roofline(self, done: Worked, device: str) -> Roofline | None:
        """Operations and bytes of the operators that launched kernels, over those kernels' time."""
        _, _, kinds = self.arrays()
        mine = kinds == KERNEL
        external, lengths = np.frombuffer(self.external, np.int64)[mine], np.frombuffer(self.duration, np.float32)[mine]
        ids = np.frombuffer(done.id, np.int64)
        if not len(ids) or not len(external):
            return None
        joined = np.isin(external, ids) & (external > 0)
        used = np.isin(ids, external) & (ids > 0)
        spent, flops = (
            float(lengths[joined].sum(dtype=np.float64)),
            float(np.frombuffer(done.flops, np.float32)[used].sum(dtype=np.float64)),
        )
        if spent <= 0 or flops <= 0:
            return None
        peak = work.peak_of(device)
        type_ = max(done.types, key=lambda name: done.types[name])
        return Roofline(
            flops=flops,
            bytes=float(np.frombuffer(done.bytes, np.float32)[used].sum(dtype=np.float64)),
            ms=spent / 1e3,
            covered=spent / float(lengths.sum(dtype=np.float64)),
            peak_flops=None if peak is None else peak.half if type_ == "half" else peak.single,
            peak_bytes_s=None if peak is None else peak.bytes_s,
        )


def matrix_work(kernels: Sequence[Kernel]) -> MatrixWork | None:
    """Which units matrix kernels ran on, by their names; None without such kernels."""
    sums: dict[bool | None, float] = {True: 0.0, False: 0.0, None: 0.0}
    plain = ""
    rows = [row for row in kernels if work.is_matrix(row.name)]
    for row in rows:
        units = work.on_matrix_units(row.name)
        sums[units] += row.self_ms
        if units is False and not plain:
            plain = row.name
    return MatrixWork(sums[True], sums[False], sums[None], plain) if rows else None


def collective_wait_ms(rows: Sequence[Collective]) -> float | None:
    """Time in collectives beyond the fastest of the same name and group, which is taken for the transfer alone; an estimate."""
    if not rows:
        return None
    fastest: dict[tuple[str, str], float] = {}
    for row in rows:
        key = (row.name, row.group)
        fastest[key] = min(fastest.get(key, row.ms), row.ms)
    return sum(row.ms - fastest[(row.name, row.group)] for row in rows)


def _union(starts: FloatArray, ends: FloatArray) -> float:
    """Length of the union of intervals."""
    if not len(starts):
        return 0.0
    order = np.argsort(starts, kind="stable")
    low, high = starts[order], np.maximum.accumulate(ends[order])
    gaps = np.maximum(low[1:] - high[:-1], 0.0)
    return float(high[-1] - low[0] - gaps.sum())
