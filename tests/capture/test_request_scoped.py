from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from inferscope.capture import CaptureBudget, RequestScopedCapture, State, Target, saving, session, stops
from inferscope.capture.request_scoped import DRAWN_LIMIT, synchronous
from inferscope.record import core
from inferscope.types import ClassKey, Column, Reason, RequestRecord, SpanRecord

PROFILE = torch.autograd.profiler.profile
SMALL = torch.randn(4, 4)
MS = 1_000_000
FREE = CaptureBudget(max_share=1.0, free_memory_mb=0, slow=2, body=2, cooldown_s=0, per_hour=1000)


class Request:
    """What the hooks see of a request."""

    def __init__(self, number: int, name: str = "score") -> None:
        self.id, self.name, self.start_ns, self.profiled, self.open = number, name, time.perf_counter_ns(), False, True


class Bench:
    """A capture with its pacing taken out, driven by hand."""

    def __init__(self, directory, budget=FREE, **target) -> None:
        self.armed = []
        self.capture = RequestScopedCapture(
            budget, set_armed=self.armed.append, columns=lambda: [Column("unattributed", "unattributed"), Column("stage", "forward")]
        )
        self.directory = directory
        self.number = 0
        if budget is FREE:
            self.capture.recording.spending.draw = lambda _now, **_: True
        self.target = Target("x", directory, **{"request": "score", "threshold_ns": 20 * MS, **target})
        self.refused = self.capture.arm(self.target)

    def draw(self, name: str = "score") -> Request:
        self.number += 1
        request = Request(self.number, name)
        assert self.capture.on_start(request) is True
        return request

    def run(self, wall_ms: float, kind: str = "call") -> Request:
        request = self.draw()
        self.capture.on_enter(request, "score", kind)
        profile = self.capture.recording.session
        torch.add(SMALL, SMALL)
        self.capture.on_exit(request, "score", kind)
        # The start lies in the request's wall time, as it does in a recorder's.
        self.capture.on_finish(request, int(wall_ms * MS) + profile.start_cost_ns)
        return request

    def save(self) -> list:
        done = []
        deadline = time.monotonic() + 5
        while len(self.capture.shelf) and time.monotonic() < deadline:
            done += self.capture.run_once()
        return done

    @property
    def counts(self):
        return self.capture.recording.counts


