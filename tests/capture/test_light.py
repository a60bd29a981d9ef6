"""Sessions without Kineto: what they record, and that they stand in nobody's way."""

from __future__ import annotations

import json
import threading
from collections import Counter

import pytest
import torch
from torch.autograd import profiler_legacy

from inferscope.capture import CaptureBudget, RequestScopedCapture, Target, guards, light, session
from inferscope.capture.session import Options, Session
from inferscope.diagnose.trace import read_trace
from inferscope.record import core

PROFILE = torch.autograd.profiler.profile
SMALL = torch.randn(8, 8)
FREE = CaptureBudget(max_share=1.0, free_memory_mb=0, shaped=0, body=0, cooldown_s=0, per_hour=1000)


def model():
    with torch.autograd.profiler.record_function("a user's words"):
        held = torch.nn.functional.linear(SMALL, SMALL)
    for _ in range(3):
        held = torch.add(held, SMALL)
    return held


def recorded(path, options, work=model):
    one = Session(1, "score", 1 << 40)
    one.open(torch, options)
    try:
        work()
    finally:
        one.close()
    one.results.save(str(path))
    return json.loads(path.read_text())


@pytest.fixture
def armed(tmp_path):
    recorder = core.Recorder()
    capture = RequestScopedCapture(FREE, set_armed=lambda value: setattr(recorder, "armed", value))
    recorder.set_hooks(on_start=capture.on_start, on_enter=capture.on_enter, on_exit=capture.on_exit, on_finish=capture.on_finish)
    capture.recording.spending.draw = lambda _now, **_: True
    assert capture.arm(Target("test", tmp_path, "score", 0)) is None
    yield recorder, capture
    capture.disable("test over")
    assert not session.lock.locked()
    assert not torch.autograd._profiler_enabled()
    assert not torch.autograd.profiler._is_profiler_enabled


def test_what_kineto_says_it_says_too(tmp_path):
    kineto, ours = (recorded(tmp_path / f"{light}.json", Options(light=light)) for light in (False, True))
    names = [
        Counter((event["cat"], event["name"]) for event in each["traceEvents"] if event["ph"] == "X" and event["cat"] != "Trace")
        for each in (kineto, ours)
    ]
    assert names[0] == names[1]
    assert names[1]["cpu_op", "aten::add"] == 3
    assert names[1]["user_annotation", "a user's words"] == 1


def test_ranges_nest_and_lie_where_the_clock_says(tmp_path):
    import time

    before = time.time_ns()
    found = recorded(tmp_path / "x.json", Options(light=True))
    after = time.time_ns()
    events = [event for event in found["traceEvents"] if event["ph"] == "X"]
    assert [event["ts"] for event in events] == sorted(event["ts"] for event in events)
    for event in events:
        start = found["baseTimeNanoseconds"] + event["ts"] * 1e3
        assert before - 50_000 <= start <= start + event["dur"] * 1e3 <= after + 50_000
        assert event["tid"] == threading.get_native_id()
    outer, inner = (
        {event["name"]: event for event in events}[name]
        for name in ("aten::linear", "aten::addmm" if any(e["name"] == "aten::addmm" for e in events) else "aten::matmul")
    )
    assert outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    assert read_trace(tmp_path / "x.json").operators


def test_a_range_that_is_open_at_either_end_is_left_out(tmp_path):
    whole = torch.autograd.profiler.record_function("open")

    def work():
        torch.add(SMALL, SMALL)
        whole.__enter__()

    found = recorded(tmp_path / "x.json", Options(light=True), work)
    whole.__exit__(None, None, None)
    assert [event["name"] for event in found["traceEvents"] if event["ph"] == "X"] == ["aten::add"]


def test_work_done_by_other_threads_for_this_one_is_told_apart(tmp_path):
    class Event:
        def __init__(self, kind, thread, at_us, name=""):
            self.kind, self.name, self.thread_id = lambda: kind, lambda: name, lambda: thread
            self.start_us, self.handle, self.scope, self.sequence_nr = lambda: at_us, lambda: 1, lambda: 0, lambda: -1
            self.cpu_elapsed_us = lambda other: other.start_us() - at_us

    lists = [
        [Event("push", 9, 30.0, "theirs"), Event("pop", 9, 40.0)],
        [Event("mark", 4, 10.0), Event("push", 4, 20.0, "own"), Event("pop", 4, 50.0)],
    ]
    light.Recorded(lists, 1_700_000_000_000_000_123).save(str(tmp_path / "x.json"))
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["baseTimeNanoseconds"] == 1_700_000_000_000_000_000, "torch's clock is not ours here: ours is believed"
    rows = {event["name"]: (event["tid"], event["ts"], event["dur"]) for event in found["traceEvents"] if event["ph"] == "X"}
    assert rows == {"theirs": ((1 << 22) + 9, 20.123, 10.0), "own": (threading.get_native_id(), 10.123, 30.0)}


