"""Services with planted causes, and the truth about each: `python scenarios.py NAME [SECONDS] [SEED]` prints one diagnosis as JSON."""

# ruff: noqa: T201
from __future__ import annotations

import gc
import json
import logging
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
if __name__ == "__main__":
    import harness
    from harness import MS, Service, now_and_then, spin, work

from inferscope.clock import now_ns
from inferscope.integration import record_copy, record_wait

SECONDS = 15.0


@dataclass(frozen=True)
class Scenario:
    """A planted service and what is true of it."""

    build: Callable[[Service], None]
    truth: tuple[str, ...]
    """Finding ids; the first is to be ranked first, all among the first three. Empty for a healthy service."""
    where: str = ""
    """What the first finding's place has to contain."""
    needs: Callable[[], str | None] = lambda: None
    """Why it cannot run here, if so."""


SCENARIOS: dict[str, Scenario] = {}


def plant(*truth, where="", needs=lambda: None):
    def register(build):
        SCENARIOS[build.__name__] = Scenario(build, truth, where, needs)
        return build

    return register


def ordinary(service, *, preprocess=None, forward=None, rules=None):
    """The request that all services share: 1 ms of preparation, 2 ms of model, a little of rules."""
    recorder = service.recorder

    def handle(arrival):
        with recorder.stage("preprocess"):
            spin(0.3)
            if preprocess is not None:
                preprocess(arrival)
        with recorder.stage("forward"):
            forward(arrival) if forward is not None else work(2.0)
        with recorder.stage("rules"):
            spin(0.2)
            if rules is not None:
                rules(arrival)

    service.handle = handle


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


@plant("H2D_SYNC_PAGEABLE", where="upload (serve.py:31)")
def pageable_copies(service):
    lane = Lane()
    service.neighbours.append(("table-refresh", now_and_then(lambda draw: lane.move(draw.uniform(60, 90)))))
    ordinary(service, preprocess=lambda _: lane.copy(0.3, 1 << 16, pageable=True, site="upload (serve.py:31)"))


@plant("MANY_SMALL_COPIES", where="features (serve.py:12)")
def small_copies(service):
    """Every request copies feature by feature; those with many features take long."""

    def prepare(arrival):
        for _ in range(60 if arrival.draw.random() < 0.10 else 10):
            begin = now_ns()
            time.sleep(0.0008)
            record_copy("h2d", 2048, begin, now_ns(), sync=True, pageable=False, site="features (serve.py:12)")

    ordinary(service, preprocess=prepare)


class Rules:
    """Rules under a named lock that a reload takes too."""

    def __init__(self, service, hold):
        self.lock = service.recorder.lock("rules", threading.Lock())
        self.hold = hold
        service.neighbours.append(("rule-reload", now_and_then(self.reload)))

    def reload(self, draw):
        with self.lock:
            self.hold(draw)

    def apply(self, _):
        with self.lock:
            spin(0.1)


@plant("LOCK_CONTENTION", where="work (")
def slow_lock(service):
    ordinary(service, rules=Rules(service, lambda draw: work(draw.uniform(60, 90))).apply)


@plant("LOCK_CONTENTION", "LOCK_HOLDER_SLOW")
def lock_holder_waits_for_io(service):
    """The holder reads the new rules from a store while it holds the lock."""
    store = subprocess.Popen(
        [sys.executable, "-c", "import sys, time\nfor line in sys.stdin: time.sleep(float(line)); print(flush=True)"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    service.cleanup.append(store.kill)

    def fetch(draw):
        print(draw.uniform(0.06, 0.09), file=store.stdin, flush=True)
        store.stdout.readline()

    ordinary(service, rules=Rules(service, fetch).apply)


@plant("GC_PAUSE", where="generation 2")
def gc_pauses(service):
    draw, keep = random.Random(1), [[] for _ in range(400_000)]
    for node in keep:
        node.extend(keep[draw.randrange(len(keep))] for _ in range(3))  # neighbours far apart in memory, as a grown cache has them
    service.neighbours.append(("cache", now_and_then(lambda _: gc.collect(), 0.5, 0.8)))
    service.cleanup.append(keep.clear)
    service.rate, service.objective_ms = 60.0, 40.0
    ordinary(service, forward=lambda _: time.sleep(0.015))  # a device works, and the collector stops who waits for it


def one_cpu():
    cpu = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpu})
    return cpu