@pytest.fixture
def bench(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(saving, "RECORD_WAIT_NS", 0)
    original = PROFILE._prepare_trace

    def build(budget=FREE, **target):
        made.append(Bench(tmp_path, budget, **target))
        assert made[-1].refused is None
        return made[-1]

    yield build
    for one in made:
        one.capture.disable("test over")
    assert not session.lock.locked()
    assert not torch.autograd._profiler_enabled()
    assert PROFILE._prepare_trace is original


# Keep or drop


def test_slow_requests_are_kept_up_to_the_budget(bench):
    b = bench()
    requests = [b.run(wall) for wall in (30, 5, 40, 50)]
    assert all(request.profiled for request in requests)
    assert (b.counts.sessions, b.counts.kept, b.counts.dropped) == (4, 2, 2)
    done = b.save()
    assert [(one.requests, one.slow, one.tier) for one in done] == [((1,), True, 1), ((3,), True, 1)]


def test_ordinary_requests_are_kept_between_p40_and_p60_only(bench):
    b = bench(body_ns=lambda: (4 * MS, 6 * MS))
    for wall in (1, 5, 7, 5.5, 5.2):
        b.run(wall)
    assert [(one.requests, one.slow) for one in b.save()] == [((2,), False), ((4,), False)]


def test_no_ordinary_request_is_kept_while_the_middle_is_unknown(bench):
    b = bench()
    b.run(5)
    assert b.counts.kept == 0


def test_our_own_stall_makes_no_request_slow(bench):
    b = bench()
    request = b.draw()
    b.capture.on_enter(request, "forward", "call")
    torch.add(SMALL, SMALL)
    b.capture.on_exit(request, "forward", "call")
    stall = sum(b.counts.stalls_ns.values())
    assert stall > 0
    b.capture.on_finish(request, 20 * MS + stall)
    assert b.counts.kept == 0


def test_complete_when_both_kinds_are_full_then_cooldown_then_idle(bench):
    b = bench(body_ns=lambda: (4 * MS, 6 * MS))
    for wall in (30, 5, 30):
        b.run(wall)
    assert not b.capture.complete
    b.run(5)
    assert b.capture.complete
    b.capture.tick()
    assert b.armed == [True, False]
    b.capture.tick()
    assert b.capture.state is State.IDLE
    assert len(b.save()) == 4


def test_a_manual_capture_keeps_whatever_comes(bench):
    b = bench(keep_all=True)
    for wall in (1, 30, 2, 3, 4):
        b.run(wall)
    assert b.counts.kept == 4
    assert b.capture.complete


def test_dropped_profiles_are_freed(bench):
    b = bench()
    request = b.draw()
    b.capture.on_enter(request, "score", "call")
    profile = b.capture.recording.session
    b.capture.on_exit(request, "score", "call")
    assert profile.results is not None
    b.capture.on_finish(request, MS)
    assert profile.results is None
    assert b.capture._drawn == {}


# Regions


def test_other_requests_are_left_alone(bench):
    b = bench()
    assert b.capture.on_start(Request(9, "other")) is False
    assert b.capture.recording.spending.seen == 0


def test_a_request_that_was_not_drawn_is_not_touched(bench):
    b = bench()
    request = Request(99)
    b.capture.on_enter(request, "score", "call")
    b.capture.on_exit(request, "score", "call")
    b.capture.on_finish(request, MS)
    assert b.counts.sessions == 0
    assert not request.profiled


def test_recursion_closes_with_the_outermost_call(bench):
    b = bench()
    request = b.draw()
    for _ in range(3):
        b.capture.on_enter(request, "score", "call")
    for remaining in (2, 1):
        b.capture.on_exit(request, "score", "call")
        assert b.capture.state is State.RECORDING, remaining
    b.capture.on_exit(request, "score", "call")
    assert b.capture.state is State.ARMED


def test_one_session_a_request(bench):
    b = bench()
    request = b.draw()
    for _ in range(3):
        b.capture.on_enter(request, "forward", "call")
        b.capture.on_exit(request, "forward", "call")
    assert b.counts.sessions == 1


def test_each_region_of_a_request_gets_its_turn(bench):
    b = bench()
    regions = set()
    for _ in range(60):
        request = b.draw()
        for name in ("pre", "forward", "post"):
            b.capture.on_enter(request, name, "call")
            if b.capture.recording.session is not None:
                regions.add(name)
            b.capture.on_exit(request, name, "call")
        b.capture.on_finish(request, MS)
    assert regions == {"pre", "forward", "post"}


def test_the_process_records_one_thing_at_a_time(bench):
    b = bench()
    first, second = b.draw(), b.draw()
    b.capture.on_enter(first, "score", "call")
    thread = threading.Thread(target=b.capture.on_enter, args=(second, "score", "call"))
    thread.start()
    thread.join()
    assert (b.counts.sessions, b.counts.busy) == (1, 1)
    b.capture.on_exit(first, "score", "call")
    b.capture.on_finish(second, 30 * MS)
    assert not second.profiled
    assert first.profiled


def test_a_region_that_is_left_on_another_thread_is_stopped_by_its_own(bench):
    b = bench()
    request = b.draw()
    b.capture.on_enter(request, "score", "with")
    profile = b.capture.recording.session

    def finish():
        b.capture.on_exit(request, "score", "with")
        b.capture.on_finish(request, 30 * MS)

    thread = threading.Thread(target=finish)
    thread.start()
    thread.join()
    assert not profile.closed
    b.capture.on_start(Request(99))
    assert profile.closed
    assert b.counts.kept == 0
    assert b.capture.state is State.ARMED


def test_a_session_that_grows_too_long_is_stopped_at_the_next_hook(bench, monkeypatch):
    monkeypatch.setattr(stops, "_FIRST_LIMIT_NS", 1)
    b = bench()
    request = b.draw()
    b.capture.on_enter(request, "score", "call")
    torch.add(SMALL, SMALL)
    b.capture.on_enter(request, "forward", "call")
    assert b.capture.state is State.ARMED
    b.capture.on_exit(request, "forward", "call")
    b.capture.on_exit(request, "score", "call")
    b.capture.on_finish(request, 30 * MS)
    assert b.counts.truncated == 1
    b.save()
    assert json.loads((b.directory / "captures" / "s0-r1.json").read_text())["truncated"] is True


def opened_by(recorder, capture, program) -> bool:
    """Whether a session opens in what `program` does with a drawn request."""
    before = capture.recording.counts.sessions
    program(recorder)
    return capture.recording.counts.sessions > before


def sync_with(recorder):
    with recorder.request("score"):
        torch.add(SMALL, SMALL)


def sync_call(recorder):
    recorder.request("score")(lambda: torch.add(SMALL, SMALL))()


def in_coroutine(recorder):
    async def main():
        with recorder.request("score"), recorder.stage("a"):
            await asyncio.sleep(0)

    asyncio.run(main())


def in_coroutine_through_a_stack(recorder):
    async def main():
        with contextlib.ExitStack() as stack:
            stack.enter_context(recorder.request("score"))
            await asyncio.sleep(0)

    asyncio.run(main())


def in_generator(recorder):
    def steps():
        with recorder.request("score"):
            yield

    list(steps())


def in_async_generator(recorder):
    async def main():
        async def steps():
            with recorder.request("score"):
                yield

        async for _ in steps():
            pass

    asyncio.run(main())


def decorated_coroutine(recorder):
    @recorder.request("score")
    async def main():
        await asyncio.sleep(0)

    asyncio.run(main())


def sync_call_inside_a_coroutine(recorder):
    forward = recorder.stage("forward")(lambda: torch.add(SMALL, SMALL))

    async def main():
        with recorder.request("score"):
            await asyncio.sleep(0)
            forward()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("program", "opens"),
    [
        (sync_with, True),
        (sync_call, True),
        (in_coroutine, False),
        (in_coroutine_through_a_stack, False),
        (in_generator, False),
        (in_async_generator, False),
        (decorated_coroutine, False),
        (sync_call_inside_a_coroutine, True),
    ],
)
def test_only_regions_that_cannot_be_suspended_are_recorded(bench, program, opens):
    b = bench()
    recorder = core.Recorder()
    recorder.set_hooks(on_start=b.capture.on_start, on_enter=b.capture.on_enter, on_exit=b.capture.on_exit, on_finish=b.capture.on_finish)
    recorder.armed = True
    assert opened_by(recorder, b.capture, program) is opens
    assert recorder.counters()["hook_errors"] == 0
    assert b.capture.recording.session is None


