"""Windows of all threads: their length, their way to a stop, and who must not wait for them."""

from __future__ import annotations

import json
import threading
import time
import types
from pathlib import Path

import pytest
import torch

from inferscope.capture import CaptureBudget, RequestScopedCapture, State, Target, saving, session, window, windows
from inferscope.capture.plan import Plan
from inferscope.capture.window import Pacing, is_fixed
from inferscope.control.protocol import Wanted
from inferscope.errors import ConfigurationError
from inferscope.record import core
from inferscope.types import ClassKey, Reason, RequestRecord

MS = 1_000_000
SMALL = torch.randn(4, 4)
PROFILE = torch.autograd.profiler.profile
pytestmark = pytest.mark.skipif(not hasattr(core.Recorder, "_open"), reason="requests in flight are known to the C core")
RISKY = CaptureBudget(max_share=1.0, free_memory_mb=0, slow=4, body=0, cooldown_s=0, per_hour=1000, all_threads=True, window_ms=20)


# What may be asked


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ({"tier": 0}, "tier"),
        ({"tier": True}, "tier"),
        ({"requests": 0}, "requests"),
        ({"requests": 65}, "requests"),
        ({"window_ms": 50}, "window_ms"),
        ({"tier": 2, "window_ms": 500}, "window_ms"),
        ({"tier": 2, "shapes": True}, "shapes"),
        ({"stacks": True}, "stacks"),
        ({"tier": 2, "allow_stall_ms": 5}, "allow_stall_ms"),
        ({"tier": 3}, "allow_stall_ms"),
        ({"tier": 3, "allow_stall_ms": 0}, "allow_stall_ms"),
        ({"tier": 3, "allow_stall_ms": "20"}, "allow_stall_ms"),
        ({"tier": 3, "allow_stall_ms": 20, "window_ms": 20_000}, "window_ms"),
        ({"tier": 3, "allow_stall_ms": 20, "window_ms": 100, "stacks": True}, "stacks"),
    ],
)
def test_plans_that_make_no_sense_are_refused_by_name(words, key):
    with pytest.raises(ConfigurationError) as caught:
        Plan(**words)
    assert caught.value.key == key


def test_plans_say_whether_they_record_all_threads():
    assert not Plan().windows
    assert Plan(tier=2).windows
    assert not Plan(tier=3, allow_stall_ms=20, shapes=True).windows
    assert Plan(tier=3, allow_stall_ms=20, window_ms=1000).windows


def test_what_channels_ask_for():
    wanted = Wanted("slow", 3, tier=3, shapes=True, stacks=True, allow_stall_ms=30)
    assert Plan.of(wanted) == Plan(tier=3, requests=3, shapes=True, stacks=True, allow_stall_ms=30)
    assert Plan.of(Wanted("slow", 3, window_ms=100, tier=3, shapes=True, allow_stall_ms=30)).windows
    assert Plan.of(Wanted("slow")) == Plan()


# Which torch


@pytest.mark.parametrize(
    ("version", "get", "fixed"),
    [
        ("2.13.0+cpu", "static auto* get() {\n    return singleton().state_.get();\n  }", False),
        ("2.14.0", "static auto* get() { return singleton().state_.get(); }", False),
        ("2.14.0", "static std::shared_ptr<T> get() { return singleton().load(); }", True),
        ("2.13.1", "static std::shared_ptr<T> get() { return singleton().load(); }", False),
        ("3.0", None, False),
        ("unknown", "static std::shared_ptr<T> get()", False),
    ],
)
def test_a_torch_is_safe_when_its_version_and_its_own_header_say_so(tmp_path, version, get, fixed):
    header = tmp_path / "include/torch/csrc/profiler/util.h"
    if get is not None:
        header.parent.mkdir(parents=True)
        header.write_text(get)
    assert is_fixed(types.SimpleNamespace(__version__=version, __file__=str(tmp_path / "__init__.py"))) is fixed


