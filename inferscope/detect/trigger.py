"""All objectives of a process, or of a pod: windows in, breaches out."""

from __future__ import annotations

import re
import secrets
from collections import deque
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final

from inferscope.clock import NS_PER_MS, NS_PER_S
from inferscope.clock import unix_offset_ns as _unix_offset_ns
from inferscope.detect.counting import Counts
from inferscope.detect.level import LevelDetector
from inferscope.detect.phases import COOLDOWN_S, Firing, Phase
from inferscope.detect.signals import Facts, Signals, check_triggers
from inferscope.detect.slo import SLO, check_objectives
from inferscope.detect.watch import ROW_LIMIT, Rows, Tuning, Watch, build
from inferscope.errors import ConfigurationError
from inferscope.types import Breach, Window

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["ObjectiveState", "Trigger", "breach_id"]

_NO_FACTS: Final = Facts()
_BURNING: Final = 3
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._]+")


@dataclass(frozen=True, slots=True)
class ObjectiveState:
    """Where one objective stands."""

    phase: Phase
    breach: str | None
    """Id of the open incident."""
    opened_ns: int | None
    cooldown_until_ns: int | None
    cooldown_s: float
    statistic: float
    """Natural logarithm of the e-detector's mean evidence, or the burn rate."""
    design_effect: float
    requests: int
    """Judged requests, in all phases but warm-up; seconds where a level is watched."""
    exceeding: int
    """Requests above the objective; bad seconds."""
    warmup_requests: int
    """Not judged because they came during warm-up."""
    excluded: int
    """Not judged because they were profiled or shed, or cancelled early."""
    promise: str = ""
    """What is promised, in words; empty for a trigger."""
    unit: str = "requests"
    """What was judged: `requests` or `seconds`."""


