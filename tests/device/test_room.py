"""The room as `runtime` drives it."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

from inferscope.aggregate.window import Aggregator
from inferscope.device.events import DeviceTimer
from inferscope.device.room import DeviceRoom
from inferscope.record import core


def test_a_room_delivers_evidence_and_stops(sim) -> None:
    recorder = core.Recorder()
    room = DeviceRoom(recorder, DeviceTimer(clock=sim.now_ns))
    sim.configure(call_us=0.3)
    sim.virtual_clock()
    assert room.period_s == 1.0
    room.start()
    room.monitor()
    channel = room._timer.channel(torch.device("sim", 0))
    assert room.period_s < 0.1
    begin = sim.now_ns()
    for _ in range(8):
        started = channel.begin(None)
        sim.kernel(5.0)
        channel.end(started, "forward")
        sim.advance_ms(10.0)
        room.harvest()
    room.monitor()
    found = room.evidence(begin, sim.now_ns())
    assert (found["busy"], found["source"]) == (None, None)  # our own spans never stand for the card
    assert found["own_spans"]["sim:0"] == pytest.approx(0.5, abs=0.1)
    assert found["memory"][0]["device"] == "sim:0"
    assert found["cards"] == []
    (row,) = found["totals"]
    assert (row["device"], row["name"], row["count"], row["errors"]) == ("sim:0", "forward", 8, 0)
    assert row["exec_ns"] == pytest.approx(8 * 5_000_000, rel=0.01)
    assert row["queue_ns"] == pytest.approx(8 * 5_000, abs=200_000)
    assert row["gap_ns"] == pytest.approx(row["gaps"] * 5_000_000, abs=400_000)
    assert 0 < found["error_ns"] < 30_000
    assert room.status()["devices"]["sim:0"]["delivered"] == 8
    assert room.status()["driver"] == "not asked"
    room.stop()
    assert not room._timer.enabled
    kinds = {held.kind for held in Aggregator(recorder).tick(10**12).series}
    assert {"device", "device.queue"} <= kinds
    room.after_fork()
    assert room.status()["devices"] == {}


def test_the_harvester_rests_while_nothing_is_pending(sim) -> None:
    room = DeviceRoom(core.Recorder(), DeviceTimer(clock=sim.now_ns))
    sim.configure(call_us=0.3)
    sim.virtual_clock()
    room.start()
    channel = room._timer.channel(torch.device("sim", 0))
    seen = []
    for _ in range(6):
        room.harvest()
        seen.append(room.period_s)
    assert seen == sorted(seen)
    assert seen[-1] == 0.2
    started = channel.begin(None)
    sim.kernel(50.0)
    channel.end(started, "forward")
    room.harvest()
    assert room.period_s == 0.02  # something is pending
    sim.advance_ms(60.0)
    assert room.harvest() == 1


def test_a_service_without_a_device_pays_nothing(monkeypatch) -> None:
    timer = DeviceTimer()
    room = DeviceRoom(core.Recorder(), timer)
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "privateuseone")  # as before a backend is registered
    room.start()
    room.harvest()
    assert not timer.enabled
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    room.harvest()  # at most a second later
    assert timer.enabled
    room.stop()
    room.harvest()
    assert not timer.enabled


def test_nothing_is_asked_of_a_device_before_the_application_used_it() -> None:
    code = """
        import sys
        from inferscope.device.room import DeviceRoom
        from inferscope.record import core
        room = DeviceRoom(core.Recorder())
        room.start()
        for _ in range(3):
            room.harvest()
            room.monitor()
        room.stop()
        assert "torch" not in sys.modules and "pynvml" not in sys.modules
        from inferscope.testing import accelerator
        sim = accelerator.load()
        import inferscope, torch
        inferscope.instrument("torch", "copies")
        room.start()
        before = sim.counters()
        torch.nn.Linear(4, 4)(torch.ones(2, 4))
        room.harvest()
        room.monitor()
        calls = {name: count for name, count in sim.counters().items() if count != before.get(name, 0)}
        assert not calls, calls
        torch.nn.Linear(4, 4).to("sim")(torch.ones(2, 4).to("sim"))
        torch.accelerator.synchronize()
        assert room.harvest() == 2
        print("done")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False, timeout=100)
    assert done.stdout == "done\n", done.stderr


def test_the_driver_speaks_of_the_cards_in_use(sim, driver_library) -> None:
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    for card, (utilization, used) in enumerate(((70, 1024), (10, 64))):
        for field, value in enumerate((utilization, used, 1980, 0, 300_000, 60)):
            driver_library.fake_set(card, field, value, 0)
    driver_library.fake_init_fails(0)
    driver_library.fake_divide(0)
    sim.identify("00000001-aaaa-bbbb-cccc-dddddddddddd")
    room = DeviceRoom(core.Recorder(), DeviceTimer())
    room.start()
    room._timer.channel(torch.device("sim", 0))
    room.monitor()
    driver_library.fake_xid(0, 79)
    driver_library.fake_xid(1, 13)  # a card that this process does not use
    room._driver._asked = 0
    room.monitor()
    found = room.evidence(0, 2**62)
    assert (found["busy"], found["source"]) == (0.7, "nvml")
    assert [card["power_w"] for card in found["cards"]] == [300.0]
    assert [fault["xid"] for fault in found["faults"]] == [79]
    (memory,) = found["memory"]
    assert memory["free_bytes"] == (80 << 30) - (1024 << 20)  # the driver's word, not torch's
    assert room.status()["driver"] == "on: nvml"
    room.stop()
    assert room._driver._library is None
