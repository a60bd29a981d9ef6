"""Detection, wired: windows of this worker become the pod's counts, its leader judges them, and what broke gets an incident when its turn comes."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import TYPE_CHECKING, Any, Final, cast

from inferscope import guard, pod
from inferscope.capture.budget import CaptureBudget
from inferscope.capture.incident import CAPTURE_S
from inferscope.clock import NS_PER_S
from inferscope.detect import Counts, Facts, Trigger
from inferscope.detect.fleet import HostBudget, SelfSelection
from inferscope.errors import CaptureRefusedError, ConfigurationError
from inferscope.rooms import facts

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from inferscope.capture.incident import IncidentKeeper
    from inferscope.device.room import DeviceRoom
    from inferscope.settings import Settings
    from inferscope.types import Breach, Window

__all__ = ["Judging", "budget_of", "trigger_of"]

LOCK_NAME: Final = "capture.lock"
_STALE_NS: Final = 20 * NS_PER_S
_RECENT: Final = 10
"""Ticks."""
_PER_HOUR: Final = 12


def trigger_of(settings: Settings) -> Trigger:
    """The detector; objectives and triggers from environment or file that cannot be used are left out with a line, those from code raise."""
    keywords: dict[str, Any] = {
        "trigger": settings.trigger,
        "fleet_size": settings.fleet_size,
        "warmup_s": settings.warmup_s,
        "warmup_requests": settings.warmup_requests,
    }
    slos = settings.slo
    limits: dict[str, Any] = settings.triggers or {}
    try:
        return Trigger(slos, limits=limits, **keywords)
    except ConfigurationError as error:
        if guard.strict() or not (any(isinstance(item, dict) for item in slos) or _foreign(settings, "triggers")):
            raise
        guard.log_once("slo", f"{error}; objectives and triggers from the environment or file are left out")
        kept = limits if not _foreign(settings, "triggers") else {}
        return Trigger([item for item in slos if not isinstance(item, dict)], limits=kept, **keywords)


def budget_of(settings: Settings) -> CaptureBudget:
    """What captures may cost.

    Raises:
        ConfigurationError: It came from code and cannot be used; from elsewhere that costs a line, and the default is used.
    """
    value: Any = settings.budget
    if value is None or isinstance(value, CaptureBudget):
        return value or CaptureBudget()
    try:
        if not isinstance(value, dict):
            raise ConfigurationError("budget", value, "expected a CaptureBudget")  # noqa: TRY301
        return budget_from(cast("dict[str, Any]", value))
    except ConfigurationError as error:
        if guard.strict() or not _foreign(settings, "budget"):
            raise
        guard.log_once("budget", f"{error}; the default is used")
        return CaptureBudget()


def budget_from(keywords: Mapping[str, Any]) -> CaptureBudget:
    """A budget from its keywords.

    Raises:
        ConfigurationError: One is unknown, or has a value that cannot be used.
    """
    known = [held.name for held in dataclasses.fields(CaptureBudget)]
    for key, value in keywords.items():
        if key not in known:
            raise ConfigurationError(f"budget.{key}", value, f"a keyword of CaptureBudget: {', '.join(known)}")
    return CaptureBudget(**keywords)


def _foreign(settings: Settings, key: str) -> bool:
    """Whether a value came from the environment or a file, which never stop a service from starting."""
    return settings.sources.get(key, "keyword") != "keyword"


class Judging:
    """The detector of one worker and what it feeds; used by one worker thread, under the lock of a tick.

    Args:
        settings: All settings.

    Raises:
        ConfigurationError: An objective or a trigger from code cannot be used.
    """

    def __init__(self, settings: Settings) -> None:
        self.trigger = trigger_of(settings)
        self.selection = SelfSelection(settings.fleet_size)
        lock: Path | None = settings.host_lock
        if lock is None and settings.state_dir is not None:
            lock = settings.state_dir / LOCK_NAME
        self.host = HostBudget(lock)
        self.limit_host(budget_of(settings))
        self._counted_for: Trigger | None = None
        self._counts: list[list[int]] = []
        self._held_until_ns = 0
        self._refused: str | None = None
        self._recent: deque[list[Counts]] = deque(maxlen=_RECENT)
        self.burning = False
        """Whether this worker saw more bad requests in the last seconds than an objective allows."""

    def limit_host(self, budget: CaptureBudget) -> None:
        """All processes of a host together may capture as often an hour as two of this kind."""
        self.host.per_hour = max(_PER_HOUR, 2 * budget.per_hour)

    def count(self, window: Window, device: DeviceRoom, moment_ns: int) -> None:
        """Add a window to this worker's running counts."""
        trigger = self.trigger
        if self._counted_for is not trigger:  # other objectives: their counts begin at zero, which takes nothing from anybody's sums
            self._counted_for, self._counts = trigger, [[0] * pod.PARTS for _ in range(trigger.width)]
        seen = Facts()
        if facts.needed(trigger.slos, trigger.limits):
            seen = guard.contained("facts", lambda: facts.gather(device, moment_ns), seen)
        rows = trigger.rows(window, seen)
        if self._recent and len(self._recent[0]) != len(rows):
            self._recent.clear()
        self._recent.append(rows)
        self.burning = trigger.burns([Counts(*map(sum, zip(*parts, strict=True))) for parts in zip(*self._recent, strict=True)])
        for row, counts in zip(self._counts, rows, strict=True):
            for part, value in enumerate(counts):
                row[part] += value

    def pooled(self, place: pod.Pod, moment_ns: int) -> list[Counts] | None:
        """Show the pod what this worker counted; in its leader, what all counted since the last tick, None in the others."""
        place.publish(moment_ns, [tuple(row) for row in self._counts])
        led = place.leading
        if not place.leads():
            return None
        if not led and len(place.workers(moment_ns)) <= 1:
            place.set_warm(False)  # the first worker: what an earlier life of this pod said is over
        if place.warm and not self.trigger.ready:
            self.trigger.mark_ready()
        elif self.trigger.ready and not place.warm:
            place.set_warm(True)
        return [Counts(*row) for row in place.collect(moment_ns, self.trigger.width)]

    def follow(self, keeper: IncidentKeeper, breach: Breach | None, moment_ns: int) -> tuple[str, ...]:
        """Open an incident for what broke, once this process is drawn and the host lets it; returns the breaches that ended."""
        closed = self.trigger.take_closed()
        if breach is not None:
            self.selection.offer(breach, moment_ns)
        for ended in closed:
            self.selection.forget(ended)
        if keeper.current is None or moment_ns >= self._held_until_ns:
            self.host.release()
        due = self.selection.take(moment_ns) if keeper.current is None else None
        self._refused = self.host.acquire(moment_ns) if due is not None else None
        if due is not None and self._refused is None:
            self._held_until_ns = moment_ns + int(CAPTURE_S * NS_PER_S)
            self.selection.forget(due.id)
            # A capture is refused when its breach is old; here it is only late, and still open.
            late = moment_ns - due.detected_ns > _STALE_NS
            if not keeper.open(dataclasses.replace(due, detected_ns=moment_ns) if late else due, moment_ns):
                self.host.release()
        return closed

    def permit(self, moment_ns: int) -> None:
        """Ask for the host's permission for a capture that somebody asked for.

        Raises:
            CaptureRefusedError: Another process of the host captures, or it has captured often.
        """
        refusal = self.host.acquire(moment_ns)
        if refusal is not None:
            raise CaptureRefusedError(refusal)
        self._held_until_ns = moment_ns + int(CAPTURE_S * NS_PER_S)

    def status(self) -> dict[str, Any]:
        """What is watched and how it stands, and who may capture."""
        return {
            "objectives": {
                name: {
                    "phase": state.phase,
                    "requests": state.requests,
                    "exceeding": state.exceeding,
                    "excluded": state.excluded,
                    "warmup_requests": state.warmup_requests,
                    "promise": state.promise,
                    "unit": state.unit,
                }
                for name, state in self.trigger.state.items()
            },
            "fleet": {
                "probability": self.selection.probabilities[0],
                "breaches": self.selection.offered,
                "drawn": self.selection.drawn,
                "waiting": list(self.selection.waiting),
                "host_lock": self._refused or self.host.reason or ("held" if self.host.held else "free"),
            },
        }
