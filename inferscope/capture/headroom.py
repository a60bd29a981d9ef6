"""Whether a diagnosis may run beside the service: memory and CPU time that the container can spare, now.

One process too many and the kernel ends the container; CPU time that a child takes from a quota is time in which the service is stopped.
A child is therefore started only where memory is free, and is told how much of a CPU it may use: half of what the quota leaves over.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from inferscope.capture import guards
from inferscope.host.cgroup import controllers, cpu_quota

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CHILD_BYTES", "LEAST_SHARE", "Headroom"]

CHILD_BYTES: Final = 256 << 20
"""Memory that must be free for a diagnosis; it was seen to take at most 120 MB."""
LEAST_SHARE: Final = 0.05
"""Part of a CPU below which a diagnosis is not worth starting."""
_ROOT: Final = Path("/sys/fs/cgroup")
_SELF: Final = Path("/proc/self/cgroup")


class Headroom:
    """Looks at the control group; for one thread of ours.

    Args:
        root: Where control groups are mounted; another tree in tests.
        own: Which group this process is in.
        available: Free memory in bytes, None where nobody says.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        root: Path = _ROOT,
        own: Path = _SELF,
        available: Callable[[], int | None] = guards.available_bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._root, self._own, self._available, self._clock = root, own, available, clock
        self._last: tuple[float, float] | None = None
        self._used = 0.0

    def look(self) -> None:
        """Take a reading: what was used since the last one, as CPUs. Readings closer than half a second are skipped."""
        now = self._clock()
        if self._last is not None and now - self._last[0] < 0.5:
            return
        spent = self._spent()
        if self._last is not None and spent >= self._last[1]:
            self._used = (spent - self._last[1]) / (now - self._last[0])
        self._last = now, spent

    def _spent(self) -> float:
        """CPU seconds of the group; of this process where the group does not say."""
        version, places = controllers(self._root, self._own)
        for place in places:
            try:
                if version == 1:
                    return self._accounted(place)
                rows = dict(line.split() for line in (place / "cpu.stat").read_text(encoding="ascii").splitlines())
                return int(rows["usage_usec"]) / 1e6
            except (OSError, ValueError, KeyError):
                continue
        return sum(os.times()[:2])

    def _accounted(self, place: Path) -> float:
        """Of version 1, where accounting is a hierarchy of its own that mirrors the other one."""
        found = place / "cpuacct.usage"
        if not found.is_file():
            found = self._root / "cpuacct" / Path(*place.relative_to(self._root).parts[1:]) / "cpuacct.usage"
        return int(found.read_text(encoding="ascii")) / 1e9

    def refusal(self) -> str | None:
        """Why no diagnosis may be started now, in words; None when one may."""
        free = self._available()
        if free is not None and free < CHILD_BYTES:
            return f"{free >> 20} MB of memory are free, a diagnosis needs {CHILD_BYTES >> 20}"
        share = self.share()
        if share is not None and share < LEAST_SHARE:
            return "the CPU quota is used up"
        return None

    def share(self) -> float | None:
        """Part of a CPU that a child may use; None without a quota, where the scheduler's idle class is enough."""
        quota = cpu_quota(self._root, self._own)
        if quota is None:
            return None
        return min(1.0, max(0.0, 0.5 * (quota - self._used)))
