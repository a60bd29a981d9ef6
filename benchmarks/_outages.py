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

MODES = ("down", "refuse", "unavailable", "black_hole", "drip", "slow", "restart")
"""`down` answers no handshake, as a host that is off; `drip` is half dead: its answer comes byte by byte and never ends; `restart` does, 7 times a second."""
DELAY_NS = 500_000
BLOCK = b"x" * 8_000
"""Hashed in each request without the interpreter, for some 10 us; getting it back is where a hold is felt."""
RECEIVER = """
import json, socket, sys, urllib.parse
from inferscope import semconv
from inferscope.testing.receiver import OtlpReceiver

class Silent:
    # Listens with a queue that is full, so that the kernel answers no further handshake.
    def __init__(self, port):
        self.sockets = [socket.socket() for _ in range(4)]
        listening, *others = self.sockets
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        listening.listen(0)
        for each in others:
            each.setblocking(False)
            each.connect_ex(("127.0.0.1", port))
    def close(self):
        for each in self.sockets:
            each.close()

with OtlpReceiver(delay_s=0.3) as receiver:
    silent = None
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
        elif word == "down":
            receiver.mode = "refuse"
            silent = silent or Silent(urllib.parse.urlsplit(receiver.url).port)
        else:
            if silent is not None:
                silent.close()
                silent = None
            if word == "restart":
                receiver.mode = "refuse"
            receiver.mode = "ok" if word == "restart" else word
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


def bounds(differences, seed=7, *, level=0.95):
    """Mean of the differences and its one-sided bounds, by bootstrap over the pairs."""
    values = np.asarray(differences, dtype=float)
    drawn = np.random.default_rng(seed).choice(values, (2000, len(values))).mean(axis=1)
    return float(np.quantile(drawn, 1 - level)), float(values.mean()), float(np.quantile(drawn, level))


@contextlib.contextmanager
def away(receiver, mode):
    """The receiver in a mode for the block's time."""
    if mode != "restart":
        receiver.say(mode)
        yield
        return
    stop = threading.Event()
    nuisance = threading.Thread(target=_restarting, args=(receiver, stop))
    nuisance.start()
    try:
        yield
    finally:
        stop.set()
        nuisance.join()


def come_back(receiver, served, seconds):
    """The receiver is well again: the total that it has once it is the right one, or when the time is over."""
    import inferscope

    receiver.say("ok")
    deadline = time.monotonic() + seconds
    total = receiver.total()
    while total != served and time.monotonic() < deadline:
        inferscope.flush(2.0)
        total = max(total, receiver.total())
    return total


def outages(block_s, pairs, rate=1000):
    """By mode: differences of the share of requests delayed beyond 0.5 ms (per 10 000) in each pair; the most memory
    held at the end of a block beyond that of the first, in kB; requests and the receiver's total."""
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
        held = []
        for mode in MODES:
            differences = []
            for _ in range(pairs):
                shares = []
                for word in ("ok", mode):
                    with away(receiver, word):
                        took = serve(block_s, rate, inferscope.request)
                    served += len(took)
                    held.append(resident_kb())
                    shares.append(1e4 * sum(each > DELAY_NS for each in took) / len(took))
                differences.append(shares[1] - shares[0])
            found[mode] = differences
        total = come_back(receiver, served, 20)
        inferscope.shutdown()
    # A sum of what blocks take would count again and again what an outage takes and the receiver's return gives back: the most that is ever
    # held is what a container sees.
    return found, max(held[1:]) - held[0], served, total


def alone(block_s, pairs):
    """The same in a process of its own: in one that did something else before, memory of that is given back in some block or other."""
    done = subprocess.run([sys.executable, __file__, str(block_s), str(pairs)], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def _restarting(receiver, stop):
    while not stop.wait(0.15):
        receiver.say("restart")


if __name__ == "__main__":
    print(json.dumps(outages(float(sys.argv[1]), int(sys.argv[2]))))
