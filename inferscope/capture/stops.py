"""What stopping sessions took, and what follows from it: how long the next one may record, and whether shapes are cheap."""

from __future__ import annotations

import resource
import time
from typing import TYPE_CHECKING, Final

from inferscope.clock import NS_PER_MS

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferscope.capture.session import Options, Session

__all__ = ["LEARN_EVERY", "SHAPES_STOP_NS", "Stall", "Stops"]

LEARN_EVERY: Final = 8
"""Of the sessions that nobody wants one in so many is fetched all the same, to know what that costs."""
SHAPES_STOP_NS: Final = 2 * NS_PER_MS
"""Estimated stop up to which a session may record shapes without being asked."""
_SHAPES_FACTOR: Final = 8.0
"""How much longer a stop takes by the event with shapes: 6.9 to 14 us, against 1 to 2 us of a light session."""
_STOP_TARGET_NS: Final = 5 * NS_PER_MS
_STOP_FLOOR_NS: Final = NS_PER_MS // 2
_LIMITS_NS: Final = (5 * NS_PER_MS, 2000 * NS_PER_MS)
_FIRST_LIMIT_NS: Final = 500 * NS_PER_MS
_WORST_RATIO: Final = 2.5
"""A stop takes 2.8 us for an operator that takes 1.2 us."""
_REGIONS: Final = 128  # whose stops are remembered


def _kind(asked: Options) -> tuple[bool, bool, bool]:
    """Sessions whose stops take alike."""
    return asked.light, asked.shapes, asked.stacks


_THREAD: Final = getattr(resource, "RUSAGE_THREAD", None)


def _preemptions() -> int:
    return -1 if _THREAD is None else resource.getrusage(_THREAD).ru_nivcsw


class Stall:
    """Measures a piece of our work on a thread of the application.

    Args:
        clock: Nanoseconds, monotonic.
    """

    __slots__ = ("_clock", "_cpu_ns", "_preempted", "begun_ns")

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._preempted = _preemptions()
        self.begun_ns, self._cpu_ns = clock(), time.thread_time_ns()

    def end(self) -> tuple[int, int, int]:
        """(wall time, CPU time, what the application lost) in ns.

        Lost is the wall time, or the CPU time when the kernel took the CPU away meanwhile: it would have done so without us, and gave it to others.
        """
        cpu_ns, wall_ns = time.thread_time_ns() - self._cpu_ns, self._clock() - self.begun_ns
        preempted = _preemptions()
        return wall_ns, cpu_ns, cpu_ns if preempted > self._preempted >= 0 else wall_ns


class Stops:
    """Means of one process."""

    def __init__(self) -> None:
        self._ratios: dict[tuple[bool, bool, bool], float] = {}
        """CPU time of a stop for each ns of CPU time recorded, by `_kind`."""
        self._took_ns: dict[tuple[str, bool], float] = {}
        self._again: set[tuple[str, bool]] = set()
        """Those that were seen more than once: the first stop of a process is slower than any other."""

    def knows(self, region: str) -> bool:
        """Whether stops of that region, without shapes, were seen."""
        return (region, False) in self._again

    def shapes_are_cheap(self, region: str) -> bool:
        """By what stops of this region took, without shapes until there were some with; unknown is dear."""
        with_shapes, without = self._took_ns.get((region, True)), self._took_ns.get((region, False))
        if with_shapes is not None:
            return with_shapes <= SHAPES_STOP_NS
        return without is not None and _STOP_FLOOR_NS + without * _SHAPES_FACTOR <= SHAPES_STOP_NS

    def limit_ns(self, asked: Options, allow_ns: int | None) -> int:
        """CPU time of the longest session whose stop should stay near its target, from what earlier stops took: a stop costs by the event."""
        ratio = self._ratios.get(_kind(asked), 0.0)
        if ratio <= 0.0:
            # What somebody allows holds for the first session too: small operators back to back make this much.
            return _FIRST_LIMIT_NS if allow_ns is None else max(int(allow_ns / (_WORST_RATIO * (1 + 3 * asked.shapes + asked.stacks))), 1)
        target = _STOP_TARGET_NS if allow_ns is None else allow_ns
        return min(max(int(target / ratio), _LIMITS_NS[0]), _LIMITS_NS[1])

    def learn(self, running: Session) -> None:
        """What the stop took, for the next ones."""
        ratio = max(running.stop_cpu_ns - (0 if running.asked.light else _STOP_FLOOR_NS), 0) / max(running.cpu_ns, NS_PER_MS)
        kind = _kind(running.asked)
        self._ratios[kind] = 0.8 * self._ratios.get(kind, ratio) + 0.2 * ratio
        key = (running.region, running.asked.shapes)
        before = self._took_ns.get(key)
        if before is not None:
            weight = 0.2 if key in self._again else 1.0
            self._took_ns[key] = (1.0 - weight) * before + weight * running.stop_cpu_ns
            self._again.add(key)
        elif len(self._took_ns) < _REGIONS:
            self._took_ns[key] = running.stop_cpu_ns
