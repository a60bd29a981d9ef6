"""The simulated accelerator, fresh for each test."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path

import pytest

from inferscope import integration
from inferscope.device import copying
from inferscope.device.backends import CaptureWatch
from inferscope.device.events import DeviceTimer, timer
from inferscope.device.harvest import DeviceSpan, Harvester
from inferscope.device.settling import PATIENCE_NS
from inferscope.integration import Registry
from inferscope.record import core
from inferscope.testing import accelerator
from inferscope.testing.accelerator import Accelerator
from inferscope_integrations import copies

MS = 1_000_000


@pytest.fixture(scope="session")
def loaded_accelerator() -> Accelerator:
    return accelerator.load()


@pytest.fixture
def sim(loaded_accelerator: Accelerator) -> Iterator[Accelerator]:
    loaded_accelerator.reset()
    yield loaded_accelerator
    loaded_accelerator.reset()


def built_driver(folder: Path, *flags: str) -> Path:
    """A stand-in for the driver's library, compiled now."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    assert compiler is not None, "the driver's stand-in needs a C compiler"
    path = folder / "libnvidia-ml.so.1"
    source = Path(__file__).parent / "fake_nvml.c"
    subprocess.run([compiler, "-shared", "-fPIC", *flags, "-Wl,-soname,libnvidia-ml.so.1", str(source), "-o", str(path)], check=True)
    return path


@pytest.fixture(scope="session")
def driver_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    # Loaded first and found again by its soname, so that no search path has to change; once, since nvidia-ml-py loads it once.
    return ctypes.CDLL(str(built_driver(tmp_path_factory.mktemp("nvml"))), ctypes.RTLD_GLOBAL)


class Rooms:
    """A timer and its harvester on the simulated device, apart from the process's own."""

    def __init__(self, sim: Accelerator, per_second: int = 10**9) -> None:
        import torch

        self.sim = sim
        sim.configure(call_us=0.3)  # on the virtual clock time must pass for somebody who asks again and again
        self.watch = CaptureWatch()
        self.timer = DeviceTimer(clock=sim.now_ns, per_second=per_second)
        self.harvester = Harvester(self.timer, None, self.watch)
        self.spans: list[DeviceSpan] = []
        self.harvester.sinks.append(self.spans.append)
        self.harvester.start()
        channel = self.timer.channel(torch.device("sim", 0))
        assert channel is not None
        self.channel = channel

    def span(self, milliseconds: float, name: str = "work", request: object = None) -> bool:
        """One kernel, timed; whether it was."""
        started = self.channel.begin(request)
        self.sim.kernel(milliseconds, name)
        if started is not None:
            self.channel.end(started, name)
        return started is not None

    def prove(self) -> None:
        """Have one span read, as a device has after its first moments."""
        self.span(0.01, "first")
        self.sim.advance_ms(1.0)
        self.harvester.run_once()
        assert self.channel.proven
        self.spans.clear()

    def prove_real(self) -> None:
        """The same on the real clock."""
        self.span(0.01, "first")
        time.sleep(0.002)
        self.harvester.run_once()
        assert self.channel.proven
        self.spans.clear()


@pytest.fixture
def make_rooms(sim: Accelerator) -> Iterator[Callable[..., Rooms]]:
    made: list[Rooms] = []

    def make(**settings: int) -> Rooms:
        made.append(Rooms(sim, **settings))
        return made[-1]

    yield make
    for rooms in made:
        rooms.harvester.after_fork()  # drops everything


@pytest.fixture
def rooms(make_rooms: Callable[..., Rooms]) -> Rooms:
    return make_rooms()


class Serving:
    """A recorder, the process's own timer and the integrations, all on the device's virtual clock."""

    def __init__(self, sim: Accelerator, recorder: core.Recorder) -> None:
        import torch

        self.sim, self.recorder = sim, recorder
        self.registry = Registry()
        self.registry.instrument(["torch", "copies"])
        self.harvester = Harvester(timer, recorder)
        self.harvester.start()
        value = torch.ones(4).to("sim")
        for _ in range(3):  # the device proves itself, and its clock becomes known
            value.cpu()
            self.harvester.run_once()
        recorder.drain()

    def settle(self) -> None:
        """All that the device finished is judged."""
        import torch

        torch.accelerator.synchronize()
        self.harvester.run_once()
        self.sim.advance_ms(PATIENCE_NS / MS)
        self.harvester.run_once()

    def vectors(self) -> list[dict[str, float]]:
        """Milliseconds by column of the requests that were handed over; each sums to its wall time."""
        found = []
        for record in self.recorder.drain():
            wall, vector = record[3], struct.unpack(f"{len(record[14]) // 8}q", record[14])
            assert sum(vector) == wall
            names = [":".join(filter(None, column)) for column in self.recorder.columns()]
            found.append({name: ns / MS for name, ns in zip(names, vector, strict=False) if ns})
        return found


@pytest.fixture
def serving(sim, monkeypatch):
    sim.configure(call_us=0.3)
    sim.operator_cost("aten::addmm", 20_000.0)
    sim.virtual_clock()
    recorder = core.Recorder(clock=sim.now_ns)
    recorder.begin_epoch(reservoir=1000)
    monkeypatch.setattr(core, "default", recorder)
    monkeypatch.setattr(timer, "clock", sim.now_ns)
    monkeypatch.setattr(copies, "now_ns", sim.now_ns)
    monkeypatch.setattr(copying, "now_ns", sim.now_ns)
    monkeypatch.setattr(copying, "_told_until", ContextVar("told_until", default=0))  # earlier tests' clock is ahead of this one
    made = Serving(sim, recorder)
    yield made
    made.harvester.stop()
    made.registry.uninstrument()
    made.harvester.after_fork()
    integration.forget_copies()
