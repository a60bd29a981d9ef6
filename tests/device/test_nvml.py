"""The driver's answers through the real nvidia-ml-py, from a library compiled for the test."""

from __future__ import annotations

import subprocess
import sys

import pytest

from inferscope.device.gpm import Work
from inferscope.device.monitor import CardFault, Identity, identity_of, monitor_for
from inferscope.device.nvml import NvmlMonitor
from tests.device.conftest import built_driver

pytest.importorskip("pynvml", reason="needs nvidia-ml-py")

FIRST, SECOND = (f"GPU-0000000{number}-aaaa-bbbb-cccc-dddddddddddd" for number in (1, 2))
INSTANCE = "MIG-00000003-aaaa-bbbb-cccc-dddddddddddd"
A_LOOK, WITH_POWER = 5, 2
"""Calls of one look at a card."""
UTILIZATION, USED, CLOCK, REASONS, POWER, TEMPERATURE, MONITORING, BUSY = range(8)
NOT_SUPPORTED, NO_PERMISSION, DRIVER_NOT_LOADED, LOST, UNKNOWN = 3, 4, 9, 15, 999


class Clock:
    def __init__(self) -> None:
        self.now = 10**12

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def driver(driver_library):
    library = driver_library
    for card in (0, 1, 2):
        for field, value in (
            (UTILIZATION, 35),
            (USED, 1024),
            (CLOCK, 1980),
            (REASONS, 0),
            (POWER, 312_500),
            (TEMPERATURE, 61),
            (MONITORING, 0),
            (BUSY, 0),
        ):
            library.fake_set(card, field, value, 0)
    library.fake_init_fails(0)
    library.fake_divide(0)
    yield library
    for card in (0, 1, 2):  # others ask these cards, too
        for field in (MONITORING, BUSY):
            library.fake_set(card, field, 0, 0)


@pytest.fixture
def monitor(driver):
    clock = Clock()
    made = NvmlMonitor(clock)
    made.advance = lambda: setattr(clock, "now", clock.now + 10**9)
    yield made
    made.close()


def test_what_the_driver_tells_is_passed_on(driver, monitor) -> None:
    driver.fake_set(1, UTILIZATION, 90, 0)
    driver.fake_set(1, REASONS, 0x4 | 0x40 | 0x1, 0)
    first, second = monitor.run_once()
    assert (first.uuid, first.utilization, first.memory_used_bytes, first.memory_total_bytes) == (FIRST, 0.35, 1 << 30, 80 << 30)
    assert (first.clock_hz, first.slowed, first.lost) == (1_980_000_000, (), False)
    assert (second.uuid, second.utilization, second.slowed) == (SECOND, 0.9, ("sw_power_cap", "hw_thermal"))


@pytest.mark.parametrize("failure", [NOT_SUPPORTED, NO_PERMISSION])
def test_what_is_not_told_is_unknown_and_not_asked_again(driver, monitor, failure) -> None:
    driver.fake_set(0, UTILIZATION, 35, failure)
    driver.fake_set(0, USED, 1024, failure)
    first, second = monitor.run_once()
    assert (first.utilization, first.memory_used_bytes, first.memory_total_bytes) == (None, None, None)
    assert first.clock_hz is not None
    assert second.utilization == 0.35
    before = driver.fake_calls()
    monitor.advance()
    monitor.run_once()
    assert driver.fake_calls() - before == (A_LOOK - 2) + A_LOOK


def test_a_passing_failure_is_asked_again(driver, monitor) -> None:
    driver.fake_set(0, UTILIZATION, 35, UNKNOWN)
    assert monitor.run_once()[0].utilization is None
    driver.fake_set(0, UTILIZATION, 35, 0)
    monitor.advance()
    assert monitor.run_once()[0].utilization == 0.35


def test_a_lost_card_is_left_alone(driver, monitor) -> None:
    driver.fake_set(0, UTILIZATION, 35, LOST)
    first, second = monitor.run_once()
    assert first.lost
    assert (first.utilization, first.memory_used_bytes, first.clock_hz, first.slowed) == (None,) * 4
    assert not second.lost
    before = driver.fake_calls()
    monitor.advance()
    assert monitor.run_once()[0].lost
    assert driver.fake_calls() - before == A_LOOK


def test_the_driver_is_asked_once_a_second_at_most(driver, monitor) -> None:
    cards = monitor.run_once()
    before = driver.fake_calls()
    assert monitor.run_once() == cards
    assert driver.fake_calls() == before


def test_nonsense_is_unknown(driver, monitor) -> None:
    driver.fake_set(0, UTILIZATION, 4_000, 0)
    assert monitor.run_once()[0].utilization is None


def test_busy_is_of_the_cards_in_use_and_of_a_period(driver, monitor) -> None:
    for number, share in enumerate((10, 20, 60)):
        driver.fake_set(0, UTILIZATION, share, 0)
        monitor.advance()
        monitor.run_once()
        if number == 0:
            start = monitor._clock() + 1
    assert monitor.busy([FIRST], start, monitor._clock()) == pytest.approx(0.4)
    assert monitor.busy([FIRST, SECOND], 0, monitor._clock()) == pytest.approx(0.35)
    assert monitor.busy(["GPU-of-somebody-else"], 0, monitor._clock()) is None


def test_without_a_driver_it_is_off_and_says_why(driver) -> None:
    driver.fake_init_fails(DRIVER_NOT_LOADED)
    monitor = NvmlMonitor()
    assert monitor.run_once() == ()
    assert monitor.off == "the driver's library cannot be used (NVMLError_DriverNotLoaded)"


