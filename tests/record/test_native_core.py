"""What only the C core has: its enter/exit descriptor, its clocks, bulk recording, and where it refuses to load."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
import weakref
from array import array
from typing import Any

import pytest
from hdrh.histogram import HdrHistogram

native = pytest.importorskip("inferscope.record._native", reason="the C core was not built")


def counted(recorder: Any, kind: str, name: str) -> tuple[int, int, int]:
    index, length = next((row[0], row[5]) for row in recorder.series() if row[1] == kind and row[2][0] == name)
    return recorder.read_counts(index, bytearray(8 * length))


def test_enter_and_exit_are_the_instance_itself() -> None:
    span = native.Recorder().stage("x")
    assert span.__enter__ is span
    assert span.__exit__ is span


def test_exit_stack_takes_the_methods_from_the_type() -> None:
    recorder = native.Recorder()
    with contextlib.ExitStack() as stack:
        request = stack.enter_context(recorder.request("r"))
        stack.enter_context(recorder.stage("x"))
        stack.callback(recorder.stage("y").__exit__, None, None, None)
        assert recorder.current() is request
    assert recorder.current() is None
    assert counted(recorder, "stage", "x")[0] == 1


def test_wrong_calls_are_type_errors() -> None:
    recorder = native.Recorder()
    for call in (lambda: recorder.stage("x")(1, 2), lambda: recorder.request("r", wrong=1), lambda: recorder.request(), recorder.stage):
        with pytest.raises(TypeError):
            call()


def test_bulk_recording_has_the_counts_of_hdrhistogram() -> None:
    recorder, peer = native.Recorder(), HdrHistogram(1, 60_000_000_000, 2)
    values = sorted({int(1.013**i) for i in range(1900)} | {0, 255, 256, 257, 60_000_000_000})
    values = [value for value in values if value <= 60_000_000_000]
    recorder._record_values("stage", "x", array("q", values))
    for value in values:
        peer.record_value(value)
    buffer = array("q", bytes(8 * 3840))
    assert recorder.read_counts(0, buffer) == (len(values), sum(values), 0)
    assert list(buffer) == list(peer.counts)


def test_counter_clock_follows_the_system_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.Recorder(clock=lambda: 5).clock_source == "custom"
    assert native.Recorder().clock_source == "monotonic"
    monkeypatch.setenv("INFERSCOPE_CLOCK", "auto")
    recorder = native.Recorder()
    if recorder.clock_source != "tsc":
        pytest.skip("the kernel does not trust this machine's time-stamp counter")
    last, worst = 0, 0
    for _ in range(300):
        before = time.perf_counter_ns()
        with recorder.request("r") as request:
            pass
        after = time.perf_counter_ns()
        assert request.start_ns >= last, "it never turns back"
        last = request.start_ns
        worst = max(worst, before - last, last - after)
        time.sleep(0.001)
    assert worst < 100_000, "ns off the clock of time.perf_counter_ns"


def test_interrupt_in_a_hook_is_not_lost() -> None:
    recorder = native.Recorder()
    recorder.armed = True

    def hook(_: object) -> bool:
        raise KeyboardInterrupt

    recorder.set_hooks(on_start=hook)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - it comes where Python next looks for signals
        with recorder.request("r"):
            pass
        for _ in range(1000):
            time.sleep(0)
    assert recorder.counters()["hook_errors"] == 1


def test_sub_interpreters_are_refused() -> None:
    program = """
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
made = interpreters.create()
interpreters.run_string(made, '''
try:
    import inferscope.record._native
except ImportError as error:
    print("refused:", error)
''')
"""
    said = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True, timeout=30)
    assert said.stdout.startswith("refused: ")


def test_one_span_serves_a_stage_after_another_and_two_when_both_are_open():
    recorder = native.Recorder()
    first = recorder.stage("a")
    second = recorder.stage("a")
    assert first is not second
    with first, second:
        pass
    made = id(first)
    del first, second
    with recorder.stage("a") as again:
        assert id(again) == made
    for index, kind, labels, *_rest, length in recorder.series():
        if (kind, labels) == ("stage", ("a",)):
            assert recorder.read_counts(index, array("q", bytes(8 * length)))[0] == 3


def test_a_span_that_was_dropped_inside_ends_when_its_stage_opens_next():
    now = [0]
    recorder = native.Recorder(clock=lambda: now[0])
    with recorder.request("r"):
        recorder.stage("a").__enter__()
        now[0] += 5
        with recorder.stage("a"):
            now[0] += 7
        now[0] += 2
    ((*_, vector, _spans, _trace, _incomplete),) = recorder.drain()
    assert list(array("q", vector)) == [2, 0, 12]
    assert recorder.counters()["late_spans"] == 0


def test_a_span_may_outlive_its_recorder():
    recorder = native.Recorder()
    span = recorder.stage("a")
    entered = recorder.stage("b")
    entered.__enter__()
    alive = weakref.ref(recorder)
    del recorder
    assert alive() is None
    with span as same:
        assert same is span
    entered.__exit__(None, None, None)
    assert (span.name, repr(span), span(len)) == ("", "<inferscope stage ''>", len)


def test_the_kernels_distrust_of_the_counter_ends_its_use(tmp_path):
    program = """
import os, sys
os.environ["INFERSCOPE_CLOCK"] = "tsc"
from inferscope.record import _native
recorder = _native.Recorder()
if recorder.clock_source != "tsc":
    sys.exit("skip")
recorder.drain()
assert recorder.clock_source == "tsc"
with recorder.request("r"), recorder.stage("s"):
    recorder._check_clock(sys.argv[1])
assert recorder.clock_source == "monotonic"
assert _native.Recorder().clock_source == "monotonic"
((_, _, start, wall, *_),) = recorder.drain()
assert 0 <= wall < 1_000_000_000
"""
    distrusted = tmp_path / "current_clocksource"
    distrusted.write_text("hpet\n")
    done = subprocess.run([sys.executable, "-c", program, str(distrusted)], capture_output=True, text=True, check=False)
    if done.stderr.strip() == "skip":
        pytest.skip("the kernel does not use the time-stamp counter")
    assert done.returncode == 0, done.stderr
