# ruff: noqa: T201
"""One wait state at a time, in a process of its own: prints what the sampler made of the thread `victim` as JSON."""

from __future__ import annotations

import json
import os
import sys
import threading
import time

from inferscope.host.gil import PERIOD_S, STATES, Sampler

SECONDS = 0.6


def sleeping():
    time.sleep(SECONDS)


def locked():
    lock = threading.Lock()
    lock.acquire()
    threading.Timer(SECONDS, lock.release).start()
    lock.acquire()


def reading():
    ours, theirs = os.pipe()
    threading.Timer(SECONDS, os.write, (theirs, b"x")).start()
    os.read(ours, 1)


def computing():
    """Python code alone: nobody else wants the interpreter but the sampler."""
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        sum(range(1000))


def spin():
    while True:
        sum(range(200))


def contended():
    """Beside two threads that compute, and that have begun before: to start one is a wait of another kind."""
    computing()


def starved():
    """Native work on one CPU that three other processes want as well."""
    import hashlib

    cpu = max(os.sched_getaffinity(0))
    hogs = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            os.sched_setaffinity(0, {cpu})
            end = time.monotonic() + SECONDS + 0.3
            while time.monotonic() < end:
                pass
            os._exit(0)
        hogs.append(child)
    os.sched_setaffinity(0, {cpu})  # this thread alone
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        hashlib.pbkdf2_hmac("sha256", b"p", b"s", 4000)


def main(name):
    for number in range(2 if name == "contended" else 0):
        threading.Thread(target=spin, name=f"spinner-{number}", daemon=True).start()
    sampler = Sampler()
    if not sampler.arm():
        print(json.dumps({"reason": sampler.reason}))
        return
    ready, ids = threading.Event(), []

    def run():
        ids.append(threading.get_native_id())
        ready.set()
        globals()[name]()

    victim = threading.Thread(target=run, name="victim")
    victim.start()
    ready.wait()
    while victim.is_alive():
        sampler.sample()
        time.sleep(PERIOD_S)
    sampler.disarm()
    rows = sampler.rows()[ids[0]][1]
    found = {"cpu": 0, "run-queue": 0, **dict.fromkeys(STATES[1:], 0), "unknown": 0}
    surplus = 0
    for at in range(len(rows) - 4, -1, -4):
        _, cpu, delay, packed = rows[at : at + 4]
        delay += surplus
        surplus = max(0, cpu + delay - (packed >> 3))
        delay -= surplus
        found["cpu"] += cpu
        found["run-queue"] += delay
        state = STATES[packed & 7]
        found[state if state != "running" else "unknown"] += max(0, (packed >> 3) - cpu - delay)
    print(json.dumps({"reason": None, "wall": sum(found.values()), **found, "samples": sampler.samples}))


if __name__ == "__main__":
    main(sys.argv[1])