def test_without_nvidia_ml_py_it_is_off_and_says_why(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monitor = NvmlMonitor()
    assert monitor.run_once() == ()
    assert monitor.off == "nvidia-ml-py is not installed"


def test_an_older_driver_has_the_older_name(tmp_path) -> None:
    built_driver(tmp_path, "-DOLD_DRIVER")
    code = (
        "from inferscope.device.nvml import NvmlMonitor\n"
        "print([card.slowed for card in NvmlMonitor().run_once()])\n"
        "import sys; print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"LD_LIBRARY_PATH": str(tmp_path)}, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines() == ["[('hw_slowdown',), ('hw_slowdown',)]", "False"]


def test_power_and_temperature_are_asked_rarely(driver, monitor) -> None:
    first, _ = monitor.run_once()
    assert (first.power_w, first.temperature_c, first.memory_clock_hz) == (312.5, 61.0, 2_619_000_000)
    driver.fake_set(0, POWER, 400_000, 0)
    for number in range(1, 11):
        before = driver.fake_calls()
        monitor.advance()
        first, _ = monitor.run_once()
        assert first.power_w == (400.0 if number == 10 else 312.5)
        assert driver.fake_calls() - before == 2 * (A_LOOK + (WITH_POWER if number == 10 else 0))


def test_what_a_card_reports_as_broken_is_heard_of_once(driver, monitor) -> None:
    monitor.run_once()
    start = monitor._clock()
    driver.fake_xid(1, 79)
    driver.fake_xid(0, 13)
    monitor.advance()
    monitor.run_once()
    now = monitor._clock()
    assert monitor.faults(start, now) == [CardFault(SECOND, now, 79), CardFault(FIRST, now, 13)]
    monitor.advance()
    monitor.run_once()
    assert len(monitor.faults(0, monitor._clock())) == 2
    assert monitor.faults(now + 1, monitor._clock()) == []


def test_an_instance_of_a_divided_card_is_a_card_that_tells_less(driver, monitor) -> None:
    driver.fake_divide(1)
    driver.fake_set(1, UTILIZATION, 0, NOT_SUPPORTED)  # the parent's, as on a real one
    driver.fake_set(2, UTILIZATION, 0, NOT_SUPPORTED)
    driver.fake_set(2, USED, 512, 0)
    _, parent, instance = monitor.run_once()
    assert (parent.uuid, parent.utilization) == (SECOND, None)
    assert (instance.uuid, instance.utilization, instance.memory_used_bytes) == (INSTANCE, None, 512 << 20)
    assert monitor.busy([INSTANCE, SECOND], 0, monitor._clock()) is None
    assert monitor.find(Identity(INSTANCE.removeprefix("MIG-"), "0000:3c:00")) == INSTANCE


def test_a_card_is_found_by_uuid_or_by_its_place_on_the_bus(driver, monitor) -> None:
    monitor.run_once()
    assert monitor.find(Identity(SECOND.removeprefix("GPU-").upper(), None)) == SECOND
    assert monitor.find(Identity(None, "0000:3b:00")) == FIRST
    assert monitor.find(Identity("of-another-machine", "0000:99:00")) is None


def test_a_device_is_identified_by_what_torch_knows_of_it(sim) -> None:
    import torch

    device = torch.device("sim", 0)
    assert identity_of(device) is None
    sim.identify("00000001-aaaa-bbbb-cccc-dddddddddddd")
    assert identity_of(device) == Identity("00000001-aaaa-bbbb-cccc-dddddddddddd", None)
    assert identity_of(torch.device("sim", 1)) is None
    assert identity_of(torch.device("cuda", 0)) is None  # a build without CUDA has nothing to say
    assert monitor_for(device).name == "nvml"


def test_what_a_cards_parts_do_is_of_the_time_between_two_looks(driver, monitor) -> None:
    driver.fake_set(0, MONITORING, 1, 0)  # the second card is older
    driver.fake_set(0, BUSY, 80, 0)
    first, second = monitor.run_once()
    assert first.work == second.work == Work()  # one sample says nothing
    assert driver.fake_samples() == 2
    for busy in (30, 60):
        driver.fake_set(0, BUSY, busy, 0)
        monitor.advance()
        first, second = monitor.run_once()
        assert second.work == Work()
        assert first.work.sm_busy == pytest.approx(busy / 100)
        assert (first.work.sm_occupancy, first.work.dram_busy) == (0.5, 0.5)
        assert first.work.tensor_busy is None  # refused, not zero
        assert (first.work.pcie_in_bytes_s, first.work.pcie_out_bytes_s) == (2000 << 20, 100 << 20)
    driver.fake_set(0, BUSY, 10, UNKNOWN)
    monitor.advance()
    assert monitor.run_once()[0].work == Work()
    driver.fake_set(0, BUSY, 20, 0)
    monitor.advance()
    assert monitor.run_once()[0].work.sm_busy == pytest.approx(0.2)
    monitor.close()
    assert driver.fake_samples() == 0


@pytest.mark.parametrize("failure", [NOT_SUPPORTED, NO_PERMISSION, LOST])
def test_a_card_without_performance_monitoring_tells_the_rest(driver, monitor, failure) -> None:
    driver.fake_set(0, MONITORING, 1, failure)
    for _ in range(2):
        first, second = monitor.run_once()
        assert first.work == second.work == Work()
        assert second.utilization == 0.35
        monitor.advance()
    assert driver.fake_samples() == 0
    assert monitor.run_once()[0].lost == (failure == LOST)
