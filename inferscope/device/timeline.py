"""Where a device's stamps lie on the host's clock, without ever waiting for the device.

A device's clock has an offset that drifts by 10 to 100 ppm (torchcomms#2449) and `elapsed_time` is a float32 of milliseconds, so every stamp is
read against a recent *anchor*: an event on a private stream, recorded every 100 ms while the device works. An anchor's host instant lies
between the call that recorded it and the first query that found it done. These bounds, carried from anchor to anchor with the bounds of the
drift that they allow, give for each stamp an interval that holds it; its middle is the answer and half its width the error bar.
"""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from inferscope.device.events import Channel

__all__ = ["Busy", "Timeline"]

PERIOD_NS: Final = 100_000_000
TRIES: Final = 3
PATIENCE_NS: Final = 40_000
"""How long one try may ask whether its event is done; the private stream is idle, so this is a launch and its notice."""
ASKED: Final = 256
"""Queries of one try at most, for a clock that stands still."""
KEPT: Final = 32
WINDOW: Final = 12
"""Anchors that bound the drift: the last 1.2 s."""
DRIFT: Final = 200e-6
"""No oscillator is worse; where the bounds say otherwise a clock was set, and the past is forgotten."""
COARSE_NS: Final = 500.0
"""A device's stamp is as coarse as this (NVIDIA: around 0.5 us), always to one side."""


@dataclass(slots=True)
class _Anchor:
    event: Any
    issue_ns: int
    device_ns: float
    """On the device's clock, counted from the first anchor."""
    low: float
    high: float
    """Bounds of host minus device at this instant: as seen, then tightened by the neighbours before it."""


