"""Copies by `Tensor.to` itself, and the allocator, on the simulated device."""

from __future__ import annotations

import threading

import pytest
import torch

from inferscope import integration
from inferscope.device.backends import captures
from inferscope.device.copies import CopyTimes
from inferscope.device.events import DeviceTimer, timer
from inferscope.device.harvest import Harvester
from inferscope.device.memory import AllocatorMonitor
from inferscope.integration import Registry
from inferscope.record import core
from inferscope.types import SpanFlag


@pytest.fixture
def serving(sim, monkeypatch):
    """The process's own timer on the device's virtual clock, with the integrations on; yields (harvester, spans)."""
    monkeypatch.setattr(timer, "clock", sim.now_ns)
    sim.configure(call_us=0.3)
    sim.virtual_clock()
    registry = Registry()
    registry.instrument(["torch", "copies"])
    harvester = Harvester(timer, core.default)
    spans = []
    harvester.sinks.append(spans.append)
    harvester.start()
    yield harvester, spans
    harvester.stop()
    registry.uninstrument()
    harvester.after_fork()  # drops the channels
    integration.forget_copies()


@pytest.mark.parametrize(
    ("pinned", "non_blocking", "sync"), [(False, False, True), (False, True, True), (True, False, True), (True, True, False)]
)
def test_a_copy_tells_bytes_direction_blocking_queue_and_transfer(sim, serving, pinned, non_blocking, sync) -> None:
    harvester, spans = serving
    sim.configure(pageable_gb_s=0.5, h2d_gb_s=2.0)
    host = torch.ones(1 << 20)
    host = host.pin_memory() if pinned else host
    torch.empty(1, device="sim")
    sim.kernel(20.0)  # the copy stands behind this
    with core.default.request("predict") as request:
        result = host.to("sim", non_blocking=non_blocking)
    torch.accelerator.synchronize()
    harvester.run_once()
    (span,) = [span for span in spans if span.name.startswith("copy:")]
    (truth,) = [op for op in sim.operations() if op.kind == "h2d"]
    assert result.device.type == "sim"
    assert (span.name, span.nbytes, span.request.id) == ("copy:h2d", 4 << 20, request.id)
    assert bool(span.flags & SpanFlag.SYNC) is sync
    assert bool(span.flags & SpanFlag.PAGEABLE) is not pinned
    assert truth.blocking is sync
    length = truth.end_ns - truth.start_ns
    assert length == pytest.approx((4 << 20) / (2.0 if pinned else 0.5), rel=0.01)
    assert span.exec_ns == pytest.approx(length, abs=10_000)
    assert span.queue_wait_ns == pytest.approx(20_000_000, abs=50_000)
    assert (span.host_ns >= 20_000_000) is sync
    assert (truth.returned_ns >= truth.end_ns) is sync
    (row,) = [row for row in integration.copies() if row["name"] != "pin"]
    assert (row["name"], row["bytes"], row["sync"], row["pageable"]) == ("h2d", 4 << 20, int(sync), int(not pinned))


def test_the_way_back_and_copy_(sim, serving) -> None:
    harvester, spans = serving
    on_device = torch.ones(256, device="sim")
    host = on_device.cpu()
    on_device.copy_(host + 1)
    torch.accelerator.synchronize()
    harvester.run_once()
    assert sorted(span.name for span in spans) == ["copy:d2h", "copy:h2d"]
    assert torch.equal(on_device.cpu(), torch.full((256,), 2.0))
    on_device.to(torch.float64)  # stays where it is
    torch.ones(3).to(torch.float64)
    harvester.run_once()
    assert len(spans) <= 3


def test_a_failing_copy_is_the_applications_own_and_leaves_nothing(sim, serving) -> None:
    harvester, _ = serving
    torch.ones(4).to("sim")
    channel = timer.channel(torch.device("sim", 0))
    created = channel.created
    sim.fail("copy", message="SIM error: out of luck")
    with pytest.raises(RuntimeError, match="out of luck"):
        torch.ones(4).to("sim")
    with pytest.raises((RuntimeError, TypeError)):
        torch.ones(4).to("no-such-device")
    with pytest.raises(RuntimeError):
        torch.ones(4, device="sim").copy_(torch.ones(5))
    torch.accelerator.synchronize()
    harvester.run_once()
    assert sim.counters().get("events_destroyed", 0) == 0
    assert channel.created - created <= 80  # the reserve and anchors


