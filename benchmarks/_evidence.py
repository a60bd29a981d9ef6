"""Rows about the evidence itself: wait states of a thread, who is blamed for a lock's queue, and what taking evidence costs a request."""

from __future__ import annotations

import contextvars
import json
import multiprocessing
import random
import statistics
import subprocess
import sys
import threading
import time

from _harness import ROOT, row

from inferscope.record import core

EXPECTED = {
    "sleeping": {"sleep"},
    "locked": {"lock"},
    "reading": {"io"},
    "computing": {"cpu", "run-queue"},
    "contended": {"gil"},
    "starved": {"run-queue"},
}
"""A computing thread of a busy machine is ready without a CPU part of the time: both are the kernel's own clocks, and neither is a wait of its code."""
BLOCKED = ("gil", "lock", "sleep", "io")
LEAST = 0.15
RATE, SERVICE_S, HOLD_S, RELOAD_S = 300.0, 50e-6, 0.045, 0.9
AUDIT_S, EVERY_S = 0.012, 0.25
THREADS = 24


def dominant(found):
    """What a thread's time is called: its largest blocked state when that takes a part of the time that it was not merely ready for a CPU, which is
    the machine's doing; else the larger of the kernel's two clocks.
    """
    blocked = {name: found[name] for name in BLOCKED}
    most = max(blocked, key=blocked.get)
    if blocked[most] >= LEAST * (found["wall"] - found["run-queue"]):
        return most
    return "cpu" if found["cpu"] >= found["run-queue"] else "run-queue"


def burn():
    while True:
        sum(range(1000))


def scenario_rows(runs):
    """Six wait states in a process of their own, on the machine as it is and with a burner for each CPU."""
    path = ROOT / "tests" / "host" / "scenarios.py"
    rows = []
    for loaded in (False, True):
        burners = [multiprocessing.Process(target=burn, daemon=True) for _ in range(multiprocessing.cpu_count())] if loaded else []
        for process in burners:
            process.start()
        wrong = []
        for name, states in EXPECTED.items():
            for _ in range(runs):
                done = subprocess.run([sys.executable, str(path), name], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT)
                found = json.loads(done.stdout)
                if found["reason"] is not None:
                    return [row("wait states: nothing can be sampled here", 0, "", "reported", note=found["reason"])]
                if dominant(found) not in states:
                    wrong.append(f"{name}: {dominant(found)}")
        for process in burners:
            process.terminate()
            process.join()
        total = runs * len(EXPECTED)
        name = f"dominant wait state right, {'a burner on each CPU' if loaded else 'machine as it is'}, of {total}"
        rows.append(row(name, total - len(wrong), "runs", f"== {total}", holds=not wrong, note=", ".join(wrong)))
    return rows


def compute(seconds):
    """A short hold: a machine wakes nobody so soon."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


class Queue:
    """Requests that take one named lock for a moment, a reload that holds it long and an audit that holds it a while; arrivals are seeded.

    The counterfactual is the same run served again on paper, first come first served, with every arrival and hold as it was measured, once with the
    reload's holds and once with those let go at once: what the machine did to the run is in both.
    """

    def __init__(self, seconds):
        self.recorder = core.Recorder()
        self.lock = self.recorder.lock("rules", threading.Lock())
        self.seconds = seconds
        self.held = []

    def take(self, who, work, length):
        asked = time.perf_counter_ns()
        with self.lock:
            got = time.perf_counter_ns()
            work(length)
            self.held.append((asked, time.perf_counter_ns() - got, who))

    def apply(self, arrivals):
        self.pace(arrivals, lambda: self.take("apply", compute, SERVICE_S))

    def audit(self, moments):
        self.pace(moments, lambda: self.take("audit", time.sleep, AUDIT_S))

    def reload(self, moments):
        self.pace(moments, self.renew)

    def renew(self):
        asked = time.perf_counter_ns()
        with self.lock:
            got = time.perf_counter_ns()
            time.sleep(HOLD_S)
            self.held.append((asked, time.perf_counter_ns() - got, "renew"))

    def pace(self, moments, act):
        for at in moments:
            time.sleep(max(0.0, self.begin + at - time.perf_counter()))
            act()

    def run(self, seed):
        """(part of the waiting that is blamed on the reload, waiting on paper with it, and without its holds, ns)."""
        draw = random.Random(seed)
        arrivals, at = [[] for _ in range(THREADS)], 0.0
        while at < self.seconds:
            at += draw.expovariate(RATE)
            arrivals[draw.randrange(THREADS)].append(at)
        reloads = [n * RELOAD_S + draw.uniform(0, 0.3) for n in range(int(self.seconds / RELOAD_S))]
        audits = [n * EVERY_S + draw.uniform(0, 0.1) for n in range(int(self.seconds / EVERY_S))]
        self.begin = time.perf_counter() + 0.1
        threads = [threading.Thread(target=self.apply, args=(each,)) for each in arrivals]
        threads += [threading.Thread(target=self.reload, args=(reloads,)), threading.Thread(target=self.audit, args=(audits,))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rows = self.recorder.lock_sites()
        total = sum(entry[5] for entry in rows)
        blamed = sum(entry[5] for entry in rows if "renew" in entry[2])
        return blamed / total if total else 0.0, waiting(self.held, None), waiting(self.held, "renew")


def waiting(held, spared):
    """All waiting of a lock that is taken first come first served, ns; `spared` lets go at once."""
    free = total = 0
    for asked, length, who in sorted(held):
        start = max(asked, free)
        total += start - asked
        free = start + (0 if who == spared else length)
    return total


def blame_rows(runs, seconds):
    """The root holder's part of all waiting, against how much of it goes away when that holder lets go at once."""
    blamed = waited = without = 0.0
    for seed in range(runs):
        part, with_it, spared = Queue(seconds).run(seed)
        blamed, waited, without = blamed + part * with_it, waited + with_it, without + spared
    part, gone = 100 * blamed / waited, 100 * (1.0 - without / waited)
    name = f"root-holder blame against the counterfactual, {runs} runs of {seconds:g} s"
    note = f"blamed {part:.1f} %, goes away {gone:.1f} %"
    return [row(name, abs(part - gone), "points", "<= 5", holds=abs(part - gone) <= 5, note=note)]


