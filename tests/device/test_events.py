"""The caller's part: what a span records, and what it refuses to."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import pytest
import torch

from inferscope.device.events import CAP, DeviceTimer


def test_a_span_knows_its_stream_and_never_synchronises(rooms) -> None:
    rooms.sim.virtual_clock()
    rooms.prove()
    before = rooms.sim.counters()
    side = torch.Stream("sim")
    with side:
        assert rooms.span(3.0, "side")
    rooms.span(2.0, "main")
    rooms.sim.advance_ms(10.0)
    assert rooms.harvester.run_once() == 2
    assert {span.name: (span.stream, span.cross_stream) for span in rooms.spans} == {"side": (side.stream_id, False), "main": (0, False)}
    assert {span.name: span.exec_ns for span in rooms.spans} == {
        "side": pytest.approx(3_000_000, abs=1000),
        "main": pytest.approx(2_000_000, abs=1000),
    }
    after = rooms.sim.counters()
    assert after.get("synchronizations", 0) == before.get("synchronizations", 0) == 0


def test_a_span_that_changes_streams_is_marked(rooms) -> None:
    rooms.sim.virtual_clock()
    rooms.prove()
    started = rooms.channel.begin(None)
    with torch.Stream("sim"):
        rooms.sim.kernel(1.0)
        rooms.channel.end(started, "moved")
    rooms.sim.advance_ms(5.0)
    rooms.harvester.run_once()
    (span,) = rooms.spans
    assert span.cross_stream


def test_a_span_that_ends_elsewhere_waits_for_its_beginning(rooms) -> None:
    rooms.sim.virtual_clock()
    rooms.prove()
    rooms.sim.kernel(50.0)  # the first event stands behind this
    started = rooms.channel.begin(None)
    with torch.Stream("sim"):
        rooms.channel.end(started, "moved")
    rooms.sim.advance_ms(5.0)
    assert rooms.harvester.run_once() >= 0
    assert rooms.spans == []
    rooms.sim.advance_ms(50.0)
    rooms.harvester.run_once()
    assert len(rooms.spans) == 1
    assert rooms.channel.counts().lost == 0


def test_events_are_reused_and_none_is_created_once_warm(rooms) -> None:
    rooms.sim.virtual_clock()
    rooms.prove()

    def work() -> None:
        for _ in range(400):
            for _ in range(8):
                rooms.span(0.1)
            rooms.sim.advance_ms(20.0)
            rooms.harvester.run_once()

    work()
    created = rooms.sim.counters()["events_created"]
    work()
    assert rooms.sim.counters()["events_created"] == created
    assert rooms.sim.counters().get("events_destroyed", 0) == 0
    assert rooms.channel.counts().delivered == 1 + 2 * 400 * 8


def test_back_pressure_drops_and_counts(rooms) -> None:
    rooms.sim.virtual_clock()
    rooms.prove()
    rooms.sim.kernel(10_000.0)
    for _ in range(CAP):
        rooms.span(0.0)
    taken = len(rooms.channel.inbox)
    assert CAP // 2 - 64 < taken <= CAP // 2
    assert rooms.channel.created <= CAP
    assert rooms.channel.counts().dropped == CAP - taken
    rooms.sim.advance_ms(11_000.0)
    assert rooms.spans == []
    assert rooms.harvester.run_once() == taken


def test_a_device_has_few_spans_pending_until_it_proved_itself(rooms) -> None:
    rooms.sim.virtual_clock()
    assert sum(rooms.span(1.0) for _ in range(100)) == 16
    rooms.sim.advance_ms(200.0)
    rooms.harvester.run_once()
    assert rooms.harvester.status()["sim:0"]["state"] == "on"


def test_requests_are_drawn_whole_and_weighted(sim, make_rooms) -> None:
    sim.virtual_clock()
    rooms = make_rooms(per_second=100)
    rooms.prove()

    class Request:
        def __init__(self, identity: int) -> None:
            self.id = identity

    taken: list[list[bool]] = []
    for second in range(6):
        for number in range(250):
            request = Request(second * 1000 + number)
            taken.append([rooms.span(0.01, request=request) for _ in range(4)])
            sim.advance_ms(4.0)
            rooms.harvester.run_once()
    settled = taken[500:]
    assert all(len(set(of_one)) == 1 for of_one in settled)
    share = sum(of_one[0] for of_one in settled) / len(settled)
    assert 0.04 < share < 0.16  # 100 of 1000 a second
    weights = {span.weight for span in rooms.spans[-50:]}
    assert all(weight == pytest.approx(1 / 0.09, rel=0.2) for weight in weights)
    assert rooms.channel.counts().drawn_out > 0


def test_nothing_is_recorded_into_a_capture(rooms) -> None:
    rooms.prove_real()
    value = torch.ones(4, device="sim")
    graph = torch.accelerator.Graph()
    with torch.Stream("sim"):
        before = rooms.channel.begin(None)
        graph.capture_begin()
        assert rooms.channel.begin(None) is None
        value.mul(2.0)
        rooms.channel.end(before, "cut by a capture")
        graph.capture_end()
        graph.replay()
    assert not rooms.channel.inbox
    assert rooms.sim.counters().get("captures_killed", 0) == 0


def test_a_failing_record_loses_one_span_and_its_event(rooms) -> None:
    rooms.sim.virtual_clock()
    rooms.prove()
    rooms.sim.fail("record")
    assert not rooms.span(1.0)
    started = rooms.channel.begin(None)
    rooms.sim.fail("record")
    rooms.channel.end(started, "lost")
    assert rooms.span(1.0)
    rooms.sim.advance_ms(10.0)
    assert rooms.harvester.run_once() == 1
    counts = rooms.channel.counts()
    assert (counts.errors, counts.lost, counts.quarantined) == (2, 1, 3)
    assert not rooms.channel.off


def test_a_lost_device_is_left_alone_and_the_application_sees_nothing_of_ours(rooms) -> None:
    rooms.sim.virtual_clock()
    rooms.prove()
    pending = [rooms.span(1.0) for _ in range(5)]
    rooms.sim.fail("*", times=None)
    for _ in range(5):
        assert rooms.channel.begin(None) is None
    assert rooms.channel.off.startswith("3 calls failed in a row, last with ")
    rooms.sim.heal()
    rooms.sim.advance_ms(10.0)
    assert rooms.harvester.run_once() == 0
    assert rooms.channel.counts().lost == len(pending)
    assert rooms.harvester.status()["sim:0"]["state"].startswith("off: ")


def test_a_backend_without_events_is_host_only(sim) -> None:
    timer = DeviceTimer()
    assert timer.channel(torch.device("cpu")) is None
    assert timer.channel(torch.device("mps", 0)) is None
    assert timer.channel(torch.device("cuda", 0)) is None  # not this process's accelerator
    assert timer.channels == {}
    found = timer.status()
    assert found["mps"] == {"state": "off: reading an event can block on MPS", "host_only": 1}
    assert found["cuda"] == {"state": "off: not the accelerator of this process", "host_only": 1}
    assert "cpu" not in found


def test_threads_have_their_own_streams(rooms) -> None:
    rooms.prove_real()
    seen: list[int] = []

    def work() -> None:
        stream = torch.Stream("sim")
        seen.append(stream.stream_id)
        with stream:
            rooms.span(0.1)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(entry[2] for entry in rooms.channel.inbox) == sorted(seen)


def test_a_forked_child_leaks_the_parents_events(rooms) -> None:
    rooms.sim.virtual_clock()
    rooms.prove()
    rooms.span(1.0)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        destroyed = rooms.sim.counters().get("events_destroyed", 0)
        rooms.harvester.after_fork()
        del rooms.channel
        gc.collect()
        same = rooms.sim.counters().get("events_destroyed", 0) == destroyed and not rooms.timer.enabled and not rooms.timer.channels
        os.write(writer, b"1" if same else b"0")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 1) == b"1"
    os.close(reader)
    os.close(writer)


def test_a_channel_keeps_nothing_of_a_request_once_delivered(rooms) -> None:
    rooms.sim.virtual_clock()
    rooms.prove()
    rooms.harvester.sinks.clear()

    class Request:
        id = 7

    request = Request()
    gone = weakref.ref(request)
    rooms.span(1.0, request=request)
    rooms.sim.advance_ms(5.0)
    rooms.harvester.run_once()
    del request
    gc.collect()
    assert gone() is None


def test_at_the_end_of_a_process_no_event_is_destroyed(rooms) -> None:
    rooms.sim.virtual_clock()
    rooms.prove()
    for _ in range(20):
        rooms.span(1.0)
    before = rooms.sim.counters().get("events_destroyed", 0)
    rooms.timer._leave()  # what atexit calls
    rooms.harvester._devices.clear()
    rooms.timer.channels.clear()
    del rooms.channel
    gc.collect()
    assert rooms.sim.counters().get("events_destroyed", 0) == before


def test_a_process_whose_device_is_lost_ends_in_time() -> None:
    code = """
        import time, torch
        from inferscope.testing import accelerator
        sim = accelerator.load()
        import inferscope
        inferscope.configure(service="lost")
        inferscope.instrument("torch", "copies")
        net, value = torch.nn.Linear(4, 4).to("sim"), torch.ones(2, 4, device="sim")
        for _ in range(3):
            with inferscope.request("predict"):
                net(value).cpu()
            time.sleep(0.05)
        sim.kernel(600_000.0)
        with inferscope.request("predict"):
            net(value)  # stands behind ten minutes of work
        sim.fail("*", times=None, message="SIM error: the card has fallen off the bus")
        for _ in range(5):
            try:
                with inferscope.request("predict"):
                    net(value).cpu()
            except RuntimeError as error:
                assert "fallen off the bus" in str(error)  # the application's own error, unchanged
            else:
                raise AssertionError("the application must hear of its device")
        time.sleep(0.3)
        state = inferscope.status()["device"]["devices"]["sim:0"]["state"]
        assert state.startswith("off: 3 calls failed in a row"), state
        print("done", flush=True)
    """
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "done\n", done.stderr
    assert done.returncode == 0
    assert time.monotonic() - began < 45