def test_windows_are_opt_in_where_torch_is_not_safe(tmp_path, monkeypatch):
    recorder = core.Recorder()

    def build(budget, in_flight):
        one = RequestScopedCapture(budget, in_flight=in_flight)
        words = one.arm(Target("x", tmp_path, "score", 0, keep_all=True, plan=Plan(tier=2)))
        one.disable("test over")
        return words

    monkeypatch.setattr(windows, "is_fixed", lambda _: False)
    free = CaptureBudget(free_memory_mb=0)
    assert "all_threads=True" in build(free, recorder._open)
    assert build(RISKY, recorder._open) is None
    assert "C core" in build(RISKY, None)
    monkeypatch.setattr(windows, "is_fixed", lambda _: True)
    assert build(free, recorder._open) is None


# How long


def test_the_first_window_is_short_and_the_next_ones_follow_what_stops_cost():
    pacing = Pacing(events=5000, stop_ns=8 * MS, longest_ns=50 * MS)
    assert pacing.next_ns == 10 * MS
    pacing.stopped(10 * MS, 1 * MS)
    assert pacing.next_ns == 20 * MS, "no more than twice what was measured"
    pacing.stopped(20 * MS, 8 * MS)
    assert pacing.next_ns == 20 * MS
    pacing.stopped(20 * MS, 40 * MS)
    assert pacing.next_ns == 4 * MS
    pacing.stopped(4 * MS, 0)
    assert 4 * MS < pacing.next_ns <= 8 * MS, "down at once, up slowly"


def test_windows_keep_to_their_budget_of_events():
    pacing = Pacing(events=1000, stop_ns=100 * MS, longest_ns=50 * MS)
    pacing.stopped(10 * MS, 1)
    pacing.counted(10 * MS, 2000)
    assert pacing.next_ns == 5 * MS
    pacing.counted(5 * MS, 1_000_000)
    assert pacing.next_ns == Pacing.LEAST_NS


# One window


class Bench:
    def __init__(self, directory: Path, plan: Plan | None = None, **target) -> None:
        self.recorder = core.Recorder()
        self.capture = RequestScopedCapture(
            RISKY, set_armed=lambda armed: setattr(self.recorder, "armed", armed), in_flight=self.recorder._open
        )
        self.capture.recording.spending.spend = lambda _stall, _now: None
        capture = self.capture
        self.recorder.set_hooks(on_start=capture.on_start, on_enter=capture.on_enter, on_exit=capture.on_exit, on_finish=capture.on_finish)
        words = {"request": "score", "threshold_ns": 20 * MS, "keep_all": plan is not None, "plan": plan or Plan(), **target}
        assert self.capture.arm(Target("x", directory, **words)) is None
        self.directory = directory

    def record(self) -> None:
        self.capture.windows._next_ns = 0
        self.capture.run_once()

    def save(self) -> list:
        done, deadline = [], time.monotonic() + 10
        while self.capture.pending and time.monotonic() < deadline:
            self.capture.windows._target = None
            done += self.capture.run_once()
        return done


