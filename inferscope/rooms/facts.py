"""What the detector asks of the device and the machine once a second, and only where an objective or a trigger needs it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from inferscope.clock import NS_PER_S
from inferscope.detect import Facts

if TYPE_CHECKING:
    from inferscope.device.room import DeviceRoom

__all__ = ["free_memory", "gather", "needed"]

_LOOK_BACK_S: Final = 5
_CGROUP: Final = Path("/sys/fs/cgroup")
_MEMINFO: Final = Path("/proc/meminfo")
_NO_LIMIT: Final = 1 << 60
"""A limit of cgroup v1 that is none."""


def needed(slos: Any, limits: Any) -> bool:
    """Whether anything that is judged depends on these facts."""
    return "device_idle" in limits or "memory_headroom" in limits or any(slo.max_gpu_mem is not None for slo in slos)


def gather(device: DeviceRoom, now_ns: int) -> Facts:
    """Read what can be read; what cannot is None."""
    busy, allocators = device.levels(now_ns - _LOOK_BACK_S * NS_PER_S, now_ns)
    cards = [(row.total_bytes - row.free_bytes, row.total_bytes) for row in allocators if row.free_bytes is not None and row.total_bytes]
    used, total = max(cards, key=lambda card: card[0] / card[1], default=(None, None))
    reserved = [row.reserved_bytes for row in allocators if row.reserved_bytes is not None]
    return Facts(
        device_busy=busy,
        gpu_used=None if used is None or total is None else used / total,
        gpu_used_bytes=used if used is not None else max(reserved, default=None),
        memory_free=free_memory(),
    )


def free_memory(cgroup: Path = _CGROUP, meminfo: Path = _MEMINFO) -> float | None:
    """Free fraction of what this container may use, or of the machine where it has no limit; None when neither tells.

    Page cache that the kernel gives back at once (`inactive_file`) counts as free, as it does for whoever kills a container for its memory.
    """
    found = [share for share in (_of_cgroup(cgroup), _of_machine(meminfo)) if share is not None]
    return min(found, default=None)


def _of_cgroup(root: Path) -> float | None:
    for limit, used in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        try:
            text = (root / limit).read_text(encoding="ascii").strip()
            if text == "max" or int(text) >= _NO_LIMIT or int(text) <= 0:
                return None
            occupied = int((root / used).read_text(encoding="ascii"))
            return 1.0 - max(0, occupied - _cache((root / used).with_name("memory.stat"))) / int(text)
        except (OSError, ValueError):
            continue
    return None


def _cache(path: Path) -> int:
    try:
        return _rows(path).get("inactive_file", 0)
    except (OSError, ValueError):
        return 0


def _of_machine(meminfo: Path) -> float | None:
    try:
        rows = _rows(meminfo)
        return rows["MemAvailable:"] / rows["MemTotal:"]
    except (OSError, ValueError, KeyError, ZeroDivisionError):
        return None


def _rows(path: Path) -> dict[str, int]:
    return {words[0]: int(words[1]) for line in path.read_text(encoding="ascii").splitlines() if len(words := line.split()) >= 2}
