"""What the container may use and how often it was stopped: cgroup v1 and v2, pressure, affinity. None is what the kernel does not say."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import Any, Final, NamedTuple

__all__ = ["Cgroup", "Tick", "allowed_cpus", "controllers", "cpu_quota"]

_ROOT: Final = Path("/sys/fs/cgroup")
_SELF: Final = Path("/proc/self/cgroup")
_PRESSURE: Final = Path("/proc/pressure/cpu")
_TICKS: Final = 900


class Tick(NamedTuple):
    """Differences between two ticks; None where it is not measured."""

    end_ns: int
    periods: int | None
    """Enforcement periods in which the group ran."""
    throttled: int | None
    """Of these, the ones in which it was stopped."""
    throttled_ns: int | None
    """Time stopped, summed over CPUs."""
    pressure_ns: int | None
    """Time in which at least one task of the group (or, failing that, of the machine) waited for a CPU."""


def controllers(root: Path = _ROOT, own: Path = _SELF) -> tuple[int | None, list[Path]]:
    """Version of the hierarchy that governs CPU time (1, 2 or None) and this process's directories in it, own first, then its parents'.

    A quota on any of them holds for this process. Inside a container the mount usually shows the own group as the root.
    """
    try:
        lines = [line.split(":", 2) for line in own.read_text(encoding="utf-8").splitlines()]
    except OSError:
        lines = []
    places = {part: path for _, names, path in (line for line in lines if len(line) == 3) for part in (names.split(",") if names else [""])}
    for version, base, path in (
        (1, root / "cpu", places.get("cpu")),
        (1, root / "cpu,cpuacct", places.get("cpu")),
        (2, root, places.get("")),
    ):
        if path is None:
            continue
        steps = [base.joinpath(*Path(path.lstrip("/")).parts[:depth]) for depth in range(len(Path(path.lstrip("/")).parts), -1, -1)]
        name = "cpu.cfs_quota_us" if version == 1 else "cpu.stat"
        found = [step for step in steps if (step / name).is_file()]
        if found:
            return version, found
    return None, []


def cpu_quota(root: Path = _ROOT, own: Path = _SELF) -> float | None:
    """CPUs that the tightest quota of the hierarchy allows; None without a quota or when it cannot be read."""
    version, places = controllers(root, own)
    found = [quota for place in places if (quota := _quota(place, version)) is not None]
    return min(found, default=None)


def _quota(place: Path, version: int | None) -> float | None:
    try:
        if version == 2:
            quota, period = (place / "cpu.max").read_text(encoding="ascii").split()
            return None if quota == "max" else int(quota) / int(period)
        allowed = int((place / "cpu.cfs_quota_us").read_text(encoding="ascii"))
        return None if allowed <= 0 else allowed / int((place / "cpu.cfs_period_us").read_text(encoding="ascii"))
    except (OSError, ValueError, ZeroDivisionError):
        return None


def allowed_cpus() -> int | None:
    """CPUs that the affinity mask allows."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


class Cgroup:
    """Reads the group's counters tick by tick; for one thread of ours."""

    def __init__(self, root: Path = _ROOT, own: Path = _SELF, pressure: Path = _PRESSURE) -> None:
        self._root, self._own, self._machine = root, own, pressure
        self.ticks: deque[Tick] = deque(maxlen=_TICKS)
        self._find()

    def _find(self) -> None:
        self.version, places = controllers(self._root, self._own)
        limited = [place for place in places if _quota(place, self.version) is not None]
        self._place: Path | None = next(iter(limited or places), None)
        self._pressure = next((file for place in places if (file := place / "cpu.pressure").is_file()), self._machine)
        self._last: tuple[int | None, ...] | None = None

    def tick(self, now_ns: int) -> Tick | None:
        """Read the counters; the first tick gives None."""
        current = (*self._stat(), self._stalled())
        last, self._last = self._last, current
        if last is None:
            return None
        tick = Tick(now_ns, *(None if a is None or b is None else a - b for a, b in zip(current, last, strict=True)))
        self.ticks.append(tick)
        return tick

    def _stat(self) -> tuple[int | None, int | None, int | None]:
        if self._place is None:
            return None, None, None
        try:
            rows = dict(line.split() for line in (self._place / "cpu.stat").read_text(encoding="ascii").splitlines())
            time = int(rows["throttled_usec"]) * 1000 if "throttled_usec" in rows else int(rows["throttled_time"])
            return int(rows["nr_periods"]), int(rows["nr_throttled"]), time
        except (OSError, ValueError, KeyError):
            return None, None, None

    def _stalled(self) -> int | None:
        try:
            line = self._pressure.read_text(encoding="ascii").splitlines()[0]
            return int(line.rpartition("total=")[2]) * 1000 if line.startswith("some") else None
        except (OSError, ValueError, IndexError):
            return None

    def evidence(self, from_ns: int, to_ns: int) -> dict[str, Any]:
        """Limits, and the ticks that end in the time."""
        return {
            "version": self.version,
            "quota": cpu_quota(self._root, self._own),
            "allowed_cpus": allowed_cpus(),
            "cpus": os.cpu_count(),
            "ticks": [list(tick) for tick in list(self.ticks) if from_ns < tick.end_ns <= to_ns],
        }

    def reset(self) -> None:
        """Start anew: for a forked child, which may lie in another group."""
        self.ticks.clear()
        self._find()
