from __future__ import annotations

import gc
import sys
import threading
import types
from pathlib import Path

import pytest
import torch

from inferscope import guard
from inferscope.capture import guards, session
from inferscope.capture.guards import ProfilerGate, arm_refusal, profiler_active, session_refusal

PROFILE = torch.autograd.profiler.profile
SECOND = 1_000_000_000


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.delenv("KINETO_USE_DAEMON", raising=False)
    original = PROFILE._prepare_trace
    yield
    assert PROFILE._prepare_trace is original


def refusal(tmp_path, **changes):
    return arm_refusal(tmp_path, **{"age_ns": 0, "ttl_ns": 60 * SECOND, "free_memory_bytes": 0, **changes})


def test_nothing_speaks_against_it(tmp_path):
    assert refusal(tmp_path) is None
    assert session_refusal(torch) is None


def test_torch_was_not_imported(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    assert refusal(tmp_path) == "torch_not_imported"
    assert "torch" not in sys.modules


def test_torch_without_the_entry_that_we_guard(tmp_path, monkeypatch):
    monkeypatch.setattr(PROFILE, "_prepare_trace", PROFILE._prepare_trace)
    with monkeypatch.context() as patch:
        patch.delattr(PROFILE, "_prepare_trace")
        assert refusal(tmp_path) == "torch_not_usable"
    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd, "kineto_available", lambda: False)
        assert refusal(tmp_path) == "torch_not_usable"


def test_kineto_daemon(tmp_path, monkeypatch):
    monkeypatch.setenv("KINETO_USE_DAEMON", "1")
    assert refusal(tmp_path) == "kineto_daemon"


def test_expired_breach(tmp_path):
    assert refusal(tmp_path, age_ns=60 * SECOND) is None
    assert refusal(tmp_path, age_ns=60 * SECOND + 1) == "breach_expired"


def test_little_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(guards.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=guards.DISK_RESERVE_BYTES - 1))
    assert refusal(tmp_path) == "disk_low"
    monkeypatch.setattr(guards.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=guards.DISK_RESERVE_BYTES))
    assert refusal(tmp_path) is None


def test_disk_is_asked_where_the_incident_will_be(tmp_path, monkeypatch):
    assert not guards.disk_low(tmp_path / "not" / "yet" / "made", 0)

    def unanswered(_):
        raise OSError

    monkeypatch.setattr(guards.shutil, "disk_usage", unanswered)
    assert guards.disk_low(tmp_path, 0)


def test_little_memory(tmp_path, monkeypatch):
    assert refusal(tmp_path, free_memory_bytes=1 << 60) == "memory_low"
    monkeypatch.setattr(guards, "available_bytes", lambda: None)
    assert refusal(tmp_path, free_memory_bytes=1 << 60) is None


def test_the_control_groups_limit_counts(monkeypatch):
    readings = {"/sys/fs/cgroup/memory.max": "3000", "/sys/fs/cgroup/memory.current": "1000", "/proc/meminfo": "MemAvailable: 4 kB\n"}

    def read(self, **_):
        if str(self) in readings:
            return readings[str(self)]
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", read)
    assert guards.available_bytes() == 2000
    readings["/sys/fs/cgroup/memory.max"] = "max"
    assert guards.available_bytes() == 4096
    del readings["/proc/meminfo"]
    assert guards.available_bytes() is None


def test_shutting_down(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "is_finalizing", lambda: True)
    assert session_refusal(torch) == "finalizing"
    assert refusal(tmp_path) == "finalizing"


def test_poisoned(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "_poisoned", "poisoned")
    assert session_refusal(torch) == "poisoned"
    assert refusal(tmp_path) == "poisoned"


@pytest.mark.parametrize(
    ("module", "question", "argument"),
    [("gevent.monkey", "is_module_patched", "threading"), ("eventlet.patcher", "is_monkey_patched", "thread")],
)
def test_greenlets(tmp_path, monkeypatch, module, question, argument):
    monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(**{question: lambda name: name == argument}))
    assert refusal(tmp_path) == "greenlets"
    monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(**{question: lambda name: False}))
    assert refusal(tmp_path) is None


def test_a_profiler_on_this_thread():
    with PROFILE(use_kineto=True):
        assert profiler_active(torch)
        assert session_refusal(torch) == "user_profiler"
    assert not profiler_active(torch)


