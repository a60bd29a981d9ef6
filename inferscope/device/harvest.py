"""Reads what the device finished: newest first on each stream, `query` only, in short slices, and never while a graph is captured.

A stream works in order, so that its newest finished event answers for all before it (D3: one slow stream no longer holds back the others).
What comes out are `DeviceSpan` values: into the series `device` and `device.queue` of the recorder, and to whoever listens.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from inferscope import guard
from inferscope.device.backends import CaptureWatch, captures
from inferscope.device.events import RESERVE, Channel, DeviceTimer, Pending
from inferscope.device.settling import WAIT, Settler
from inferscope.device.timeline import Busy, Timeline

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferscope.record.core import Recorder

__all__ = ["DeviceSpan", "Harvester"]

SLICE: Final = 64
"""Spans read in one slice, after which request threads may have the interpreter."""
SLICE_NS: Final = 300_000
CREATED_A_PASS: Final = 8
"""A capture that wants to begin waits for these, and creating one can be slow."""


class DeviceSpan(NamedTuple):
    """One span of a device's work; instants in ns on the host's clock."""

    name: str
    device: str
    stream: int
    issue_ns: int
    """When the caller marked its start."""
    start_ns: int | None
    """When the stream reached it; None before the device's clock is known."""
    error_ns: int | None
    """Half the width of the interval that holds `start_ns`."""
    exec_ns: int | None
    """From its first event to its last, other threads' work on the same stream included; None for `device_error`."""
    queue_wait_ns: int | None
    """From issue to start: what stood before it in the stream."""
    gap_ns: int | None
    """Idle time of the stream before it, as far as our spans show; None for the first one and for a nested one."""
    host_ns: int
    """What the caller spent between the two marks."""
    cross_stream: bool
    """It ended on another stream than it began on."""
    device_error: bool
    """Its events could not be read: a failing call, or a device that is lost. What the host saw of it holds."""
    shared_stream: bool
    """Several requests had spans pending on the stream: `exec_ns` may hold others' work."""
    weight: float
    """Spans that it stands for."""
    request: Any
    """The request, perhaps closed by now, or None."""
    nbytes: int
    flags: int
    """Bits of `types.SpanFlag`."""


def _span(channel: Channel, stream: int, entry: Pending) -> DeviceSpan:
    """What the host knows of a span."""
    _, _, _, cross, issue, returned, name, request, weight, nbytes, flags, _ = entry
    return DeviceSpan(
        name=name,
        device=str(channel.device),
        stream=stream,
        issue_ns=issue,
        start_ns=None,
        error_ns=None,
        exec_ns=None,
        queue_wait_ns=None,
        gap_ns=None,
        host_ns=returned - issue,
        cross_stream=cross,
        device_error=True,
        shared_stream=False,
        weight=weight,
        request=request,
        nbytes=nbytes,
        flags=flags,
    )


class _Stream:
    """Pending spans of one stream, and where the last one that was read ended."""

    __slots__ = ("last_end", "pending", "ready", "stride")

    def __init__(self) -> None:
        self.pending: deque[Pending] = deque()
        self.ready = 0
        """How many of the oldest are known to be finished."""
        self.last_end: int | None = None
        self.stride = 16


class _Device:
    __slots__ = ("busy", "channel", "reversed", "streams", "timeline")

    def __init__(self, channel: Channel, timeline: Timeline) -> None:
        self.channel, self.timeline = channel, timeline
        self.streams: dict[int, _Stream] = {}
        self.busy = Busy()
        self.reversed = 0


