"""A service whose collector is away in every way there is: what its requests notice, what memory does, and whether the totals are right afterwards.

Blocks with a receiver that misbehaves alternate with blocks of a healthy one, so that what the machine does meanwhile falls on both. A request
gives the interpreter away for some 10 us and wants it back; its own duration is its delay.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

MODES = ("refuse", "unavailable", "black_hole", "drip", "slow", "restart")
DELAY_NS = 500_000
BLOCK = b"x" * 8_000
"""Hashed in each request without the interpreter, for some 10 us; getting it back is where a hold is felt."""
RECEIVER = """
import json, sys
from inferscope import semconv
from inferscope.testing.receiver import OtlpReceiver
with OtlpReceiver(delay_s=0.3) as receiver:
    print(receiver.url, flush=True)
    total, seen = 0, 0
    for line in sys.stdin:
        word = line.strip()
        if word == "total":
            for point in receiver.metrics(semconv.REQUESTS):
                if point.attributes.get(semconv.ATTR_REQUEST) == "away":
                    total = max(total, point.value)
            receiver.clear()
            print(json.dumps(total), flush=True)
        elif word == "restart":
            receiver.mode = "refuse"
            receiver.mode = "ok"
        else:
            receiver.mode = word
"""


class Receiver:
    """A receiver in a process of its own."""

    def __enter__(self):
        self._child = subprocess.Popen([sys.executable, "-c", RECEIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.url = self._child.stdout.readline().strip()
        return self

    def __exit__(self, *_):
        self._child.stdin.close()
        self._child.wait(10)
        self._child.stdout.close()

    def say(self, word):
        self._child.stdin.write(f"{word}\n")
        self._child.stdin.flush()

    def total(self):
        self.say("total")
        return json.loads(self._child.stdout.readline())


def resident_kb():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1])
    return 0


def serve(seconds, rate, request):
    """Durations of requests in ns, about `rate` a second for so long."""
    found, until, pause = [], time.perf_counter() + seconds, 1 / rate
    while time.perf_counter() < until:
        begun = time.perf_counter_ns()
        with request("away"):
            hashlib.sha256(BLOCK)
        found.append(time.perf_counter_ns() - begun)
        time.sleep(pause)
    return found


def bounds(differences, seed=7):
    """Median of the differences and its one-sided 95 % bounds, by bootstrap over the pairs."""
    values = np.asarray(differences, dtype=float)
    drawn = np.random.default_rng(seed).choice(values, (2000, len(values))).mean(axis=1)
    return float(np.quantile(drawn, 0.05)), float(values.mean()), float(np.quantile(drawn, 0.95))


def outages(block_s, pairs, rate=1000):
    """By mode: differences of the share of requests delayed beyond 0.5 ms (per 10 000) in each pair; memory in kB; requests and the receiver's total."""
    import inferscope

    found, served = {}, 0
    with Receiver() as receiver, tempfile.TemporaryDirectory() as state:
        inferscope.configure(
            service="away", slo=inferscope.SLO("away", p99_ms=20), endpoint=receiver.url, state_dir=state, export_interval_s=0.2,
            capture=False, warmup_s=86_400, warmup_requests=10_000_000,
        )  # fmt: skip
        for index in range(60):
            with inferscope.request("away"), inferscope.stage(f"stage{index}"):
                served += 1
        served += len(serve(1.0, rate, inferscope.request))
        grown = {True: 0, False: 0}
        for mode in MODES:
            differences = []
            for _ in range(pairs):
                shares = []
                for word in ("ok", mode):
                    before = resident_kb()
                    stop = threading.Event()
                    nuisance = None
                    if word == "restart":
                        nuisance = threading.Thread(target=_restarting, args=(receiver, stop))
                        nuisance.start()
                    else:
                        receiver.say(word)
                    took = serve(block_s, rate, inferscope.request)
                    stop.set()
                    if nuisance is not None:
                        nuisance.join()
                    served += len(took)
                    grown[word == "ok"] += resident_kb() - before
                    shares.append(1e4 * sum(each > DELAY_NS for each in took) / len(took))
                differences.append(shares[1] - shares[0])
            found[mode] = differences
        receiver.say("ok")
        deadline = time.monotonic() + 20
        with contextlib.suppress(Exception):
            while receiver.total() != served and time.monotonic() < deadline:
                inferscope.flush(2.0)
        total = receiver.total()
        inferscope.shutdown()
    # What the evidence's horizon takes in its first minutes is in both kinds of blocks alike.
    return found, grown[False] - grown[True], served, total


def _restarting(receiver, stop):
    while not stop.wait(0.15):
        receiver.say("restart")