def test_code_outside_any_program_is_not_trusted():
    assert synchronous(None) is False
    assert synchronous(sys._getframe()) is True


# The user's own profiler


def test_nested_in_our_region_the_users_profiler_sees_everything(bench):
    b = bench()
    request = b.draw()
    b.capture.on_enter(request, "score", "call")
    with PROFILE(use_kineto=True) as user:
        assert b.capture.recording.session is None
        for _ in range(7):
            torch.add(SMALL, SMALL)
        other = b.draw()
        b.capture.on_enter(other, "score", "call")
        assert b.counts.refused == {"user_profiler": 1}
        b.capture.on_exit(other, "score", "call")
    b.capture.on_exit(request, "score", "call")
    b.capture.on_finish(request, 30 * MS)
    assert sum(event.name == "aten::add" for event in user.function_events) == 7
    assert (b.counts.yielded, b.counts.kept) == (1, 0)
    assert b.capture.recording.machine.counts[State.RECORDING, State.YIELDED] == 1
    b.run(30)
    assert b.counts.kept == 1


def test_on_another_thread_the_users_profiler_waits_for_ours(bench):
    b = bench()
    request = b.draw()
    b.capture.on_enter(request, "score", "call")
    seen = []

    def profile():
        with PROFILE(use_kineto=True) as user:
            seen.append(b.capture.recording.session)
            torch.add(SMALL, SMALL)
        seen.append(sum(event.name == "aten::add" for event in user.function_events))

    thread = threading.Thread(target=profile)
    thread.start()
    time.sleep(0.05)
    assert seen == []
    b.capture.on_exit(request, "score", "call")
    thread.join()
    assert seen == [None, 1]
    b.capture.on_finish(request, 30 * MS)
    assert b.counts.kept == 0


