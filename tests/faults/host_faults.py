"""Planted in the host: locks, the collector, CPUs, the interpreter, the container, the process's own threads."""

from __future__ import annotations

import gc
import logging
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from harness import now_and_then, spin, work
from planted import Rules, hogs, no_torch, one_cpu, ordinary, plant

BURNS = "the pool that is planted burns the CPU that requests lack"


@plant("LOCK_CONTENTION", where="work (")
def slow_lock(service):
    service.rate = 90.0
    ordinary(service, forward=lambda _: time.sleep(0.001), rules=Rules(service, lambda draw: work(draw.uniform(38, 48))).apply)


@plant("LOCK_CONTENTION", "LOCK_HOLDER_SLOW")
def lock_holder_waits_for_io(service):
    """The holder reads the new rules from a store while it holds the lock."""
    store = subprocess.Popen(
        [sys.executable, "-c", "import sys, time\nfor line in sys.stdin: time.sleep(float(line)); print(flush=True)"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    service.cleanup.append(store.kill)

    def fetch(draw):
        print(draw.uniform(0.045, 0.06), file=store.stdin, flush=True)
        store.stdout.readline()

    ordinary(service, rules=Rules(service, fetch).apply)


def collection_ms():
    begin = time.perf_counter()
    gc.collect()
    return 1e3 * (time.perf_counter() - begin)


def grown_cache(pause_ms):
    """A cache so large that a collection, which walks through it, takes so long on this machine."""
    draw, keep, took_ms, number = random.Random(1), [], 0.0, 60_000
    while took_ms < pause_ms and len(keep) < 1_000_000:
        fresh = [[] for _ in range(number)]
        keep += fresh
        for node in fresh:
            node.extend(keep[draw.randrange(len(keep))] for _ in range(3))  # neighbours far apart in memory, as a grown cache has them
        took_ms = min(collection_ms() for _ in range(3))
        number = max(10_000, int(len(keep) * min(1.0, pause_ms / took_ms - 1.0)))
    return keep


@plant("GC_PAUSE", where="generation 2")
def gc_pauses(service):
    keep = grown_cache(26.0)
    service.neighbours.append(("cache", now_and_then(lambda _: gc.collect(), 0.09, 0.14)))
    service.cleanup.append(keep.clear)
    service.rate, service.objective_ms = 110.0, 27.0
    ordinary(service, forward=lambda _: time.sleep(0.012))  # a device works, and the collector stops who waits for it


def foreign_cpu(service, own, name):
    """Processes take the only CPU for a while, now and then."""
    one_cpu()
    burn = hogs(service, 12, own=own)
    service.neighbours.append((name, now_and_then(lambda draw: burn(draw.uniform(0.07, 0.09)), 0.13, 0.2)))
    service.rate, service.objective_ms = 36.0, 30.0
    ordinary(service, forward=lambda _: work(6.0))
    return burn


@plant("CPU_PREEMPTION")
def starved(service):
    """Other processes, not of this service, take the only CPU for a while, now and then."""
    foreign_cpu(service, False, "starter")


@plant("LOADER_COMPETES", where="processes that this one started")
def loader_processes(service):
    """A pool of data loaders that the service started prepares batches on the same CPU, now and then."""
    foreign_cpu(service, True, "epoch")


def pool(service, what, name):
    """Six threads want the only CPU that is allowed, now and then."""
    one_cpu()

    def run(draw):
        threads = [threading.Thread(target=work, args=(draw.uniform(11, 14),), name=f"{name}-{n}") for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    service.neighbours.append((what, now_and_then(run, 0.07, 0.12)))
    service.rate, service.objective_ms = 40.0, 25.0
    ordinary(service, forward=lambda _: work(5.0))


@plant("LOADER_COMPETES", where="dataloader", hot=BURNS)
def loader_threads(service):
    """The same with threads, which decode in native code."""
    pool(service, "epoch", "dataloader")


@plant("THREAD_OVERSUB", hot=BURNS)
def affinity(service):
    """One CPU of several is allowed, and a pool of the service's own wants more, now and then."""
    pool(service, "reindex", "index")


CGROUP = Path("/sys/fs/cgroup/cpu")


def fake_group(service):
    """A tree of its own that says what a quota would do, while foreign processes take the CPU as the quota would."""
    burn, busy = foreign_cpu(service, False, "other"), [0.0]
    service.neighbours.clear()
    root = Path(tempfile.mkdtemp(prefix="cgroup-"))
    (root / "cpu.max").write_text("100000 100000\n")
    (root / "self").write_text("0::/\n")
    counts = {"nr_periods": 0, "nr_throttled": 0, "throttled_usec": 0}

    def write():
        partial = root / "partial"
        partial.write_text("".join(f"{name} {value}\n" for name, value in counts.items()))
        partial.replace(root / "cpu.stat")

    def throttle(draw):
        seconds = draw.uniform(0.07, 0.09)
        busy[0] = time.monotonic() + 2 * seconds
        burn(seconds)

    def count(stop, _draw):
        while not stop.wait(0.1):
            counts["nr_periods"] += 1
            if time.monotonic() < busy[0]:
                counts["nr_throttled"] += 1
                counts["throttled_usec"] += 70_000
            write()

    write()
    service.cgroup = (root, root / "self")
    service.neighbours += [("reindex", now_and_then(throttle, 0.13, 0.2)), ("kernel", count)]


def real_group(service):
    """A quota of the kernel's, in a group of its own."""
    group = CGROUP / f"inferscope-fault-{os.getpid()}"
    group.mkdir()
    (group / "cpu.cfs_period_us").write_text("100000")
    (group / "cpu.cfs_quota_us").write_text("30000")
    (group / "cgroup.procs").write_text(str(os.getpid()))

    def leave():
        (CGROUP / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()

    service.cleanup.append(leave)
    service.neighbours.append(("reindex", now_and_then(lambda draw: work(draw.uniform(60, 90)))))
    ordinary(service)


@plant("CGROUP_THROTTLE")
def throttled(service):
    """INFERSCOPE_FAULTS_CGROUP=1 allows a real group where one can be made (cgroup v1)."""
    real = os.environ.get("INFERSCOPE_FAULTS_CGROUP") == "1" and os.access(CGROUP / "cgroup.procs", os.W_OK)
    (real_group if real else fake_group)(service)


@plant("THREAD_OVERSUB", needs=no_torch, hot="pools that want more CPUs than there are burn those that there are")
def omp_oversubscription(service):
    """Every request's operators spread over eight threads, on fewer CPUs, several requests at a time; 22 ms of CPU a request on any machine."""
    import torch

    torch.set_num_threads(8)
    left, right = torch.randn(448, 448), torch.randn(448, 448)

    def milliseconds():
        begin = time.process_time()
        for _ in range(6):
            torch.mm(left, right)
        return 1e3 * (time.process_time() - begin) / 6

    number = max(1, round(22.0 / min(milliseconds() for _ in range(6))))

    def forward(_):
        for _ in range(number):
            torch.mm(left, right)

    service.rate = 54.0
    ordinary(service, forward=forward)
    for _ in range(3):
        torch.mm(left, right)


@plant("GIL_CONTENTION", where="report-encoder")
def interpreter_burners(service):
    for name in ("report-encoder-1", "report-encoder-2"):
        service.neighbours.append((name, now_and_then(lambda draw: spin(draw.uniform(34, 42)), 0.21, 0.30)))

    def prepare(_):
        for _ in range(10):  # each native call gives the interpreter up and has to get it back
            work(0.03)

    service.rate = 120.0
    ordinary(service, preprocess=prepare, forward=lambda _: time.sleep(0.001))


READER = """
import os, random, time
seen = chosen = 0
while os.read(0, 4096):
    if seen % 7 == 0:
        chosen = random.randrange(7)
    if seen % 7 == chosen:
        time.sleep(0.065)
    seen += 1
"""
"""Stalls in one read of each seven, at a place that is drawn: stalls that are drawn alone join to few episodes."""


@plant("IO_IN_REQUEST", where="rules")
def logging_in_request(service):
    """Each request logs to a pipe whose reader stalls now and then."""
    ours, theirs = os.pipe()
    import fcntl

    fcntl.fcntl(theirs, 1031, 4096)  # F_SETPIPE_SZ: a small one
    reader = subprocess.Popen([sys.executable, "-c", READER], stdin=ours)
    service.cleanup += [lambda: os.close(theirs), reader.kill]
    logger = logging.getLogger("service")
    logger.propagate = False
    logger.addHandler(logging.StreamHandler(os.fdopen(os.dup(theirs), "w")))
    logger.setLevel(logging.INFO)
    service.rate = 90.0
    ordinary(service, rules=lambda _: logger.info("decision %s", "x" * 1900))


@plant("TELEMETRY_OVERHEAD", where="OtelPeriodicExportingMetricReader")
def telemetry(service):
    service.neighbours.append(("OtelPeriodicExportingMetricReader", now_and_then(lambda draw: spin(draw.uniform(38, 46)), 0.09, 0.15)))
    service.rate = 110.0
    ordinary(service, preprocess=lambda _: [work(0.03) for _ in range(10)], forward=lambda _: time.sleep(0.001))
