"""A meter of how long a thread keeps the interpreter, and the check that it sees what it should.

A short operation without the interpreter lock asks for the CPU time that the watched thread burnt until the lock came back, and for the wall time;
the smaller one is the hold.
"""

from __future__ import annotations

import hashlib
import statistics
import threading
import time

import _harness

from inferscope.pace import PAUSE_S


class Heartbeat:
    """Runs work on a thread of its own and says for how long it kept the interpreter, in ms."""

    def __init__(self):
        self._go, self._leave = threading.Semaphore(0), threading.Event()
        self._work, self._busy = None, False
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()
        self._clock = time.pthread_getcpuclockid(self._thread.ident)

    def _loop(self):
        while True:
            self._go.acquire()
            if self._leave.is_set():
                return
            self._work()
            self._busy = False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._leave.set()
        self._go.release()
        self._thread.join()

    def longest_hold(self, work):
        block, worst = b"x" * 20_000, 0
        self._work, self._busy = work, True
        self._go.release()
        while self._busy:
            begun, before = time.perf_counter_ns(), time.clock_gettime_ns(self._clock)
            hashlib.sha256(block)  # about 15-35 us without the lock
            burnt, passed = time.clock_gettime_ns(self._clock) - before, time.perf_counter_ns() - begun
            worst = max(worst, min(burnt, passed))
        return worst / 1e6


def model(milliseconds):
    """What a well-behaved thread does: the same CPU time in slices of 0.1 ms with a yield after each. Its holds are the machine's noise."""
    for _ in range(max(round(milliseconds / 0.1), 1)):
        until = time.thread_time_ns() + 100_000
        while time.thread_time_ns() < until:
            pass
        time.sleep(0)


def meter_row():
    """What the heartbeat says of a thread that does nothing, and of one that keeps the interpreter for 2 ms: it must tell them apart."""
    block = list(range(400_000))

    def hog():
        begun, holds = time.thread_time_ns(), 0
        while time.thread_time_ns() - begun < 20_000_000:
            block.sort(reverse=bool(holds % 2))  # one call, which never lets go
            holds += 1
            time.sleep(PAUSE_S)

    one = min(_sorted_ns(block) for _ in range(5)) / 1e6
    with Heartbeat() as beat:
        asleep = max(beat.longest_hold(lambda: time.sleep(0.02)) for _ in range(3))
        seen = statistics.median(beat.longest_hold(hog) for _ in range(3))
    holds = asleep < 0.5 * one <= seen
    note = f"a sort of {one:.2f} ms that never lets go; a thread asleep {asleep:.2f} ms"
    return _harness.row("the meter: a planted hold", seen, "ms", "seen, and none of a thread asleep", holds=holds, note=note)


def _sorted_ns(block):
    begun = time.thread_time_ns()
    block.sort(reverse=True)
    block.sort()
    return (time.thread_time_ns() - begun) // 2