# Arming


def test_arming_is_refused_with_words(tmp_path, monkeypatch):
    one = RequestScopedCapture(CaptureBudget(free_memory_mb=0, per_hour=1))
    target = Target("x", tmp_path, "score", MS)
    monkeypatch.setenv("KINETO_USE_DAEMON", "1")
    assert "KINETO_USE_DAEMON" in one.arm(target)
    monkeypatch.delenv("KINETO_USE_DAEMON")
    assert one.arm(Target("x", tmp_path, "score", MS, detected_ns=time.perf_counter_ns() - 61_000 * MS)) == "the breach is too old"
    assert one.arm(target) is None
    assert "under way" in one.arm(target)
    one.disarm()
    assert "a moment ago" in one.arm(target)
    assert "hourly" in one.arm(Target("x", tmp_path, "score", MS, keep_all=True))
    one.disable("over")
    assert "off" in one.arm(target)
    assert one.status()["refused"] == {"kineto_daemon": 1, "breach_expired": 1, "busy": 1, "cooldown": 1, "per_hour": 1, "disabled": 1}


def test_armed_only_for_its_time(tmp_path):
    now = [1]
    flips = []
    one = RequestScopedCapture(
        CaptureBudget(max_share=1.0, free_memory_mb=0, armed_s=10, cooldown_s=5), set_armed=flips.append, clock=lambda: now[0]
    )
    assert one.arm(Target("x", tmp_path, "score", MS)) is None
    now[0] += 9_999 * MS
    assert one.on_start(Request(1))
    now[0] += 2 * MS
    assert not one.on_start(Request(2))
    one.tick()
    assert (one.state, flips) == (State.COOLDOWN, [True, False])
    now[0] += 5_000 * MS
    one.tick()
    assert one.state is State.IDLE


def test_disarmed_while_recording_the_profile_is_dropped_and_the_gate_removed_after(bench):
    b = bench()
    request = b.draw()
    b.capture.on_enter(request, "score", "call")
    b.capture.disarm()
    assert b.armed == [True]
    b.capture.on_exit(request, "score", "call")
    b.capture.on_finish(request, 30 * MS)
    assert (b.capture.state, b.armed, b.counts.kept) == (State.COOLDOWN, [True, False], 0)


def test_requests_that_end_without_a_word_are_forgotten(tmp_path):
    now = [1]
    one = RequestScopedCapture(CaptureBudget(max_share=1.0, free_memory_mb=0, armed_s=3600), clock=lambda: now[0])
    one.recording.spending.draw = lambda _now, **_: True
    assert one.arm(Target("x", tmp_path, "score", MS)) is None
    drawn = [one.on_start(Request(n)) for n in range(DRAWN_LIMIT + 1)]
    assert drawn == [True] * DRAWN_LIMIT + [False]
    now[0] += 61_000 * MS
    assert not one.on_start(Request(1000))
    assert one.on_start(Request(1001))
    one.disable("test over")


def test_the_log_level_is_set_only_if_nobody_set_it(monkeypatch):
    import os

    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    RequestScopedCapture()
    assert os.environ["KINETO_LOG_LEVEL"] == "99"
    monkeypatch.setenv("KINETO_LOG_LEVEL", "1")
    RequestScopedCapture()
    assert os.environ["KINETO_LOG_LEVEL"] == "1"


# Failures


def test_a_profiler_that_fails_three_times_trips_the_breaker(bench, monkeypatch):
    b = bench()

    def broken(*_):
        raise RuntimeError("no")

    monkeypatch.setattr(session, "profiler", broken)
    for _ in range(3):
        request = b.draw()
        with pytest.raises(RuntimeError):
            b.capture.on_enter(request, "score", "call")
        assert not session.lock.locked()
        b.capture.on_exit(request, "score", "call")
        b.capture.on_finish(request, 30 * MS)
        assert request.profiled
    assert b.capture.state is State.TRIPPED
    assert b.capture.status()["reason"] == "start: RuntimeError"
    assert b.armed == [True, False]
    assert b.capture.arm(b.target) == "the breaker is open"