HOG = "import sys, time\nfor line in sys.stdin:\n end = time.monotonic() + float(line)\n while time.monotonic() < end: pass"


@plant("CPU_PREEMPTION")
def starved(service):
    """Other processes take the only CPU for a while, now and then."""
    one_cpu()
    hogs = [subprocess.Popen([sys.executable, "-c", HOG], stdin=subprocess.PIPE, text=True) for _ in range(12)]
    service.cleanup += [hog.kill for hog in hogs]

    def burst(draw):
        seconds = draw.uniform(0.15, 0.22)
        for hog in hogs:
            print(seconds, file=hog.stdin, flush=True)  # of wall time each, while all share the CPU

    service.neighbours.append(("starter", now_and_then(burst)))
    service.rate, service.objective_ms = 20.0, 45.0
    ordinary(service, forward=lambda _: work(11.0))


@plant("THREAD_OVERSUB")
def affinity(service):
    """One CPU of several is allowed, and a pool of the service's own wants more, now and then."""
    one_cpu()
    service.objective_ms = 25.0

    def reindex(draw):
        pool = [threading.Thread(target=work, args=(draw.uniform(18, 26),), name=f"index-{n}") for n in range(6)]
        for thread in pool:
            thread.start()
        for thread in pool:
            thread.join()

    service.neighbours.append(("reindex", now_and_then(reindex)))
    ordinary(service, forward=lambda _: work(5.0))


CGROUP = Path("/sys/fs/cgroup/cpu")


def _no_cgroup():
    if os.environ.get("INFERSCOPE_FAULTS_CGROUP") != "1":
        return "INFERSCOPE_FAULTS_CGROUP=1 allows it to make a cgroup of its own"
    return None if os.access(CGROUP / "cgroup.procs", os.W_OK) else "no cgroup v1 CPU controller that can be written"


@plant("CGROUP_THROTTLE", needs=_no_cgroup)
def throttled(service):
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


def _no_torch():
    import importlib.util

    return None if importlib.util.find_spec("torch") else "torch is not installed"


@plant("THREAD_OVERSUB", needs=_no_torch)
def omp_oversubscription(service):
    """Every request's operators spread over eight threads, on fewer CPUs, several requests at a time."""
    import torch

    torch.set_num_threads(8)
    service.rate, service.objective_ms = 9.0, 40.0
    left, right = torch.randn(640, 640), torch.randn(640, 640)

    def forward(_):
        for _ in range(6):
            torch.mm(left, right)

    def burst(since):
        return 25.0 if int(since * 2) % 2 == 0 else 3.0

    service.rate_at = burst
    ordinary(service, forward=forward)
    for _ in range(3):
        torch.mm(left, right)


@plant("GIL_CONTENTION", where="report-encoder")
def interpreter_burners(service):
    for name in ("report-encoder-1", "report-encoder-2"):
        service.neighbours.append((name, now_and_then(lambda draw: spin(draw.uniform(80, 110)), 0.4, 0.7)))
    service.objective_ms = 25.0

    def prepare(_):
        for _ in range(6):  # each native call gives the interpreter up and has to get it back
            work(0.1)

    ordinary(service, preprocess=prepare)


@plant("MODEL_SLOW", where="forward")
def slow_model(service):
    """Some inputs, not larger than others, take the model long."""
    service.rate = 30.0
    ordinary(service, forward=lambda arrival: work(70.0 if arrival.draw.random() < 0.06 else 2.0))


@plant("SATURATION")
def more_traffic(service):
    """60 % more requests after a third of the time; two workers serve 100 of 20 ms a second, of which the device takes most."""
    service.workers, service.objective_ms = 2, 60.0
    service.seconds *= 1.2
    service.rate_at = lambda since: 64.0 if since < service.seconds / 3 else 64.0 * 1.6
    ordinary(service, forward=lambda _: time.sleep(0.0185))


@plant("INPUT_SIZE", where="forward")
def large_inputs(service):
    service.rate = 35.0
    service.size = lambda draw: draw.uniform(30, 45) if draw.random() < 0.06 else draw.uniform(0.5, 2.0)
    ordinary(service, forward=lambda arrival: work(2.0 * arrival.size))


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