class Trigger:
    """Turns windows into breaches; one worker thread uses it. It collects evidence and never pages.

    Args:
        slos: Objectives with different names; see `check_objectives`.
        limits: Triggers beside them; see `signals.check_triggers`. Default none.
        trigger: `e_detector` or `burn_rate`.
        fleet_size: Processes that judge this service.
        warmup_s: See `Detector`, like the next two.
        warmup_requests: Requests that end the warm-up.
        cooldown_s: Quiet time after an incident.
        unix_offset_ns: What to add to the monotonic clock for wall time.

    Raises:
        ConfigurationError: Two objectives have one name, a request has too many thresholds, or there is too much to watch.
    """

    def __init__(
        self,
        slos: Sequence[SLO],
        *,
        limits: Mapping[str, Any] | None = None,
        trigger: str = "e_detector",
        fleet_size: int = 1,
        warmup_s: float = 300.0,
        warmup_requests: int = 2000,
        cooldown_s: float = COOLDOWN_S,
        unix_offset_ns: Callable[[], int] = _unix_offset_ns,
    ) -> None:
        self.slos = check_objectives(slos)
        """The objectives."""
        self.limits = check_triggers(dict(limits or {}))
        """Limits of the triggers, by name."""
        signals = Signals(self.limits)
        self._watches = build(self.slos, signals, Tuning(trigger, fleet_size, warmup_s, warmup_requests, cooldown_s))
        if len(self._watches) > ROW_LIMIT:
            raise ConfigurationError("slo", len(self._watches), f"at most {ROW_LIMIT} promises and triggers in all")
        self._rows = Rows(self.slos, signals)
        self._unix_offset_ns = unix_offset_ns
        self._warmup_ns, self._warmup_limit = int(warmup_s * NS_PER_S), warmup_requests
        self._first_ns: int | None = None
        self._seen = 0
        self._warm = False
        self._busiest: dict[str, float] = {}
        self._waiting: deque[Breach] = deque()
        self._closed: list[str] = []

    @property
    def width(self) -> int:
        """How many rows `rows` gives and `update` takes."""
        return len(self._watches)

    def rows(self, window: Window, facts: Facts = _NO_FACTS) -> list[Counts]:
        """What this process saw in a window, to be added up over the workers of a pod and handed to `update`."""
        for name in self._busiest:
            self._busiest[name] *= 0.9
        for held in window.classes:
            if held.count:
                self._busiest[held.key.request] = self._busiest.get(held.key.request, 0.0) + held.count
        self._seen += sum(held.count for held in window.classes)
        return self._rows.count(window, facts)

    def adopt(self, other: Trigger) -> None:
        """Go on where another trigger stood, for everything that both watch in the same way; incidents of what is no longer watched close."""
        mine = {watch.name: watch for watch in self._watches}
        for before in other._watches:
            watch = mine.get(before.name)
            if watch is not None and watch.slo == before.slo and watch.limit == before.limit:
                watch.take_over(before)
            elif before.breach is not None:
                self._closed.append(before.breach)
        self._closed += other._closed
        self._waiting += other._waiting
        self._seen, self._first_ns, self._busiest = other._seen, other._first_ns, dict(other._busiest)
        if other.ready:
            self.mark_ready()

    @property
    def ready(self) -> bool:
        """Whether the warm-up is over: for one objective at least, or by time or requests when there is none."""
        return self._warm or any(watch.judge.phase != "warming" for watch in self._watches if not isinstance(watch.judge, LevelDetector))

    @property
    def state(self) -> Mapping[str, ObjectiveState]:
        """Where everything that is watched stands, by name."""
        return {
            watch.name: ObjectiveState(
                watch.judge.phase,
                watch.breach,
                watch.judge.opened_ns if watch.judge.phase == "open" else None,
                watch.judge.until_ns,
                watch.judge.cooldown_s,
                watch.judge.statistic,
                watch.judge.design_effect,
                watch.requests,
                watch.exceeding,
                watch.judge.warmup_requests,
                watch.judge.excluded,
                watch.promise,
                "seconds" if isinstance(watch.judge, LevelDetector) else "requests",
            )
            for watch in self._watches
        }

    def mark_ready(self) -> None:
        """End the warm-up of everything now."""
        self._warm = True
        for watch in self._watches:
            watch.judge.mark_ready()

    def note_cause(self, name: str, fingerprint: str, trigger: str | None = None) -> None:
        """Tell the cause of an objective's latest incident, once it was diagnosed; a repeated one doubles the cooldown.

        Args:
            name: The objective or trigger, as the breach named it.
            fingerprint: Route, top stages and holder, as one string.
            trigger: What fired, as the breach said. Default: whatever watches the latency.
        """
        for watch in self._watches:
            if watch.told_as == name and (watch.name == name if trigger is None else watch.fired == trigger):
                watch.judge.note_cause(fingerprint)

    def take_closed(self) -> tuple[str, ...]:
        """Ids of the breaches that ended since the last call."""
        closed, self._closed = tuple(self._closed), []
        return closed

    def update(self, now_ns: int, source: Window | Sequence[Counts | tuple[int, ...]]) -> Breach | None:
        """Judge what happened since the previous call.

        Args:
            now_ns: End of the counted time, monotonic.
            source: A window of this process, or the rows of the pod's workers added up: (requests, exceeding, errors) since the previous
                call, or whole `Counts`.

        Returns:
            A breach that opened; a second one of the same call is returned by the next.
        """
        if self._first_ns is None or now_ns < self._first_ns:
            self._first_ns = now_ns
        late = now_ns - self._first_ns >= self._warmup_ns or self._seen >= self._warmup_limit
        if not self._warm and (self.ready or (late and not self.slos)):
            self._warm = True
            for watch in self._watches:
                if isinstance(watch.judge, LevelDetector):
                    watch.judge.mark_ready()
        rows = self.rows(source) if isinstance(source, Window) else [Counts(*row) for row in source]
        for watch, row in zip(self._watches, rows, strict=True):
            self._judge(now_ns, watch, row)
        return self._waiting.popleft() if self._waiting else None

    def burns(self, rows: Sequence[Counts]) -> bool:
        """Whether some objective's bad requests, three at least, are more than it allows.

        Args:
            rows: Counted over a while, in the order of `rows`.
        """
        return any(
            row.exceeding >= _BURNING and row.exceeding > (1.0 - watch.slo.quantile) * row.requests
            for watch, row in zip(self._watches, rows, strict=True)
            if watch.slo is not None and watch.name == watch.slo.name
        )

    def manual(self, now_ns: int, request: str = "") -> Breach:
        """A breach that somebody asked for: it opens no objective and starts no cooldown.

        Args:
            now_ns: Now, monotonic.
            request: The request to look at; the first objective's when left out.
        """
        slo = next((one for one in self.slos if request in {"", one.request_name}), None)
        name = request or (slo.request_name if slo else "process")
        unix_ns = now_ns + self._unix_offset_ns()
        threshold, quantile = (slo.threshold_ms, slo.quantile) if slo else (0.0, 0.99)
        label = slo.name if slo else name
        return Breach(breach_id(unix_ns, name), label, name, threshold, quantile, now_ns, now_ns, unix_ns, 0, 0, "manual", 0.0, 1.0)

    def _judge(self, now_ns: int, watch: Watch, row: Counts) -> None:
        before = watch.judge.phase
        fired = watch.judge.judge(now_ns, row)
        if isinstance(watch.judge, LevelDetector):
            watch.requests, watch.exceeding = watch.judge.seconds, watch.judge.bad_seconds
        elif before != "warming":
            watch.requests += row.requests
            watch.exceeding += row.exceeding
        if before == "open" and watch.judge.phase != "open" and watch.breach is not None:
            self._closed.append(watch.breach)
            watch.breach = None
        if fired is not None:
            breach = self._breach(now_ns, watch, fired)
            watch.breach, watch.fired = breach.id, fired.trigger
            self._waiting.append(breach)

    def _breach(self, now_ns: int, watch: Watch, fired: Firing) -> Breach:
        """A trigger's breach is told of the busiest request, with that request's objective where it has one."""
        slo = watch.slo
        request = slo.request_name if slo is not None else max(self._busiest, key=lambda name: self._busiest[name], default="process")
        known = slo or next((one for one in self.slos if one.request_name == request), None)
        unix_ns = now_ns + self._unix_offset_ns()
        return Breach(
            breach_id(unix_ns, request),
            watch.told_as,
            request,
            known.threshold_ns / NS_PER_MS if known is not None else 0.0,
            known.quantile if known is not None else 0.99,
            fired.onset_ns,
            now_ns,
            unix_ns,
            fired.requests,
            fired.exceeding,
            fired.trigger,
            fired.statistic,
            fired.design_effect,
        )


def breach_id(unix_ns: int, request: str) -> str:
    """`YYYYMMDDThhmmssZ-<request>-<4 hex>`: sorts by time, safe as a directory's name."""
    moment = datetime.fromtimestamp(unix_ns // NS_PER_S, timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    name = _UNSAFE.sub("_", request).strip("._")[:60] or "request"
    return f"{moment}-{name}-{secrets.token_hex(2)}"
