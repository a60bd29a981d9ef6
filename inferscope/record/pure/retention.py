"""Which finished requests leave their thread as a whole: breaching, slowest, sampled from their band, or profiled."""

from __future__ import annotations

import heapq
import random
from array import array
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from inferscope.types import Reason

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inferscope.record.pure.classes import RequestClass
    from inferscope.record.pure.settle import Pin
    from inferscope.record.pure.state import Counters

    Retained = tuple[Any, ...]

__all__ = ["Retention"]

_CAPACITY: Final = 8192
_VECTOR: Final = 14
"""Its place in a retained record."""


class Retention:
    """Budgets of one epoch and the queue to the reader.

    Args:
        counters: Takes what the full queue drops.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._queue: deque[tuple[Retained, Pin | None]] = deque()
        self._random = random.Random()  # noqa: S311 - a sample; and never the application's own generator
        self._breaching = 2048
        self._reservoir = 64
        self._slowest = 32

    def begin_epoch(self, classes: Iterable[RequestClass], breaching: int, reservoir: int, slowest: int) -> None:
        """Renew the budgets, halve what the reservoirs have seen, forget the slowest."""
        self._breaching, self._reservoir, self._slowest = breaching, reservoir, slowest
        for each in classes:
            each.heap = []
            for row in tuple(each.seen):
                each.seen[row] //= 2

    def decide(self, of: RequestClass, wall_ns: int, row: int, *, profiled: bool) -> int:
        """Reasons to keep a request, 0 for none; a profiled one takes no place among the slowest nor in a reservoir."""
        reasons = 0
        if of.edges and wall_ns > of.edges[0] and self._breaching > 0:
            self._breaching -= 1
            reasons = Reason.BREACH
        if profiled:
            return reasons | Reason.PROFILED
        heap = of.heap
        if len(heap) < self._slowest:
            heapq.heappush(heap, wall_ns)
            reasons |= Reason.SLOWEST
        elif heap and wall_ns > heap[0]:
            heapq.heapreplace(heap, wall_ns)
            reasons |= Reason.SLOWEST
        seen = of.seen.get(row, 0) + 1
        of.seen[row] = seen
        if seen <= self._reservoir or self._random.random() * seen < self._reservoir:
            reasons |= Reason.RESERVOIR
        return reasons

    def room(self) -> bool:
        """Whether the queue takes another request; a refusal is counted."""
        if len(self._queue) < _CAPACITY:
            return True
        self._counters.retained_dropped += 1
        return False

    def put(self, retained: Retained, pin: Pin | None = None) -> None:
        """Hand a request to the reader.

        Args:
            retained: The record, without its last field.
            pin: Holds it back while its device data are pending.
        """
        self._queue.append((retained, pin))

    def drain(self) -> list[Retained]:
        """Everything retained since the last call but what waits for device data."""
        queue = self._queue
        waiting: list[tuple[Retained, Pin | None]] = []
        ready: list[Retained] = []
        for _ in range(len(queue)):
            retained, pin = queue.popleft()
            if pin is None:
                ready.append((*retained, False))
            elif pin.until:
                waiting.append((retained, pin))
            else:
                vector = array("q", pin.vector[: pin.columns]).tobytes()
                ready.append((*retained[:_VECTOR], vector, *retained[_VECTOR + 1 :], pin.incomplete))
        queue.extendleft(reversed(waiting))
        return ready

    def clear(self) -> None:
        """Forget the queue and draw anew: a forked child must not repeat its parent's sample."""
        self._queue.clear()
        self._random.seed()
