"""Who owns the time that a caller spent blocked on a device: what the device did meanwhile (DESIGN 4.5, 4.6).

A blocking copy, or a value that was read, is recorded on the host as `copy`. Its events tell later how long it stood in its stream before its own
turn came (as does a caller's wait for its stream, whose time its stage owns at first), and the spans of that stream tell what the stream did then: kernels of the same request belong to their stage, work of another
request is `gpu-queue`. Copies stay with the copy, since taking turns is how copies wait for each other; so does what no span of ours covers.
"""

from __future__ import annotations

import bisect
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from inferscope.device.copies import PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferscope.device.harvest import DeviceSpan
    from inferscope.record.core import Recorder

__all__ = ["GPU_QUEUE", "LEAST_NS", "PATIENCE_NS", "WAIT", "Settler"]

WAIT: Final = "wait:"
"""Names of spans that mark a caller who waits for its stream; the stage in which it does follows, or nothing."""

GPU_QUEUE: Final = ("gpu-queue", "")
"""The column of time that a device spent on other requests while this one waited."""
LEAST_NS: Final = 20_000
"""Shorter waits are a launch, and within the error of their own measurement."""
PATIENCE_NS: Final = 300_000_000
"""How long a wait is kept until it is judged: the forward that encloses it is read later than it."""
KEPT: Final = 1024
"""Spans of a stream that are remembered."""
REACH: Final = 64
"""Spans after a wait's beginning that are looked at: those that enclose it end after it."""

A_SLICE: Final = 8
"""Waits judged in one slice: some 20 us each."""

_Piece = tuple[int, int]


class _Span(NamedTuple):
    start: int
    end: int
    request: int
    """Id; 0 for none."""
    name: str


class _Wait(NamedTuple):
    start: int
    ready: int
    """When its turn in the stream came, or when the caller went on."""
    end: int
    """When its own work ended, or when the caller went on."""
    done: int
    """When its own work ended on the device."""
    request: int
    ref: int
    source: tuple[str, str]
    """The column that owns the time so far."""
    seen: int


class _Stream:
    """Spans of one stream by their ends, and waits that are not judged yet."""

    __slots__ = ("ends", "spans", "waits")

    def __init__(self) -> None:
        self.spans: list[_Span] = []
        self.ends: list[int] = []
        self.waits: deque[_Wait] = deque()

    def add(self, span: _Span) -> None:
        at = bisect.bisect_right(self.ends, span.end)
        self.ends.insert(at, span.end)
        self.spans.insert(at, span)
        if len(self.spans) > 2 * KEPT:
            del self.spans[:KEPT], self.ends[:KEPT]

    def during(self, start: int, end: int) -> list[_Span]:
        """Spans that overlap a period."""
        first = bisect.bisect_right(self.ends, start)
        return [span for span in self.spans[first : first + REACH] if span.start < end]


class Settler:
    """Moves time of requests between their columns; used by the harvesting thread alone.

    Args:
        recorder: Whose requests.

    Attributes:
        settled_ns: What was moved, to `gpu-queue` and to stages.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._streams: dict[tuple[str, int], _Stream] = {}
        self._columns: dict[tuple[str, str], int] = {}
        self.settled_ns: dict[str, int] = {"gpu-queue": 0, "stage": 0}

    def add(self, span: DeviceSpan, ref: int, now: int) -> None:
        """Remember a span; judge what it waited for later, when it blocked its caller.

        Args:
            span: As it was read.
            ref: Of `Recorder.pin`; 0 when nothing waits for it.
            now: Of the timer's clock.
        """
        if span.start_ns is None or span.exec_ns is None:
            self._recorder.unpin(ref)
            return
        stream = self._streams.get((span.device, span.stream))
        if stream is None:
            stream = self._streams[span.device, span.stream] = _Stream()
        identity = 0 if span.request is None else int(span.request.id)
        if not span.name.startswith(WAIT):
            stream.add(_Span(span.start_ns, span.start_ns + span.exec_ns, identity, span.name))
        if not ref:
            return
        returned = span.issue_ns + span.host_ns
        done = span.start_ns + span.exec_ns
        end = min(done, returned)
        source = _source(span.name)
        if source is None or end - span.issue_ns < max(LEAST_NS, span.error_ns or 0):
            self._recorder.unpin(ref)
            return
        stream.waits.append(_Wait(span.issue_ns, min(span.start_ns, returned), end, done, identity, ref, source, now))

    def run_once(self, now: int, breathe: Callable[[], object] = lambda: None, *, everything: bool = False) -> None:
        """Judge the waits that are old enough.

        Args:
            now: Of the timer's clock.
            breathe: Called after each few.
            everything: The others too: nothing more will come.
        """
        judged = 0
        for stream in self._streams.values():
            while stream.waits and (everything or now - stream.waits[0].seen >= PATIENCE_NS):
                wait = stream.waits.popleft()
                self._judge(wait, stream.during(wait.start, wait.end))
                self._recorder.unpin(wait.ref)
                judged += 1
                if judged % A_SLICE == 0:
                    breathe()

    def _judge(self, wait: _Wait, spans: list[_Span]) -> None:
        """Share out a wait, and what others had between the copy's own two events.

        A stream works in order, and a span's last event follows its own last kernel: what runs at an instant belongs to that span, of all that
        cover the instant, which ends first. On a stream that threads share, spans enclose others' work.
        """
        source = self._column(*wait.source)
        left = [(wait.start, wait.end)]
        for span in sorted(spans, key=lambda span: span.end):
            # One that ends later than the copy may have worked after it; before the copy's turn it can only have worked before it.
            left, taken = _take(left, span.start, span.end if span.end <= wait.done else min(span.end, wait.ready))
            if not taken or span.name.startswith(PREFIX):
                continue
            self._move(wait, source, ("stage", span.name) if span.request == wait.request else GPU_QUEUE, taken)

    def _move(self, wait: _Wait, source: int, column: tuple[str, str], nanoseconds: int) -> None:
        moved = self._recorder.settle(wait.ref, source, self._column(*column), nanoseconds)
        self.settled_ns[column[0]] += moved

    def _column(self, kind: str, name: str) -> int:
        known = self._columns.get((kind, name))
        if known is None:
            known = self._columns[kind, name] = self._recorder.column(kind, name)
        return known

    def after_fork(self) -> None:
        """In a forked child: nothing of the parent's requests is ours."""
        self._streams = {}


def _source(name: str) -> tuple[str, str] | None:
    """The column that owns the time of a blocked caller until it is settled."""
    if name.startswith(PREFIX):
        return "copy", name[len(PREFIX) :]
    if name.startswith(WAIT):
        return ("stage", name[len(WAIT) :]) if name != WAIT else ("unattributed", "unattributed")
    return None


def _take(left: list[_Piece], begin: int, until: int) -> tuple[list[_Piece], int]:
    """What is left of pieces of time without a period, and how much that took."""
    rest: list[_Piece] = []
    taken = 0
    for start, end in left:
        low, high = max(start, begin), min(end, until)
        if low >= high:
            rest.append((start, end))
            continue
        taken += high - low
        if start < low:
            rest.append((start, low))
        if high < end:
            rest.append((high, end))
    return rest, taken
