"""The host's side of a trace: operators, runtime calls and Python functions of each thread, nested by time."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

import numpy as np

from inferscope.diagnose.traces.values import SyncSite

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from inferscope.diagnose.traces.values import StageSpan
    from inferscope.types import IntArray

__all__ = ["ANNOTATION", "CALL", "OPERATOR", "PYTHON", "TOLERANCE_NS", "Sweep", "Track"]

TOLERANCE_NS: Final = 50_000
"""How far an operator may lie outside a stage and still be joined to it: twice the clocks' worst measured disagreement."""

OPERATOR, CALL, PYTHON, ANNOTATION = range(4)
_FRAMES: Final = 8
"""Callers that a place where the device is waited for keeps."""
_PLACES: Final = 2048
_LIBRARY: Final = ("torch/", "<built-in", "<frozen", "nn.Module:", "threading.py", "contextlib.py", "importlib")


class Track:
    """Events of one thread as plain arrays: start and duration (us), name, kind."""

    __slots__ = ("correlation", "corresponds", "duration", "kind", "name", "start")

    def __init__(self) -> None:
        self.start = array("d")
        self.duration = array("f")
        self.name = array("I")
        self.kind = array("B")
        self.corresponds = array("I")
        """Indices of runtime calls, in the order in which they were read."""
        self.correlation = array("q")
        """Their correlation with device work; -1 for one that stands between a copy and its synchronise, 0 for none."""

    def add(self, start: float, duration: float, name: int, kind: int) -> None:
        """Take one event."""
        self.start.append(start)
        self.duration.append(duration)
        self.name.append(name)
        self.kind.append(kind)

    def correlations_of(self, calls: array[int]) -> IntArray:
        """Correlations of the runtime calls with these indices that have one."""
        index, held = np.frombuffer(self.corresponds, np.uint32), np.frombuffer(self.correlation, np.int64)
        wanted: IntArray = held[np.isin(index, np.frombuffer(calls, np.uint32))]
        return wanted[wanted > 0]

    def order(self) -> Iterable[int]:
        """Indices by start, the longer first of those that start together: parents before children."""
        starts, durations = np.frombuffer(self.start), np.frombuffer(self.duration, np.float32)
        later, earlier = starts[1:], starts[:-1]
        if bool(np.all((later > earlier) | ((later == earlier) & (durations[1:] <= durations[:-1])))):
            return range(len(starts))
        held = array("q")
        held.frombytes(np.lexsort((-durations, starts)).astype(np.int64).tobytes())
        return held


class _Stages:
    """Finds the innermost of our spans around an operator of one thread."""

    def __init__(self, spans: Iterable[StageSpan], base_unix_ns: int) -> None:
        rows = [((span.start_unix_ns - base_unix_ns) / 1e3, (span.end_unix_ns - base_unix_ns) / 1e3, span.label) for span in spans]
        self._rows = sorted(rows, key=lambda row: row[1] - row[0])

    def find(self, start: float, end: float) -> str | None:
        """The shortest span that holds the operator, exactly or else within the tolerance."""
        for slack in (0.0, TOLERANCE_NS / 1e3):
            for low, high, label in self._rows:
                if low - slack <= start and end <= high + slack:
                    return label
        return None


class Sweep:
    """Sums over all threads: self time by name and by stage, where the device is waited for, and the stage of each launch.

    Args:
        names: By their numbers.
        waits: Numbers of the runtime calls that wait for the device.
        spans: Our own stages; without any, the trace's annotations are the stages.
        base_unix_ns: Added to a trace's times.
    """

    def __init__(self, names: Sequence[str], waits: frozenset[int], spans: Sequence[StageSpan], base_unix_ns: int) -> None:
        self._names, self._waits, self._spans, self._base = names, waits, spans, base_unix_ns
        self.totals: dict[int, list[float]] = {}
        """[calls, self us] by name."""
        self.stages: dict[str, float] = {}
        """Self us."""
        self.launched: dict[str, list[IntArray]] = {}
        """Correlations of the runtime calls inside each stage."""
        self._places: dict[tuple[int, ...], list[float]] = {}
        self._readable: dict[int, bool] = {}

    def add(self, thread: Track, tid: int) -> None:
        """Nest one thread's events and add their self times: duration less that of the events directly inside."""
        joined = _Stages([span for span in self._spans if span.thread_id == tid], self._base)
        starts, durations, kinds, names = thread.start, thread.duration, thread.kind, thread.name
        launched: dict[str, array[int]] = {}
        ends: list[float] = []
        alone: list[float] = []
        open_: list[int] = []
        solid: list[int] = []  # depths of what takes its time from its parent: Python functions and annotations do not

        def close() -> None:
            ends.pop()
            own, index = max(alone.pop(), 0.0), open_.pop()
            if kinds[index] > CALL:
                return
            solid.pop()
            row = self.totals.setdefault(names[index], [0, 0.0])
            row[0] += 1
            row[1] += own
            label = joined.find(starts[index], starts[index] + durations[index]) if self._spans else self._annotation(thread, open_)
            if label is not None:
                self.stages[label] = self.stages.get(label, 0.0) + own
                if kinds[index] == CALL:
                    launched.setdefault(label, array("I")).append(index)

        for index in thread.order():
            start = starts[index]
            while ends and ends[-1] <= start:
                close()
            if kinds[index] <= CALL:
                if solid:
                    alone[solid[-1]] -= durations[index]
                solid.append(len(open_))
                if names[index] in self._waits:
                    self._place(thread, open_, index)
            ends.append(start + durations[index])
            alone.append(durations[index])
            open_.append(index)
        while ends:
            close()
        for label, calls in launched.items():
            self.launched.setdefault(label, []).append(thread.correlations_of(calls))

    def _annotation(self, thread: Track, open_: Sequence[int]) -> str | None:
        """The innermost annotation around what just ended."""
        for index in reversed(open_):
            if thread.kind[index] == ANNOTATION:
                return self._names[thread.name[index]]
        return None

    def _place(self, thread: Track, open_: Sequence[int], call: int) -> None:
        around = [thread.name[index] for index in reversed(open_) if thread.kind[index] != ANNOTATION and self._keeps(thread.name[index])]
        key = (thread.name[call], *around[:_FRAMES])
        if key not in self._places and len(self._places) >= _PLACES:
            key = (thread.name[call],)
        row = self._places.setdefault(key, [0, 0.0])
        row[0] += 1
        row[1] += thread.duration[call]

    def _keeps(self, name: int) -> bool:
        """Whether a frame says something to who wrote the service: not the inside of torch."""
        if name not in self._readable:
            text = self._names[name]
            self._readable[name] = not any(part in text for part in _LIBRARY)
        return self._readable[name]

    def sites(self) -> tuple[SyncSite, ...]:
        """Where the device was waited for, by descending time."""
        rows = [
            SyncSite(self._names[key[0]], tuple(self._names[name] for name in key[1:]), int(row[0]), row[1] / 1e3)
            for key, row in self._places.items()
        ]
        return tuple(sorted(rows, key=lambda row: (-row.ms, row.call, row.where)))
