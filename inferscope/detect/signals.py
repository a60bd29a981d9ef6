"""Triggers beside objectives: signs of trouble that a process can see in itself, each off unless a limit is given.

    scope.configure(triggers={"lock_wait_ms": 50, "gc_pause_ms": 100, "predicate": my_function})
    INFERSCOPE_TRIGGERS="lock_wait_ms=50,gc_pause_ms=100"

`Signals.rows` runs in every worker and says what its second was; the pod's leader judges the sums with a `LevelDetector` each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from inferscope import guard
from inferscope.aggregate.histogram import above, longest_ns
from inferscope.detect.counting import Counts, flow
from inferscope.detect.level import MARGIN, Persistence
from inferscope.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from inferscope.types import Distribution, Window

__all__ = ["LIMITS", "PERSISTENCE", "UNKNOWN", "Facts", "Signals", "check_triggers", "gpu_row", "level_row"]

UNKNOWN: Final = Counts(0, 0)
"""Nobody could say: the second is not judged."""
_WAITS_SHARE: Final = 0.01
_MICRO: Final = 1e6

LIMITS: Final[dict[str, tuple[float, float, str]]] = {
    "lock_wait_ms": (0.001, 60_000.0, "milliseconds: more than 1 % of a second's waits for one lock took longer"),
    "gc_pause_ms": (0.01, 60_000.0, "milliseconds: a garbage collection stopped the process for longer"),
    "device_idle": (0.01, 1.0, "a fraction: the device was busy for less of a second, device-wide, while requests waited in a queue"),
    "memory_headroom": (0.001, 0.9, "a fraction: less than this of the device's or the container's memory is free"),
    "error_rate": (0.0001, 0.99, "a fraction: a larger share of all requests failed"),
    "throughput_drop": (0.05, 0.99, "a fraction: the rate fell by more than this below what it used to be, while requests waited"),
}
"""Lowest and highest limit of each trigger, and what it means."""

PERSISTENCE: Final[dict[str, Persistence]] = {
    "lock_wait_ms": Persistence(5, 10),
    "gc_pause_ms": Persistence(3, 60),  # full collections come seconds to minutes apart
    "device_idle": Persistence(8, 10),
    "memory_headroom": Persistence(5, 10),
    "predicate": Persistence(3, 10),
}
"""Bad seconds, of so many, that open; where none is given a trigger has a judge of its own."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a window does not hold; None is unknown."""

    device_busy: float | None = None
    """Busy fraction of the least busy device in use over the latest seconds, from the driver."""
    gpu_used: float | None = None
    """Used fraction of the fullest device's memory, from the driver."""
    gpu_used_bytes: int | None = None
    """Used bytes of that device, from the driver; else what torch's allocator has reserved."""
    memory_free: float | None = None
    """Free fraction of what this container, or else this machine, may use."""