@plant("BATCH_TIMEOUT", where="queue:batch")
def batch_timeout(service):
    """Now and then traffic is too thin to fill a batch, and requests wait for its timer."""
    service.workers, service.objective_ms = 16, 40.0
    service.rate_at = lambda since: 9.0 if int(since * 2) % 2 == 0 else 150.0
    batcher = Batcher(service, 2, 60.0, lambda _: None)
    ordinary(service, forward=batcher.wait)


@plant("BATCH_CAPACITY", where="queue:batch")
def batch_capacity(service):
    """Bursts come faster than batches are served."""
    service.workers, service.objective_ms = 32, 60.0
    service.rate_at = lambda since: 150.0 if int(since * 4) % 4 == 0 else 35.0
    batcher = Batcher(service, 4, 5.0, lambda _: time.sleep(0.050))
    ordinary(service, forward=batcher.wait)


@plant("HEAD_OF_LINE")
def head_of_line(service):
    """One worker; a large request now and then, and small ones behind it."""
    service.workers, service.rate = 1, 35.0
    service.size = lambda draw: draw.uniform(38, 48) if draw.random() < 0.04 else draw.uniform(0.8, 1.2)
    ordinary(service, forward=lambda arrival: time.sleep(0.002 * arrival.size))


@plant("COLD_START")
def cold_start(service):
    """The first seconds load weights lazily."""
    begin = now_ns()
    service.seconds = max(service.seconds, 16.0)

    def forward(_):
        time.sleep(0.060 if (now_ns() - begin) / 1e9 < 3.0 else 0.0)
        work(2.0)

    ordinary(service, forward=forward)


@plant("IO_IN_REQUEST", where="rules")
def logging_in_request(service):
    """Each request logs to a pipe whose reader stalls now and then."""
    ours, theirs = os.pipe()
    import fcntl

    fcntl.fcntl(theirs, 1031, 4096)  # F_SETPIPE_SZ: a small one
    reader = subprocess.Popen(
        [sys.executable, "-c", "import os, sys, random, time\nwhile os.read(0, 4096):\n if random.random() < 0.4: time.sleep(0.1)"],
        stdin=ours,
    )  # fmt: skip
    service.cleanup += [lambda: os.close(theirs), reader.kill]
    logger = logging.getLogger("service")
    logger.propagate = False
    logger.addHandler(logging.StreamHandler(os.fdopen(os.dup(theirs), "w")))
    logger.setLevel(logging.INFO)
    ordinary(service, rules=lambda _: logger.info("decision %s", "x" * 900))


@plant("RETRY_OR_ERROR", where="fetch")
def errors_and_retries(service):
    """A backend refuses some calls; they are tried again after a pause, and some give up."""
    recorder = service.recorder

    def fetch(arrival):
        bad = arrival.draw.random() < 0.08
        for attempt in range(3):
            with recorder.stage("fetch"):
                time.sleep(0.025 if bad else 0.003)
                if not bad:
                    return
            if attempt == 2 and arrival.draw.random() < 0.5:
                raise RuntimeError("refused")

    ordinary(service, rules=fetch)


@plant("TELEMETRY_OVERHEAD", where="OtelPeriodicExportingMetricReader")
def telemetry(service):
    service.neighbours.append(("OtelPeriodicExportingMetricReader", now_and_then(lambda draw: spin(draw.uniform(110, 150)), 0.4, 0.7)))
    service.objective_ms = 25.0
    ordinary(service, preprocess=lambda _: [work(0.1) for _ in range(6)])


@plant("H2D_SYNC_PAGEABLE", "LOCK_CONTENTION")
def copies_and_lock(service):
    lane = Lane()
    service.neighbours.append(("table-refresh", now_and_then(lambda draw: lane.move(draw.uniform(70, 110)))))
    ordinary(
        service,
        preprocess=lambda _: lane.copy(0.3, 1 << 16, pageable=True, site="upload (serve.py:31)"),
        rules=Rules(service, lambda draw: work(draw.uniform(50, 75))).apply,
    )


@plant("INPUT_SIZE", "LOCK_CONTENTION")
def inputs_and_lock(service):
    service.rate = 35.0
    service.size = lambda draw: draw.uniform(35, 50) if draw.random() < 0.05 else draw.uniform(0.5, 2.0)
    ordinary(
        service,
        forward=lambda arrival: work(2.0 * arrival.size),
        rules=Rules(service, lambda draw: time.sleep(draw.uniform(0.08, 0.11))).apply,
    )


