"""One objective's state machine: warming up, armed, open, cooling down."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Protocol

from inferscope.clock import NS_PER_S
from inferscope.detect.burnrate import BurnRate
from inferscope.detect.edetector import MixtureDetector, Tick
from inferscope.detect.phases import COOLDOWN_S, Cooldown, Firing, Phase

if TYPE_CHECKING:
    from inferscope.detect.counting import Counts
    from inferscope.detect.slo import SLO

__all__ = ["Detector", "Firing", "Phase"]

_SEVERE_NS: Final = 10 * NS_PER_S
_SEVERE_SHARE: Final = 0.3
_CLOSING_TICKS: Final = 25


class _Judge(Protocol):
    statistic: float
    design_effect: float

    def reset(self) -> None: ...
    def learn(self, tick: Tick, /) -> None: ...
    def remember(self) -> Any: ...
    def unlearn(self, remembered: Any, /) -> None: ...
    def update(self, tick: Tick, /) -> bool: ...
    def onset(self) -> tuple[int, int, int]: ...


class _Severe:
    """Requests far over the objective, second by second: a full outage need not wait for ticks to fill at few requests a second.

    Fires when in the last ten seconds the likelihood of a share of 30 % against the allowed one passes the detector's threshold, in at least
    three different seconds: three requests five times over the objective are 0.006 % of ten seconds at 5000 a second, and no breach.
    """

    def __init__(self, allowed: float, threshold: float) -> None:
        share = max(_SEVERE_SHARE, (1.0 + allowed) / 2.0) if allowed >= _SEVERE_SHARE else _SEVERE_SHARE
        self._gain = math.log(share / allowed)
        self._loss = math.log((1.0 - share) / (1.0 - allowed))
        self._threshold = threshold
        self._recent: deque[tuple[int, int, int, int]] = deque()
        self._counted_from = 0

    def reset(self) -> None:
        self._recent.clear()

    def update(self, now_ns: int, since_ns: int, n: int, severe: int) -> Firing | None:
        if n:
            self._recent.append((since_ns, now_ns, n, severe))
        while self._recent and self._recent[0][1] <= now_ns - _SEVERE_NS:
            self._recent.popleft()
        if not severe:
            return None
        total = sum(entry[3] for entry in self._recent)
        requests = sum(entry[2] for entry in self._recent)
        evidence = total * self._gain + (requests - total) * self._loss
        seconds = {entry[1] // NS_PER_S for entry in self._recent if entry[3]}
        if evidence <= self._threshold or total < 3 or len(seconds) < 3:
            return None
        onset = next(entry[0] for entry in self._recent if entry[3])
        since = [entry for entry in self._recent if entry[1] > onset]
        return Firing("severe", onset, sum(e[2] for e in since), sum(e[3] for e in since), evidence, 1.0)


class Detector:
    """Judges one objective from counts; `update` is called about once a second.

    Args:
        slo: The objective.
        trigger: `e_detector` or `burn_rate`.
        told_as: What firings are called. Default: after what fired.
        allowed: Share of bad requests that is allowed. Default: 1 - the objective's quantile.
        fleet_size: Processes that judge the same service; see `MixtureDetector`.
        warmup_s: Warm-up ends this long after the first request, or
        warmup_requests: after this many requests, whichever comes first, or at `mark_ready()`. Requests until then are counted, not judged.
        cooldown_s: An incident is followed by this long without a new one; doubled up to an hour while causes repeat.
    """

    def __init__(
        self,
        slo: SLO,
        *,
        trigger: str = "e_detector",
        told_as: str | None = None,
        allowed: float | None = None,
        fleet_size: int = 1,
        warmup_s: float = 300.0,
        warmup_requests: int = 2000,
        cooldown_s: float = COOLDOWN_S,
    ) -> None:
        self.slo = slo
        self.phase: Phase = "warming"
        self.warmup_requests = 0
        """Requests that were not judged because they came during warm-up."""
        self.excluded = 0
        """Profiled requests that were not judged."""
        self.opened_ns: int | None = None
        self._cooldown = Cooldown(cooldown_s)
        self._warmup_ns, self._warmup_limit = int(warmup_s * NS_PER_S), warmup_requests
        self._allowed = 1.0 - slo.quantile if allowed is None else allowed
        self._trigger, self._told_as = trigger, told_as
        self._latency: _Judge = BurnRate(self._allowed) if trigger == "burn_rate" else MixtureDetector(self._allowed, fleet_size)
        self._errors = MixtureDetector(slo.max_error_rate, fleet_size) if slo.max_error_rate is not None else None
        self._severe = _Severe(self._allowed, MixtureDetector(self._allowed, fleet_size).threshold + math.log(6.0))
        self._first_ns: int | None = None
        self._last_ns: int | None = None
        self._start_ns = 0
        self._counts = [0, 0, 0]
        self._closing: deque[tuple[Tick, int]] = deque()
        self._remembered: tuple[Any, Any] = (None, None)

    @property
    def until_ns(self) -> int | None:
        """When the cooldown ends."""
        return self._cooldown.until_ns

    @property
    def cooldown_s(self) -> float:
        """How long the next cooldown, or the present one, lasts."""
        return self._cooldown.length_s

    @property
    def statistic(self) -> float:
        """Natural logarithm of the e-detector's mean evidence, or the burn rate."""
        return self._latency.statistic

    @property
    def design_effect(self) -> float:
        """How much burstier slow requests are than independent ones."""
        return self._latency.design_effect

    def mark_ready(self) -> None:
        """End the warm-up now."""
        if self.phase == "warming":
            self.phase = "armed"

    def note_cause(self, fingerprint: str) -> None:
        """Tell the cause of the latest incident: the cooldown doubles when it is the previous one's, and starts over when it is not."""
        self._cooldown.note_cause(fingerprint)

    def judge(self, now_ns: int, row: Counts) -> Firing | None:
        """As `update`, from a row of counts."""
        fired = self.update(now_ns, row[0], row[1], row[2], severe=row[3], excluded=row[4])
        return fired if fired is None or self._told_as is None else fired._replace(trigger=self._told_as)

    def update(self, now_ns: int, n: int, k: int, errors: int = 0, *, severe: int = 0, excluded: int = 0) -> Firing | None:
        """Take the counts since the previous call.

        Args:
            now_ns: End of the counted time, monotonic.
            n: Requests, without profiled ones.
            k: Those above the threshold.
            errors: Those that failed.
            severe: Those more than five times above the threshold.
            excluded: Profiled requests.

        Returns:
            What fired, in the armed state only.
        """
        self.excluded += excluded
        if self._last_ns is not None and now_ns < self._last_ns:
            self._clock_went_back(now_ns)
        since_ns = self._last_ns if self._last_ns is not None else now_ns - NS_PER_S
        self._last_ns = now_ns
        if self._first_ns is None and n:
            self._first_ns = since_ns
        if self.phase == "warming":
            self._warm(now_ns, n)
            return None
        if self.phase == "cooldown" and self._cooldown.over(now_ns):
            self._arm()
        fired = self._severe.update(now_ns, since_ns, n, severe) if self.phase == "armed" and self.slo.severe else None
        tick = self._tick(now_ns, since_ns, n, k, errors)
        if tick is not None:
            fired = self._judge(*tick) or fired
        if self.phase == "open":
            self._maybe_close(now_ns)
        if fired is not None:
            self._open(now_ns)
        return fired

    def _clock_went_back(self, now_ns: int) -> None:
        """Instants before and after cannot be compared: drop the evidence, keep the phase and what is known of bursts."""
        self._last_ns, self._counts = None, [0, 0, 0]
        if self.opened_ns is not None:
            self.opened_ns = min(self.opened_ns, now_ns)
        self._first_ns = None
        self._closing.clear()
        self._latency.reset()
        self._severe.reset()
        if self._errors is not None:
            self._errors.reset()

    def _warm(self, now_ns: int, n: int) -> None:
        self.warmup_requests += n
        late = self._first_ns is not None and now_ns - self._first_ns >= self._warmup_ns
        if late or self.warmup_requests >= self._warmup_limit:
            self.phase = "armed"

    def _tick(self, now_ns: int, since_ns: int, n: int, k: int, errors: int) -> tuple[Tick, int] | None:
        """Add to the tick in progress; returns it when it lasted a second and has the requests."""
        counts = self._counts
        if not counts[0]:
            self._start_ns = since_ns  # time without requests belongs to no tick
        counts[0] += n
        counts[1] += min(k, n)
        counts[2] += min(errors, n)
        # 0.95: the worker's second may come a little early
        if counts[0] < self.slo.min_requests or now_ns - self._start_ns < 0.95 * NS_PER_S:
            return None
        tick, failed = Tick(self._start_ns, now_ns, counts[0], counts[1]), counts[2]
        self._counts = [0, 0, 0]
        return tick, failed

    def _judge(self, tick: Tick, failed: int) -> Firing | None:
        wrong = Tick(tick.start_ns, tick.end_ns, tick.requests, failed)
        if self.phase != "armed":
            self._latency.learn(tick)
            if self._errors is not None:
                self._errors.learn(wrong)
            if self.phase == "open":
                self._closing.append((tick, failed))
            return None
        slow = self._latency.update(tick)
        failing = self._errors is not None and self._errors.update(wrong)
        if slow:
            return Firing(self._trigger, *self._latency.onset(), self._latency.statistic, self._latency.design_effect)
        if failing and self._errors is not None:
            return Firing("error_rate", *self._errors.onset(), self._errors.statistic, self._errors.design_effect)
        return None

    def _open(self, now_ns: int) -> None:
        self.phase, self.opened_ns = "open", now_ns
        self._remembered = (self._latency.remember(), self._errors.remember() if self._errors is not None else None)
        self._closing.clear()

    def _arm(self) -> None:
        self.phase = "armed"
        self._cooldown.end()
        self._latency.reset()
        self._severe.reset()
        if self._errors is not None:
            self._errors.reset()

    def _maybe_close(self, now_ns: int) -> None:
        """Close when the objective held for `window_s` and 25 ticks, and in their latest third; or when no requests come any more."""
        window_ns = int(self.slo.window_s * NS_PER_S)
        opened = self.opened_ns or now_ns
        closing = self._closing
        while len(closing) > _CLOSING_TICKS and closing[1][0].start_ns <= now_ns - window_ns:
            closing.popleft()
        silent = now_ns - max(closing[-1][0].end_ns if closing else opened, opened) > 10 * window_ns
        if not silent:
            if len(closing) < _CLOSING_TICKS or now_ns - closing[0][0].start_ns < 0.95 * window_ns:
                return
            ticks = list(closing)
            if not (self._holds(ticks) and self._holds(ticks[-(len(ticks) // 3) :])):
                return
        if now_ns - opened > 2 * max(window_ns, now_ns - closing[0][0].start_ns if closing else 0):
            # it lasted: a fault and not a burst
            self._latency.unlearn(self._remembered[0])
            if self._errors is not None:
                self._errors.unlearn(self._remembered[1])
        self.phase = "cooldown"
        self._cooldown.begin(now_ns)

    def _holds(self, ticks: list[tuple[Tick, int]]) -> bool:
        requests = sum(tick.requests for tick, _ in ticks)
        slow = sum(tick.bad for tick, _ in ticks)
        failed = sum(errors for _, errors in ticks)
        limit = self.slo.max_error_rate
        return slow <= self._allowed * requests and (limit is None or failed <= limit * requests)
