"""NVIDIA's driver, through nvidia-ml-py; see `monitor` for what holds for every driver.

MIG instances are cards of their own: their parent does not tell its utilisation, and they do not tell theirs (dask#8739), which leaves it
unknown. Process ids and structures that changed size between drivers (nvitop#226, nvidia-docker#1483) are not asked for at all.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import TYPE_CHECKING, Any, Final

from inferscope.clock import now_ns
from inferscope.device.gpm import Gpm, Work
from inferscope.device.monitor import Card, DriverMonitor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Card", "NvmlMonitor"]

_NEVER: Final = frozenset({"NVMLError_NotSupported", "NVMLError_NoPermission", "NVMLError_FunctionNotFound"})
_SLOWED: Final = {
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "hw_power_brake": 0x80,
}
"""Bits of `nvmlDeviceGetCurrentClocksEventReasons` that mean slower clocks than asked for (nvml.h)."""
_EVENTS_A_LOOK: Final = 16
_MIG_ON: Final = 1


class NvmlMonitor(DriverMonitor):
    """Asks `libnvidia-ml.so.1`."""

    name = "nvml"

    def __init__(self, clock: Callable[[], int] = now_ns) -> None:
        super().__init__(clock)
        self._events: Any = None
        self._gpm: Gpm | None = None

    def _open(self) -> str:
        try:
            nvml: Any = importlib.import_module("pynvml")
        except ImportError:
            return "nvidia-ml-py is not installed"
        try:
            nvml.nvmlInit()
            self._library = nvml
            for index in range(nvml.nvmlDeviceGetCount()):
                self._add(nvml.nvmlDeviceGetHandleByIndex(index))
        except Exception as error:  # noqa: BLE001  (no driver, no permission: said in the status)
            self.close()
            return f"the driver's library cannot be used ({type(error).__name__})"
        self._subscribe()
        self._gpm = Gpm(nvml, self._ask)
        return ""

    def _add(self, handle: Any) -> None:
        nvml = self._library
        uuid = _text(nvml.nvmlDeviceGetUUID(handle))
        self._handles[uuid] = handle
        with contextlib.suppress(Exception):  # a container may hide the bus; the UUID is enough
            place = nvml.nvmlDeviceGetPciInfo(handle)
            self._pci[uuid] = f"{place.domain:04x}:{place.bus:02x}:{place.device:02x}"
        with contextlib.suppress(Exception):  # not a card that can be divided, or an old library
            if nvml.nvmlDeviceGetMigMode(handle)[0] == _MIG_ON:
                self._pci.pop(uuid, None)  # torch sees an instance under its parent's place on the bus
                for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
                    self._add_instance(handle, index)

    def _add_instance(self, parent: Any, index: int) -> None:
        with contextlib.suppress(Exception):  # this place holds no instance
            instance = self._library.nvmlDeviceGetMigDeviceHandleByIndex(parent, index)
            self._handles[_text(self._library.nvmlDeviceGetUUID(instance))] = instance

    def _subscribe(self) -> None:
        """Hear of XID errors, where that is supported."""
        nvml = self._library
        with contextlib.suppress(Exception):
            events, heard = nvml.nvmlEventSetCreate(), False
            for handle in self._handles.values():
                with contextlib.suppress(Exception):
                    nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
                    heard = True
            if heard:
                self._events = events

    def _listen(self) -> Iterator[tuple[str, int]]:
        nvml = self._library
        for _ in range(_EVENTS_A_LOOK if self._events is not None else 0):
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
                uuid = _text(nvml.nvmlDeviceGetUUID(event.device))
            except Exception as error:  # noqa: BLE001  (nothing happened, which is the rule; or a card is gone, and nothing will be heard)
                if type(error).__name__ != "NVMLError_Timeout":
                    self._events = None
                return
            yield uuid, int(event.eventData)

    def _read(self, uuid: str) -> Card:
        nvml = self._library
        used = self._ask(uuid, "nvmlDeviceGetUtilizationRates")
        memory = self._ask(uuid, "nvmlDeviceGetMemoryInfo")
        clock = self._ask(uuid, "nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM)
        other = self._ask(uuid, "nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM)
        reasons = self._ask(uuid, "nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:  # its name before R535
            reasons = self._ask(uuid, "nvmlDeviceGetCurrentClocksThrottleReasons")
        share = None if used is None else used.gpu / 100
        return Card(
            uuid=uuid,
            utilization=share if share is not None and 0 <= share <= 1 else None,  # more than 100 % has been seen (nvtop#110)
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            clock_hz=None if clock is None else int(clock) * 1_000_000,
            slowed=None if reasons is None else tuple(name for name, bit in _SLOWED.items() if reasons & bit),
            lost=uuid in self._lost,
            memory_clock_hz=None if other is None else int(other) * 1_000_000,
            work=Work() if self._gpm is None else self._gpm.look(uuid),
        )

    def _power_and_temperature(self, uuid: str) -> tuple[float | None, float | None]:
        nvml = self._library
        power = self._ask(uuid, "nvmlDeviceGetPowerUsage")
        heat = self._ask(uuid, "nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU)
        return None if power is None else power / 1000, None if heat is None else float(heat)

    def _failed(self, uuid: str, call: str, error: Exception) -> None:
        kind = type(error).__name__
        if kind == "NVMLError_GpuIsLost":
            self._lost.add(uuid)
        elif kind in _NEVER:
            self._silent[uuid].add(call)

    def close(self) -> None:
        """Let go of the driver."""
        if self._library is not None:
            if self._gpm is not None:
                self._gpm.close()
            with contextlib.suppress(Exception):
                if self._events is not None:
                    self._library.nvmlEventSetFree(self._events)
                self._library.nvmlShutdown()
        self._library = self._events = self._gpm = None
        self._handles.clear()


def _text(value: str | bytes) -> str:
    """Older releases of nvidia-ml-py return bytes."""
    return value.decode() if isinstance(value, bytes) else value
