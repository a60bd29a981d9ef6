"""What planted services are made of: the registry, the request they share, copies, locks, batches and neighbours."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from harness import MS, Service, now_and_then, spin, work

from inferscope.clock import now_ns
from inferscope.integration import record_copy, record_wait


def _nothing():
    return None


@dataclass(frozen=True)
class Scenario:
    """A planted service and what is true of it."""

    build: Callable[[Service], None]
    truth: tuple[str, ...]
    """Finding ids; the first is to be ranked first, all among the first three. Empty for a healthy service."""
    where: str = ""
    """What the first finding's place has to contain."""
    needs: Callable[[], str | None] = _nothing
    """Why it cannot run here, if so."""
    few: str = ""
    """Why it cannot yield sixty slow episodes in fifteen seconds, if so."""
    hot: str = ""
    """Why it takes more than 40 % of a CPU, if so."""

    @property
    def torch(self) -> bool:
        """Whether it starts from a process that has torch."""
        return self.needs is not _nothing


SCENARIOS: dict[str, Scenario] = {}


def plant(*truth, where="", needs=_nothing, few="", hot=""):
    def register(build):
        SCENARIOS[build.__name__] = Scenario(build, truth, where, needs, few, hot)
        return build

    return register


def ordinary(service, *, preprocess=None, forward=None, rules=None):
    """The request that all services share: a little of preparation, 1 ms of model, a little of rules."""
    recorder = service.recorder

    def handle(arrival):
        with recorder.stage("preprocess"):
            spin(0.2)
            if preprocess is not None:
                preprocess(arrival)
        with recorder.stage("forward"):
            forward(arrival) if forward is not None else work(1.0)
        with recorder.stage("rules"):
            spin(0.1)
            if rules is not None:
                rules(arrival)

    service.handle = handle


class OneIn:
    """Says yes to one of each `many` in a row, at a place that is drawn: as many slow requests whatever the seed."""

    def __init__(self, many):
        self.many, self.seen, self.chosen, self.lock = many, 0, 0, threading.Lock()

    def __call__(self, draw):
        with self.lock:
            position = self.seen % self.many
            if position == 0:
                self.chosen = draw.randrange(self.many)
            self.seen += 1
            return position == self.chosen


class Lane:
    """A copy engine that serves one transfer after another."""

    def __init__(self):
        self.lock, self.free = threading.Lock(), 0

    def move(self, milliseconds):
        with self.lock:
            start = max(now_ns(), self.free)
            self.free = start + int(milliseconds * MS)
            end = self.free
        time.sleep(max(0.0, (end - now_ns()) / 1e9))

    def copy(self, milliseconds, nbytes, *, pageable, site, sync=True):
        begin = now_ns()
        self.move(milliseconds)
        record_copy("h2d", nbytes, begin, now_ns(), sync=sync, pageable=pageable, site=site)


class Rules:
    """Rules under a named lock that a reload takes too."""

    def __init__(self, service, hold, pause_s=(0.09, 0.15)):
        self.lock = service.recorder.lock("rules", threading.Lock())
        self.hold = hold
        service.neighbours.append(("rule-reload", now_and_then(self.reload, *pause_s)))

    def reload(self, draw):
        with self.lock:
            self.hold(draw)

    def apply(self, _):
        with self.lock:
            spin(0.05)


class Batcher:
    """Collects requests until there are `most` or the oldest waited `longest_ms`, then serves them at once on one instance."""

    def __init__(self, service, most, longest_ms, serve):
        self.most, self.longest, self.serve = most, longest_ms / 1e3, serve
        self.held, self.changed = [], threading.Condition()
        service.neighbours.append(("batcher", self.loop))

    def wait(self, _):
        entry = [now_ns(), threading.Event(), 0]
        with self.changed:
            self.held.append(entry)
            self.changed.notify()
        entry[1].wait(10)
        record_wait("batch", entry[0], entry[2] or now_ns())

    def loop(self, stop, _draw):
        while not stop.is_set():
            with self.changed:
                if not self.held:
                    self.changed.wait(0.05)
                    continue
                left = self.longest - (now_ns() - self.held[0][0]) / 1e9
                if len(self.held) < self.most and left > 0:
                    self.changed.wait(left)
                    continue
                batch, self.held = self.held[: self.most], self.held[self.most :]
            start = now_ns()
            self.serve(len(batch))
            for entry in batch:
                entry[2] = start
                entry[1].set()


def one_cpu():
    cpu = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpu})
    return cpu


HOG = "import sys, time\nfor line in sys.stdin:\n end = time.monotonic() + float(line)\n while time.monotonic() < end: pass"
"""Burns a CPU for as many seconds of wall time as each line says."""
FOREIGN = """
import subprocess, sys
hogs = [subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE, text=True) for _ in range(int(sys.argv[2]))]
for line in sys.stdin:
    for hog in hogs:
        print(line, end="", file=hog.stdin, flush=True)
for hog in hogs:
    hog.kill()
    hog.wait()
"""


def hogs(service, number, *, own):
    """Processes that burn CPUs when told; children of the service, or of somebody else. Returns what tells them for how long."""
    if own:
        started = [subprocess.Popen([sys.executable, "-c", HOG], stdin=subprocess.PIPE, text=True) for _ in range(number)]
    else:
        started = [subprocess.Popen([sys.executable, "-c", FOREIGN, HOG, str(number)], stdin=subprocess.PIPE, text=True)]

    def stop():
        for process in started:
            process.stdin.close()
            process.wait(10)

    def burn(seconds):
        for process in started:
            print(seconds, file=process.stdin, flush=True)

    service.cleanup.append(stop)
    return burn


def forked(service, loop):
    """A process that reads lines from us and works as `loop(lines, ready)` does; gives what tells it a line. To be called before any thread is started."""
    told, tells = os.pipe()
    hears, says = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(tells)
        with os.fdopen(told) as lines:
            loop(lines, lambda: os.write(says, b"."))
        os._exit(0)
    os.close(told)
    os.close(says)
    sink = os.fdopen(tells, "w")
    service.cleanup += [sink.close, lambda: os.waitpid(child, 0)]
    return (lambda line: print(line, file=sink, flush=True)), (lambda: os.read(hears, 1))


def no_torch():
    return None if importlib.util.find_spec("torch") else "torch is not installed"