class Harvester:
    """Delivers what devices finished. One thread calls `run_once`.

    Args:
        timer: Where spans come from; switched on by `start`.
        recorder: Gets the series; None for none.
        watch: Open captures.

    Attributes:
        sinks: Called with each `DeviceSpan`.
    """

    def __init__(self, timer: DeviceTimer, recorder: Recorder | None, watch: CaptureWatch = captures) -> None:
        self._timer, self._recorder, self._watch, self._clock = timer, recorder, watch, timer.clock
        self._devices: dict[Any, _Device] = {}
        self._queries: dict[str, Callable[[Any], bool] | None] = {}
        self.settler = None if recorder is None else Settler(recorder)
        self.sinks: list[Callable[[DeviceSpan], None]] = []

    def start(self) -> None:
        """Let the integrations take spans."""
        self._timer.pin = None if self._recorder is None else self._recorder.pin
        self._timer.enabled = True

    def stop(self) -> None:
        """Take none any more; read what is finished."""
        self._timer.enabled = False
        with guard.guard("device"):
            self.run_once()
            if self.settler is not None:
                self.settler.run_once(self._clock(), everything=True)

    def run_once(self, breathe: Callable[[], object] = lambda: None) -> int:
        """Read everything that is finished, slice by slice, with `breathe` in between; returns how many spans were delivered."""
        total = 0
        for channel in list(self._timer.channels.values()):
            device = self._devices.get(channel)
            if device is None:
                device = self._open(channel)
                if device is None:
                    continue
            total += self._serve(device, breathe)
        if self.settler is not None:
            self.settler.run_once(self._clock(), breathe)
        return total

    def _open(self, channel: Channel) -> _Device | None:
        if channel.off:
            return None
        with self._watch.quiet() as allowed:
            if not allowed:
                return None
            self._relax(channel)
            try:
                import torch

                stream = torch.Stream(device=channel.device)
            except Exception as error:  # noqa: BLE001  (tried again, and given up after three times)
                channel.failed(error)
                return None
        device = self._devices[channel] = _Device(channel, Timeline(channel, self._clock, stream))
        return device

    def _relax(self, channel: Channel) -> None:
        """Once a kind of device: make this thread's queries harmless to captures that C++ code began, and to threads that want the interpreter."""
        kind = channel.device.type
        if kind not in self._queries:
            self._queries[kind] = None
            with guard.guard("device"):
                if channel.backend.relax is not None:
                    channel.backend.relax()
                if channel.backend.queries is not None:
                    self._queries[kind] = channel.backend.queries()
        channel.done = self._queries[kind] or channel.done

    def _serve(self, device: _Device, breathe: Callable[[], object]) -> int:
        channel, total = device.channel, 0
        self._sort(device)
        if channel.off:
            self._give_up(device)
            return 0
        with self._watch.quiet() as allowed:
            if not allowed:
                return 0
            now = self._clock()
            channel.pace(now)
            device.timeline.tick(now)
            self._reserve(device)
            for stream in device.streams.values():
                stream.ready = max(stream.ready, self._finished(channel, stream))
        while any(stream.ready for stream in device.streams.values()):
            breathe()
            with self._watch.quiet() as allowed:
                if not allowed or channel.off:
                    break
                total += self._slice(device)
        return total

    def _sort(self, device: _Device) -> None:
        inbox = device.channel.inbox
        while inbox:
            entry = inbox.popleft()
            device.channel.recorded += 1
            stream = device.streams.get(entry[2])
            if stream is None:
                stream = device.streams[entry[2]] = _Stream()
            stream.pending.append(entry)
        joins = device.channel.joins
        while joins:
            join = joins.popleft()
            if self.settler is not None:
                self.settler.join(str(device.channel.device), join)

    @staticmethod
    def _reserve(device: _Device) -> None:
        """Create the free events that callers will need, here and on an idle stream, so that they exist in the driver too."""
        channel = device.channel
        if not channel.proven:
            return
        try:
            for _ in range(min(CREATED_A_PASS, RESERVE - len(channel.pool))):
                event = channel.spare(new=True)
                event.record(device.timeline.stream)
                channel.give(event)
        except Exception as error:  # noqa: BLE001
            channel.failed(error)

    def _finished(self, channel: Channel, stream: _Stream) -> int:
        """How many of the oldest pending spans are finished; at most three queries."""
        pending, ready = stream.pending, stream.ready
        if len(pending) == ready:
            return ready
        try:
            finished = len(pending) if channel.done(pending[-1][1]) else self._stride(channel, stream)
        except Exception as error:  # noqa: BLE001  (asked again at the next pass)
            channel.failed(error)
            return ready
        channel.worked()
        return finished

    @staticmethod
    def _stride(channel: Channel, stream: _Stream) -> int:
        """The newest is not finished: feel forward from the oldest, farther after a hit and nearer after a miss; two queries."""
        pending, ready = stream.pending, stream.ready
        for _ in range(2):
            reach = min(ready + stream.stride, len(pending) - 1)
            if reach > ready and channel.done(pending[reach - 1][1]):
                stream.stride = min(2 * stream.stride, 1024)
                ready = reach
            else:
                stream.stride = max(1, stream.stride // 2)
        return ready

    def _slice(self, device: _Device) -> int:
        until, delivered = self._clock() + SLICE_NS, 0
        for identity, stream in device.streams.items():
            shared = len({id(entry[7]) for entry in list(stream.pending)[:SLICE]}) > 1 if stream.ready > 1 else False
            while stream.ready:
                entry = stream.pending.popleft()
                stream.ready -= 1
                self._read(device, identity, stream, entry, shared=shared)
                delivered += 1
                if delivered >= SLICE or self._clock() > until:
                    return delivered
        return delivered

    def _read(self, device: _Device, identity: int, stream: _Stream, entry: Pending, *, shared: bool) -> None:
        channel, (first, last), issue = device.channel, entry[:2], entry[4]
        try:
            elapsed = first.elapsed_time(last)
            found = device.timeline.locate(first, issue)
        except Exception as error:  # noqa: BLE001
            if self._early(entry):
                stream.pending.append(entry)
            else:  # this one span is lost, and counted
                channel.lost += 1
                channel.failed(error, first, last)
                self._deliver(_span(channel, identity, entry), entry)
            return
        channel.worked()
        channel.proven = True
        channel.delivered += 1
        channel.give(first, last)
        if elapsed < 0:  # seen on HIP (rocm-libraries#6379)
            device.reversed += 1
        spent = max(0, round(elapsed * 1e6 * device.timeline.rate()))
        span = _span(channel, identity, entry)._replace(exec_ns=spent, device_error=False, shared_stream=shared)
        if found is not None:
            start, bar = found
            gap = start - stream.last_end if stream.last_end is not None and start >= stream.last_end else None
            stream.last_end = max(stream.last_end or 0, start + spent)
            device.busy.add(start, start + spent)
            span = span._replace(start_ns=start, error_ns=bar, queue_wait_ns=max(0, start - issue), gap_ns=gap)
        self._deliver(span, entry)

    @staticmethod
    def _early(entry: Pending) -> bool:
        """Whether a span is not finished after all: two threads of one stream told of their spans in the other order, or it began elsewhere."""
        try:
            return not (entry[0].query() and entry[1].query())
        except Exception:  # noqa: BLE001  (then it is lost)
            return False

    def _deliver(self, span: DeviceSpan, entry: Pending) -> None:
        recorder, pin = self._recorder, entry[11]
        if recorder is not None and span.exec_ns is not None and not span.name.startswith(WAIT):
            start = span.issue_ns if span.start_ns is None else span.start_ns
            recorder.interval("device", span.name, start, start + span.exec_ns, flags=span.flags, aux=span.nbytes)
            if span.start_ns is not None:
                recorder.interval("device.queue", span.name, span.issue_ns, max(span.issue_ns, span.start_ns))
        if self.settler is not None:
            with guard.guard("device"):
                self.settler.add(span, pin, self._clock())
        for sink in self.sinks:
            with guard.guard("device"):
                sink(span)

    def _give_up(self, device: _Device) -> None:
        """A device that failed: what is pending is lost; its events are neither reused nor destroyed."""
        for stream in device.streams.values():
            device.channel.lost += len(stream.pending)
            for entry in stream.pending:
                device.channel.quarantine.extend(entry[:2])
                self._deliver(_span(device.channel, entry[2], entry), entry)
            stream.pending.clear()
            stream.ready = 0

    # -- what others ask ----------------------------------------------------------------------------------------------------------

    def busy(self, from_ns: int, to_ns: int) -> dict[str, float]:
        """Share of a period that our own spans cover, by device; others' work on the card is not in it."""
        found = {str(device.channel.device): device.busy.fraction(from_ns, to_ns) for device in self._devices.values()}
        return {name: share for name, share in found.items() if share is not None}

    @property
    def pending(self) -> int:
        """Spans that are told of and not delivered."""
        return sum(len(stream.pending) for device in self._devices.values() for stream in device.streams.values())

    def status(self) -> dict[str, Any]:
        """State, totals and clock by device."""
        found = self._timer.status()
        for device in self._devices.values():
            found[str(device.channel.device)] |= {
                "drift_ppm": device.timeline.drift_ppm,
                "anchors_missed": device.timeline.missed,
                "reversed": device.reversed,
                "pending": sum(len(stream.pending) for stream in device.streams.values()),
            }
        return found

    def after_fork(self) -> None:
        """In a forked child: forget the parent's devices and everything pending on them."""
        self._watch.after_fork()
        if self.settler is not None:
            self.settler.after_fork()
        self._timer.after_fork()
        self._devices = {}
