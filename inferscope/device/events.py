"""Device spans: two pooled `torch.Event`s around work, recorded on the stream that it runs on. The caller's part of device timing.

A channel belongs to one device. The caller takes an event, records it, and later another; both go into the channel's inbox, and the harvester
does the rest elsewhere. Nothing here queries, waits or destroys an event. Costs and the reasons for each rule: pytorch#78279 (pools),
#119393 (destroying can block), #78066 (never through `torch.cuda.current_stream`), sglang#39960 (creation can stall for 10 ms).
"""

from __future__ import annotations

import atexit
import ctypes
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from inferscope.clock import NS_PER_S, now_ns
from inferscope.device.backends import BACKENDS, Backend
from inferscope.device.memory import StageMemory
from inferscope.types import SpanFlag

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CAP", "PER_SECOND", "RESERVE", "Channel", "DeviceTimer", "Started", "timer"]

CAP: Final = 4096
"""Events a device at most; with all of them pending, spans are dropped and counted."""
RESERVE: Final = 64
"""Free events that the harvester keeps ready, so that none is created on a request's path."""
PER_SECOND: Final = 1000
"""Device spans a second and device; beyond, requests are drawn and their spans carry a weight."""
ERRORS_TO_OFF: Final = 3
"""Failures in a row after which a device is left alone."""
UNPROVEN: Final = 16
"""Pending spans that a device may have before its first one was read."""
_OTHER: Final = Backend(off="not the accelerator of this process")
_WHOLE: Final = 1 << 32
_MIX: Final = 2654435761  # Knuth's multiplicative hash: neighbouring request ids spread evenly

Started: TypeAlias = tuple[Any, int, int, float, Any]
"""Event, id of its stream, instant before the record, weight, request."""
Pending: TypeAlias = tuple[Any, Any, int, bool, int, int, str, Any, float, int, int, int]
"""First and last event, id of the last stream, whether the first was on another, issue, return, name, request, weight, bytes, flags, pin."""

Join: TypeAlias = tuple[int, int, int | None]
"""Instant, the stream that waits, and the stream that it waits for; None when that is not known."""
KEPT_JOINS: Final = 256


class Counts(NamedTuple):
    """What became of spans, running totals of one device."""

    recorded: int
    delivered: int
    drawn_out: int
    """Left out by drawing or by the second's budget; the weights stand for them."""
    dropped: int
    """Left out because too much was pending."""
    lost: int
    """Recorded but never read: a failing call."""
    errors: int
    """Failing calls."""
    events_created: int
    quarantined: int
    refused: int
    """Not begun: a failing call."""
    host_only: int
    """Spans without a device half: their work ended on another device."""