@pytest.fixture
def bench(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(windows, "GAP_NS", 0)
    monkeypatch.setattr(saving, "RECORD_WAIT_NS", 0)

    def build(plan=None, **target):
        made.append(Bench(tmp_path, plan, **target))
        return made[-1]

    yield build
    for one in made:
        one.capture.disable("test over")
    assert not session.lock.locked()
    assert not torch.autograd.profiler._is_profiler_enabled


class Served:
    """Requests on threads of their own, for as long as the block lasts."""

    def __init__(self, recorder, threads=2, hold_s=0.0) -> None:
        self.recorder, self.hold_s = recorder, hold_s
        self.stop = threading.Event()
        self.threads = [threading.Thread(target=self.work) for _ in range(threads)]
        self.natives = set()

    def work(self) -> None:
        self.natives.add(threading.get_native_id())
        while not self.stop.is_set():
            with self.recorder.request("score"), self.recorder.stage("forward"):
                for _ in range(20):
                    torch.add(SMALL, SMALL)
                time.sleep(self.hold_s)
            time.sleep(0.001)

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        while len(self.natives) < len(self.threads):
            time.sleep(0.001)
        return self

    def __exit__(self, *_) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()


def test_a_window_shows_every_thread_and_says_what_it_cost(bench):
    b = bench(Plan(tier=2, requests=1, window_ms=20))
    with Served(b.recorder) as served:
        b.record()
        (done,) = b.save()
    assert (done.tier, done.trace) == (2, "captures/s0-w1.trace.json")
    said = json.loads((b.directory / "captures/s0-w1.json").read_text())
    trace = json.loads((b.directory / said["trace"]).read_text())
    seen = {event["tid"] for event in trace["traceEvents"] if event.get("name") == "aten::add"}
    assert seen == served.natives
    assert set(said["threads"]) == served.natives
    assert said["tier"] == 2
    assert said["request_id"] is None
    assert 5 * MS < said["window"]["length_ns"]
    assert said["gil_gap_ms"] == max(said["stall_ms"].values()) > 0
    counts = b.capture.recording.machine.counts
    assert counts[State.RECORDING, State.DRAINING] == counts[State.DRAINING, State.STOPPING] == 1


def test_requests_in_flight_leave_the_statistics(bench):
    b = bench(Plan(tier=2, requests=1))
    with Served(b.recorder, threads=1, hold_s=0.05):
        b.record()
    time.sleep(0.06)
    assert any(record[6] & Reason.PROFILED for record in b.recorder.drain()) or b.recorder.read_class(0)["excluded"] > 0


def test_a_window_without_a_slow_request_is_dropped(bench, monkeypatch):
    b = bench()
    monkeypatch.setattr(windows, "JUDGE_NS", 0)
    with Served(b.recorder):
        b.record()
    assert (b.capture.windows.recorded, b.capture.recording.counts.refused) == (1, {})
    b.capture.windows._next_ns = 1 << 62
    b.capture.windows.run_once(tuple)
    assert b.capture.windows.dropped == 1


def test_a_window_with_a_slow_request_is_kept(bench, monkeypatch):
    b = bench()
    with Served(b.recorder):
        b.record()
    (held, _, _) = b.capture.windows._held[0]
    record = RequestRecord(
        7,
        ClassKey("score", None, None),
        held.opened_ns - MS,
        30 * MS,
        0,
        Reason.BREACH,
        7,
        None,
        1,
        None,
        None,
        None,
        None,
        False,
        (0, 0),
        (),
    )
    other = RequestRecord(
        8,
        ClassKey("score", None, None),
        held.silent_ns + MS,
        30 * MS,
        0,
        Reason.BREACH,
        7,
        None,
        1,
        None,
        None,
        None,
        None,
        False,
        (0, 0),
        (),
    )
    b.capture.attach_records([record, other])
    monkeypatch.setattr(windows, "JUDGE_NS", 0)
    (done,) = b.save()
    assert (done.slow, done.requests) == (True, (7,))


def test_what_does_not_finish_parks_the_window_until_it_does(bench, monkeypatch):
    monkeypatch.setattr(windows, "DRAIN_S", 0.05)
    b = bench(Plan(tier=2, requests=1))
    entered, leave = threading.Event(), threading.Event()

    def serve():
        with b.recorder.request("score"):
            entered.set()
            leave.wait()

    thread = threading.Thread(target=serve)
    thread.start()
    entered.wait()
    b.record()
    assert b.capture.state is State.PARKED
    b.record()
    assert b.capture.windows.status()["parked_now"]
    leave.set()
    thread.join()
    b.capture.windows._next_ns = 1 << 62
    b.capture.run_once()
    assert b.capture.state is State.ARMED
    windows_ = b.capture.windows
    assert (windows_.parked, windows_.dropped, windows_.complete) == (1, 1, False), "what was parked says nothing about now"


def test_a_request_that_is_open_for_long_keeps_windows_away(bench, monkeypatch):
    monkeypatch.setattr(windows, "OLD_NS", 0)
    b = bench(Plan(tier=2, requests=1), threshold_ns=0)
    with b.recorder.request("score"):
        time.sleep(0.002)
        b.record()
    assert b.capture.recording.counts.refused == {"long_requests": 1}


# The application's own profiler


def test_the_users_profiler_does_not_wait_for_its_own_request(bench):
    b = bench(Plan(tier=2, requests=1, window_ms=200))
    b.capture.windows._pacing.FIRST_NS = 200 * MS
    opened, seen = threading.Event(), []

    def serve():
        with b.recorder.request("score"):
            opened.wait()
            begun = time.monotonic()
            with PROFILE(use_kineto=True) as user:
                seen.append(time.monotonic() - begun)
                for _ in range(25):
                    torch.add(SMALL, SMALL)
            seen.append(sum(event.name == "aten::add" for event in user.function_events))

    thread = threading.Thread(target=serve)
    thread.start()
    real = window.Window.wait

    def wait(self, seconds):
        opened.set()
        real(self, 5.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window.Window, "wait", wait)
        b.record()
    thread.join()
    assert seen[1] == 25, "the user's trace is complete"
    assert seen[0] < 1.0
    counts = b.capture.recording.counts
    assert (counts.yielded, counts.abandoned, counts.kept) == (1, 0, 0)


def test_no_window_beside_the_users_profiler(bench):
    b = bench(Plan(tier=2, requests=1))
    with PROFILE(use_kineto=True):
        b.record()
    assert b.capture.recording.counts.refused == {"user_profiler": 1}
    b.record()
    assert b.capture.windows.recorded == 1


# Tier 3


def test_shapes_and_stacks_of_single_requests(bench):
    b = bench(Plan(tier=3, requests=1, allow_stall_ms=100, shapes=True, stacks=True))
    with b.recorder.request("score"):
        torch.add(SMALL, SMALL)
    b.save()
    said = json.loads((b.directory / "captures/s0-r1.json").read_text())
    assert (said["tier"], said["shapes"], said["stacks"]) == (3, True, True)
    trace = json.loads((b.directory / said["trace"]).read_text())
    (add,) = [event for event in trace["traceEvents"] if event.get("name") == "aten::add"]
    assert add["args"]["Input Dims"][:2] == [[4, 4], [4, 4]]
    assert "Concrete Inputs" not in add["args"]
    assert any(event.get("cat") == "python_function" for event in trace["traceEvents"])


def test_what_was_allowed_holds_for_the_first_session_too(bench):
    b = bench(Plan(tier=3, requests=1, allow_stall_ms=1, shapes=True))
    with b.recorder.request("score"):
        for _ in range(400):
            torch.add(SMALL, SMALL)
        with b.recorder.stage("forward"):
            pass
        for _ in range(4000):
            torch.add(SMALL, SMALL)
    b.save()
    said = json.loads((b.directory / "captures/s0-r1.json").read_text())
    assert said["truncated"]
    assert said["events"] < 1000


def find_add(trace):
    return next(event for event in trace["traceEvents"] if event.get("name") == "aten::add")


def test_shapes_come_by_themselves_where_a_stop_is_cheap(bench, tmp_path):
    b = bench(threshold_ns=0)
    b.capture.windows.disarm()
    b.capture.recording.spending.draw = lambda _now, **_: True
    for _ in range(6):
        with b.recorder.request("score"):
            torch.add(SMALL, SMALL)
    b.save()
    said = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("captures/s0-r?.json"))]
    assert not said[0]["shapes"], "nothing is known before the first stop"
    assert sum(row["shapes"] for row in said) == 3
    assert all(row["light"] for row in said)
    shaped = [json.loads((tmp_path / row["trace"]).read_text()) for row in said if row["shapes"]]
    assert all({"Input Dims": [[4, 4], [4, 4], []]}.items() <= find_add(trace)["args"].items() for trace in shaped)
    stops = b.capture.recording._stops
    stops._took_ns[("score", True)] = 3 * MS
    assert not stops.shapes_are_cheap("score")
    assert not stops.shapes_are_cheap("never seen")


def test_shapes_are_not_tried_for_ever(bench):
    b = bench(threshold_ns=1 << 62)
    b.capture.windows.disarm()
    b.capture.recording.spending.draw = lambda _now, **_: True
    seen = []
    real = session.Session.close
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session.Session, "close", lambda self, **more: seen.append(self.asked.shapes) or real(self, **more))
        for _ in range(40):
            with b.recorder.request("score"):
                torch.add(SMALL, SMALL)
    assert seen.count(True) == 12
    assert not any(seen[-20:])
