"""What a process does only while it warms up: it compiles, tunes and asks the driver for memory. Read from counters that others keep anyway."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, TypeGuard

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Self

    from inferscope.bench.result import LoadResult
    from inferscope.device.memory import Memory

__all__ = ["Event", "Watch", "counts", "last_event"]

PERIOD_S: Final = 0.1
Event = tuple[int, str, int]
"""When (ns), of which kind (`compile`, `autotune` or `allocation`), how many since the last look."""


def _is_dict(value: object) -> TypeGuard[dict[Any, Any]]:
    return isinstance(value, dict)


def counts(memory: Sequence[Memory] = ()) -> dict[str, int]:
    """Running totals of warm-up work in this process; a library that is not loaded has done nothing.

    Args:
        memory: the allocators of the devices in use.
    """
    found = {"compile": 0, "autotune": 0, "allocation": 0}
    counters: Any = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    if _is_dict(counters):
        frames: Any = counters.get("frames", {})
        found["compile"] = int(frames.get("total", 0)) if _is_dict(frames) else 0
        inductor: Any = counters.get("inductor", {})
        if _is_dict(inductor):
            found["autotune"] = sum(int(value) for name, value in inductor.items() if "autotune" in str(name) or "benchmark" in str(name))
    for row in memory:
        found["allocation"] += row.driver_allocations or 0
    return found


class Watch:
    """Notes when the totals rise, while a block runs.

    Args:
        read: the totals; `counts` by default.
        period_s: between two looks.
        also: called at each look.
    """

    def __init__(
        self,
        read: Callable[[], dict[str, int]] = counts,
        period_s: float = PERIOD_S,
        also: Callable[[], object] | None = None,
    ) -> None:
        self._read, self._period_s, self._also = read, period_s, also
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="inferscope-steady")
        self._work: Future[None] | None = None
        self._before: dict[str, int] = {}
        self.events: list[Event] = []

    def __enter__(self) -> Self:
        """Begin."""
        self._before = self._read()
        self._work = self._pool.submit(self._run)
        return self

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            self._look()

    def _look(self) -> None:
        now, found = time.perf_counter_ns(), self._read()
        self.events += [
            (now, kind, total - self._before.get(kind, 0)) for kind, total in found.items() if total > self._before.get(kind, 0)
        ]
        self._before = found
        if self._also is not None:
            self._also()

    def __exit__(self, *_: object) -> None:
        """End, with a last look."""
        self._stop.set()
        if self._work is not None:
            self._work.result()
        self._pool.shutdown()
        self._look()


def last_event(result: LoadResult, events: Sequence[Event]) -> tuple[int, str]:
    """The first request that began after all warm-up work was over, and what that work was.

    Returns:
        0 and nothing when there was none; the number of requests when it never ended.
    """
    size = int(result.intended_ns.size)
    inside = [event for event in events if size and event[0] > int(result.intended_ns[0])]
    if not inside:
        return 0, ""
    last = max(at for at, _, _ in inside)
    kinds = {kind: sum(count for _, name, count in inside if name == kind) for kind in sorted({kind for _, kind, _ in inside})}
    after = int((result.intended_ns <= last).sum())
    return after, ", ".join(f"{count} {kind}{'' if kind == 'autotune' else 's'}" for kind, count in kinds.items())