@plant("GC_PAUSE", "H2D_SYNC_PAGEABLE")
def gc_and_copies(service):
    gc_pauses(service)
    lane = Lane()
    service.neighbours.append(("table-refresh", now_and_then(lambda draw: lane.move(draw.uniform(40, 60)), 0.7, 1.1)))
    ordinary(
        service,
        preprocess=lambda _: lane.copy(0.3, 1 << 16, pageable=True, site="upload (serve.py:31)"),
        forward=lambda _: time.sleep(0.015),
    )


@plant()
def healthy(service):
    service.objective_ms = 120.0
    ordinary(service)


@plant()
def healthy_with_locks_and_copies(service):
    """Short holds and quick copies under contention that costs nobody the objective."""
    service.objective_ms, service.rate = 120.0, 60.0
    lane = Lane()
    ordinary(
        service,
        preprocess=lambda _: lane.copy(0.2, 1 << 16, pageable=True, site="upload (serve.py:31)"),
        rules=Rules(service, lambda _: work(4.0)).apply,
    )


@plant()
def healthy_in_bursts(service):
    service.objective_ms = 200.0
    service.rate_at = lambda since: 110.0 if int(since) % 4 == 0 else 30.0
    service.size = lambda draw: draw.lognormvariate(0.0, 0.6)
    ordinary(service, forward=lambda arrival: work(min(8.0, 2.0 * arrival.size)))


def judge(name, result):
    """How a diagnosis compares with the truth: None where the scenario could not run."""
    scenario = SCENARIOS[name]
    if "skipped" in result:
        return {"name": name, "truth": scenario.truth, "skipped": result["skipped"]}
    found = [finding["id"] for finding in result["findings"]]
    first = result["findings"][0] if found else {"id": "nothing", "where": "", "severity": ""}
    # what stands first at equal severity and share belongs together, such as a lock and what its holder waits for
    right = (
        not scenario.truth
        or (first["id"] == scenario.truth[0] and scenario.where in first["where"] and first["severity"] in {"high", "medium"})
        if len(scenario.truth) < 2
        else first["id"] in scenario.truth and first["severity"] in {"high", "medium"}
    )
    return {
        "name": name,
        "truth": scenario.truth,
        "first": f"{first['id']} ({first['severity']})" if found else "nothing",
        "right": right,
        "in_three": set(scenario.truth) <= set(found[:3]),
        "loud": [finding["id"] for finding in result["findings"] if finding["severity"] in {"high", "medium"}]
        if not scenario.truth
        else [],
        "other_high": [f["id"] for f in result["findings"] if f["severity"] == "high" and f["id"] not in scenario.truth],
        **{key: result[key] for key in ("requests", "exceeding", "p50_ms", "p99_ms", "cpu", "run_queue", "raised")},
    }


def diagnosis(name, seconds=SECONDS, seed=1):
    """Run one scenario in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), name, str(seconds), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def table(rows):
    """Lines of text, one a service."""
    lines = [f"{'service':32} {'planted':36} {'ranked first':32} {'first':5} {'in 3':5} {'other high':24} P50/P99 ms, CPUs used/waited for"]
    for row in rows:
        planted = " + ".join(row["truth"]) or "healthy"
        if "skipped" in row:
            lines.append(f"{row['name']:32} {planted:36} skipped: {row['skipped']}")
            continue
        words = {True: "yes", False: "NO"}
        others = ", ".join(row["other_high"]) or "-"
        figures = f"{row['p50_ms']:.1f}/{row['p99_ms']:.0f}  {row['cpu']:.2f}/{row['run_queue']:.2f}{'' if row['raised'] else '  priority as given'}"
        lines.append(
            f"{row['name']:32} {planted:36} {row['first']:32} {words[row['right']]:5} {words[row['in_three']]:5} {others:24} {figures}"
        )
    return lines


QUICK = ("slow_lock", "copies_and_lock")
"""What a short run takes, one after another."""


def main(name, seconds=SECONDS, seed=1):
    scenario = SCENARIOS[name]
    missing = scenario.needs()
    if missing is not None:
        print(json.dumps({"skipped": missing}))
        return
    raised = harness.raise_priority()
    service = Service(seconds=float(seconds), seed=int(seed))
    scenario.build(service)
    gc.collect()
    print(json.dumps({"raised": raised, **harness.run(service)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
