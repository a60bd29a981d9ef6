"""Who of a fleet captures, when all of it breaks at once, and how many may capture on one host.

A fault hits every replica in the same minute. Each of N decides for itself, by lot: four of a thousand are enough to name the cause, all
thousand would be an outage of their own. Lots are independent, so that a draw of four at once gets more than five in 21 % of faults (Poisson).
The four therefore come in rounds: two of N at once, which gets nobody in 14 % of faults and more than five in 2 %, then one of N in each round
that follows while the incident lasts; from the third on rounds double. Whoever is drawn captures after a delay of up to four seconds.
On one host a lock file lets one process capture at a time, and so many an hour.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from inferscope.clock import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from inferscope.types import Breach

__all__ = ["HostBudget", "SelfSelection"]

WANTED: Final = (2.0, 1.0, 1.0)
"""Replicas that shall capture, by round, on average; then as many as in the last."""
WANTED_IN_ALL: Final = sum(WANTED)
JITTER_S: Final = 4.0
ROUND_S: Final = 45.0
"""Between draws: longer than a capture and its delay last, so that the rounds do not add up."""
_LONGEST_ROUND_S: Final = 1440.0
_HOUR_NS: Final = 3600 * NS_PER_S


@dataclass(slots=True)
class _Pending:
    breach: Breach
    due_ns: int | None
    """When the capture begins; None while it was not drawn."""
    redraw_ns: int
    round_s: float
    rounds: int = 0


class SelfSelection:
    """Holds a process's breaches back until it is drawn; one worker thread uses it.

    Args:
        fleet_size: Replicas of the service, N. Up to four capture at once, without a delay.
        uniform: Source of numbers in [0, 1); replaced in tests.
    """

    def __init__(self, fleet_size: int = 1, uniform: Callable[[], float] = random.random) -> None:
        self.probabilities = tuple(1.0 if fleet_size <= WANTED_IN_ALL else wanted / fleet_size for wanted in WANTED)
        """Of being drawn, by round."""
        self.offered = self.drawn = 0
        self._uniform = uniform
        self._pending: dict[str, _Pending] = {}

    @property
    def waiting(self) -> tuple[str, ...]:
        """Ids of breaches that have no incident of their own here: not drawn so far, or not due."""
        return tuple(self._pending)

    def offer(self, breach: Breach, now_ns: int) -> None:
        """Take a breach that opened."""
        self.offered += 1
        pending = _Pending(breach, None, now_ns, ROUND_S)
        self._draw(pending, now_ns)
        self._pending[breach.id] = pending

    def _draw(self, pending: _Pending, now_ns: int) -> None:
        pending.redraw_ns = now_ns + int(pending.round_s * NS_PER_S)
        probability = self.probabilities[min(pending.rounds, len(WANTED) - 1)]
        pending.rounds += 1
        if pending.rounds >= len(WANTED):
            pending.round_s = min(2.0 * pending.round_s, _LONGEST_ROUND_S)
        if probability >= 1.0:
            pending.due_ns = now_ns
        elif self._uniform() < probability:
            pending.due_ns = now_ns + int(self._uniform() * JITTER_S * NS_PER_S)
        if pending.due_ns is not None:
            self.drawn += 1

    def take(self, now_ns: int) -> Breach | None:
        """The next breach to capture for, once it is due; it stays until `forget`."""
        for pending in self._pending.values():
            if pending.due_ns is None and now_ns >= pending.redraw_ns:
                self._draw(pending, now_ns)
            if pending.due_ns is not None and now_ns >= pending.due_ns:
                return pending.breach
        return None

    def forget(self, breach_id: str) -> None:
        """It has its incident now, or it ended before."""
        self._pending.pop(breach_id, None)


class HostBudget:
    """A lock file that all processes of a host share: one captures at a time, and so many begin in an hour.

    The file holds the beginnings of the latest hour, on the monotonic clock that all processes of a host share; one that lies in the future
    is of an earlier boot. The lock goes with the process that holds it, so that a killed one blocks nobody.

    Args:
        path: The file; None, or one that cannot be used, limits nothing.
        per_hour: Captures of the whole host an hour.
    """

    def __init__(self, path: Path | None, per_hour: int = 12) -> None:
        self._path = path
        self.per_hour = per_hour
        self._descriptor = -1
        self.reason = "" if path is not None else "there is no state directory"
        """Why nothing is limited; empty when it is."""

    @property
    def held(self) -> bool:
        """Whether this process has the host's permission."""
        return self._descriptor >= 0

    def acquire(self, now_ns: int) -> str | None:
        """Ask for permission to capture.

        Returns:
            None, or why not, in words.
        """
        if self.held or self._path is None:
            return None
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            self.reason = f"{self._path} cannot be used ({error.strerror})"
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return "another process of this host is capturing"
        refusal = self._count(descriptor, now_ns)
        if refusal is not None:
            os.close(descriptor)
            return refusal
        self._descriptor = descriptor
        return None

    def _count(self, descriptor: int, now_ns: int) -> str | None:
        with contextlib.suppress(OSError, struct.error):
            size = os.fstat(descriptor).st_size // 8 * 8
            begun = [moment for (moment,) in struct.iter_unpack("<q", os.pread(descriptor, min(size, 8192), 0))]
            recent = sorted({moment for moment in begun if moment > 0 and 0 <= now_ns - moment < _HOUR_NS})
            if len(recent) >= self.per_hour:
                return f"this host has captured {len(recent)} times within an hour"
            data = struct.pack(f"<{len(recent) + 1}q", *recent, now_ns)
            os.pwrite(descriptor, data, 0)
            os.ftruncate(descriptor, len(data))
        return None

    def release(self) -> None:
        """Let another process capture."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1

    def after_fork(self) -> None:
        """In a forked child: close its copy, the lock stays the parent's."""
        self.release()
