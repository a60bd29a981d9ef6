"""Burn rates: the plain alternative to the e-detector, in the words of the SRE workbook (chapter 5, "Alerting on SLOs").

Burn 1 uses the error budget up exactly; two windows must agree, so that an old burst does not keep firing. Windows are counted in ticks of
at least a second and at least `min_requests` requests, so that few requests make long windows instead of false triggers.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from inferscope.detect.edetector import Tick

__all__ = ["BurnRate"]

_RULES: Final = ((60, 5, 3.0), (600, 60, 1.5))
"""Long window, short window (ticks) and the burn that both must reach."""


class BurnRate:
    """Compares the share of bad requests with the allowed one over two pairs of windows.

    Args:
        allowed: The share of bad requests that the objective allows: 1 - quantile.
    """

    def __init__(self, allowed: float) -> None:
        self._allowed = allowed
        self._ticks: deque[Tick] = deque(maxlen=max(rule[0] for rule in _RULES))
        self._sums = {size: [0, 0] for rule in _RULES for size in rule[:2]}
        self.threshold = _RULES[0][2]
        self.design_effect = 1.0
        self.statistic = 0.0
        """The highest burn that both windows of a rule reached."""
        self._fired = _RULES[0][0]

    def reset(self) -> None:
        """Forget all ticks."""
        self._ticks.clear()
        self._sums = {size: [0, 0] for size in self._sums}
        self.statistic = 0.0

    def learn(self, tick: Tick) -> None:
        """Nothing to learn: only `update` counts."""

    def remember(self) -> None:
        """Nothing to remember."""

    def unlearn(self, remembered: object) -> None:
        """Nothing to unlearn."""

    def update(self, tick: Tick) -> bool:
        """Take a tick; True when both windows of a rule burn fast enough."""
        for size, sums in self._sums.items():
            sums[0] += tick.requests
            sums[1] += tick.bad
            if len(self._ticks) >= size:
                leaving = self._ticks[-size]
                sums[0] -= leaving.requests
                sums[1] -= leaving.bad
        self._ticks.append(tick)
        self.statistic, fires = 0.0, False
        for long, short, burn in _RULES:
            both = min(self._burn(long), self._burn(short))
            self.statistic = max(self.statistic, both)
            if both >= burn and not fires:
                fires, self._fired = True, long
        return fires

    def onset(self) -> tuple[int, int, int]:
        """Where the long window's excess over the allowed share began to grow for good, with requests and bad requests since."""
        best, run, n, k = (-math.inf, self._ticks[-1].start_ns if self._ticks else 0, 0, 0), 0.0, 0, 0
        for position, tick in enumerate(reversed(self._ticks)):
            if position >= self._fired:
                break
            n, k = n + tick.requests, k + tick.bad
            run += tick.bad - self.threshold / 2.0 * self._allowed * tick.requests
            if run > best[0]:
                best = (run, tick.start_ns, n, k)
        return best[1:]

    def _burn(self, size: int) -> float:
        """Over a window that is not yet full, what is missing counts as good: a young process is not judged by one tick."""
        requests, bad = self._sums[size]
        seen = min(len(self._ticks), size)
        return bad / (requests * size / seen) / self._allowed if requests else 0.0
