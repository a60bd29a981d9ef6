"""All objectives of a process, or of a pod: windows in, breaches out."""

from __future__ import annotations

import re
import secrets
from collections import deque
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Final

from inferscope.clock import NS_PER_MS, NS_PER_S
from inferscope.clock import unix_offset_ns as _unix_offset_ns
from inferscope.detect.detector import COOLDOWN_S, Detector, Firing, Phase
from inferscope.detect.slo import SLO, Counts, check_objectives, count
from inferscope.types import Breach, Window

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["ObjectiveState", "Trigger", "breach_id"]

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
    """Judged requests, in all phases but warm-up."""
    exceeding: int
    warmup_requests: int
    excluded: int


class _Objective:
    __slots__ = ("breach", "detector", "exceeding", "requests", "slo")

    def __init__(self, slo: SLO, detector: Detector) -> None:
        self.slo, self.detector = slo, detector
        self.breach: str | None = None
        self.requests = self.exceeding = 0


class Trigger:
    """Turns windows into breaches; one worker thread uses it. It collects evidence and never pages.

    Args:
        slos: Objectives with different names; see `check_objectives`.
        trigger: `e_detector` or `burn_rate`.
        fleet_size: Processes that judge this service.
        warmup_s: See `Detector`, like the next two.
        warmup_requests: Requests that end the warm-up.
        cooldown_s: Quiet time after an incident.
        unix_offset_ns: What to add to the monotonic clock for wall time.

    Raises:
        ConfigurationError: Two objectives have one name, or a request has too many thresholds.
    """

    def __init__(
        self,
        slos: Sequence[SLO],
        *,
        trigger: str = "e_detector",
        fleet_size: int = 1,
        warmup_s: float = 300.0,
        warmup_requests: int = 2000,
        cooldown_s: float = COOLDOWN_S,
        unix_offset_ns: Callable[[], int] = _unix_offset_ns,
    ) -> None:
        self._objectives = {
            slo.name: _Objective(
                slo,
                Detector(
                    slo,
                    trigger=trigger,
                    fleet_size=fleet_size,
                    warmup_s=warmup_s,
                    warmup_requests=warmup_requests,
                    cooldown_s=cooldown_s,
                ),
            )
            for slo in check_objectives(slos)
        }
        self._unix_offset_ns = unix_offset_ns
        self._warmup_ns = int(warmup_s * NS_PER_S)
        self._first_ns: int | None = None
        self._warm = False
        self._waiting: deque[Breach] = deque()
        self._closed: list[str] = []

    @property
    def slos(self) -> tuple[SLO, ...]:
        """The objectives, in the order that pooled counts come in."""
        return tuple(objective.slo for objective in self._objectives.values())

    @property
    def ready(self) -> bool:
        """Whether the warm-up is over: for one objective at least, or by time when there is none."""
        return self._warm or any(objective.detector.phase != "warming" for objective in self._objectives.values())

    @property
    def state(self) -> Mapping[str, ObjectiveState]:
        """Where every objective stands, by name."""
        return {
            name: ObjectiveState(
                held.detector.phase,
                held.breach,
                held.detector.opened_ns if held.detector.phase == "open" else None,
                held.detector.until_ns,
                held.detector.cooldown_s,
                held.detector.statistic,
                held.detector.design_effect,
                held.requests,
                held.exceeding,
                held.detector.warmup_requests,
                held.detector.excluded,
            )
            for name, held in self._objectives.items()
        }

    def mark_ready(self) -> None:
        """End the warm-up of all objectives now."""
        self._warm = True
        for objective in self._objectives.values():
            objective.detector.mark_ready()

    def note_cause(self, name: str, fingerprint: str) -> None:
        """Tell the cause of an objective's latest incident, once it was diagnosed; a repeated one doubles the cooldown.

        Args:
            name: The objective.
            fingerprint: Route, top stages and holder, as one string.
        """
        if name in self._objectives:
            self._objectives[name].detector.note_cause(fingerprint)

    def take_closed(self) -> tuple[str, ...]:
        """Ids of the breaches that ended since the last call."""
        closed, self._closed = tuple(self._closed), []
        return closed

    def update(self, now_ns: int, source: Window | Sequence[Counts | tuple[int, int, int]]) -> Breach | None:
        """Judge what happened since the previous call.

        Args:
            now_ns: End of the counted time, monotonic.
            source: A window of this process, or the pod's pooled counts in the order of `slos`: (requests, exceeding, errors) since the
                previous call, or whole `Counts`.

        Returns:
            A breach that opened; a second one of the same call is returned by the next.
        """
        if self._first_ns is None:
            self._first_ns = now_ns
        if not self._objectives and now_ns - self._first_ns >= self._warmup_ns:
            self._warm = True
        for position, objective in enumerate(self._objectives.values()):
            counts = count(objective.slo, source) if isinstance(source, Window) else Counts(*source[position])
            self._judge(now_ns, objective, counts)
        return self._waiting.popleft() if self._waiting else None

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

    def _judge(self, now_ns: int, objective: _Objective, counts: Counts) -> None:
        detector = objective.detector
        before = detector.phase
        fired = detector.update(now_ns, counts.requests, counts.exceeding, counts.errors, severe=counts.severe, excluded=counts.excluded)
        if before != "warming":
            objective.requests += counts.requests
            objective.exceeding += counts.exceeding
        if before == "open" and detector.phase != "open" and objective.breach is not None:
            self._closed.append(objective.breach)
            objective.breach = None
        if fired is not None:
            breach = self._breach(now_ns, objective.slo, fired)
            objective.breach = breach.id
            self._waiting.append(breach)

    def _breach(self, now_ns: int, slo: SLO, fired: Firing) -> Breach:
        unix_ns = now_ns + self._unix_offset_ns()
        return Breach(
            breach_id(unix_ns, slo.request_name),
            slo.name,
            slo.request_name,
            slo.threshold_ns / NS_PER_MS,
            slo.quantile,
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
