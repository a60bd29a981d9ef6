"""Copies by `Tensor.to` itself, and the allocator, on the simulated device."""

from __future__ import annotations

import threading

import pytest
import torch

from inferscope import integration
from inferscope.device.backends import captures
from inferscope.device.copies import CopyTimes
from inferscope.device.events import timer
from inferscope.device.harvest import Harvester
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


def test_what_waits_for_a_value_is_counted_by_the_line_that_asked(sim, serving) -> None:
    harvester, spans = serving
    sim.configure(d2h_gb_s=1.0)
    value = torch.ones(1, device="sim")
    sim.kernel(3.0)
    with core.default.request("predict"):
        value.item()
        if value > 0:
            [float(value), value.tolist()]
        torch.ones(4, device="sim").nonzero()
    torch.accelerator.synchronize()
    harvester.run_once()
    rows = [row for row in integration.copies() if row["implicit"]]
    assert sum(row["count"] for row in rows) == 5
    assert all(row["site"].startswith("test_what_waits_for_a_value_is_counted_by_the_line_that_asked (test_copies.py:") for row in rows)
    assert len({row["site"] for row in rows}) == 4
    reads = [span for span in spans if span.flags & SpanFlag.IMPLICIT_SYNC]
    assert len(reads) == 5
    assert (reads[0].name, reads[0].nbytes) == ("copy:d2h", 4)
    assert reads[0].queue_wait_ns == pytest.approx(3_000_000, abs=50_000)
    assert reads[0].host_ns >= 3_000_000  # no synchronisation is to be seen in the source, and it blocks
    before = len(integration.copies())
    torch.ones(1).item()  # the host's own values wait for nobody
    assert len(integration.copies()) == before


def test_copies_from_device_to_device(sim, serving) -> None:
    harvester, spans = serving
    here = torch.ones(256, device="sim:0")
    there = here.to("sim:1")
    there.copy_(here)
    here.copy_(here + 1)
    here.to("sim:0")
    here.to("sim")
    here.to(torch.float64)
    assert there.device.index == 1
    torch.accelerator.synchronize()
    harvester.run_once()
    sim.advance_ms(100.0)
    harvester.run_once()
    copies = [span for span in spans if span.name == "copy:d2d"]
    assert [(span.nbytes, span.flags) for span in copies] == [(1024, 0)] * 3
    assert {span.device for span in copies} == {"sim:0", "sim:1"}
    (row,) = {row["name"]: row for row in integration.copies()}.values()
    assert (row["name"], row["sync"], row["pageable"]) == ("d2d", 0, 0)


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


class _Moving(torch.nn.Module):
    """Goes to another device while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.to("sim:1")
        return self.layer(value.to("sim:1"))


def test_a_model_that_moves_has_no_device_time_of_one_device(sim, serving) -> None:
    harvester, spans = serving
    net = _Moving().to("sim:0")
    with core.default.request("predict"):
        assert net(torch.ones(2, 4, device="sim:0")).device.index == 1
    torch.accelerator.synchronize()
    harvester.run_once()
    assert [span.name for span in spans if span.name == "forward"] == []
    assert timer.channel(torch.device("sim", 0)).counts().host_only == 1
    assert net(torch.ones(2, 4, device="sim:1")).device.index == 1  # and from now on it stays
    torch.accelerator.synchronize(1)
    sim.advance_ms(100.0)
    harvester.run_once()
    assert [span.device for span in spans if span.name == "forward"] == ["sim:1"]


def test_a_replay_is_timed_from_outside(sim, serving) -> None:
    harvester, spans = serving
    sim.operator_cost("aten::mul", 4000.0)
    value = torch.ones(4, device="sim")
    graph = torch.accelerator.Graph()
    with torch.Stream("sim"), graph:
        value.mul(2.0)
    with core.default.request("predict") as request:
        graph.replay()
    torch.accelerator.synchronize()
    harvester.run_once()
    (span,) = [span for span in spans if span.name == "replay"]
    assert span.exec_ns == pytest.approx(4_000_000, rel=0.01)
    assert span.request.id == request.id
    assert sim.counters().get("captures_killed", 0) == 0


def test_host_models_are_as_without_a_device(sim, serving) -> None:
    harvester, spans = serving
    before = sim.counters()["calls:record"]
    torch.nn.Linear(4, 4)(torch.ones(2, 4))
    assert sim.counters()["calls:record"] == before
    assert harvester.run_once() == 0
    assert spans == []


@pytest.mark.parametrize("every_mode", [0, 1], ids=["cuda", "rocm"])
def test_captures_are_watched_and_survive_a_busy_harvester(sim, serving, every_mode) -> None:
    harvester, _ = serving
    sim.configure(query_kills_all=every_mode)  # on ROCm a query ends a capture whatever its mode and its thread's (pytorch#176251)
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