class Channel:
    """Events and pending spans of one device; made by `DeviceTimer.channel`.

    Attributes:
        off: Why this device is not timed any more; empty while it is.
        recorded: Spans that the harvester was told of.
        done: Whether an event is done, as the harvester asks; a backend may have a better way than torch's.
        proven: Whether a span of this device was read successfully.
        inbox: Pending spans in the order of their last record, for the harvester.
        joins: Streams that were told to wait for others, for the harvester.
        weight: What one span stands for at the moment.
    """

    def __init__(
        self,
        device: Any,
        make_event: Callable[[], Any],
        stream_of: Callable[[int], Any],
        clock: Callable[[], int],
        per_second: int,
        pin: Callable[[Any], int] = lambda _request: 0,
    ) -> None:
        self.device, self.index = device, int(device.index)
        self.backend = BACKENDS.get(device.type, Backend())
        self.off = self.backend.off
        self.proven = False
        self.inbox: deque[Pending] = deque()
        self.pool: deque[Any] = deque()
        self.quarantine: list[Any] = []
        self.joins: deque[Join] = deque(maxlen=KEPT_JOINS)
        self.weight = 1.0
        self.created = self.recorded = self.delivered = self.drawn_out = self.dropped = self.lost = self.errors = self.refused = (
            self.elsewhere
        ) = 0
        self.done: Callable[[Any], bool] = _done
        self._make_event, self._pin = make_event, pin
        self._all: list[Any] = []
        # Bound once: each is called at every mark.
        self._clock, self._stream_of, self._take, self._tell = clock, stream_of, self.pool.popleft, self.inbox.append
        self._threshold = _WHOLE
        self._drawing = False
        self._in_a_row = 0
        self._second = 0
        self._drawn_before = 0
        self._per_second = per_second
        self._left = 0 if self.off else per_second

    # -- the caller's part --------------------------------------------------------------------------------------------------------

    def begin(self, request: Any, stream: Any = None) -> Started | None:
        """Mark the start of work on this thread's current stream; None when this span is not timed.

        Args:
            request: The request that it belongs to, or None; all spans of one request are drawn together.
            stream: Another stream than the current one.
        """
        left = self._left
        if left <= 0 or (self._drawing and not self._drawn(request)):
            if not self.off:
                self.drawn_out += 1
            return None
        event = None
        try:
            if stream is None:
                stream = self._stream_of(self.index)
            if stream.is_capturing():
                return None
            try:
                event = self._take()
            except IndexError:
                event = self._create()
                if event is None:
                    return None
            issue = self._clock()
            event.record(stream)
        except Exception as error:  # noqa: BLE001  (the application's work goes on)
            self.refused += 1
            self.failed(error, event)
            return None
        self._left = left - 1
        return event, stream.stream_id, issue, self.weight, request

    def end(self, started: Started, name: str, nbytes: int = 0, flags: int = 0, stream: Any = None) -> None:
        """Mark the end of the work that `begin` started, on the stream that is current now.

        Args:
            started: What `begin` returned.
            name: Label of the span: a stage's name, or `copy:h2d`.
            nbytes: Bytes, for a copy.
            flags: Bits of `types.SpanFlag`.
            stream: As given to `begin`.
        """
        first, before, issue, weight, request = started
        last = None
        try:
            if stream is None:
                stream = self._stream_of(self.index)
            if stream.is_capturing():
                self.pool.append(first)  # recorded outside the capture, so it may be used again
                return
            try:
                last = self._take()
            except IndexError:
                last = self._create()
                if last is None:
                    self.pool.append(first)
                    return
            last.record(stream)
        except Exception as error:  # noqa: BLE001
            self.lost += 1
            self.failed(error, first, last)
            return
        identity = stream.stream_id
        returned = self._clock()
        # Only who blocked on the device has time that what the device did may own.
        pin = self._pin(request) if flags & SpanFlag.SYNC and request is not None else 0
        self._tell((first, last, identity, identity != before, issue, returned, name, request, weight, nbytes, flags, pin))

    def joined(self, stream: Any, source: Any) -> None:
        """Note that `stream` (None: the current one) waits from now on for what `source` holds (None: for an event of an unknown stream)."""
        waiting = self._stream_of(self.index) if stream is None else stream
        self.joins.append((self._clock(), waiting.stream_id, None if source is None else source.stream_id))

    def abandon(self, started: Started) -> None:
        """Forget a start whose work failed or was none."""
        self.pool.append(started[0])

    def host_only(self, started: Started) -> None:
        """Forget a start whose work ended on another device: what this one did says little of it."""
        self.pool.append(started[0])
        self.elsewhere += 1

    def _drawn(self, request: Any) -> bool:
        identity = self._left + self.drawn_out if request is None else request.id
        return (identity * _MIX) % _WHOLE < self._threshold

    def _create(self) -> Any:
        """A new event while there are few enough; None, counted, under back-pressure."""
        if self.created >= (CAP if self.proven else 2 * UNPROVEN):
            self.dropped += 1
            return None
        return self._new()

    def _new(self) -> Any:
        event = self._make_event()
        self.created += 1
        self._all.append(event)
        return event

    def failed(self, error: Exception, *events: Any) -> None:
        """Count a failing call; its events are never used nor destroyed again. The third in a row leaves the device alone."""
        self.errors += 1
        self._in_a_row += 1
        self.quarantine.extend(event for event in events if event is not None)
        if self._in_a_row >= ERRORS_TO_OFF:
            self.off = f"{ERRORS_TO_OFF} calls failed in a row, last with {type(error).__name__}"
            self._left = 0  # what `begin` looks at first

    # -- the harvester's part -----------------------------------------------------------------------------------------------------

    def worked(self) -> None:
        """A call succeeded."""
        self._in_a_row = 0

    def spare(self, *, new: bool = False) -> Any:
        """An event for the harvester's own use; it never lacks one."""
        if self.pool and not new:
            return self.pool.popleft()
        return self._new()

    def give(self, *events: Any) -> None:
        """Take events back for reuse, oldest first."""
        self.pool.extend(events)

    def pace(self, now: int) -> None:
        """Once a second: refill the budget, and draw so many requests that the coming second keeps to it."""
        if now - self._second < NS_PER_S:
            return
        elapsed = max(1.0, (now - self._second) / NS_PER_S) if self._second else 1.0
        seen = self._per_second - self._left + self.drawn_out - self._drawn_before
        wanted, self._drawn_before = seen / elapsed, self.drawn_out
        self._second = now
        self._left = 0 if self.off else self._per_second
        # A little less than the budget, so that the luck of the draw does not end a second early.
        share = 1.0 if wanted <= self._per_second else 0.9 * self._per_second / wanted
        self._threshold = int(share * _WHOLE)
        self._drawing = share < 1.0
        self.weight = 1.0 / share

    def counts(self) -> Counts:
        """Running totals."""
        return Counts(
            self.recorded, self.delivered, self.drawn_out, self.dropped, self.lost, self.errors, self.created, len(self.quarantine),
            self.refused, self.elsewhere,
        )  # fmt: skip

    def leak(self) -> None:
        """Let no event ever be destroyed: in a forked child, and at the end of a process, whose driver may be gone (pytorch#97142)."""
        for event in self._all:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(event))
        self._all.clear()
        self.pool.clear()
        self.quarantine.clear()
        self.inbox.clear()


