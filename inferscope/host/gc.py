"""GC pauses from `gc.callbacks`, without a lock, a log line or a request to the collector itself.

The callback runs inside a collection, on whichever thread caused it: a lock taken there can deadlock (prometheus client_python#371,
#429). It reads the clock, and on stop hands one positioned interval to the recorder, which charges it to the request that the collecting
thread is in.
"""

from __future__ import annotations

import gc
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from inferscope.clock import now_ns

if TYPE_CHECKING:
    from inferscope.record.core import Recorder

__all__ = ["GcPauses"]

_POSITIONED_NS: Final = 200_000
"""Shorter pauses are counted without their position."""


class GcPauses:
    """Counts and times collections by generation.

    Attributes:
        pauses: By generation: [collections, total ns, longest ns] since `start()`.
        positions: (start ns, end ns, generation, native thread id) of the latest pauses of at least 0.2 ms: a pause stops every thread that
            runs Python, and is laid over the requests in flight later.
        failures: Callbacks that failed; counted only, because nothing may be logged inside a collection.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._began = 0
        self._thread = 0
        self.failures = 0
        self.pauses: list[list[int]] = [[0, 0, 0] for _ in range(3)]
        self.positions: deque[tuple[int, int, int, int]] = deque(maxlen=2048)
        self._callback = self._on_gc  # one bound method, so that it can be found again in gc.callbacks

    def start(self) -> None:
        """Listen; a second call changes nothing."""
        if self._callback not in gc.callbacks:
            gc.callbacks.append(self._callback)

    def stop(self) -> None:
        """Stop listening."""
        if self._callback in gc.callbacks:
            gc.callbacks.remove(self._callback)

    def _on_gc(self, phase: str, info: dict[str, Any]) -> None:
        try:
            self._note(phase, info)
        except Exception:  # noqa: BLE001  (the interpreter would print it to the application's stderr)
            self.failures += 1

    def _note(self, phase: str, info: dict[str, Any]) -> None:
        # Collections do not nest and hold the GIL, so one start time is enough; the thread is checked for the builds where they might.
        if phase == "start":
            self._thread = threading.get_ident()
            self._began = now_ns()
            return
        end = now_ns()
        begin = self._began
        if begin == 0 or self._thread != threading.get_ident():
            return
        self._began = 0
        generation = min(int(info["generation"]), 2)
        row = self.pauses[generation]
        row[0] += 1
        row[1] += end - begin
        row[2] = max(row[2], end - begin)
        if end - begin >= _POSITIONED_NS:
            self.positions.append((begin, end, generation, threading.get_native_id()))
        self._recorder.interval("gc", f"gen{generation}", begin, end)

    def evidence(self) -> list[dict[str, int]]:
        """Pauses by generation, as the incident keeps them."""
        return [
            {"generation": generation, "count": count, "total_ns": total, "max_ns": longest}
            for generation, (count, total, longest) in enumerate(self.pauses)
        ]
