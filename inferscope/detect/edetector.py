"""Is the share of bad requests above what the objective allows? A mixture e-detector over counts, divided by the design effect.

Each tick of n requests with k bad ones multiplies the evidence for "the share is p_j" against "it is p0" by the likelihood ratio; every
past instant may be the onset (Shin, Ramdas, Rinaldo, "E-detectors: a nonparametric framework for sequential change detection", 2022):

    l_j = [k ln(p_j/p0) + (n - k) ln((1 - p_j)/(1 - p0))] / phi        R_j <- (seconds + R_j) exp(l_j)        fire when mean_j R_j > A

With independent requests and a share of at most p0, the mean time to a false trigger is at least A seconds. Slow requests come in bursts,
though: one stall hits everything in flight. phi, the variance of k over that of independent requests (the design effect of cluster
sampling), divides the evidence accordingly; that is a heuristic, without a theorem, and measured in `benchmarks/trigger.py`.
No tick contributes more than 42 % of what is needed, so three must agree and one burst, however bad, never fires; clipping keeps the guarantee.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from dataclasses import dataclass
from typing import Final

__all__ = ["DesignEffect", "MixtureDetector", "Tick"]

RATIOS: Final = (1.5, 2.0, 3.0, 5.0, 10.0, 30.0)
"""Shares looked for, as multiples of the allowed one; 1.5 % to 30 % for a P99."""

HIGHEST_SHARE: Final = 0.6
RUN_SECONDS: Final = 604_800.0
"""A week: the mean time between false triggers of a fleet, if requests were independent."""

_EFFECT_LIMIT: Final = 100_000.0
_SUPPOSED_STALL_S: Final = 0.03
"""Until a service is known, slow requests are supposed to come in stalls of 30 ms: a restart must not fire on the first three of them."""
_SUPPOSED_TICKS: Final = 150.0
_LONGEST_TICK_S: Final = 60.0
"""A longer tick counts as this long: after a machine that slept for a week, or a clock that jumped, the waiting alone would be evidence."""
_CAP: Final = 0.42
"""Below a half, so that two ticks never suffice; above a third, so that a fault's first, partly healthy tick may be one of the three."""


@dataclass(frozen=True, slots=True)
class Tick:
    """At least a second and at least `min_requests` requests."""

    start_ns: int
    end_ns: int
    requests: int
    bad: int


class DesignEffect:
    """How much more the number of bad requests varies than if requests were independent.

    The largest of three ratios of discounted sums (a ratio of sums is steadier than a mean of ratios). Two are (k - nm)^2 over nm(1 - m),
    with m the discounted share of bad requests, over single ticks and over blocks of ten: they know bursts and episodes, but a fault that
    begins would inflate them and so hide itself; they are read as they stood 30 ticks ago. The third is taken from neighbouring ticks,
    (k - k')^2 / 2 (von Neumann, 1941): a new level leaves it alone, so it may be read at once.
    Memory of 600 ticks (3600 for the blocks), a plain average before that, with 30 imagined ticks at the start: of independent requests, and
    for the third ratio of 30 ms stalls during the first minutes.

    Args:
        allowed: The share that the objective allows; a share far below it is taken for a quarter of it.
    """

    def __init__(self, allowed: float) -> None:
        self._floor = allowed / 4.0
        self._requests = self._bad = 0.0
        self._scales = (_Scale(1, 600.0, 30), _Scale(10, 360.0, 3))
        self._between = _Ratio(600.0, 30.0)
        self._share = -1.0

    def copy(self) -> DesignEffect:
        """The same knowledge, apart."""
        other = DesignEffect(4.0 * self._floor)
        other._requests, other._bad, other._share = self._requests, self._bad, self._share
        other._between = self._between.copy()
        other._scales = (self._scales[0].copy(), self._scales[1].copy())
        return other

    def update(self, n: int, k: int) -> float:
        """Take a tick of `n` requests, `k` of them bad; returns the design effect, at least 1."""
        keep = 1.0 - 1.0 / 600.0
        self._requests = keep * self._requests + n
        self._bad = keep * self._bad + k
        mean = min(max(self._bad / self._requests, self._floor), 0.5)
        for scale in self._scales:
            scale.add(n, k, mean)
        share = k / n
        if self._share >= 0.0:
            local = min(max((share + self._share) / 2.0, self._floor), 0.5)
            self._between.add(n * n * (share - self._share) ** 2 / 2.0, n * local * (1.0 - local))
            self._between.suppose(1.0 + _SUPPOSED_STALL_S * n)
        self._share = share
        return min(max(self._scales[0].earlier[0], self._scales[1].earlier[0], self._between.value, 1.0), _EFFECT_LIMIT)