def test_forward_is_timed_on_the_device(sim, serving) -> None:
    harvester, spans = serving
    sim.operator_cost("aten::addmm", 3000.0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).to("sim")
    value = torch.ones(2, 4).to("sim")
    for call in (lambda: net(value), lambda: net(input=value)):
        with core.default.request("predict"):
            call()
    torch.accelerator.synchronize()
    harvester.run_once()
    forwards = [span for span in spans if span.name == "forward"]
    assert len(forwards) == 2
    assert all(span.exec_ns == pytest.approx(6_000_000, rel=0.02) for span in forwards)
    assert sum(span.name.startswith("copy:") for span in spans) == 1  # moving the module is no request's copy


def test_host_models_are_as_without_a_device(sim, serving) -> None:
    harvester, spans = serving
    before = sim.counters()["calls:record"]
    torch.nn.Linear(4, 4)(torch.ones(2, 4))
    assert sim.counters()["calls:record"] == before
    assert harvester.run_once() == 0
    assert spans == []


def test_captures_are_watched_and_survive_a_busy_harvester(sim, serving) -> None:
    harvester, _ = serving
    net = torch.nn.Linear(4, 4).to("sim")
    value = torch.ones(2, 4, device="sim")
    stop = threading.Event()

    def harvest() -> None:
        while not stop.is_set():
            harvester.run_once()

    thread = threading.Thread(target=harvest)
    thread.start()
    try:
        for _ in range(30):
            net(value)
            graph = torch.accelerator.Graph(capture_error_mode="global")
            with torch.Stream("sim"), graph:
                assert captures.open == 1
                net(value)
            graph.replay()
    finally:
        stop.set()
        thread.join()
    assert captures.open == 0
    assert captures.seen >= 30
    assert sim.counters()["captures"] == 30
    assert sim.counters().get("captures_killed", 0) == 0


def test_a_capture_that_fails_to_begin_is_not_open(sim, serving) -> None:
    graph = torch.accelerator.Graph()
    with pytest.raises(RuntimeError, match="default stream cannot be captured"):
        graph.capture_begin()
    assert captures.open == 0


def test_totals_part_what_blocked_from_what_travelled(sim, serving) -> None:
    harvester, _ = serving
    times = CopyTimes()
    harvester.sinks.append(times.add)
    sim.configure(pageable_gb_s=1.0)
    for _ in range(5):
        torch.ones(1 << 18).to("sim")
    torch.accelerator.synchronize()
    harvester.run_once()
    (row,) = times.evidence()
    assert (row["name"], row["pageable"], row["sync"], row["count"], row["bytes"]) == ("h2d", True, True, 5, 5 << 20)
    assert row["host_ns"] == pytest.approx(row["transfer_ns"], rel=0.05)
    assert row["bytes_per_s"] == pytest.approx(1e9, rel=0.02)
    assert row["queue_ns"] < 5 * 50_000
    times.reset()
    assert times.evidence() == []


def test_the_allocator_is_read_without_a_synchronisation(sim) -> None:
    local = DeviceTimer()
    monitor = AllocatorMonitor(local)
    assert monitor.sample() == []
    held = torch.empty(1 << 20, device="sim")
    local.channel(held.device)
    before = sim.counters()
    (row,) = monitor.sample()
    assert row.device == "sim:0"
    assert row.allocated_bytes >= held.nbytes
    assert row.reserved_bytes >= row.allocated_bytes
    assert row.out_of_memory >= 0
    after = sim.counters()
    assert all(after.get(call, 0) == before.get(call, 0) for call in ("synchronizations", "calls:query", "implicit_syncs"))


def test_an_allocator_that_tells_nothing_is_unknown(sim, monkeypatch) -> None:
    local = DeviceTimer()
    local.channel(torch.device("sim", 0))

    def refuse(_index: int) -> dict[str, int]:
        raise RuntimeError("not implemented")

    monkeypatch.setattr(torch._C, "_accelerator_getDeviceStats", refuse)
    monkeypatch.setattr(torch._C, "_accelerator_getMemoryInfo", refuse)
    (row,) = AllocatorMonitor(local).sample()
    assert row == ("sim:0", *[None] * 11)
