"""What the runtime's rooms do when they are asked: with real objectives and a real recorder, the rest as doubles."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from inferscope.control.lending import audit_event, lend, put_in_force, with_change
from inferscope.control.protocol import Actor, Wanted
from inferscope.detect import Trigger
from inferscope.detect.slo import SLO
from inferscope.errors import CaptureRefusedError, ConfigurationError, InferscopeError
from inferscope.record.core import Recorder
from inferscope.settings import Settings

SCORE = SLO("score", p99_ms=20, window_s=30, min_requests=50)
RANK = SLO("rank", p95_ms=5)
ACTOR = Actor("socket", 1000, 7)


@pytest.fixture
def rooms():
    settings = Settings(slo=(SCORE, RANK), warmup_s=0.0, warmup_requests=0)
    return SimpleNamespace(
        off=set(),
        settings=settings,
        recorder=Recorder(),
        capture=SimpleNamespace(disarmed=0, disarm=lambda: setattr(rooms_capture[0], "disarmed", 1)),
        exporter=SimpleNamespace(events=[]),
        trigger=Trigger(settings.slo, warmup_s=300.0, warmup_requests=2000),
        pod=SimpleNamespace(workers=lambda now_ns: (0,)),
    )


rooms_capture: list = []


@pytest.fixture
def lent(rooms):
    rooms_capture[:] = [rooms.capture]
    rooms.exporter.event = rooms.exporter.events.append
    asked = []

    def capture_now(wanted):
        asked.append((wanted.reason, wanted.requests))
        return "incident-1"

    runtime = SimpleNamespace(status=dict, snapshot=dict, capture_now=capture_now)
    return SimpleNamespace(operations=lend(rooms, runtime, contextlib.nullcontext), asked=asked, rooms=rooms)


def test_a_captures_reason_names_who_asked(lent):
    assert lent.operations.capture(Wanted("slow", 3), ACTOR) == "incident-1"
    assert lent.asked == [("slow (socket uid 1000 pid 7)", 3)]


def test_recording_is_a_hot_switch(lent):
    lent.operations.disable("recording")
    assert (lent.rooms.recorder.enabled, lent.rooms.off) == (False, {"recording"})
    lent.operations.enable("recording")
    assert (lent.rooms.recorder.enabled, lent.rooms.off) == (True, set())


def test_captures_that_are_off_are_refused_until_they_are_on(lent):
    lent.operations.disable("capture")
    assert lent.rooms.capture.disarmed
    with pytest.raises(CaptureRefusedError, match="switched off on demand"):
        lent.operations.capture(Wanted("slow", 3), ACTOR)
    lent.operations.enable("capture")
    assert lent.operations.capture(Wanted("slow", 3), ACTOR)


@pytest.mark.parametrize(("part", "room"), [("capture", "capture"), ("export", "exporter")])
def test_what_was_never_on_cannot_be_switched_on(lent, part, room):
    setattr(lent.rooms, room, None)
    lent.operations.disable(part)
    with pytest.raises(InferscopeError, match="configure"):
        lent.operations.enable(part)


def test_an_objective_changes_and_the_recorder_knows(lent):
    lent.rooms.trigger.mark_ready()
    lent.operations.set_slo("score", {"p99_ms": 25.0})
    changed = lent.rooms.trigger.slos
    assert changed == (SLO("score", p99_ms=25.0, window_s=30, min_requests=50), RANK)
    assert lent.rooms.settings.slo == changed
    assert lent.rooms.trigger.ready
    with lent.rooms.recorder.request("score"):
        pass
    assert lent.rooms.recorder.classes()[0][5] == (25_000_000,)


def test_another_quantile_takes_the_place_of_the_one_before():
    assert with_change((SCORE, RANK), "score", {"p999_ms": 90})[0] == SLO("score", p999_ms=90, window_s=30, min_requests=50)


def test_what_is_wrong_with_an_objective_is_said_and_changes_nothing(lent):
    before = lent.rooms.trigger
    with pytest.raises(InferscopeError, match="known are score, rank"):
        lent.operations.set_slo("nothing", {"p99_ms": 1.0})
    with pytest.raises(ConfigurationError):
        lent.operations.set_slo("score", {"p99_ms": -1.0})
    with pytest.raises(ConfigurationError):
        lent.operations.set_slo("score", {"p99_ms": 1.0, "p95_ms": 1.0})
    with pytest.raises(ConfigurationError):
        put_in_force(lent.rooms, (SCORE, *(SLO(f"s{n}", p99_ms=30 + n, request="score") for n in range(5))))
    assert lent.rooms.trigger is before


def test_an_objective_that_workers_share_is_not_changed_in_one(lent):
    lent.rooms.pod.workers = lambda now_ns: (0, 1, 2)
    with pytest.raises(InferscopeError, match="3 workers"):
        lent.operations.set_slo("score", {"p99_ms": 25.0})


def test_an_objective_is_not_changed_under_an_open_incident(lent):
    lent.rooms.trigger = SimpleNamespace(slos=(SCORE,), ready=True, state={"score": SimpleNamespace(phase="open")})
    with pytest.raises(InferscopeError, match="incident is open"):
        lent.operations.set_slo("score", {"p99_ms": 25.0})


ENTRY = {
    "at_unix_ns": 5, "op": "capture", "id": "a1", "args": {"reason": "slow", "requests": 3}, "state": "denied", "why": "busy", "result": None,
    "actor": {"channel": "http", "uid": None, "pid": None, "peer": "127.0.0.1:4"},
}  # fmt: skip


def test_a_change_becomes_an_event(lent):
    lent.operations.audit(ENTRY)
    (event,) = lent.rooms.exporter.events
    assert event == audit_event(ENTRY)
    assert (event.name, event.time_unix_ns, event.body) == ("inferscope.control", 5, "capture asked by http 127.0.0.1:4, denied: busy")
    assert event.attributes["inferscope.control.args.requests"] == 3
    assert "inferscope.control.uid" not in event.attributes
    lent.rooms.exporter = None
    lent.operations.audit(ENTRY)
