"""What the detector asks of the machine and the device: read from a fake tree, absent where nothing tells."""

from __future__ import annotations

import pytest

from inferscope.detect import SLO
from inferscope.device.memory import Memory
from inferscope.device.room import DeviceRoom
from inferscope.rooms import facts

GB = 1 << 30


@pytest.fixture
def machine(tmp_path):
    path = tmp_path / "meminfo"
    path.write_text("MemTotal:       8000 kB\nMemFree:        100 kB\nMemAvailable:   2000 kB\n")
    return path


def test_a_container_with_a_limit(tmp_path, machine):
    (tmp_path / "memory.max").write_text(f"{4 * GB}\n")
    (tmp_path / "memory.current").write_text(f"{3 * GB}\n")
    assert facts.free_memory(tmp_path, tmp_path / "none") == pytest.approx(0.25)
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {2 * GB}\n")
    assert facts.free_memory(tmp_path, tmp_path / "none") == pytest.approx(0.75)
    assert facts.free_memory(tmp_path, machine) == pytest.approx(0.25), "the machine may be fuller than its container"


def test_an_older_hierarchy(tmp_path):
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/memory.limit_in_bytes").write_text(f"{2 * GB}\n")
    (tmp_path / "memory/memory.usage_in_bytes").write_text(f"{GB}\n")
    assert facts.free_memory(tmp_path, tmp_path / "none") == pytest.approx(0.5)


@pytest.mark.parametrize("limit", ["max\n", f"{1 << 62}\n", "", "soon", "0\n"])
def test_no_limit_is_the_machines(tmp_path, machine, limit):
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text("5\n")
    assert facts.free_memory(tmp_path, machine) == pytest.approx(0.25)
    assert facts.free_memory(tmp_path, tmp_path / "none") is None


class Device:
    def __init__(self, busy=None, *memory):
        self.busy, self.memory = busy, memory

    def levels(self, from_ns, to_ns):
        assert 0 < to_ns - from_ns <= 10**10
        return self.busy, self.memory


def allocator(reserved=None, free=None, total=None):
    return Memory("cuda:0", None, None, reserved, None, None, None, None, None, free, total)


def test_the_fullest_card_counts():
    found = facts.gather(Device(0.4, allocator(GB, 72 * GB, 80 * GB), allocator(GB, GB, 10 * GB), allocator(50 * GB)), 10**10)
    assert (found.device_busy, found.gpu_used, found.gpu_used_bytes) == (0.4, 0.9, 9 * GB)


def test_without_a_driver_the_allocator_tells_bytes_and_no_fraction():
    found = facts.gather(Device(None, allocator(3 * GB), allocator()), 10**10)
    assert (found.device_busy, found.gpu_used, found.gpu_used_bytes) == (None, None, 3 * GB)
    assert facts.gather(Device(), 10**10).gpu_used_bytes is None


def test_the_device_room_has_these_levels():
    room = DeviceRoom(None)
    assert room.levels(0, 1) == (None, ())
    assert facts.gather(room, 10**10).gpu_used is None


def test_nothing_is_asked_that_nobody_needs():
    assert not facts.needed([SLO("score", p99_ms=20)], {"lock_wait_ms": 5})
    assert facts.needed([SLO("score", p99_ms=20, max_gpu_mem=0.9)], {})
    assert facts.needed([], {"memory_headroom": 0.1})
    assert facts.needed([], {"device_idle": 0.1})
