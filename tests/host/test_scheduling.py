"""Threads' totals and the process's seconds."""

from __future__ import annotations

import hashlib
import threading
import time

import pytest

from inferscope.clock import now_ns
from inferscope.host.scheduling import Schedstat, Scheduling, ThreadTimes, is_telemetry

available = pytest.mark.skipif(Schedstat().reason is not None, reason="no schedstat here")


@available
def test_cpu_time_of_a_thread_is_the_kernels():
    schedstat, thread = Schedstat(), threading.get_native_id()
    before, cpu = schedstat.read(thread), time.thread_time_ns()
    while time.thread_time_ns() - cpu < 20_000_000:
        pass
    used = schedstat.read(thread).cpu_ns - before.cpu_ns
    assert 19_000_000 < used < 60_000_000


@available
def test_descriptors_of_ended_threads_are_closed():
    schedstat, stop = Schedstat(), threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    native = thread.native_id
    assert isinstance(schedstat.read(native), ThreadTimes)
    stop.set()
    thread.join()
    deadline = time.monotonic() + 2
    while native in schedstat.threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert native not in schedstat._files
    assert schedstat.read(native) is None


def test_without_the_file_it_says_so_and_stays_silent(tmp_path):
    schedstat = Schedstat(str(tmp_path))
    assert "cannot be read" in schedstat.reason
    scheduling = Scheduling(schedstat)
    assert scheduling.tick(1) is None
    assert scheduling.tick(2) is None
    assert not scheduling.seconds


@available
def test_a_second_adds_up_all_threads_and_tells_telemetry():
    scheduling = Scheduling()
    assert scheduling.tick(now_ns()) is None
    worker = threading.Thread(target=lambda: hashlib.pbkdf2_hmac("sha256", b"p", b"s", 60_000), name="inferscope-worker")
    worker.start()
    time.sleep(0.005)
    second = scheduling.tick(now_ns())
    worker.join()
    assert second.threads >= 2
    assert 0 < second.telemetry_cpu_ns <= second.cpu_ns
    assert second.voluntary + second.involuntary > 0
    assert list(scheduling.within(0, now_ns())) == [second]
    scheduling.reset()
    assert not scheduling.seconds


def test_names_of_threads_that_only_measure():
    assert is_telemetry("inferscope-worker")
    assert is_telemetry("OtelBatchSpanRecordProcessor")
    assert not is_telemetry("rule-reload")
