"""CPU time of the processes that this one started, such as loaders of data: they compete for the same CPUs and are in none of its own clocks."""

from __future__ import annotations

import os
from collections import deque
from itertools import islice
from pathlib import Path
from typing import Final

__all__ = ["Children"]

_SELF: Final = Path("/proc/self/task")
_PROC: Final = Path("/proc")
_TICKS: Final = 900
_MOST: Final = 64
_UTIME: Final = 11
"""Field of `/proc/PID/stat` after the name, as proc(5) counts from 3; the system time follows."""


class Children:
    """Reads the children's clocks tick by tick; for one thread of ours. Grandchildren are not followed."""

    def __init__(self, tasks: Path = _SELF, processes: Path = _PROC) -> None:
        self._tasks, self._processes = tasks, processes
        self._hz = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
        self._last: dict[int, int] = {}
        self._before = 0
        self.ticks: deque[tuple[int, int, int]] = deque(maxlen=_TICKS)
        """End, length and CPU time, ns; only of ticks with children."""

    def tick(self, now_ns: int) -> None:
        """Read them."""
        current = {pid: used for pid in self._pids() if (used := self._used(pid)) is not None}
        spent = sum(used - self._last.get(pid, used if self._before == 0 else 0) for pid, used in current.items())
        if current and self._before:
            self.ticks.append((now_ns, now_ns - self._before, spent * 1_000_000_000 // self._hz))
        self._last, self._before = current, now_ns

    def _pids(self) -> list[int]:
        found: list[int] = []
        try:
            for task in islice(self._tasks.iterdir(), _MOST):  # who starts processes is usually the first thread
                found += [int(pid) for pid in (task / "children").read_text(encoding="ascii").split()]
        except (OSError, ValueError):
            return found[:_MOST]  # a kernel without CONFIG_PROC_CHILDREN, or a thread that has just ended
        return found[:_MOST]

    def _used(self, pid: int) -> int | None:
        """Clock ticks of user and system time."""
        try:
            fields = (self._processes / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            return int(fields[_UTIME]) + int(fields[_UTIME + 1])
        except (OSError, ValueError, IndexError):
            return None

    def evidence(self, from_ns: int, to_ns: int) -> list[list[int]]:
        """Ticks that end in the time."""
        return [list(tick) for tick in list(self.ticks) if from_ns < tick[0] <= to_ns]

    def reset(self) -> None:
        """A forked child starts without any."""
        self._last, self._before = {}, 0
        self.ticks.clear()
