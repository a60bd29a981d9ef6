"""Who owns the time that a caller spent blocked on a device: what the device did meanwhile (DESIGN 4.5, 4.6).

A blocking copy, or a value that was read, is recorded on the host as `copy`. Its events tell later how long it stood in its stream before its own
turn came (as does a caller's wait for its stream, whose time its stage owns at first), and the spans of that stream tell what the stream did then: kernels of the same request belong to their stage, work of another
request is `gpu-queue`. Copies stay with the copy, since taking turns is how copies wait for each other; so does what no span of ours covers.

Where other streams were waited for as well (a device, an event, a stream that depends on others), the one that finished last explains the wait first.
"""

from __future__ import annotations

import bisect
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from inferscope.device.copies import PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferscope.device.events import Join
    from inferscope.device.harvest import DeviceSpan
    from inferscope.record.core import Recorder

__all__ = ["GPU_QUEUE", "LEAST_NS", "PATIENCE_NS", "WAIT", "Scope", "Settler"]

WAIT: Final = "wait:"
"""Names of spans that mark a caller who waits: `wait:SCOPE:STAGE`, where the stage may be empty."""


class Scope:
    """What a caller waits for."""

    STREAM: Final = "stream"
    EVENT: Final = "event"
    """Torch does not tell the stream of an event: it is one of those that the request has work on."""
    DEVICE: Final = "device"
    """All of its streams."""


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
    issue: int
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
    scope: str


class _Stream:
    """Spans of one stream by their ends, what it was told to wait for, and waits that are not judged yet."""

    __slots__ = ("ends", "joins", "spans", "waits")

    def __init__(self) -> None:
        self.joins: deque[tuple[int, int | None]] = deque(maxlen=KEPT)
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
        settled_ns: What was moved, to `gpu-queue`, to stages and, from a stage that waited for them, to copies.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._streams: dict[tuple[str, int], _Stream] = {}
        self._columns: dict[tuple[str, str], int] = {}
        self.settled_ns: dict[str, int] = {"gpu-queue": 0, "stage": 0, "copy": 0}

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
        stream = self._stream(span.device, span.stream)
        identity = 0 if span.request is None else int(span.request.id)
        if not span.name.startswith(WAIT):
            stream.add(_Span(span.issue_ns, span.start_ns, span.start_ns + span.exec_ns, identity, span.name))
        if not ref:
            return
        returned = span.issue_ns + span.host_ns
        done = span.start_ns + span.exec_ns
        end = min(done, returned)
        scope, source = _source(span.name)
        if source is None or end - span.issue_ns < max(LEAST_NS, span.error_ns or 0):
            self._recorder.unpin(ref)
            return
        stream.waits.append(_Wait(span.issue_ns, min(span.start_ns, returned), end, done, identity, ref, source, now, scope))

    def join(self, device: str, join: Join) -> None:
        """Remember that a stream was told to wait for another one, or for an event of an unknown one."""
        instant, stream, source = join
        self._stream(device, stream).joins.append((instant, source))

    def _stream(self, device: str, identity: int) -> _Stream:
        found = self._streams.get((device, identity))
        if found is None:
            found = self._streams[device, identity] = _Stream()
        return found

    def run_once(self, now: int, breathe: Callable[[], object] = lambda: None, *, everything: bool = False) -> None:
        """Judge the waits that are old enough.

        Args:
            now: Of the timer's clock.
            breathe: Called after each few.
            everything: The others too: nothing more will come.
        """
        judged = 0
        for (device, _), stream in list(self._streams.items()):
            while stream.waits and (everything or now - stream.waits[0].seen >= PATIENCE_NS):
                wait = stream.waits.popleft()
                self._judge(wait, stream, device)
                self._recorder.unpin(wait.ref)
                judged += 1
                if judged % A_SLICE == 0:
                    breathe()

    def _judge(self, wait: _Wait, stream: _Stream, device: str) -> None:
        """Share out a wait, and what others had between the copy's own two events.

        A stream works in order, and a span's last event follows its own last kernel: what runs at an instant belongs to that span, of all that
        cover the instant, which ends first. On a stream that threads share, spans enclose others' work.
        """
        source = self._column(*wait.source)
        left = [(wait.start, wait.end)]
        own = stream.during(wait.start, wait.end)
        others = self._others(wait, stream, device)
        if wait.scope == Scope.EVENT and not any(span.request == wait.request for span in own) and others:
            own = []  # the request has its work elsewhere
        for spans in sorted([own, *others], key=lambda spans: -_finished(spans, wait.end)):
            for span in sorted(spans, key=lambda span: span.end):
                if spans is own:
                    # One that ends later than the copy may have worked after it; before the copy's turn it can only have worked before it.
                    until = span.end if span.end <= wait.done else min(span.end, wait.ready)
                else:
                    until = min(span.end, wait.ready if wait.scope == Scope.STREAM else wait.end)
                left, taken = _take(left, span.start, until)
                column = _owner(span, wait)
                if taken and column is not None:
                    self._move(wait, source, column, taken)

    def _others(self, wait: _Wait, stream: _Stream, device: str) -> list[list[_Span]]:
        """Spans of the other streams that the wait was for, stream by stream."""
        joins = [join for join in stream.joins if join[0] <= wait.start] if wait.scope == Scope.STREAM else []
        if wait.scope == Scope.STREAM and not joins:
            return []
        found: list[list[_Span]] = []
        for (where, identity), other in self._streams.items():
            if where != device or other is stream:
                continue
            spans = other.during(wait.start, wait.end)
            mine = any(span.request == wait.request for span in spans)
            if joins:
                # Only what was in the other stream already when this one was told to wait for it.
                told = max((at for at, source in joins if source == identity or (source is None and mine)), default=0)
                spans = [span for span in spans if span.issue < told]
            elif wait.scope == Scope.EVENT and not mine:
                continue
            if spans:
                found.append(spans)
        return found

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


def _source(name: str) -> tuple[str, tuple[str, str] | None]:
    """What is waited for, and the column that owns the time of a blocked caller until it is settled; None for who is not blocked."""
    if name.startswith(PREFIX):
        return Scope.STREAM, ("copy", name[len(PREFIX) :])
    if name.startswith(WAIT):
        scope, _, stage = name[len(WAIT) :].partition(":")
        return scope, ("stage", stage) if stage else ("unattributed", "unattributed")
    return Scope.STREAM, None


def _owner(span: _Span, wait: _Wait) -> tuple[str, str] | None:
    """Whose time a wait was that `span` explains; None where it belongs already."""
    copy = span.name.startswith(PREFIX)
    if copy and wait.source[0] == "copy":
        return None
    if span.request != wait.request:
        return GPU_QUEUE
    return ("copy", span.name[len(PREFIX) :]) if copy else ("stage", span.name)


def _finished(spans: list[_Span], until: int) -> int:
    """When a stream's last span that can have been waited for in full ended."""
    return max((span.end for span in spans if span.end <= until + LEAST_NS), default=0)


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