def test_a_profiler_on_another_thread_is_seen_even_without_the_flag(monkeypatch):
    started, stop = threading.Event(), threading.Event()

    def record():
        with PROFILE(use_kineto=True):
            started.set()
            stop.wait()

    thread = threading.Thread(target=record)
    thread.start()
    started.wait()
    try:
        # As after the end of any other profiler in the process.
        with monkeypatch.context() as patch:
            patch.setattr(torch.autograd.profiler, "_is_profiler_enabled", False)
            assert not torch.autograd._profiler_enabled()
            assert profiler_active(torch)
    finally:
        stop.set()
        thread.join()
    assert not profiler_active(torch)


def test_without_the_symbol_the_flag_decides(monkeypatch):
    guards._native_probe.cache_clear()
    monkeypatch.setattr(guards, "_SYMBOL", "no_such_symbol")
    try:
        assert guards._native_probe(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")) is None
        assert guards._native_probe("no-such-library.so") is None
        assert not profiler_active(torch)
        with PROFILE(use_kineto=True):
            assert profiler_active(torch)
    finally:
        guards._native_probe.cache_clear()


def test_each_reason_has_words():
    assert all(words[0].islower() or words.startswith(("KINETO", "CUDA")) for words in guards.REASONS.values())


# The gate


@pytest.fixture
def gate():
    arrivals = []
    made = ProfilerGate(lambda profile: getattr(profile, "is_ours", False), lambda: arrivals.append(threading.get_ident()))
    made.arrivals = arrivals
    made.install(torch)
    yield made
    made.remove()


@pytest.mark.parametrize("kind", ["autograd", "profiler", "schedule"])
def test_every_way_to_profile_passes_the_gate(gate, kind):
    if kind == "autograd":
        user = PROFILE(use_kineto=True)
    else:
        plan = torch.profiler.schedule(wait=0, warmup=1, active=1) if kind == "schedule" else None
        user = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], schedule=plan)
    with user:
        assert set(gate.arrivals) == {threading.get_ident()}
        assert gate.occupied()
        if kind == "schedule":
            # Prepared and not yet recording: no flag shows this one.
            assert not torch.autograd.profiler._is_profiler_enabled
            user.step()
        torch.ones(2) + 1
    assert not gate.occupied()


def test_a_profiler_that_was_dropped_before_it_recorded_holds_nothing(gate):
    user = PROFILE(use_kineto=True)
    gate._enter(user)
    assert gate.occupied()
    del user
    gc.collect()
    assert not gate.occupied()


def test_ours_passes_unnoticed(gate):
    ours = PROFILE(use_kineto=True)
    ours.is_ours = True
    with ours:
        torch.ones(2) + 1
    assert gate.arrivals == []
    assert not gate.occupied()


def test_installed_once_and_removed(gate):
    wrapper = PROFILE._prepare_trace
    gate.install(torch)
    assert PROFILE._prepare_trace is wrapper
    gate.remove()
    assert PROFILE._prepare_trace is not wrapper
    gate.remove()
    with PROFILE(use_kineto=True):
        pass
    assert gate.arrivals == []


def test_somebody_wrapped_on_top_of_us(gate):
    inner = PROFILE._prepare_trace
    passed = []

    def outer(self):
        passed.append(self)
        return inner(self)

    original = inner.__wrapped__
    PROFILE._prepare_trace = outer
    gate.remove()
    try:
        assert PROFILE._prepare_trace is outer
        with PROFILE(use_kineto=True):
            pass
        assert len(passed) == 1
        assert gate.arrivals == []
    finally:
        PROFILE._prepare_trace = original


@pytest.mark.parametrize("kind", ["emit_nvtx", "emit_itt"])
def test_ranges_of_other_tools_pass_the_gate(gate, kind):
    ranges = getattr(torch.autograd.profiler, kind)
    before = ranges.__enter__
    one = ranges(enabled=False)
    with one:
        assert gate.arrivals == [threading.get_ident()]
        assert gate.occupied()
    assert not gate.occupied()
    gate.remove()
    assert ranges.__enter__ is not before


def test_a_profiler_that_was_prepared_before_we_came_is_met_when_it_starts():
    arrivals = []
    made = ProfilerGate(lambda _: False, lambda: arrivals.append(1))
    user = PROFILE(use_kineto=True)
    user._prepare_trace()
    made.install(torch)
    try:
        user._start_trace()
        assert arrivals == [1]
        assert made.occupied()
        user.__exit__(None, None, None)
        assert not made.occupied()
    finally:
        made.remove()


def test_our_failure_does_not_keep_the_user_from_profiling(gate):
    def fail():
        raise ValueError

    gate._arrived = fail
    guard.reset()
    with PROFILE(use_kineto=True) as user:
        torch.ones(2) + 1
    assert any(event.name == "aten::ones" for event in user.function_events)
    assert guard.counts() == {"capture": 2}, "when it is prepared and when it starts"
    guard.reset()
