"""When a process is looked at: while all is well in bursts that take one part in sixteen of the time and begin at random, so that no rhythm of the
service hides; while an objective burns all the time, but for two minutes at most, since a fire that nobody puts out may last for days.
"""

from __future__ import annotations

import random
from typing import Final

__all__ = ["SHARE", "Allowance", "Duty"]

SHARE: Final = 16
_BURST_NS: Final = 320_000_000
"""Long against most requests, since a look says what a thread did between two looks of one burst."""
_CYCLE_NS: Final = SHARE * _BURST_NS
_STRETCH_NS: Final = 120_000_000_000
"""An objective that is broken has its incident within seconds, or minutes at few requests."""


class Duty:
    """One burst a cycle of 5.12 s; for one thread of ours.

    Args:
        draw: Where in its cycle a burst begins.
    """

    def __init__(self, draw: random.Random | None = None) -> None:
        self._draw = draw or random.Random()  # noqa: S311  (a time to look, no secret)
        self._cycle = -1
        self._from_ns = self._first_ns = 0

    def wait_ns(self, now_ns: int) -> int:
        """Until the burst of this cycle begins: 0 within it, time to the next cycle after it."""
        self._first_ns = self._first_ns or now_ns
        cycle, at = divmod(now_ns - self._first_ns, _CYCLE_NS)
        if cycle != self._cycle:
            self._cycle = cycle
            self._from_ns = self._draw.randrange(_BURST_NS, _CYCLE_NS - _BURST_NS)
        if at < self._from_ns:
            return self._from_ns - at
        return 0 if at < self._from_ns + _BURST_NS else _CYCLE_NS - at


class Allowance:
    """Time in which a process may be looked at without a pause though no incident is open: two minutes, earned anew one part in sixteen."""

    def __init__(self) -> None:
        self._left_ns = _STRETCH_NS
        self._last_ns = 0
        self._spends = False

    def spend(self, now_ns: int) -> bool:
        """Whether it may be looked at from now on; when two minutes are used up, not again before half of them are earned."""
        self._settle(now_ns)
        self._spends = self._left_ns > (0 if self._spends else _STRETCH_NS // 2)
        return self._spends

    def rest(self, now_ns: int) -> None:
        """Nothing burns, or an incident is open and pays for itself."""
        self._settle(now_ns)
        self._spends = False

    def _settle(self, now_ns: int) -> None:
        passed = now_ns - self._last_ns if self._last_ns else 0
        self._last_ns = now_ns
        earned = -passed if self._spends else passed // SHARE
        self._left_ns = max(0, min(_STRETCH_NS, self._left_ns + earned))
