"""When a healthy process is looked at: in bursts that take one part in sixteen of the time and begin at random, so that no rhythm of the service hides."""

from __future__ import annotations

import random
from typing import Final

__all__ = ["SHARE", "Duty"]

SHARE: Final = 16
_BURST_NS: Final = 320_000_000
"""Long against most requests, since a look says what a thread did between two looks of one burst."""
_CYCLE_NS: Final = SHARE * _BURST_NS


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