def level_row(value: float | None, limit: float, *, below: bool = False) -> Counts:
    """A row of flags for one value and its limit; `below` turns it around: small values are bad."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    bad = value < limit if below else value > limit
    good = value >= limit / MARGIN if below else value <= limit * MARGIN
    return Counts(1, int(bad), int(good), round(min(value, 1e12) * _MICRO), 0)


def gpu_row(limit: float, facts: Facts) -> Counts:
    """Memory of the fullest device against `SLO(max_gpu_mem=)`: a fraction up to 1, bytes above."""
    return level_row(facts.gpu_used if limit <= 1.0 else facts.gpu_used_bytes, limit)


def check_triggers(value: object, source: str = "triggers") -> dict[str, Any]:
    """Limits by trigger name, from a mapping or from text such as "lock_wait_ms=50,error_rate=0.01".

    Raises:
        ConfigurationError: A name is unknown or a limit unusable.
    """
    accepted = f"a mapping with some of {', '.join([*LIMITS, 'predicate'])}"
    if isinstance(value, str):
        pairs = [pair.partition("=") for pair in value.split(",") if pair.strip()]
        value = {name.strip(): limit.strip() for name, _, limit in pairs}
    if not isinstance(value, dict):
        raise ConfigurationError(source, value, accepted)
    return {str(name): _limit(str(name), limit, source, accepted) for name, limit in cast("dict[object, Any]", value).items()}


def _limit(name: str, limit: Any, source: str, accepted: str) -> Any:
    if name == "predicate":
        if not callable(limit):
            raise ConfigurationError(f"{source}.predicate", limit, "a function that takes a Window and returns whether the second was bad")
        return limit
    if name not in LIMITS:
        raise ConfigurationError(f"{source}.{name[:40]}", limit, accepted)
    low, high, meaning = LIMITS[name]
    try:
        number = float(limit) if not isinstance(limit, bool) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if not low <= number <= high:
        raise ConfigurationError(f"{source}.{name}", limit, f"from {low:g} to {high:g}, {meaning}")
    return number


class Signals:
    """Says what a second was for each trigger that has a limit; used by one worker thread.

    Args:
        limits: As `check_triggers` returns them; the predicate is called on that thread, and switched off when it fails three times in a
            minute.
    """

    def __init__(self, limits: Mapping[str, Any]) -> None:
        self.limits = dict(limits)

    @property
    def names(self) -> tuple[str, ...]:
        """The triggers that are on, in the order of their rows."""
        return tuple(self.limits)

    def rows(self, window: Window, facts: Facts) -> list[Counts]:
        """One row a trigger."""
        return [self._row(name, limit, window, facts) for name, limit in self.limits.items()]

    def _row(self, name: str, limit: Any, window: Window, facts: Facts) -> Counts:
        if name == "predicate":
            return _asked(limit, window)
        if name == "error_rate":
            requests = sum(int(held.bands.counts.sum()) for held in window.classes)
            return Counts(requests, min(sum(held.errors for held in window.classes), requests))
        if name == "throughput_drop":
            return flow(None, window)
        if name == "memory_headroom":
            free = [share for share in (facts.memory_free, None if facts.gpu_used is None else 1.0 - facts.gpu_used) if share is not None]
            return level_row(min(free, default=None), limit, below=True)
        if name == "device_idle":
            return _idle(limit, window, facts)
        kind = "lock.wait" if name == "lock_wait_ms" else "gc"
        return _longest([series for series in window.series if series.kind == kind], limit, single=kind == "gc")


def _longest(found: list[Distribution], limit_ms: float, *, single: bool) -> Counts:
    """Whether waits of one series were too long: one of them where `single`, more than 1 % of them otherwise."""
    limit_ns, worst = round(limit_ms * 1e6), 0.0
    bad, good = False, True
    for series in found:
        if not series.count:
            continue
        worst = max(worst, (longest_ns(series) or 0) / 1e6)
        allowed = 0.0 if single else _WAITS_SHARE * series.count
        bad = bad or above(series, limit_ns) > allowed
        good = good and above(series, round(limit_ns * MARGIN)) <= allowed
    return Counts(1, int(bad), int(good and not bad), round(worst * _MICRO), 0)


def _idle(limit: float, window: Window, facts: Facts) -> Counts:
    if facts.device_busy is None:
        return UNKNOWN
    waited = flow(None, window)[1]
    backlog = waited * 1000 >= window.end_ns - window.start_ns  # one request waiting on average, by Little's law
    if not backlog:
        return Counts(1, 0, 1, round(facts.device_busy * _MICRO), 0)
    return level_row(facts.device_busy, limit, below=True)


def _asked(predicate: Callable[[Window], object], window: Window) -> Counts:
    answer = guard.contained("predicate", lambda: bool(predicate(window)), None)
    return UNKNOWN if answer is None else Counts(1, int(answer), int(not answer), int(answer) * int(_MICRO), 0)
