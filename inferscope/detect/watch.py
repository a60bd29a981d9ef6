"""What is watched: for each objective its latency and errors and what else it promises, then the triggers. One row of counts each.

The order of the rows follows from objectives and limits alone, so that all workers of a pod count the same thing in the same place.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from inferscope.detect.counting import Counts, Jitter, SizeFilter, count, flow
from inferscope.detect.detector import Detector
from inferscope.detect.level import DropDetector, LevelDetector, ThroughputDetector
from inferscope.detect.signals import PERSISTENCE, Facts, Signals, gpu_row
from inferscope.detect.slo import SLO

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inferscope.detect.phases import Firing, Phase
    from inferscope.types import Window

__all__ = ["ROW_LIMIT", "Rows", "Tuning", "Watch", "build"]

ROW_LIMIT: Final = 40
"""Rows of one service: what the pool of a pod has room for."""


class Judge(Protocol):
    """What turns rows into firings."""

    phase: Phase
    opened_ns: int | None
    warmup_requests: int
    excluded: int

    @property
    def until_ns(self) -> int | None: ...
    @property
    def cooldown_s(self) -> float: ...
    @property
    def statistic(self) -> float: ...
    @property
    def design_effect(self) -> float: ...
    def mark_ready(self) -> None: ...
    def note_cause(self, fingerprint: str, /) -> None: ...
    def judge(self, now_ns: int, row: Counts, /) -> Firing | None: ...


class Tuning(NamedTuple):
    """How judges are built; see `Detector`."""

    trigger: str = "e_detector"
    fleet_size: int = 1
    warmup_s: float = 300.0
    warmup_requests: int = 2000
    cooldown_s: float = 600.0


class Watch:
    """One row with its judge.

    Args:
        name: As `status()` shows it: the objective's name, `NAME:jitter` and the like, or the trigger's name.
        slo: The objective that a breach of it is told of; None for a trigger.
        judge: What turns rows into firings.
        limit: A trigger's limit.
    """

    __slots__ = ("breach", "exceeding", "fired", "judge", "limit", "name", "requests", "slo")

    def __init__(self, name: str, slo: SLO | None, judge: Judge, limit: Any = None) -> None:
        self.name, self.slo, self.judge, self.limit = name, slo, judge, limit
        self.breach: str | None = None
        """Id of the open incident."""
        self.fired: str | None = None
        """What fired the latest one."""
        self.requests = self.exceeding = 0
        """Judged so far, in all phases but warm-up."""

    @property
    def told_as(self) -> str:
        """What a breach calls it: the objective's name, or the trigger's."""
        return self.slo.name if self.slo is not None else self.name

    @property
    def promise(self) -> str:
        """What is promised, in words; empty for a trigger."""
        if self.slo is None:
            return ""
        kind = self.name.removeprefix(self.slo.name).removeprefix(":")
        return {
            "": f"{100 * self.slo.quantile:g} % of {self.slo.request_name} within {self.slo.threshold_ms:g} ms",
            "jitter": f"P99 - P50 at most {self.slo.jitter_ms} ms",
            "throughput": f"at least {self.slo.min_throughput} a second while requests wait",
            "gpu_memory": f"device memory at most {self.slo.max_gpu_mem}",
        }[kind]

    def take_over(self, other: Watch) -> None:
        """Go on where an equal one stood: what it learned, and its open incident."""
        self.judge, self.breach, self.fired = other.judge, other.breach, other.fired
        self.requests, self.exceeding = other.requests, other.exceeding


def build(slos: Sequence[SLO], signals: Signals, tuning: Tuning) -> list[Watch]:
    """All watches, in the order of their rows."""
    watches = [watch for slo in slos for watch in _of_objective(slo, tuning)]
    return watches + [_of_signal(name, limit, tuning) for name, limit in signals.limits.items()]


def _detector(slo: SLO, tuning: Tuning, *, told_as: str | None = None, allowed: float | None = None) -> Detector:
    return Detector(
        slo,
        trigger=tuning.trigger,
        told_as=told_as,
        allowed=allowed,
        fleet_size=tuning.fleet_size,
        warmup_s=tuning.warmup_s,
        warmup_requests=tuning.warmup_requests,
        cooldown_s=tuning.cooldown_s,
    )


def _of_objective(slo: SLO, tuning: Tuning) -> list[Watch]:
    found = [Watch(slo.name, slo, _detector(slo, tuning))]
    if slo.jitter_ms is not None:
        plain = SLO(slo.name, p99_ms=slo.jitter_ms, window_s=slo.window_s, min_requests=slo.min_requests)
        found.append(Watch(f"{slo.name}:jitter", slo, _detector(plain, tuning, told_as="jitter")))
    if slo.min_throughput is not None:
        rate = ThroughputDetector(slo.min_throughput, window_s=slo.window_s, cooldown_s=tuning.cooldown_s)
        found.append(Watch(f"{slo.name}:throughput", slo, rate))
    if slo.max_gpu_mem is not None:
        level = LevelDetector("gpu_memory", window_s=slo.window_s, cooldown_s=tuning.cooldown_s)
        found.append(Watch(f"{slo.name}:gpu_memory", slo, level))
    return found


def _of_signal(name: str, limit: Any, tuning: Tuning) -> Watch:
    label = name.removesuffix("_ms")
    judge: Judge
    if name == "error_rate":
        plain = SLO("error_rate", p99_ms=1.0)
        judge = _detector(plain, tuning._replace(trigger="e_detector"), told_as="error_rate", allowed=limit)
    elif name == "throughput_drop":
        judge = DropDetector(limit, cooldown_s=tuning.cooldown_s)
    else:
        judge = LevelDetector(label, persistence=PERSISTENCE[name], cooldown_s=tuning.cooldown_s)
    return Watch(label, None, judge, limit)


class Rows:
    """Counts windows into rows, in the order of `build`; used by one worker thread.

    Args:
        slos: The objectives.
        signals: The triggers.
    """

    def __init__(self, slos: Sequence[SLO], signals: Signals) -> None:
        self._slos, self._signals = tuple(slos), signals
        self._sizes: Mapping[str, SizeFilter] = {slo.name: SizeFilter(slo) for slo in slos if slo.size is not None}
        # An objective's P50 is that of its class: of all sizes, because classes are not split by size.
        self._jitters: Mapping[str, Jitter] = {slo.name: Jitter(replace(slo, size=None)) for slo in slos if slo.jitter_ms is not None}

    def count(self, window: Window, facts: Facts) -> list[Counts]:
        """Everything since the previous window."""
        found: list[Counts] = []
        for slo in self._slos:
            sized = self._sizes.get(slo.name)
            found.append(count(slo, window) if sized is None else sized.count(window))
            if slo.jitter_ms is not None:
                found.append(self._jitters[slo.name].count(window))
            if slo.min_throughput is not None:
                found.append(flow(slo, window))
            if slo.max_gpu_mem is not None:
                found.append(gpu_row(slo.max_gpu_mem, facts))
        return found + self._signals.rows(window, facts)
