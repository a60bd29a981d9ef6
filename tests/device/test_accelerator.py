"""The simulated accelerator keeps a device's rules: the tests of the device rooms stand on it."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from inferscope.testing.accelerator import AcceleratorUnavailableError, _build


def timed_event() -> torch.Event:
    return torch.Event("sim", enable_timing=True)


def test_results_are_those_of_the_cpu(sim) -> None:
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 3))
    value = torch.randn(5, 8)
    plain = net(value)
    on_device = net.to("sim")(value.to("sim"))
    assert on_device.device == torch.device("sim", 0)
    assert torch.allclose(on_device.cpu(), plain)
    assert [op.name for op in sim.operations() if op.kind == "kernel"][-1] == "aten::addmm"
    index = torch.tensor([2, 0], device="sim")
    table = torch.arange(12.0).reshape(3, 4).to("sim")
    assert torch.equal(table[index].t().contiguous().cpu(), torch.arange(12.0).reshape(3, 4)[[2, 0]].t())


def test_work_completes_asynchronously_and_in_order_of_its_stream(sim) -> None:
    sim.virtual_clock()
    first, last, other = timed_event(), timed_event(), timed_event()
    first.record()
    sim.kernel(20.0)
    last.record()
    side = torch.Stream("sim")
    with side:
        sim.kernel(1.0)
        other.record()
    assert (last.query(), other.query()) == (False, False)
    sim.advance_ms(2.0)
    assert (last.query(), other.query()) == (False, True)
    last.synchronize()
    assert last.query()
    assert first.elapsed_time(last) == pytest.approx(20.0, abs=1e-3)
    slow, fast = (op for op in sim.operations() if op.name == "kernel")
    assert (slow.stream, fast.stream) == (0, side.stream_id)
    assert slow.end_ns - slow.start_ns == 20_000_000
    assert fast.start_ns - fast.issue_ns == 5_000


def test_real_clock_is_the_clock_of_the_process(sim) -> None:
    done = timed_event()
    before = time.perf_counter_ns()
    sim.kernel(300.0)
    done.record()
    issued = time.perf_counter_ns()
    assert not done.query()
    done.synchronize()
    assert time.perf_counter_ns() - before >= 300_000_000
    (kernel,) = sim.operations()
    assert before <= kernel.issue_ns <= issued
    assert kernel.thread_id == threading.get_native_id()


def test_events_raise_what_torch_raises_elsewhere(sim) -> None:
    sim.virtual_clock()
    never, running, plain = timed_event(), timed_event(), torch.Event("sim")
    running.record()
    with pytest.raises(ValueError, match="must be recorded"):
        running.elapsed_time(never)
    sim.kernel(1.0)
    later = timed_event()
    later.record()
    with pytest.raises(RuntimeError, match="must be completed"):
        running.elapsed_time(later)
    plain.record()
    with pytest.raises(ValueError, match="enable_timing"):
        running.elapsed_time(plain)
    assert never.query()  # torch's own answer for an event that nobody recorded


def test_waiting_for_an_event_orders_two_streams(sim) -> None:
    sim.virtual_clock()
    ready = timed_event()
    sim.kernel(10.0, "producer")
    ready.record()
    side = torch.Stream("sim")
    with side:
        side.wait_event(ready)
        sim.kernel(1.0, "consumer")
    producer, consumer = sim.operations()
    assert consumer.start_ns >= producer.end_ns


@pytest.mark.parametrize(
    ("pinned", "non_blocking", "blocks"), [(False, False, True), (False, True, True), (True, False, True), (True, True, False)]
)
def test_copies_keep_a_cards_rules(sim, pinned, non_blocking, blocks) -> None:
    sim.configure(pageable_gb_s=1.0, h2d_gb_s=4.0, copy_us=0.0, pageable_us=0.0)
    host = torch.ones(1 << 20)
    host = host.pin_memory() if pinned else host
    assert host.is_pinned() is pinned
    sim.virtual_clock()
    sim.kernel(10.0)
    asked = sim.now_ns()
    on_device = host.to("sim", non_blocking=non_blocking)
    (copy,) = (op for op in sim.operations() if op.kind == "h2d")
    assert (copy.nbytes, copy.pageable, copy.blocking) == (4 << 20, not pinned, blocks)
    assert copy.end_ns - copy.start_ns == pytest.approx((4 << 20) / (4.0 if pinned else 1.0), rel=1e-6)
    assert copy.start_ns >= asked + 10_000_000  # in the order of its stream
    assert sim.now_ns() == (copy.end_ns if blocks else asked)
    assert torch.equal(on_device.cpu(), host)


def test_reading_a_scalar_waits_for_the_stream(sim) -> None:
    value = torch.ones(4).to("sim").sum()
    sim.virtual_clock()
    sim.kernel(7.0)
    asked = sim.now_ns()
    assert value.item() == 4.0
    assert sim.now_ns() - asked >= 7_000_000
    assert sim.counters()["implicit_syncs"] == 1


def test_a_devices_clock_drifts_and_its_stamps_are_coarse(sim) -> None:
    sim.virtual_clock()
    sim.configure(drift_ppm=80, launch_us=0)
    first, last = timed_event(), timed_event()
    first.record()
    sim.advance_ms(1000.0)
    last.record()
    elapsed = first.elapsed_time(last)
    assert elapsed == pytest.approx(1000.08, abs=1e-3)
    assert elapsed == float(torch.tensor(elapsed, dtype=torch.float32))  # a float32 of milliseconds, as everywhere


def test_a_query_from_another_thread_kills_a_global_capture_and_a_relaxed_one_does_not(sim) -> None:
    pending = timed_event()
    sim.kernel(0.1)
    pending.record()
    value = torch.ones(4, device="sim")

    def capture(meanwhile) -> None:
        graph = torch.accelerator.Graph(capture_error_mode="global")
        with torch.Stream("sim"):
            graph.capture_begin()
            doubled = value + value
            thread = threading.Thread(target=meanwhile)
            thread.start()
            thread.join()
            graph.capture_end()
            graph.replay()
        assert doubled is not None

    refused: list[str] = []

    def query() -> None:
        try:
            pending.query()
        except RuntimeError as error:
            refused.append(str(error))

    def relaxed_query() -> None:
        with sim.relaxed():
            query()

    capture(lambda: None)
    capture(relaxed_query)
    assert not refused
    with pytest.raises(RuntimeError, match="previous error during capture"):
        capture(query)
    assert "not permitted when stream is capturing" in refused[0]
    assert sim.counters()["captures_killed"] == sim.counters()["killed_by:query"] == 1


def test_a_capture_defers_its_work_to_the_replay(sim) -> None:
    value = torch.ones(4, device="sim")
    graph = torch.accelerator.Graph()
    stream = torch.Stream("sim")
    sim.clear_log()
    with stream:
        graph.capture_begin()
        assert stream.is_capturing()
        value.mul(2.0)
        assert not sim.operations()
        graph.capture_end()
        graph.replay()
        graph.replay()
    assert [(op.name, op.replayed) for op in sim.operations()] == [("aten::mul", True)] * 2


def test_faults_strike_once_or_until_healed(sim) -> None:
    event = timed_event()
    sim.fail("record", message="SIM error: device-side assert")
    with pytest.raises(RuntimeError, match="device-side assert"):
        event.record()
    event.record()
    sim.fail("*", times=None, message="SIM error: the device fell off the bus")
    for call in (event.query, event.record, lambda: sim.kernel(1.0), torch.accelerator.synchronize):
        with pytest.raises(RuntimeError, match="fell off the bus"):
            call()
    sim.heal()
    event.record()


def test_two_devices_have_queues_memory_and_events_of_their_own(sim) -> None:
    sim.virtual_clock()
    event = timed_event()
    event.record()
    with torch.accelerator.device_index(1):
        sim.kernel(5.0)
        with pytest.raises(RuntimeError, match="recorded on a stream of device 1"):
            event.record()
        torch.accelerator.synchronize()
    assert sim.operations()[-1].device == 1
    before = torch.accelerator.memory_allocated(1)
    held = torch.empty(1 << 18, device="sim:1")
    assert torch.accelerator.memory_allocated(1) - before == held.nbytes
    sim.configure(memory_gb=0.001)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 20, device="sim:1")
    assert torch.accelerator.memory_stats(1)["num_ooms"] >= 1


def test_a_setting_that_is_none_is_refused(sim) -> None:
    with pytest.raises(ValueError, match="unknown setting 'bandwidth'"):
        sim.configure(bandwidth=3.0)


def test_without_a_compiler_the_message_says_what_to_install(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(AcceleratorUnavailableError, match=r"no-such-compiler.*C\+\+20"):
        _build.library()
    monkeypatch.setattr(_build, "_FOLDER", tmp_path)
    (tmp_path / "simulator.cpp").write_text("this is no program", encoding="utf-8")
    monkeypatch.delenv("CXX")
    with pytest.raises(AcceleratorUnavailableError, match="does not compile"):
        _build.library()
