"""Kineto and Chrome traces, read as a stream: a 100 MB trace needs tens of megabytes, because only numbers are kept of each event.

The standard library alone does it. `TraceSummary` answers what a diagnosis asks: which operators took the time, which copies were
pageable, who waited for the device, and to which of our stages each operator belongs. A pageable copy that is followed by a stream
synchronise on the same thread is a synchronous copy, whatever `non_blocking` said.
"""

from __future__ import annotations

import gzip
import zlib
from array import array
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from inferscope.diagnose.stream import open_trace, stream
from inferscope.errors import EvidenceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

__all__ = ["TOLERANCE_NS", "Operator", "StageSpan", "TraceSummary", "Transfer", "read_trace"]

TOLERANCE_NS: Final = 50_000
"""How far an operator may lie outside a stage and still be joined to it: twice the clocks' worst measured disagreement."""

_CPU: Final = frozenset({"cpu_op", "operator"})
_RUNTIME: Final = frozenset({"cuda_runtime", "cuda_driver", "hip_runtime", "runtime", "mtia_runtime", "xpu_runtime"})
_DEVICE: Final = frozenset({"kernel", "gpu_memcpy", "memcpy", "gpu_memset", "memset", "mtia_ccp_events"})
_MEMCPY: Final = frozenset({"gpu_memcpy", "memcpy"})
_SYNCHRONOUS: Final = frozenset({"cudaMemcpy", "hipMemcpy", "hipMemcpyWithStream", "cuMemcpyHtoD_v2", "cuMemcpyDtoH_v2"})
_SILENT: Final = ("IsCapturing", "LastError", "GetDevice", "GetAttribute")
"""Runtime calls that may stand between a copy and the synchronise that belongs to it."""


@dataclass(frozen=True, slots=True)
class Operator:
    """Time in one operator or runtime call, without its children."""

    name: str
    calls: int
    self_ms: float


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copies of one kind on the device's time line."""

    direction: str
    """`HtoD`, `DtoH`, `DtoD` or what the trace says."""
    memory: str
    """`pageable`, `pinned` or `unknown`: the host side."""
    copies: int
    bytes: int
    ms: float


class StageSpan(NamedTuple):
    """One of our spans, to join operators to."""

    label: str
    start_unix_ns: int
    end_unix_ns: int
    thread_id: int


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """What a trace says."""

    events: int
    """Complete (`X`) events."""
    threads: tuple[int, ...]
    """Native ids of the threads with operators."""
    window_ms: float
    """From the first to the last complete event."""
    base_unix_ns: int
    """Added to `ts` it gives unix time; 0 when the trace does not say, as in older ones whose `ts` is unix time itself."""
    operators: tuple[Operator, ...]
    """By descending self time."""
    transfers: tuple[Transfer, ...]
    synchronisations: tuple[Operator, ...]
    """Runtime calls that wait for the device, by descending time."""
    synchronous_copies: int
    """Pageable copies directly followed by a stream synchronise on the same thread."""
    launches: int
    device_events: int
    device_busy: float | None
    """Union of this process's device work over its own span; None without device events. Others may share the card: it never proves that the card is idle."""
    device_ms: float = 0.0
    """Sum of the device work's durations."""
    stages_ms: Mapping[str, float] = field(default_factory=dict[str, float])
    """Self time of operators and runtime calls joined to our stages."""


def read_trace(path: Path, spans: Sequence[StageSpan] = ()) -> TraceSummary:
    """Read one trace, plain or gzip.

    Args:
        path: The trace.
        spans: Our own spans of the captured request.

    Raises:
        EvidenceError: The file is empty, truncated, damaged or no trace; the message is one line.
    """
    reader = _Reader()
    try:
        with open_trace(path) as text:
            for event in stream(text, reader.header):
                reader.add(event)
    except EvidenceError as error:
        msg = f"{path.name}: {error}" + (f" after {reader.elements} events" if reader.elements else "")
        raise EvidenceError(msg) from error
    except (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError) as error:
        msg = f"{path.name}: damaged or truncated ({error}) after {reader.elements} events"
        raise EvidenceError(msg) from error
    except OSError as error:
        msg = f"{path.name}: cannot be read ({error.strerror or error})"
        raise EvidenceError(msg) from error
    return reader.summary(spans)


