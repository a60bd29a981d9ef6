"""AMD's driver behind the same protocol, from a stand-in with amdsmi's names, answers and failures."""

from __future__ import annotations

import enum
import sys
import types

import pytest
import torch

from inferscope.device.amd import AmdMonitor
from inferscope.device.monitor import Identity, monitor_for

FIRST, SECOND = "18ff74a1-0000-1000-80b4-000000000001", "18ff74a1-0000-1000-80b4-000000000002"
NOT_SUPPORTED, NO_PERMISSION, BUSY, NOT_FOUND = 2, 10, 30, 31


class LibraryError(Exception):
    """As `AmdSmiLibraryException`."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.err_code = code


class Kind(enum.IntEnum):
    GFX, MEM, HOTSPOT, CURRENT = range(4)


class Smi(types.ModuleType):
    """Two cards; `answers` by call and card, an int among them is a failure."""

    AmdSmiClkType = AmdSmiTemperatureType = AmdSmiTemperatureMetric = Kind

    def __init__(self) -> None:
        super().__init__("amdsmi")
        self.calls = 0
        self.open = False
        self.answers: dict[tuple[str, str], object] = {}

    def amdsmi_init(self) -> None:
        self.open = True

    def amdsmi_shut_down(self) -> None:
        self.open = False

    def amdsmi_get_processor_handles(self) -> list[str]:
        return [FIRST, SECOND]

    def amdsmi_get_gpu_device_uuid(self, handle: str) -> str:
        return handle

    def amdsmi_get_gpu_device_bdf(self, handle: str) -> str:
        return f"0000:{'C1' if handle == FIRST else 'C2'}:00.0"

    def _answer(self, name: str, handle: str, usual: object) -> object:
        self.calls += 1
        answer = self.answers.get((name, handle), usual)
        if isinstance(answer, LibraryError):
            raise answer
        return answer

    def amdsmi_get_gpu_activity(self, handle: str) -> object:
        return self._answer("activity", handle, {"gfx_activity": 40, "umc_activity": 3, "mm_activity": "N/A"})

    def amdsmi_get_gpu_vram_usage(self, handle: str) -> object:
        return self._answer("memory", handle, {"vram_total": 65_536, "vram_used": 1_024})

    def amdsmi_get_clock_info(self, handle: str, kind: Kind) -> object:
        return self._answer("clock", handle, {"clk": 2100 if kind is Kind.GFX else 1300, "max_clk": 2100})

    def amdsmi_get_violation_status(self, handle: str) -> object:
        return self._answer("violations", handle, {"active_ppt_pwr": False, "active_socket_thrm": "N/A"})

    def amdsmi_get_power_info(self, handle: str) -> object:
        return self._answer("power", handle, {"current_socket_power": "N/A", "average_socket_power": 240})

    def amdsmi_get_temp_metric(self, handle: str, _kind: Kind, _metric: Kind) -> object:
        return self._answer("temperature", handle, 71)


@pytest.fixture
def smi(monkeypatch) -> Smi:
    made = Smi()
    monkeypatch.setitem(sys.modules, "amdsmi", made)
    return made


@pytest.fixture
def monitor(smi):
    clock = [10**12]
    made = AmdMonitor(lambda: clock[0])
    made.advance = lambda: clock.__setitem__(0, clock[0] + 10**9)
    yield made
    made.close()
    assert not smi.open


def test_what_the_driver_tells_is_passed_on(smi, monitor) -> None:
    smi.answers["violations", SECOND] = {"active_ppt_pwr": True, "active_hbm_thrm": True}
    first, second = monitor.run_once()
    assert (first.uuid, first.utilization, first.memory_used_bytes, first.memory_total_bytes) == (FIRST, 0.4, 1 << 30, 64 << 30)
    assert (first.clock_hz, first.memory_clock_hz, first.slowed) == (2_100_000_000, 1_300_000_000, ())
    assert (first.power_w, first.temperature_c, first.lost) == (240.0, 71.0, False)
    assert second.slowed == ("sw_power_cap", "hbm_thermal")
    assert monitor.busy([FIRST], 0, 2 * 10**12) == 0.4


def test_not_available_is_unknown(smi, monitor) -> None:
    smi.answers["activity", FIRST] = {"gfx_activity": "N/A"}
    smi.answers["memory", FIRST] = LibraryError(NO_PERMISSION)
    smi.answers["violations", FIRST] = LibraryError(NOT_SUPPORTED)
    smi.answers["clock", SECOND] = LibraryError(BUSY)
    first, second = monitor.run_once()
    assert (first.utilization, first.memory_used_bytes, first.slowed) == (None, None, None)
    assert second.clock_hz is None
    smi.answers.clear()
    monitor.advance()
    first, second = monitor.run_once()
    assert (first.memory_used_bytes, first.slowed) == (None, None)  # refused for good, and not asked again
    assert (first.utilization, second.clock_hz) == (0.4, 2_100_000_000)


def test_a_card_that_is_gone_is_left_alone(smi, monitor) -> None:
    smi.answers["activity", FIRST] = LibraryError(NOT_FOUND)
    first, second = monitor.run_once()
    assert first.lost
    assert (first.utilization, first.clock_hz) == (None, None)
    assert not second.lost
    before = smi.calls
    monitor.advance()
    assert monitor.run_once()[0].lost
    assert smi.calls - before == 5


def test_a_card_is_found_by_uuid_or_by_its_place_on_the_bus(smi, monitor) -> None:
    monitor.run_once()
    assert monitor.find(Identity(FIRST.upper(), None)) == FIRST
    assert monitor.find(Identity(None, "0000:c2:00")) == SECOND


def test_without_the_driver_it_is_off_and_says_why(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    monitor = AmdMonitor()
    assert monitor.run_once() == ()
    assert monitor.off == "amdsmi is not installed"

    class Unloadable:
        """amdsmi without its library (observed with 7.0.2)."""

        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == "amdsmi":
                raise KeyError("libamd_smi.so")

    monkeypatch.delitem(sys.modules, "amdsmi")
    monkeypatch.setattr(sys, "meta_path", [Unloadable, *sys.meta_path])
    monitor = AmdMonitor()
    assert monitor.run_once() == ()
    assert monitor.off == "the driver's library cannot be used (KeyError)"


def test_a_rocm_build_of_torch_speaks_to_it(monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert monitor_for(torch.device("cuda", 0)).name == "amdsmi"
    monkeypatch.setattr(torch.version, "hip", None)
    assert monitor_for(torch.device("cuda", 0)).name == "nvml"