def test_automatic_captures_are_light_and_others_are_not(armed, tmp_path):
    recorder, capture = armed
    with recorder.request("score"):
        torch.add(SMALL, SMALL)
        assert capture.recording.session.asked.light
        assert torch.autograd.profiler._is_profiler_enabled, "compiled code names its regions"
    assert capture.recording.counts.kept == 1
    assert capture.recording._least("score", "cuda", shapes=False) == Options()
    assert capture.recording._least("score", None, shapes=False) == Options(light=True)


def test_a_torch_that_no_longer_has_it_gets_kineto(armed, monkeypatch):
    recorder, capture = armed
    monkeypatch.setattr(light, "_NEEDED", ("_enable_profiler_legacy", "gone"))
    with recorder.request("score"):
        torch.add(SMALL, SMALL)
        assert not capture.recording.session.asked.light
    assert capture.recording.counts.kept == 1


def test_one_that_fails_is_not_tried_again(armed, monkeypatch):
    recorder, capture = armed
    monkeypatch.setattr(light, "_gone", "")
    monkeypatch.setattr(light.Light, "__enter__", lambda _: 1 / 0)
    monkeypatch.setenv("INFERSCOPE_STRICT", "0")
    with recorder.request("score"):
        torch.add(SMALL, SMALL)
    assert not light.available(torch)
    with recorder.request("score"):
        torch.add(SMALL, SMALL)
    assert capture.recording.counts.kept == 1


def test_what_nobody_wants_is_not_fetched_but_for_some(armed):
    recorder, capture = armed
    object.__setattr__(capture._armed.target, "threshold_ns", 1 << 60)
    fetched = []
    original = light.Light._stop
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            light.Light, "_stop", lambda self, *, consolidate: (fetched.append(consolidate), original(self, consolidate=consolidate))[1]
        )
        for _ in range(32):
            with recorder.request("score"):
                torch.add(SMALL, SMALL)
    assert len(fetched) == 32
    assert 4 <= sum(fetched) <= 6, "the first two, and every eighth"
    counts = capture.recording.counts
    assert (counts.sessions, counts.kept, counts.dropped) == (32, 0, 32)


def test_the_users_older_profiler_sees_everything_and_is_not_refused(armed):
    recorder, capture = armed
    with recorder.request("score"):
        with profiler_legacy.profile() as user:
            assert capture.recording.session is None
            torch.add(SMALL, SMALL)
            with recorder.request("score"):
                torch.add(SMALL, SMALL)
    assert sum(event.name == "aten::add" for event in user.function_events) == 2
    assert capture.recording.counts.refused == {"user_profiler": 1}
    assert capture.recording.counts.yielded == 1


def test_an_older_profiler_that_was_there_before_us_is_known():
    with profiler_legacy.profile():
        assert guards.profiler_active(torch)
    assert not guards.profiler_active(torch)


def test_a_thread_that_dies_with_its_session_costs_a_capture_and_no_more(armed):
    recorder, capture = armed

    def serve():
        request = recorder.request("score")
        request.__enter__()
        torch.add(SMALL, SMALL)

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    for _ in range(100):
        capture.run_once()
        if not session.lock.locked():
            break
        threading.Event().wait(0.02)
    assert session.poisoned() == ""
    assert capture.recording.counts.abandoned == 1
    with recorder.request("score"):
        torch.add(SMALL, SMALL)
    assert capture.recording.counts.kept == 1


def test_the_users_profiler_does_not_wait_for_ever(armed, monkeypatch):
    from inferscope.capture import recording

    recorder, capture = armed
    monkeypatch.setattr(recording, "USER_WAIT_S", 0.05)
    entered, leave = threading.Event(), threading.Event()

    def serve():
        with recorder.request("score"):
            torch.add(SMALL, SMALL)
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=serve)
    thread.start()
    entered.wait(10)
    with PROFILE(use_kineto=True) as user:
        torch.add(SMALL, SMALL)
        leave.set()
        thread.join()
        assert torch.autograd.profiler._is_profiler_enabled, "ours leaves the flag to the user"
        torch.add(SMALL, SMALL)
    assert sum(event.name == "aten::add" for event in user.function_events) == 2
    assert session.poisoned() == ""
    with recorder.request("score"):
        torch.add(SMALL, SMALL)
    assert (capture.recording.counts.kept, capture.recording.counts.yielded) == (1, 1)
