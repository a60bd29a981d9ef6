"""How soon slow requests are caught: the real draw, budget and keep-if-slow of request-scoped captures over simulated traffic in virtual time.

Simulated are only the requests and the profiler: a session takes what one was measured to take in a process of its own just before, drawn from
those measurements, and there is one at a time.
"""

from __future__ import annotations

import heapq
import math
import random
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch  # noqa: F401  (captures are refused in a process that has none)

from inferscope.capture import CaptureBudget, RequestScopedCapture, Target

RATE = 100
OBJECTIVE_S = 0.02
SHARE = 0.04
STALL_MS_PER_S = CaptureBudget().stall_ms_per_s
S = 1_000_000_000


def requests(rng, seconds, shape):
    """(start, end) of each request, seconds: about 4 % take more than 20 ms, by themselves or held up together by a lock or a copy."""
    starts = np.cumsum(rng.exponential(1.0 / RATE, int(1.2 * RATE * seconds)))
    starts = starts[starts < seconds]
    work = rng.lognormal(math.log(0.005), 0.25, len(starts))
    if shape == "independent":
        work += np.where(rng.random(len(starts)) < SHARE, rng.uniform(0.025, 0.05, len(starts)), 0.0)
        return starts, starts + work
    # A stall of 30 to 60 ms makes those slow that wait in it for more than about 15 ms: 30 ms of arrivals, and what is in flight.
    stalls = np.sort(rng.uniform(0.0, seconds, rng.poisson(seconds * SHARE / 0.0385)))
    ends = starts + work
    for begin, length in zip(stalls, rng.uniform(0.03, 0.06, len(stalls)), strict=True):
        held = (starts < begin + length) & (ends > begin)
        ends[held] = np.maximum(ends[held], begin + length) + np.where(starts[held] > begin, work[held], 0.0)
    return starts, ends


class Simulated:
    """A capture whose clock and profiler are the simulation's."""

    def __init__(self, directory, stalls, seed):
        self.now_ns = S
        self.stalls, self.chance = stalls, random.Random(seed)
        self.session, self.charge = None, 0
        self.capture = RequestScopedCapture(CaptureBudget(free_memory_mb=0), clock=lambda: self.now_ns)
        self.capture.recording.open = self.open
        self.capture.shelf.put = lambda kept: None
        refused = self.capture.arm(Target("x", Path(directory), "score", int(OBJECTIVE_S * S)))
        if refused is not None:
            raise SystemExit(f"captures are refused here: {refused}")
        self.busy = None

    def open(self, request, name, *_, shapes=False, **__):
        if self.busy is not None:
            return None
        self.busy = request.id
        start, stop, self.charge = self.chance.choice(self.stalls["shapes" if shapes else "dropped"])
        self.session = SimpleNamespace(
            closed=True, discard=False, yielded=False, results=object(), region=name, start_cost_ns=start, stop_cost_ns=stop, thread=0,
            truncated=False, asked=SimpleNamespace(shapes=shapes, light=not shapes),
        )  # fmt: skip
        return self.session

    def finish(self, request, wall_s):
        request.open = False
        wall_ns = int(wall_s * S)
        if self.busy == request.id:
            self.busy = None
            if wall_ns > OBJECTIVE_S * S and not self.session.asked.shapes:
                self.charge = self.chance.choice(self.stalls["kept"])[2]
            self.capture.recording.spending.spend(self.charge, self.now_ns)
            wall_ns += self.session.start_cost_ns
        self.capture.on_finish(request, wall_ns)


def measured(*, quick):
    """What attempts take on this machine now: (start, stop, charge) in ns of those that are dropped, kept, and kept with shapes."""
    from capture import child

    found = child("stalls", 150 if quick else 600)
    if found is None:
        raise SystemExit("the process whose stalls are measured crashed")
    return found


def kept(job, stalls):
    """Slow profiles kept within 30 s of the breach, the share of slow requests, and attempts, for one seed."""
    shape, seed = job
    random.seed(seed)  # the draw's own
    rng = np.random.default_rng(seed)
    starts, ends = requests(rng, 30.0, shape)
    with tempfile.TemporaryDirectory() as directory:
        held = Simulated(directory, stalls, seed)
        open_: list[tuple[float, int, SimpleNamespace]] = []
        for number, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            while open_ and open_[0][0] <= start:
                when, _, request = heapq.heappop(open_)
                held.now_ns = S + int(when * S)
                held.finish(request, when - request.at)
            held.now_ns = S + int(start * S)
            request = SimpleNamespace(id=number + 1, name="score", start_ns=held.now_ns, profiled=False, open=True, at=start)
            if held.capture.on_start(request):
                held.capture.on_enter(request, "score", "call")
            heapq.heappush(open_, (end, number, request))
        slow = held.capture._armed.slow if held.capture._armed is not None else held.capture.budget.slow
        held.capture.disarm()
    return slow, float(np.mean(ends - starts > OBJECTIVE_S)), held.capture.recording.spending.attempts