@pytest.mark.parametrize("written", [b"", b'{"traceEvents": [', None])
def test_a_trace_that_was_not_written_whole_leaves_no_file(bench, written):
    b = bench()
    b.run(30)

    class Results:
        def save(self, path):
            if written is not None:
                Path(path).write_bytes(written)

    b.capture.shelf._queue[0].profile.results = Results()
    assert b.save() == []
    assert b.counts.save_failed == 1
    assert list((b.directory / "captures").iterdir()) == []
    assert not session.lock.locked()


def test_nothing_is_saved_while_the_user_profiles(bench):
    b = bench()
    b.run(30)
    with PROFILE(use_kineto=True):
        assert b.capture.run_once() == ()
        assert b.capture.shelf.unsaved == 1
    assert len(b.save()) == 1


# What lies on disk


def test_trace_and_side_file(bench):
    b = bench()
    request = b.run(30)
    span = SpanRecord(1, 10, 20, -1, 77, 0, 0)
    record = RequestRecord(
        1, ClassKey("score", None, None), 5, 30 * MS, 0, Reason.PROFILED, 7, None, 1, None, None, None, None, False, (0, 0), (span,)
    )
    b.capture.attach_records([record])
    (summary,) = b.save()
    trace, side = b.directory / summary.trace, b.directory / "captures" / "s0-r1.json"
    assert {path.stat().st_mode & 0o777 for path in (trace, side)} == {0o600}
    assert (b.directory / "captures").stat().st_mode & 0o777 == 0o700
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X"]
    assert any(event["name"] == "aten::add" and event["tid"] == threading.get_native_id() for event in events)
    said = json.loads(side.read_text())
    assert said["events"] == summary.events == len(events)
    assert (said["id"], said["tier"], said["slow"], said["request_id"], said["request"]) == ("s0-r1", 1, True, request.id, "score")
    assert said["trace"] == "captures/s0-r1.trace.json"
    assert said["threads"] == [threading.get_native_id()]
    assert said["spans"] == [{"column": "forward", "start_ns": 10, "end_ns": 20, "thread": 77, "flags": 0, "aux": 0}]
    assert said["torch"] == torch.__version__
    assert all(said["stall_ms"][part] > 0 for part in ("start", "stop", "save"))
    assert summary.stall_ms == round(said["stall_ms"]["start"] + said["stall_ms"]["stop"], 3)


def test_the_traces_clock_joins_ours(bench):
    b = bench()
    request = b.draw()
    b.capture.on_enter(request, "score", "call")
    begun = time.perf_counter_ns()
    torch.add(SMALL, SMALL)
    ended = time.perf_counter_ns()
    b.capture.on_exit(request, "score", "call")
    b.capture.on_finish(request, 30 * MS)
    b.save()
    side = json.loads((b.directory / "captures" / "s0-r1.json").read_text())
    trace = json.loads((b.directory / side["trace"]).read_text())
    (add,) = [event for event in trace["traceEvents"] if event.get("name") == "aten::add"]
    at = trace["baseTimeNanoseconds"] + add["ts"] * 1000 - side["unix_offset_ns"]
    slack = 200_000
    assert begun - slack <= at <= ended + slack
    assert side["region"]["start_ns"] <= begun <= ended <= side["region"]["end_ns"]


def test_what_lies_on_disk_is_not_overwritten(bench):
    b = bench()
    (b.directory / "captures").mkdir()
    (b.directory / "captures" / "s0-r1.trace.json").write_text("published")
    b.run(30)
    assert b.save() == []
    assert (b.directory / "captures" / "s0-r1.trace.json").read_text() == "published"
    assert b.counts.save_failed == 1


def test_a_request_that_starts_behind_a_late_one_is_drawn_out_of_turn(tmp_path):
    asked = []
    b = Bench(tmp_path)
    b.capture.recording.spending.draw = lambda _now, *, likely: asked.append(likely) or False
    first = Request(1)
    b.capture.on_start(first)
    b.capture.on_start(Request(2))
    first.start_ns -= b.capture._armed.target.threshold_ns
    b.capture.on_start(Request(3))
    first.open = False
    b.capture.on_start(Request(4))
    assert asked == [False, False, True, False]
