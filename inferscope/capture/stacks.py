"""Where slow requests are, without torch: stacks of the threads whose requests are late, sampled while an incident is open.

Stacks are read by the C core in one step; without it there are none, and the evidence says so. A stack is function, file and line: code,
never a value.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from inferscope.clock import now_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Flight = Callable[[], Sequence[tuple[Any, ...]]]
    Stack = tuple[tuple[str, str, int], ...]
    Read = Callable[[int, int], Stack | None]

__all__ = ["PERIOD_S", "SlowStacks"]

PERIOD_S: Final = 0.02
LATE: Final = 0.6
"""Part of the objective after which a request that is still open is looked at."""
THREADS: Final = 4
"""Threads of which one sample reads the stacks: those of the oldest requests."""
DEPTH: Final = 48
DISTINCT: Final = 512
"""Different stacks that are told apart; what comes later is counted as dropped."""
_REQUESTS: Final = 8
_SHARED: Final = 2


@dataclass(slots=True)
class _Seen:
    samples: int = 0
    requests: list[int] = field(default_factory=list[int])


class SlowStacks:
    """The samples of one process; `sample` is called by one thread of ours.

    Args:
        in_flight: The open requests, as the recorder's `_open` gives them; None without the C core.
        read: A thread's stack, as the recorder's `_stack` gives it; None without the C core.
    """

    def __init__(self, in_flight: Flight | None, read: Read | None) -> None:
        self._in_flight, self._read = in_flight, read
        self.reason = None if in_flight is not None and read is not None else "stacks are read by the C core only, which is not in use"
        self.armed = False
        self.samples = self.dropped = self.shared = 0
        self._request: str | None = None
        self._late_ns = self.from_ns = self.to_ns = 0
        self._seen: dict[tuple[str | None, Stack], _Seen] = {}
        self._idents: dict[int, int] = {}

    def arm(self, request: str | None, threshold_ns: int) -> None:
        """Start afresh.

        Args:
            request: Requests of that name only; None or empty looks at all.
            threshold_ns: The objective; 0 looks at every open request.
        """
        self._request, self._late_ns = request or None, int(LATE * threshold_ns)
        self.samples = self.dropped = self.shared = self.from_ns = self.to_ns = 0
        self._seen, self._idents = {}, {}
        self.armed = self.reason is None

    def disarm(self) -> None:
        """Stop; what was seen stays for `document`."""
        self.armed = False

    def sample(self, moment_ns: int | None = None) -> None:
        """Look at the threads of the oldest late requests."""
        if not self.armed or self._in_flight is None or self._read is None:
            return
        now = now_ns() if moment_ns is None else moment_ns
        self.from_ns, self.to_ns = self.from_ns or now, now
        late: dict[int, list[tuple[Any, ...]]] = {}
        for row in self._in_flight():
            if not row[5] and now - row[3] > self._late_ns and self._request in {None, row[1]}:
                late.setdefault(row[4], []).append(row)
        for native, rows in sorted(late.items(), key=lambda item: min(row[3] for row in item[1]))[:THREADS]:
            if len(rows) >= _SHARED:
                self.shared += 1  # tasks on one thread: its stack is that of whichever runs
                continue
            stack = self._read(self._ident(native), DEPTH)
            if stack:
                self._count(rows[0], stack)

    def _ident(self, native: int) -> int:
        if native not in self._idents:
            self._idents = {thread.native_id: thread.ident or 0 for thread in threading.enumerate() if thread.native_id is not None}
        return self._idents.get(native, 0)

    def _count(self, row: tuple[Any, ...], stack: Stack) -> None:
        self.samples += 1
        key = (row[2], stack)
        seen = self._seen.get(key)
        if seen is None:
            if len(self._seen) >= DISTINCT:
                self.dropped += 1
                return
            seen = self._seen[key] = _Seen()
        seen.samples += 1
        if row[0] not in seen.requests and len(seen.requests) < _REQUESTS:
            seen.requests.append(row[0])

    def document(self, slot: int) -> dict[str, Any]:
        """What was seen, as JSON types: most frequent stack first, each innermost frame first."""
        rows = sorted(self._seen.items(), key=lambda item: -item[1].samples)
        return {
            "schema": 1,
            "slot": slot,
            "request": self._request,
            "reason": self.reason,
            "period_s": PERIOD_S,
            "from_ns": self.from_ns or None,
            "to_ns": self.to_ns or None,
            "late_ns": self._late_ns,
            "samples": self.samples,
            "shared": self.shared,
            "dropped": self.dropped,
            "stacks": [
                {"stage": stage, "samples": seen.samples, "requests": seen.requests, "frames": [list(frame) for frame in stack]}
                for (stage, stack), seen in rows
            ],
        }
