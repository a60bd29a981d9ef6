"""Judges of levels rather than of shares: a second is bad, good or neither; enough bad ones in a while open, a while without one closes.

A share of slow requests has a distribution to be tested against; a full device memory, a held lock or a queue that grows has none. What
keeps these quiet is persistence (so many bad seconds of the latest), hysteresis (a second is good again only well on the other side of the
limit, and the incident closes after `window_s` of good ones) and the cooldown that doubles.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from inferscope.clock import NS_PER_S
from inferscope.detect.counting import Counts, plus
from inferscope.detect.phases import COOLDOWN_S, Cooldown, Firing, Phase

__all__ = ["MARGIN", "DropDetector", "LevelDetector", "Persistence", "Seen", "ThroughputDetector"]

MARGIN: Final = 0.9
"""A second is good again below this part of a limit (or above its inverse)."""
_SPAN_S: Final = 10.0
"""Rates are taken over this long: single seconds of a slow service are too few requests."""
_MICRO: Final = 1e6
_SHORTEST_NS: Final = NS_PER_S // 4
_KNOWN: Final = 60
"""Seconds after which it is known what is usual."""


class Persistence(NamedTuple):
    """How much it takes to open."""

    bad: int = 5
    """Bad seconds,"""
    of: int = 10
    """of the latest so many that were judged."""


USUAL: Final = Persistence()


class Seen(NamedTuple):
    """What one second was; both False means that it counts for neither side."""

    bad: bool
    good: bool
    value: float
    """What was compared with the limit."""


class LevelDetector:
    """Opens on enough bad seconds, closes after good ones. `update` is called about once a second with pooled flags.

    A row of flags is (processes that judged, of these bad, of these good, sum of their values in millionths, 0): one bad process of a pod
    makes the second bad, all must be good for it to be good.

    Args:
        name: What a firing says.
        persistence: How much it takes to open.
        window_s: Seconds without a bad second, and with good ones only, that close.
        cooldown_s: See `Cooldown`.
    """

    def __init__(self, name: str, *, persistence: Persistence = USUAL, window_s: float = 60.0, cooldown_s: float = COOLDOWN_S) -> None:
        self.name = name
        self.phase: Phase = "warming"
        self.opened_ns: int | None = None
        self.statistic = 0.0
        """The latest value that was judged."""
        self.design_effect = 1.0
        self.warmup_requests = self.excluded = 0
        self.seconds = self.bad_seconds = 0
        """Judged so far, in all phases but warm-up."""
        self._persistence = persistence
        self._window_ns = int(window_s * NS_PER_S)
        self._cooldown = Cooldown(cooldown_s)
        self._recent: deque[tuple[int, int, bool]] = deque(maxlen=persistence.of)
        """(begin, requests, bad) of each judged second."""
        self._last_ns: int | None = None
        self._bad_ns = 0
        self._part: Counts | None = None

    @property
    def until_ns(self) -> int | None:
        """When the cooldown ends."""
        return self._cooldown.until_ns

    @property
    def cooldown_s(self) -> float:
        """How long the next cooldown, or the present one, lasts."""
        return self._cooldown.length_s

    def mark_ready(self) -> None:
        """End the warm-up: nothing is judged before."""
        if self.phase == "warming":
            self.phase = "armed"

    def note_cause(self, fingerprint: str) -> None:
        """As `Detector.note_cause`."""
        self._cooldown.note_cause(fingerprint)

    def judge(self, now_ns: int, row: Counts) -> Firing | None:
        """Take the row since the previous call; returns what fired, in the armed phase only."""
        since_ns = now_ns - NS_PER_S if self._last_ns is None else self._last_ns
        if now_ns < since_ns:  # the clock went back: instants before and after cannot be compared
            self._recent.clear()
            self._bad_ns, since_ns = now_ns, now_ns - NS_PER_S
        if self._part is not None:
            row = plus(row, self._part)
        if now_ns - since_ns < _SHORTEST_NS:  # somebody asked for numbers in between: not a second of its own
            self._part = row
            return None
        self._part, self._last_ns = None, now_ns
        seen = self._look(row, since_ns, now_ns)
        if seen is None:
            return None
        self.statistic = seen.value
        if self.phase != "warming":
            self.seconds, self.bad_seconds = self.seconds + 1, self.bad_seconds + seen.bad
        if self.phase == "cooldown" and self._cooldown.over(now_ns):
            self._cooldown.end()
            self.phase = "armed"
            self._recent.clear()
        if self.phase == "open":
            self._maybe_close(now_ns, seen)
        elif self.phase == "armed":
            return self._count(now_ns, since_ns, seen)
        return None

    def _count(self, now_ns: int, since_ns: int, seen: Seen) -> Firing | None:
        self._recent.append((since_ns, 1, seen.bad))
        bad = [entry for entry in self._recent if entry[2]]
        if not seen.bad or len(bad) < self._persistence.bad:
            return None
        self.phase, self.opened_ns, self._bad_ns = "open", now_ns, now_ns
        counted = sum(entry[1] for entry in self._recent if entry[0] >= bad[0][0])
        self._recent.clear()
        return Firing(self.name, bad[0][0], counted, len(bad), seen.value, 1.0)

    def _maybe_close(self, now_ns: int, seen: Seen) -> None:
        if not seen.good:
            self._bad_ns = now_ns
        elif now_ns - self._bad_ns >= self._window_ns:
            self.phase = "cooldown"
            self._cooldown.begin(now_ns)

    def _look(self, row: Counts, since_ns: int, now_ns: int) -> Seen | None:  # noqa: ARG002  (rates need the times)
        """What the second was; None when nobody could say."""
        judged, bad, good, value = row[:4]
        if not judged:
            return None
        return Seen(bad > 0, good >= judged, value / _MICRO / judged)


class _Flow(LevelDetector):
    """A row of flow is (items finished, time that requests waited in queues in microseconds, 0, 0, 0)."""

    def __init__(self, name: str, *, window_s: float = 60.0, cooldown_s: float = COOLDOWN_S) -> None:
        super().__init__(name, persistence=Persistence(3, 5), window_s=window_s, cooldown_s=cooldown_s)
        self._flow: deque[tuple[int, int, int]] = deque()
        """(begin, end, items) of the latest seconds with a backlog, ten at most."""
        self._backlog = False

    def _rate(self, row: Counts, since_ns: int, now_ns: int) -> float | None:
        """Items a second over the latest ten seconds, all of them with requests that waited; None when they were not.

        By Little's law the time waited in a second is the mean number that wait. It is known when a wait ends: a second in which nothing
        finished and no wait ended keeps the backlog of the one before.
        """
        if row[0] or row[1]:
            self._backlog = row[1] / _MICRO >= (now_ns - since_ns) / NS_PER_S
        gap = now_ns - since_ns > 3 * _SPAN_S * NS_PER_S  # the machine slept: nothing is known of that time
        if not self._backlog or gap or (self._flow and self._flow[-1][1] != since_ns):
            self._flow.clear()
        if not self._backlog or gap:
            return None
        self._flow.append((since_ns, now_ns, row[0]))
        while self._flow[0][1] <= now_ns - _SPAN_S * NS_PER_S:
            self._flow.popleft()
        span = (now_ns - self._flow[0][0]) / NS_PER_S
        return sum(entry[2] for entry in self._flow) / span if span >= 0.9 * _SPAN_S else None


class ThroughputDetector(_Flow):
    """Fires when fewer items finish a second than promised although requests wait.

    Args:
        minimum: Items a second that are promised under backlog.
        window_s: See `LevelDetector`.
        cooldown_s: See `LevelDetector`.
    """

    def __init__(self, minimum: float, *, window_s: float = 60.0, cooldown_s: float = COOLDOWN_S) -> None:
        super().__init__("throughput", window_s=window_s, cooldown_s=cooldown_s)
        self._minimum = minimum

    def _look(self, row: Counts, since_ns: int, now_ns: int) -> Seen | None:
        rate = self._rate(row, since_ns, now_ns)
        if rate is None:
            # Without backlog a low rate says that little was asked for: nothing is wrong, and an incident may close.
            return None if self._backlog else Seen(bad=False, good=True, value=row[0] * NS_PER_S / (now_ns - since_ns))
        return Seen(rate < self._minimum, rate >= self._minimum / MARGIN, rate)


class DropDetector(_Flow):
    """Fires when the rate falls by more than a fraction below what it used to be although requests wait.

    What it used to be is a discounted mean of ten minutes, learned in good seconds only, so that a drop does not become the custom.

    Args:
        drop: Fraction between 0 and 1.
        window_s: See `LevelDetector`.
        cooldown_s: See `LevelDetector`.
    """

    def __init__(self, drop: float, *, window_s: float = 60.0, cooldown_s: float = COOLDOWN_S) -> None:
        super().__init__("throughput_drop", window_s=window_s, cooldown_s=cooldown_s)
        self._drop = drop
        self._usual = 0.0
        self._learned = 0

    def _look(self, row: Counts, since_ns: int, now_ns: int) -> Seen | None:
        rate = self._rate(row, since_ns, now_ns)
        present = row[0] * NS_PER_S / (now_ns - since_ns)
        floor = (1.0 - self._drop) * self._usual
        bad = rate is not None and self._learned >= _KNOWN and rate < floor
        if not bad and self.phase != "open" and (not self._backlog or present >= floor):
            self._learned += 1
            self._usual += (present - self._usual) / min(self._learned, 600)
        if rate is None:
            return None if self._backlog else Seen(bad=False, good=True, value=present)
        return Seen(bad, rate >= floor / MARGIN, rate)
