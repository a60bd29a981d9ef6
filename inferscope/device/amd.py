"""AMD's driver, through amdsmi; see `monitor` for what holds for every driver.

Tried against a stand-in with amdsmi's names and answers, never with a card. Without its library amdsmi fails to import with a KeyError, and
numbers that it does not know are the text "N/A".
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any, Final

from inferscope.device.monitor import Card, DriverMonitor

__all__ = ["AmdMonitor"]

_NOT_SUPPORTED: Final = frozenset({2, 3, 10})
"""AMDSMI_STATUS_NOT_SUPPORTED, _NOT_YET_IMPLEMENTED and _NO_PERM (amdsmi.h)."""
_GONE: Final = frozenset({31, 32, 34, 51})
"""AMDSMI_STATUS_NOT_FOUND, _NOT_INIT, _DRIVER_NOT_LOADED and _NO_DRV: the card, or the driver under it, is not there any more."""
_SLOWED: Final = {
    "sw_power_cap": "active_ppt_pwr",
    "hw_thermal": "active_prochot_thrm",
    "socket_thermal": "active_socket_thrm",
    "vr_thermal": "active_vr_thrm",
    "hbm_thermal": "active_hbm_thrm",
}
_MEBIBYTE: Final = 1 << 20


class AmdMonitor(DriverMonitor):
    """Asks `libamd_smi.so`."""

    name = "amdsmi"

    def _open(self) -> str:
        try:
            smi: Any = importlib.import_module("amdsmi")
        except ImportError:
            return "amdsmi is not installed"
        except Exception as error:  # noqa: BLE001  (KeyError: 'libamd_smi.so')
            return f"the driver's library cannot be used ({type(error).__name__})"
        try:
            smi.amdsmi_init()
            self._library = smi
            for handle in smi.amdsmi_get_processor_handles():
                uuid = str(smi.amdsmi_get_gpu_device_uuid(handle))
                self._handles[uuid] = handle
                with contextlib.suppress(Exception):
                    self._pci[uuid] = str(smi.amdsmi_get_gpu_device_bdf(handle)).lower().rpartition(".")[0]
        except Exception as error:  # noqa: BLE001
            self.close()
            return f"the driver's library cannot be used ({type(error).__name__})"
        return ""

    def _read(self, uuid: str) -> Card:
        smi = self._library
        used = self._answers(uuid, "amdsmi_get_gpu_activity")
        memory = self._answers(uuid, "amdsmi_get_gpu_vram_usage")
        clock = self._answers(uuid, "amdsmi_get_clock_info", smi.AmdSmiClkType.GFX)
        other = self._answers(uuid, "amdsmi_get_clock_info", smi.AmdSmiClkType.MEM)
        slowed: dict[str, Any] | None = self._ask(uuid, "amdsmi_get_violation_status")
        share = _number(used.get("gfx_activity"), 0.01)
        return Card(
            uuid=uuid,
            utilization=share if share is not None and 0 <= share <= 1 else None,
            memory_used_bytes=_whole(memory.get("vram_used"), _MEBIBYTE),
            memory_total_bytes=_whole(memory.get("vram_total"), _MEBIBYTE),
            clock_hz=_whole(clock.get("clk"), 1_000_000),
            slowed=None if slowed is None else tuple(name for name, key in _SLOWED.items() if slowed.get(key) is True),
            lost=uuid in self._lost,
            memory_clock_hz=_whole(other.get("clk"), 1_000_000),
        )

    def _answers(self, uuid: str, call: str, *args: Any) -> dict[str, Any]:
        """What a call tells, by name; nothing when it failed."""
        found: dict[str, Any] | None = self._ask(uuid, call, *args)
        return found if found is not None else {}

    def _power_and_temperature(self, uuid: str) -> tuple[float | None, float | None]:
        smi = self._library
        power = self._answers(uuid, "amdsmi_get_power_info")
        watts = [_number(power.get(key)) for key in ("current_socket_power", "average_socket_power", "socket_power")]
        heat = self._ask(uuid, "amdsmi_get_temp_metric", smi.AmdSmiTemperatureType.HOTSPOT, smi.AmdSmiTemperatureMetric.CURRENT)
        return next((each for each in watts if each is not None), None), _number(heat)

    def _failed(self, uuid: str, call: str, error: Exception) -> None:
        code = getattr(error, "err_code", None)
        if code in _GONE:
            self._lost.add(uuid)
        elif code in _NOT_SUPPORTED:
            self._silent[uuid].add(call)

    def close(self) -> None:
        """Let go of the driver."""
        if self._library is not None:
            with contextlib.suppress(Exception):
                self._library.amdsmi_shut_down()
        self._library = None
        self._handles.clear()


def _number(value: Any, scale: float = 1.0) -> float | None:
    """A number of amdsmi; None for "N/A" and what else is none."""
    return value * scale if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _whole(value: Any, scale: int) -> int | None:
    number = _number(value)
    return None if number is None else int(number * scale)