def stages(recorder, count):
    for _ in range(count):
        with recorder.request("score"):
            for name in NAMES:
                with recorder.stage(name):
                    pass


NAMES = [f"stage-{number}" for number in range(8)]


def apart(recorder, count):
    """The same with something between two stages, so that no boundary is shared."""
    for _ in range(count):
        with recorder.request("score"):
            for name in NAMES:
                with recorder.stage(name):
                    pass
                len(name)


def plain(recorder, count):
    for _ in range(count):
        with recorder.request("score"):
            pass


def spent(work, *arguments):
    """CPU time of this thread, ns."""
    began = time.thread_time_ns()
    contextvars.Context().run(work, *arguments)
    return time.thread_time_ns() - began


def clocks(count):
    now = time.perf_counter_ns
    for _ in range(count):
        now()
        now()


def cost_rows(rounds):
    """The default tier (CPU time and switches at a request's ends) and the armed one (capture hooks on a request and its 8 stages as well).

    Armed evidence of stages is taken by the sampling thread, so that a stage reads nothing but its clock, shared boundary or not.
    """
    default, armed = core.Recorder(), core.Recorder()
    default.cpu_mode = armed.cpu_mode = "on"
    armed.set_hooks(on_start=lambda _: False, on_enter=None, on_exit=None, on_finish=lambda _, __: None)
    armed.armed = True
    ratios, shared, single = [], [], []
    for _ in range(rounds):
        two = spent(clocks, 400) / 400
        ratios.append(spent(plain, default, 200) / 200 / two)
        shared.append(spent(stages, armed, 100) / 100 / 1e3)
        single.append(spent(apart, armed, 100) / 100 / 1e3)
        for recorder in (default, armed):
            recorder.drain()
            recorder.begin_epoch()
    ratio, together, alone = (statistics.median(values) for values in (ratios, shared, single))
    return [
        row("default tier, a request", ratio, "x two clock reads", "<= 28", holds=ratio <= 28),
        row("armed tier, a request of 8 stages with shared boundaries", together, "us", "<= 15", holds=together <= 15),
        row("armed tier, a request of 8 stages apart", alone, "us", "<= 25", holds=alone <= 25),
        *sampler_rows(),
    ]


def sampler_rows():
    """What sampling every 10 ms costs while armed, and one part in sixteen of the time: a thread of ours pays, requests do not."""
    from inferscope.host.duty import SHARE
    from inferscope.host.gil import PERIOD_S, Sampler

    stop = threading.Event()

    def serve():
        while not stop.wait(0.02):
            sum(range(20_000))

    threads = [threading.Thread(target=serve, name=f"serve-{n}") for n in range(16)]
    for thread in threads:
        thread.start()
    sampler = Sampler()
    if not sampler.arm():
        stop.set()
        return []
    costs = []
    for _ in range(120):
        began = time.thread_time_ns()
        sampler.sample()
        costs.append(time.thread_time_ns() - began)
        time.sleep(PERIOD_S)
    stop.set()
    for thread in threads:
        thread.join()
    each = statistics.median(costs) / 1e3
    part = each / PERIOD_S / 1e4
    return [
        row(
            "sampler of 16 busy threads while armed, each look",
            each,
            "us",
            "reported",
            note=f"{part:.1f} % of a CPU, {part / SHARE:.2f} % while healthy",
        )
    ]