class _Ratio:
    """Discounted spread over discounted expectation; imagined ticks steady it while little was seen."""

    __slots__ = ("expected", "imagined", "keep", "seen", "spread", "supposed")

    def __init__(self, memory: float, imagined: float) -> None:
        self.keep = 1.0 - 1.0 / memory
        self.imagined = imagined
        self.spread = self.expected = self.seen = 0.0
        self.supposed = 1.0

    def copy(self) -> _Ratio:
        return copy.copy(self)

    def add(self, spread: float, expected: float) -> None:
        self.spread = self.keep * self.spread + spread
        self.expected = self.keep * self.expected + expected
        self.seen = self.keep * self.seen + 1.0

    def suppose(self, value: float) -> None:
        """What to take the imagined ticks' ratio for; believed for some minutes and then no more."""
        self.supposed = 1.0 + (value - 1.0) * math.exp(-self.seen / _SUPPOSED_TICKS)

    @property
    def value(self) -> float:
        imagined = self.expected / self.seen * self.imagined if self.seen else 1.0
        return (self.spread + self.supposed * imagined) / (self.expected + imagined)


class _Scale:
    """Spread around the long mean, over blocks of some ticks."""

    __slots__ = ("bad", "earlier", "ratio", "requests", "span", "ticks")

    def __init__(self, span: int, memory: float, lag: int) -> None:
        self.span = span
        self.ratio = _Ratio(memory, 30.0 / span)
        self.earlier: deque[float] = deque([1.0], maxlen=lag)
        self.requests = self.bad = self.ticks = 0

    def copy(self) -> _Scale:
        other = copy.copy(self)
        other.ratio, other.earlier = self.ratio.copy(), self.earlier.copy()
        return other

    def add(self, n: int, k: int, mean: float) -> None:
        self.requests, self.bad, self.ticks = self.requests + n, self.bad + k, self.ticks + 1
        if self.ticks == self.span:
            self.ratio.add((self.bad - self.requests * mean) ** 2, self.requests * mean * (1.0 - mean))
            self.earlier.append(self.ratio.value)
            self.requests = self.bad = self.ticks = 0


class MixtureDetector:
    """Evidence that a share is above the allowed one.

    Args:
        allowed: p0, the share of bad requests that the objective allows: 1 - quantile.
        fleet_size: Processes that run this detector; the threshold grows with it, so that the fleet's rate of false triggers does not.
    """

    def __init__(self, allowed: float, fleet_size: int = 1) -> None:
        shares = sorted({min(ratio * allowed, max(HIGHEST_SHARE, (1.0 + allowed) / 2.0)) for ratio in RATIOS})
        self._gains = [(math.log(share / allowed), math.log((1.0 - share) / (1.0 - allowed))) for share in shares]
        self._evidence = [-math.inf] * len(shares)
        self._effect = DesignEffect(allowed)
        self._snapshots: deque[DesignEffect] = deque([self._effect.copy()], maxlen=2)
        self._learned = 0
        self._recent: deque[Tick] = deque(maxlen=900)
        self.threshold = math.log(RUN_SECONDS * max(fleet_size, 1))
        """ln A."""
        self._cap = _CAP * (self.threshold + math.log(len(shares)))
        self.design_effect = 1.0
        self.statistic = -math.inf
        """ln of the mean evidence."""

    def reset(self) -> None:
        """Drop the evidence; what is known of bursts stays."""
        self._evidence = [-math.inf] * len(self._gains)
        self._recent.clear()
        self.statistic = -math.inf

    def learn(self, tick: Tick) -> None:
        """Learn how bursty bad requests are, and judge nothing."""
        self._learned += 1
        if self._learned % 30 == 0:
            self._snapshots.append(self._effect.copy())
        self.design_effect = self._effect.update(tick.requests, tick.bad)

    def remember(self) -> DesignEffect:
        """What was known of bursts 30 to 60 ticks ago: before a fault that fires now began."""
        return self._snapshots[0]

    def unlearn(self, remembered: DesignEffect) -> None:
        """Go back to what was known; for the end of a fault that was no burst, and must not slow the detection of the next one."""
        self._effect = remembered.copy()
        self._snapshots.clear()
        self._snapshots.append(remembered)

    def update(self, tick: Tick) -> bool:
        """Take a tick; True when the evidence passes the threshold."""
        self.learn(tick)
        self._recent.append(tick)
        begun = math.log(min(max((tick.end_ns - tick.start_ns) / 1e9, 1e-3), _LONGEST_TICK_S))
        good = tick.requests - tick.bad
        total = 0.0
        for position, (gain, loss) in enumerate(self._gains):
            step = min((tick.bad * gain + good * loss) / self.design_effect, self._cap)
            held = self._evidence[position]
            high, low = (held, begun) if held > begun else (begun, held)
            held = self._evidence[position] = min(high + math.log1p(math.exp(low - high)) + step, 100.0)
            total += math.exp(held)
        self.statistic = math.log(max(total, 1e-300) / len(self._gains))
        return self.statistic > self.threshold

    def onset(self) -> tuple[int, int, int]:
        """The likeliest instant at which the share rose, with the requests and bad requests since: the maximum of the likelihood."""
        gain, loss = self._gains[self._evidence.index(max(self._evidence))]
        best = (-math.inf, self._recent[-1].start_ns if self._recent else 0, 0, 0)
        run, n, k = 0.0, 0, 0
        for tick in reversed(self._recent):
            n, k = n + tick.requests, k + tick.bad
            run += min((tick.bad * gain + (tick.requests - tick.bad) * loss) / self.design_effect, self._cap)
            if run > best[0]:
                best = (run, tick.start_ns, n, k)
        return best[1:]