class Timeline:
    """Anchors of one device; owned by the harvester, used by its thread alone.

    Attributes:
        stream: The private stream.
        missed: Anchors that were not done within their patience.
    """

    def __init__(self, channel: Channel, clock: Any, stream: Any) -> None:
        self._channel, self._clock, self.stream = channel, clock, stream
        self._anchors: deque[_Anchor] = deque()
        self._drift = (-DRIFT, DRIFT)
        self._ticked = -PERIOD_NS
        self._spans = -1
        self.missed = 0

    @property
    def drift_ppm(self) -> float | None:
        """Rate of the host's clock against the device's, minus one; None until two anchors lie apart."""
        return None if len(self._anchors) < 2 else sum(self._drift) / 2 * 1e6

    def tick(self, now: int) -> None:
        """Set an anchor when one is due and the device worked since the last one; call it while no capture is open."""
        if now - self._ticked < PERIOD_NS or self._spans == self._channel.recorded:
            return
        self._ticked, self._spans = now, self._channel.recorded
        best: tuple[int, int, Any] | None = None
        for _ in range(TRIES):
            found = self._try()
            if found is None:
                continue
            if best is None or found[1] - found[0] < best[1] - best[0]:
                if best is not None:
                    self._channel.give(best[2])
                best = found
            else:
                self._channel.give(found[2])
        if best is None:
            self.missed += 1
            return
        self._add(*best)

    def _try(self) -> tuple[int, int, Any] | None:
        channel, clock = self._channel, self._clock
        event = channel.spare()
        try:
            issue = clock()
            event.record(self.stream)
            until = issue + PATIENCE_NS
            for _ in range(ASKED):
                done = channel.done(event)
                seen = clock()
                if done:
                    return issue, seen, event
                if seen > until:
                    break
        except Exception as error:  # noqa: BLE001  (the next tick tries again)
            channel.failed(error, event)
            return None
        channel.give(event)  # in-order reuse is allowed while pending
        return None

    def _add(self, issue: int, seen: int, event: Any) -> None:
        anchors = self._anchors
        device = 0.0
        if anchors:
            last = anchors[-1]
            try:
                device = last.device_ns + last.event.elapsed_time(event) * 1e6
            except Exception as error:  # noqa: BLE001
                self._channel.failed(error, event)
                return
        new = _Anchor(event, issue, device, issue - device - COARSE_NS, seen - device + COARSE_NS)
        self._bound_drift(new)
        if anchors:
            low, high = self._carried(anchors[-1], device)
            low, high = max(low, new.low), min(high, new.high)
            if low <= high:
                new.low, new.high = low, high
            else:  # a clock was set, or the machine slept
                self._forget()
        anchors.append(new)
        while len(anchors) > KEPT:
            self._channel.give(anchors.popleft().event)

    def _forget(self) -> None:
        self._channel.give(*(anchor.event for anchor in self._anchors))
        self._anchors.clear()
        self._drift = (-DRIFT, DRIFT)

    def _bound_drift(self, new: _Anchor) -> None:
        """Tightest and loosest slope that all pairs with the new anchor allow; earlier pairs of the window stay in force."""
        low, high = -DRIFT, DRIFT
        for old in list(self._anchors)[-WINDOW:]:
            span = new.device_ns - old.device_ns
            if span > 0:
                low = max(low, (new.low - old.high) / span)
                high = min(high, (new.high - old.low) / span)
        if low <= high:
            self._drift = (low, high)

    def _carried(self, anchor: _Anchor, device_ns: float) -> tuple[float, float]:
        """Bounds of the offset at another device instant."""
        low, high = self._drift
        away = device_ns - anchor.device_ns
        if away >= 0:
            return anchor.low + low * away, anchor.high + high * away
        return anchor.low + high * away, anchor.high + low * away

    def rate(self) -> float:
        """Host nanoseconds in a device nanosecond."""
        return 1.0 + sum(self._drift) / 2

    def locate(self, event: Any, issue_ns: int) -> tuple[int, int] | None:
        """Host instant of a completed event and half the width of the interval that holds it, ns; None before the first anchor.

        Args:
            event: Completed.
            issue_ns: When it was recorded: no stamp is earlier.

        Raises:
            RuntimeError: The device refuses to compare the events.
        """
        if not self._anchors:
            return None
        anchor = next((each for each in reversed(self._anchors) if each.issue_ns <= issue_ns), self._anchors[0])
        if anchor.issue_ns <= issue_ns:
            device = anchor.device_ns + anchor.event.elapsed_time(event) * 1e6
        else:
            device = anchor.device_ns - event.elapsed_time(anchor.event) * 1e6
        low, high = self._carried(anchor, device)
        low, high = max(float(issue_ns), device + low), device + high
        if high < low:
            return issue_ns, int(COARSE_NS)
        return round((low + high) / 2), round((high - low) / 2 + COARSE_NS)


class Busy:
    """Union of our own spans on one device: what we saw of it, not what it did; others share the card.

    Args:
        keep_ns: How far back.
    """

    def __init__(self, keep_ns: int = 60_000_000_000) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._keep_ns = keep_ns

    def add(self, start: int, end: int) -> None:
        """Merge one span."""
        starts, ends = self._starts, self._ends
        first = bisect.bisect_left(ends, start)
        last = bisect.bisect_right(starts, end)
        if first < last:
            start, end = min(start, starts[first]), max(end, ends[last - 1])
        starts[first:last], ends[first:last] = [start], [end]
        old = bisect.bisect_left(ends, ends[-1] - self._keep_ns)
        if old > len(ends) // 2:
            del starts[:old], ends[:old]

    def fraction(self, from_ns: int, to_ns: int) -> float | None:
        """Share of a period that our spans cover; None for an empty period."""
        if to_ns <= from_ns:
            return None
        first = bisect.bisect_right(self._ends, from_ns)
        covered = 0
        for start, end in zip(self._starts[first:], self._ends[first:], strict=True):
            if start >= to_ns:
                break
            covered += min(end, to_ns) - max(start, from_ns)
        return covered / (to_ns - from_ns)