class _Thread:
    """Operators and runtime calls of one thread: start, duration (us) and name, as plain arrays."""

    __slots__ = ("calls", "duration", "name", "start")

    def __init__(self) -> None:
        self.start = array("d")
        self.duration = array("d")
        self.name = array("L")
        self.calls: list[tuple[float, bool, int]] = []
        """(start, is a stream synchronise, correlation of a copy or 0 or -1 for another call)."""


class _Reader:
    """Keeps numbers of events while they stream by, and sums them up at the end."""

    def __init__(self) -> None:
        self.header: dict[str, object] = {}
        self.elements = 0
        self.events = 0
        self.first, self.last = float("inf"), float("-inf")
        self.names: dict[str, int] = {}
        self.threads: dict[tuple[object, int], _Thread] = {}
        self.operators: set[tuple[object, int]] = set()
        self.transfers: dict[tuple[str, str], list[float]] = {}
        self.synchronisations: dict[str, list[float]] = {}
        self.pageable: set[int] = set()
        self.launches = 0
        self.busy: list[array[float]] = [array("d"), array("d")]

    def add(self, event: Mapping[str, Any]) -> None:
        """Take one event."""
        self.elements += 1
        if event.get("ph") != "X":
            return
        try:
            start, duration = float(event["ts"]), float(event.get("dur") or 0.0)
            category, name = str(event.get("cat", "")).lower(), str(event["name"])
        except (KeyError, TypeError, ValueError) as error:
            msg = f"damaged event ({type(error).__name__}: {error})"
            raise EvidenceError(msg) from error
        self.events += 1
        if start > 0:
            self.first, self.last = min(self.first, start), max(self.last, start + duration)
        if category in _CPU:
            self._host(event, start, duration, name)
            self.operators.add((event.get("pid"), _integer(event.get("tid"))))
        elif category in _RUNTIME:
            self._call(event, start, duration, name)
        elif category in _DEVICE:
            self.busy[0].append(start)
            self.busy[1].append(duration)
            if category in _MEMCPY:
                self._copy(event, duration, name)

    def _host(self, event: Mapping[str, Any], start: float, duration: float, name: str) -> _Thread:
        key = (event.get("pid"), _integer(event.get("tid")))
        thread = self.threads.get(key)
        if thread is None:
            thread = self.threads[key] = _Thread()
        thread.start.append(start)
        thread.duration.append(duration)
        thread.name.append(self.names.setdefault(name, len(self.names)))
        return thread

    def _call(self, event: Mapping[str, Any], start: float, duration: float, name: str) -> None:
        thread = self._host(event, start, duration, name)
        self.launches += "Launch" in name
        waits = "ynchroniz" in name or name in _SYNCHRONOUS
        if waits:
            row = self.synchronisations.setdefault(name, [0, 0.0])
            row[0] += 1
            row[1] += duration
        if not any(word in name for word in _SILENT):
            arguments: Mapping[str, Any] = event.get("args") or {}
            correlation = _integer(arguments.get("correlation")) if "Memcpy" in name else -1
            thread.calls.append((start, "StreamSynchronize" in name, correlation))

    def _copy(self, event: Mapping[str, Any], duration: float, name: str) -> None:
        arguments: Mapping[str, Any] = event.get("args") or {}
        words = name.split()
        direction = words[1] if len(words) > 1 else name
        lower = name.lower()
        memory = "pageable" if "pageable" in lower else "pinned" if "pinned" in lower else "unknown"
        row = self.transfers.setdefault((direction, memory), [0, 0, 0.0])
        row[0] += 1
        row[1] += _integer(arguments.get("bytes"))
        row[2] += duration
        if memory == "pageable":
            self.pageable.add(_integer(arguments.get("correlation")))

    def summary(self, spans: Sequence[StageSpan]) -> TraceSummary:
        """Sort, nest and add up."""
        base = _integer(self.header.get("baseTimeNanoseconds"))
        totals: dict[int, list[float]] = {}
        stages: dict[str, float] = {}
        for (_, tid), thread in self.threads.items():
            joined = _Stages([span for span in spans if span.thread_id == tid], base)
            _nest(thread, totals, joined, stages)
        names = list(self.names)
        operators = (Operator(names[name], int(row[0]), row[1] / 1e3) for name, row in totals.items())
        waits = (Operator(name, int(row[0]), row[1] / 1e3) for name, row in self.synchronisations.items())
        copies = (Transfer(way, memory, int(row[0]), int(row[1]), row[2] / 1e3) for (way, memory), row in self.transfers.items())
        return TraceSummary(
            events=self.events,
            threads=tuple(sorted(tid for _, tid in self.operators)),
            window_ms=max(0.0, self.last - self.first) / 1e3 if self.events else 0.0,
            base_unix_ns=base,
            operators=tuple(sorted(operators, key=lambda row: (-row.self_ms, row.name))),
            transfers=tuple(sorted(copies, key=lambda row: -row.ms)),
            synchronisations=tuple(sorted(waits, key=lambda row: -row.self_ms)),
            synchronous_copies=sum(_pairs(thread.calls, self.pageable) for thread in self.threads.values()),
            launches=self.launches,
            device_events=len(self.busy[0]),
            device_busy=_union(self.busy[0], self.busy[1]),
            device_ms=sum(self.busy[1]) / 1e3,
            stages_ms={label: micros / 1e3 for label, micros in stages.items()},
        )


