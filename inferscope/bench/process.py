"""CPU time and memory of a process and its children, from outside, as /proc tells; None where it does not."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["Usage", "host_cpu_s", "listening", "usage"]

_TICKS: Final = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process and its children have used and hold."""

    cpu_s: float
    resident_bytes: int
    peak_bytes: int
    """The greatest resident size since their start; of several processes, the sum of each one's own peak."""


def _family(pid: int) -> list[int]:
    """The process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in brackets, may hold anything; the parent is the second field after it.
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        children.setdefault(parent, []).append(int(path.parent.name))
    found: list[int] = []
    todo = [pid]
    while todo:
        found.append(todo.pop())
        todo += children.get(found[-1], [])
    return found


def usage(pid: int, *, children: bool = True) -> Usage | None:
    """What `pid` and, if wanted, its children use now; None when it is gone or /proc is not there.

    Args:
        pid: the process.
        children: whether those that descend from it count too.
    """
    cpu, resident, peak, seen = 0.0, 0, 0, False
    for each in _family(pid) if children else [pid]:
        try:
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            status = Path(f"/proc/{each}/status").read_text()
        except OSError:
            continue
        sizes = {line.partition(":")[0]: line.split()[1] for line in status.splitlines() if line.startswith(("VmRSS", "VmHWM"))}
        cpu += (int(fields[11]) + int(fields[12])) / _TICKS
        resident += int(sizes.get("VmRSS", 0)) * 1024
        peak += int(sizes.get("VmHWM", 0)) * 1024
        seen = True
    return Usage(cpu, resident, peak) if seen else None


def host_cpu_s() -> float | None:
    """CPU seconds that the whole machine has spent on work since it started; None when /proc does not tell."""
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    except (OSError, IndexError):
        return None
    # user, nice, system, irq, softirq, steal; not idle and iowait. Guests are in user.
    return sum(int(fields[index]) for index in (0, 1, 2, 5, 6, 7)) / _TICKS


def listening(port: int) -> int | None:
    """The process on this machine that listens on a TCP port, the eldest of several; None when none of ours does or /proc does not tell."""
    inodes: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
        except OSError:
            continue
        inodes |= {f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port}
    if not inodes:
        return None
    holders: list[tuple[int, int]] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            held = any(str(each.readlink()) in inodes for each in (folder / "fd").iterdir())
            if held:
                holders.append((int((folder / "stat").read_text().rpartition(")")[2].split()[19]), int(folder.name)))
        except OSError:
            continue  # another user's, or gone
    return min(holders)[1] if holders else None
