"""The six scenarios: each dominant state is told from the others, in a process of its own."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from inferscope.host import gil
from inferscope.host.gil import GIL, IO, LOCK, RUNNING, SLEEP, Sampler, classify
from inferscope.host.interpreter import runtime_range

pytestmark = pytest.mark.skipif(Sampler().reason is not None, reason=f"nothing can be sampled here: {Sampler().reason}")

RUNTIME = (0x1000, 0x2000)


def scenario(name):
    path = Path(__file__).with_name("scenarios.py")
    done = subprocess.run([sys.executable, str(path), name], capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize(("name", "state", "least"), [("sleeping", "sleep", 0.9), ("locked", "lock", 0.9), ("reading", "io", 0.9)])
def test_a_blocked_thread_is_named_by_what_it_waits_for(name, state, least):
    found = scenario(name)
    assert found[state] >= least * found["wall"], found


def test_a_computing_thread_waits_for_nothing_though_the_sampler_takes_the_interpreter():
    found = scenario("computing")
    assert found["cpu"] + found["run-queue"] >= 0.85 * found["wall"], found
    assert found["gil"] <= 0.15 * found["wall"], found


def test_contention_for_the_interpreter_is_told_from_locks():
    found = scenario("contended")
    blocked = {name: found[name] for name in ("gil", "lock", "sleep", "io", "unknown")}
    assert max(blocked, key=blocked.get) == "gil", found
    assert found["gil"] >= 0.4 * (found["wall"] - found["run-queue"]), found  # a machine short of CPUs adds waits of its own


def test_a_starved_thread_is_ready_and_has_no_cpu():
    found = scenario("starved")
    assert found["run-queue"] >= 0.4 * found["wall"], found
    assert found["gil"] + found["lock"] <= 0.1 * found["wall"], found


@pytest.mark.parametrize(
    ("line", "state"),
    [
        (b"running\n", RUNNING),
        (b"-1 0x7ffe 0x7f00\n", RUNNING),
        (b"", RUNNING),
        (b"202 0x1800 0x189 0x0 0x0 0x0 0x0 0x7ffe 0x7f00\n", GIL),
        (b"202 0x2000 0x189 0x0 0x0 0x0 0x0 0x7ffe 0x7f00\n", LOCK),
        (b"230 0x1 0x0 0x7ffe 0x0 0x0 0x0 0x7ffe 0x7f00\n", SLEEP),
        (b"0 0x5 0x7ffe 0x1000 0x0 0x0 0x0 0x7ffe 0x7f00\n", IO),
        (b"232 0x5 0x7ffe 0x1000 0x0 0x0 0x0 0x7ffe 0x7f00\n", IO),
    ],
)
def test_lines_of_the_kernel(line, state):
    assert classify(line, RUNTIME, "x86_64") == state


def test_the_interpreter_has_a_plausible_size():
    low, high = runtime_range()
    assert 4096 < high - low < 64 << 20


def test_a_waiting_thread_costs_one_interval():
    stop = threading.Event()
    waiter = threading.Thread(target=stop.wait, name="waiter")
    waiter.start()
    sampler = Sampler()
    assert sampler.arm()
    for _ in range(30):
        time.sleep(0.002)
        sampler.sample()
    rows = sampler.rows()[waiter.native_id]
    stop.set()
    waiter.join()
    assert rows[0] == "waiter"
    assert len(rows[1]) <= 8
    assert rows[1][-1] & 7 == LOCK


def test_a_thread_that_ended_waits_no_more():
    stop = threading.Event()
    waiter = threading.Thread(target=stop.wait, name="waiter")
    waiter.start()
    sampler = Sampler()
    assert sampler.arm()
    sampler.sample()
    time.sleep(0.01)
    sampler.sample()
    thread = waiter.native_id
    stop.set()
    waiter.join()
    for _ in range(20):
        time.sleep(0.005)
        sampler.sample()
    ends = sampler.rows()[thread][1][-4] * 1000 + sampler.first_ns
    assert ends < sampler.last_ns - 50_000_000


def test_nothing_is_sampled_while_it_is_not_armed():
    sampler = Sampler()
    sampler.sample()
    assert sampler.samples == 0
    assert sampler.arm()
    sampler.sample()
    sampler.disarm()
    sampler.sample()
    assert sampler.samples == 1
    assert not sampler._threads


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(gil, "_ROWS", 0)
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    other.start()
    sampler = Sampler()
    sampler.arm()
    sampler.sample()
    stop.set()
    other.join()
    assert sampler.dropped > 0
    assert not any(len(rows) for _, rows in sampler.rows().values())


def test_an_interpreter_without_a_lock_says_so(monkeypatch):
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    sampler = Sampler()
    assert "without an interpreter lock" in sampler.reason
    assert not sampler.arm()


def test_threads_that_live_for_a_few_samples_are_seen():
    """A pool that starts threads for 40 ms at a time: what it takes of the CPUs is seen, and by name."""
    used = []

    def compute():
        begin = time.thread_time_ns()
        while time.thread_time_ns() - begin < 40_000_000:
            hashlib.pbkdf2_hmac("sha256", b"a", b"b", 1000)
        used.append(time.thread_time_ns())

    sampler = Sampler()
    assert sampler.arm()
    ends = time.monotonic() + 1.0
    pool = []
    while time.monotonic() < ends:
        if not any(thread.is_alive() for thread in pool):
            pool = [threading.Thread(target=compute, name=f"short-{number}") for number in range(2)]
            for thread in pool:
                thread.start()
        sampler.sample()
        time.sleep(0.01)
    sampler.disarm()
    for thread in pool:
        thread.join()
    rows = [rows for name, rows in sampler.rows().values() if (name or "").startswith("short-")]
    assert sum(sum(each[1::4]) for each in rows) / 1e6 >= 0.5 * sum(used) / 1e9, (len(rows), len(used))


def test_a_thread_for_each_request_does_not_fill_the_evidence(monkeypatch):
    monkeypatch.setattr(gil, "_ENDED", 3)
    sampler, begun = Sampler(), time.monotonic()
    assert sampler.arm()
    for _ in range(40):
        stop = threading.Event()
        thread = threading.Thread(target=stop.wait, name="request")
        thread.start()
        time.sleep(0.002)
        sampler.sample()
        stop.set()
        thread.join()
    sampler.disarm()
    looks = (time.monotonic() - begun) / 0.1
    # the first three and those alive when the limit is met, then one at a look every 100 ms
    assert 3 <= sum(name == "request" for name, _ in sampler.rows().values()) <= 6 + looks


def test_nothing_is_said_of_the_time_between_two_runs():
    stop = threading.Event()
    waiter = threading.Thread(target=stop.wait, name="waiter")
    waiter.start()
    sampler = Sampler()
    assert sampler.arm()
    for _ in range(3):  # runs of 20 ms with 60 ms between them
        for _ in range(5):
            time.sleep(0.004)
            sampler.sample()
        sampler.rest()
        sampler.rest()
        time.sleep(0.06)
    chapter = sampler.turn()
    sampler.sample()
    later = sampler.chapter()
    stop.set()
    waiter.join()
    assert len(chapter.spans) == 3
    assert len(later.spans) == 1
    assert later.first_ns > chapter.last_ns
    _, rows, places = chapter.intervals()[waiter.native_id]
    assert len(places) == len(rows) // 4
    for end, length in zip(rows[0::4], rows[3::4], strict=True):
        begin = end - (length >> 3)
        inside = [(low - chapter.first_ns, high - chapter.first_ns) for low, high in chapter.spans]
        assert any(low // 1000 - 1 <= begin and end <= high // 1000 + 1000 for low, high in inside), (begin, end, inside)
    waited = sum(length >> 3 for length in rows[3::4])
    run = sum(high - low for low, high in chapter.spans) // 1000
    assert waited <= run + 3000
    assert waited >= run // 2