def _integer(value: object) -> int:
    try:
        return int(cast("Any", value))
    except (TypeError, ValueError):
        return 0


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


def _nest(thread: _Thread, totals: dict[int, list[float]], joined: _Stages, stages: dict[str, float]) -> None:
    """Add each event's self time: its duration less that of the events directly inside it."""
    starts, durations, names = thread.start, thread.duration, thread.name
    order: Iterable[int] = range(len(starts))
    if any(starts[i] > starts[i + 1] or (starts[i] == starts[i + 1] and durations[i] < durations[i + 1]) for i in range(len(starts) - 1)):
        order = sorted(range(len(starts)), key=lambda i: (starts[i], -durations[i]))
    open_: list[list[float]] = []  # [end, self time, index]

    def close() -> None:
        _, alone, position = open_.pop()
        index = int(position)
        row = totals.setdefault(names[index], [0, 0.0])
        row[0] += 1
        row[1] += max(alone, 0.0)
        label = joined.find(starts[index], starts[index] + durations[index])
        if label is not None:
            stages[label] = stages.get(label, 0.0) + max(alone, 0.0)

    for index in order:
        while open_ and open_[-1][0] <= starts[index]:
            close()
        if open_:
            open_[-1][1] -= durations[index]
        open_.append([starts[index] + durations[index], durations[index], index])
    while open_:
        close()


def _pairs(calls: list[tuple[float, bool, int]], pageable: set[int]) -> int:
    calls.sort()
    return sum(copy[2] in pageable and follower[1] for copy, follower in pairwise(calls))


def _union(starts: array[float], durations: array[float]) -> float | None:
    """Busy fraction between the first and the last device event."""
    if not starts:
        return None
    busy, until = 0.0, float("-inf")
    first, last = min(starts), max(map(float.__add__, starts, durations))
    for start, duration in sorted(zip(starts, durations, strict=True)):
        busy += max(0.0, start + duration - max(start, until))
        until = max(until, start + duration)
    return busy / (last - first) if last > first else 1.0