def _done(event: Any) -> bool:
    return bool(event.query())


class DeviceTimer:
    """The channels of this process.

    Args:
        clock: For tests.
        per_second: Spans a second and device.

    Attributes:
        enabled: Whether spans are taken; the harvester switches it on, since nobody would read them without one.
        memory: What stages take of each device's memory.
        pin: Holds a request back until the time that it blocked on a device is settled; from the harvester's recorder.
    """

    def __init__(self, clock: Callable[[], int] = now_ns, per_second: int = PER_SECOND) -> None:
        self.enabled = False
        self._per_second = per_second
        self.channels: dict[Any, Channel] = {}
        self._lock = threading.Lock()
        self.clock = clock
        self.memory = StageMemory(clock)
        self.pin: Callable[[Any], int] | None = None
        self._host_only: dict[str, int] = {}

    def channel(self, device: Any) -> Channel | None:
        """The channel of a device that the application uses, or None: call it only with the device of a tensor that exists.

        Args:
            device: A `torch.device`; without an index the current one is meant.
        """
        found = self.channels.get(device)
        return found if found is not None else self._open(device)

    def _open(self, device: Any) -> Channel | None:
        if device.type in BACKENDS and BACKENDS[device.type].off:
            self._untimed(device.type)
            return None
        import torch

        api: Any = torch
        if device.index is None:
            return self.channel(torch.device(device.type, api._C._accelerator_getDeviceIndex()))  # noqa: SLF001  (4 us less than the public one)
        accelerator = api._C._accelerator_getAccelerator()  # noqa: SLF001
        if accelerator is None or accelerator.type != device.type:
            self._untimed(device.type)
            return None
        with self._lock:
            if not self.channels:
                atexit.register(self._leave)
            if device not in self.channels:
                self.channels[device] = Channel(
                    device,
                    lambda: torch.Event(device, enable_timing=True),
                    api._C._accelerator_getStream,  # noqa: SLF001
                    self.clock,
                    self._per_second,
                    lambda request: 0 if self.pin is None else self.pin(request),
                )
            return self.channels[device]

    def _untimed(self, kind: str) -> None:
        """Count a span that has no device half because of the kind of its device."""
        if kind != "cpu":
            self._host_only[kind] = self._host_only.get(kind, 0) + 1

    def _leave(self) -> None:
        self.enabled = False
        for channel in self.channels.values():
            channel.leak()

    def after_fork(self) -> None:
        """In a forked child: the parent's events are not ours to touch."""
        self._lock = threading.Lock()
        self._leave()
        self.channels = {}
        self.memory.reset()

    def status(self) -> dict[str, Any]:
        """State and totals by device."""
        untimed: dict[str, Any] = {
            kind: {"state": f"off: {BACKENDS.get(kind, _OTHER).off or _OTHER.off}", "host_only": count}
            for kind, count in list(self._host_only.items())
        }
        return untimed | {
            str(device): {
                "state": f"off: {channel.off}" if channel.off else "on" if channel.proven else "unproven",
                **channel.counts()._asdict(),
            }
            for device, channel in list(self.channels.items())
        }


timer: Final = DeviceTimer()
"""What the integrations time devices with."""
