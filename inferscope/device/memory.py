"""What torch's own allocator holds of each device: counters that it keeps anyway, so that reading them synchronises nothing.

`mem_get_info` asks the driver and is left to NVML; another process's memory is not in these numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from inferscope.device.events import DeviceTimer

__all__ = ["AllocatorMonitor", "Memory"]


class Memory(NamedTuple):
    """One device's allocator, bytes and running totals; None where the backend does not tell."""

    device: str
    allocated_bytes: int | None
    """In tensors."""
    allocated_peak_bytes: int | None
    reserved_bytes: int | None
    """Taken from the driver: tensors and cache."""
    allocations: int | None
    """Since start."""
    driver_allocations: int | None
    """Calls that went to the driver, which synchronise the device."""
    retries: int | None
    """Allocations that flushed the cache first: each stops the device."""
    out_of_memory: int | None


_KEYS: Final = (
    "allocated_bytes.all.current",
    "allocated_bytes.all.peak",
    "reserved_bytes.all.current",
    "allocation.all.allocated",
    "num_device_alloc",
    "num_alloc_retries",
    "num_ooms",
)


class AllocatorMonitor:
    """Reads the allocator of every device that the application was seen to use.

    Args:
        timer: Knows those devices; nothing is asked about others.
    """

    def __init__(self, timer: DeviceTimer) -> None:
        self._timer = timer

    def sample(self) -> list[Memory]:
        """One row a device; empty before the application used one."""
        return [self._read(device) for device in sorted(self._timer.channels, key=str)]

    @staticmethod
    def _read(device: Any) -> Memory:
        import torch

        try:
            api: Any = torch
            own = getattr(torch, device.type, None)
            read = getattr(own, "memory_stats", None) or api.accelerator.memory_stats
            stats: dict[str, int] = read(device.index)
        except Exception:  # noqa: BLE001  (a backend without these numbers, or a lost device: unknown, not zero)
            stats = {}
        return Memory(str(device), *(stats.get(key) for key in _KEYS))
