"""A service under open load in this process, watched as the runtime watches one, and what a diagnosis says of it.

Requests arrive at seeded random instants whatever the service does; workers take them from one queue, and a request begins when the
service has seen it, so waiting for a worker is part of it. Nothing here knows what is planted.

The process asks for a higher priority, because what other processes of a busy machine do to it is a cause as well; `raised` in the result
says whether it was given.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import queue
import random
import resource
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferscope import integration
from inferscope.aggregate.horizon import Horizon
from inferscope.aggregate.window import Aggregator
from inferscope.clock import now_ns, unix_offset_ns
from inferscope.diagnose import diagnose
from inferscope.host import process
from inferscope.host.cgroup import Cgroup
from inferscope.host.gc import GcPauses
from inferscope.host.gil import PERIOD_S
from inferscope.host.watch import HostWatch
from inferscope.record import core
from inferscope.types import Breach

if TYPE_CHECKING:
    from collections.abc import Callable

MS = 1_000_000


@dataclass
class Arrival:
    """One request on its way."""

    at_ns: int
    size: float
    draw: random.Random


@dataclass
class Service:
    """What a scenario configures."""

    seconds: float
    seed: int = 0
    rate: float = 70.0
    workers: int = 8
    objective_ms: float = 22.0
    size: Callable[[random.Random], float] = lambda draw: draw.uniform(0.5, 1.5)
    rate_at: Callable[[float], float] | None = None
    """Requests a second at a time since start; default always `rate`."""
    handle: Callable[[Arrival], None] | None = None
    neighbours: list[tuple[str, Callable[[threading.Event, random.Random], None]]] = field(default_factory=list)
    cleanup: list[Callable[[], None]] = field(default_factory=list)
    card: Any = None
    """A simulated device, see `simulated.Card`."""
    cgroup: tuple[Path, Path] | None = None
    """Where the group's files lie and which group is ours, instead of the kernel's."""
    leave: Callable[[], None] | None = None
    """Called on each worker's thread when it has served its last request."""
    finish: Callable[[dict[str, Any]], list[Any]] | None = None
    """Called with the evidence when the service has ended; gives captures (side file, trace)."""
    slow: list[tuple[int, int]] = field(default_factory=list)
    """When each request above the objective arrived and ended; the harness fills it."""

    @property
    def recorder(self) -> Any:
        return core.default


SHORT_MS = 2.0


def work(milliseconds: float) -> None:
    """Native computation of so much CPU time that gives the interpreter up, as a small model does; its second half is cut to the speed of the first."""
    begin, rounds = time.thread_time_ns(), max(1, int(milliseconds * ROUNDS_A_MS / (1 if milliseconds < SHORT_MS else 2)))
    hashlib.pbkdf2_hmac("sha256", b"applicant", b"salt", rounds)
    if milliseconds >= SHORT_MS:
        used = (time.thread_time_ns() - begin) / 1e6
        hashlib.pbkdf2_hmac("sha256", b"applicant", b"salt", max(1, int(rounds * (milliseconds / used - 1.0))))


def spin(milliseconds: float) -> None:
    """Python computation of so much CPU time."""
    end = time.thread_time_ns() + int(milliseconds * 1e6)
    while time.thread_time_ns() < end:
        sum(range(50))


def raise_priority() -> bool:
    """Whether this process, and those that it starts from now on, got a higher priority."""
    try:
        os.setsid()  # sessions are scheduled as groups, and priorities count within one
    except OSError:
        pass  # it leads one already
    try:
        os.setpriority(os.PRIO_PROCESS, 0, -12)
        Path("/proc/self/autogroup").write_text("-12")
    except OSError:
        return False
    return True


def _rounds_a_ms() -> float:
    best = float("inf")
    for _ in range(5):
        begin = time.thread_time_ns()
        hashlib.pbkdf2_hmac("sha256", b"applicant", b"salt", 3000)
        best = min(best, time.thread_time_ns() - begin)
    return 3000 / (best / 1e6)


ROUNDS_A_MS = _rounds_a_ms()


def calibrate() -> None:
    """How much `work` does in a millisecond, at the speed of now: another process on the same core made it a third less when this one began."""
    global ROUNDS_A_MS
    ROUNDS_A_MS = max(_rounds_a_ms() for _ in range(3))


def now_and_then(
    work_: Callable[[random.Random], None], low: float = 0.09, high: float = 0.15
) -> Callable[[threading.Event, random.Random], None]:
    """A neighbour that does something at random instants."""

    def loop(stop: threading.Event, draw: random.Random) -> None:
        while not stop.wait(draw.uniform(low, high)):
            work_(draw)

    return loop


class Watched:
    """The rooms around a service, ticked as the runtime ticks them."""

    def __init__(self, service: Service) -> None:
        self.recorder = service.recorder
        self.recorder.set_edges("score", (int(service.objective_ms * MS),))
        self.pauses = GcPauses(self.recorder)
        self.aggregator, self.horizon = Aggregator(self.recorder, epoch_ns=2_000_000_000), Horizon()
        self.watch = HostWatch(self.pauses)
        self.card = service.card
        if service.cgroup is not None:
            self.watch.cgroup = Cgroup(*service.cgroup)
        self.stop = threading.Event()

    def start(self) -> None:
        self.pauses.start()
        self.begin = now_ns()
        self.tick()
        self.watch.arm()

    def tick(self) -> None:
        moment = now_ns()
        window = self.aggregator.tick(moment, lambda: time.sleep(0))
        sites = self.aggregator.lock_sites()
        self.horizon.add(window, sites)
        self.watch.tick(moment, window.records, sites)

    def ticking(self) -> None:
        while not self.stop.wait(1.0):
            self.tick()

    def sampling(self) -> None:
        while not self.stop.wait(PERIOD_S):
            self.watch.sample()

    def evidence(self) -> dict[str, Any]:
        self.tick()
        self.watch.disarm()
        end = now_ns()
        document = self.horizon.evidence("score", self.begin, end, pid=os.getpid(), instance_id="fault")
        document["copies"] = integration.copies()
        document["gc"] = self.pauses.evidence()
        document["process"] = process.facts()
        if self.card is not None:
            document["device"] = self.card.evidence(self.begin, end)
        document["host"] = self.watch.evidence("score", self.begin, end)
        return document


def _serve(service: Service, arrivals: queue.SimpleQueue[Arrival | None]) -> None:
    while (arrival := arrivals.get()) is not None:
        try:
            with service.recorder.request("score", started_ns=arrival.at_ns, size=arrival.size):
                service.handle(arrival)
        except RuntimeError:
            pass  # a request that failed; the recorder has noted it
        end = now_ns()
        if end - arrival.at_ns > service.objective_ms * MS:
            service.slow.append((arrival.at_ns, end))
    if service.leave is not None:
        service.leave()


def _arrive(service: Service, arrivals: queue.SimpleQueue[Arrival | None], begin: int) -> None:
    draw, at = random.Random(service.seed), begin
    for number in itertools.count():
        since = (at - begin) / 1e9
        if since >= service.seconds:
            return
        at += int(draw.expovariate(service.rate if service.rate_at is None else service.rate_at(since)) * 1e9)
        time.sleep(max(0.0, (at - now_ns()) / 1e9))
        arrivals.put(Arrival(now_ns(), service.size(draw), random.Random(service.seed * 1_000_003 + number)))


def episodes(slow: list[tuple[int, int]]) -> int:
    """Slow requests that overlap in time are one episode."""
    found, until = 0, -1
    for begin, end in sorted(slow):
        found += begin > until
        until = max(until, end)
    return found


def children_s() -> float:
    """CPU time of the children that this process has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(service: Service) -> dict[str, Any]:
    """Serve for `service.seconds`, then diagnose; returns the findings and figures of the run as JSON types."""
    watched, arrivals = Watched(service), queue.SimpleQueue()
    watched.start()
    threads = [threading.Thread(target=_serve, args=(service, arrivals), name=f"serve-{n}", daemon=True) for n in range(service.workers)]
    others = [
        threading.Thread(target=target, name=f"inferscope-{target.__name__}", daemon=True) for target in (watched.ticking, watched.sampling)
    ]
    others += [] if service.card is None else service.card.threads(watched.stop)
    for name, loop in service.neighbours:
        others.append(threading.Thread(target=loop, args=(watched.stop, random.Random(f"{name} {service.seed}")), name=name, daemon=True))
    own, children, begun = time.process_time(), children_s(), time.monotonic()
    for thread in (*threads, *others):
        thread.start()
    _arrive(service, arrivals, watched.begin)
    for _ in threads:
        arrivals.put(None)
    for thread in threads:
        thread.join(20)
    used, lasted = time.process_time() - own, time.monotonic() - begun
    watched.stop.set()
    for thread in others:
        thread.join(5)
    document = json.loads(json.dumps(watched.evidence()))
    captures = [] if service.card is None else service.card.captures(document)
    if service.finish is not None:
        captures += service.finish(document)
    for action in service.cleanup:
        action()
    figures = {
        "seconds": round(lasted, 2),
        "episodes": episodes(service.slow),
        "cpu": round(used / lasted, 3),
        "children_cpu": round((children_s() - children) / lasted, 3),
    }
    return {**figures, **_diagnosed(service, document, captures)}


def _diagnosed(service: Service, document: dict[str, Any], captures: list[Any]) -> dict[str, Any]:
    row, begin, end = document["classes"][0], document["from_ns"], document["to_ns"]
    breach = Breach(
        id="fault", slo="score", request="score", threshold_ms=service.objective_ms, quantile=0.99, onset_ns=begin, detected_ns=end,
        detected_unix_ns=end + unix_offset_ns(), requests=row["count"], exceeding=row["violations"][0], trigger="e_detector", statistic=0.0,
        design_effect=1.0,
    )  # fmt: skip
    incident = diagnose(breach, [document], captures)
    return {
        "requests": row["count"],
        "exceeding": row["violations"][0],
        "p50_ms": incident.latency_ms.p50,
        "p99_ms": incident.latency_ms.p99,
        "run_queue": round(sum(second[3] for second in document["host"]["scheduling"]["seconds"]) / 1e9 / service.seconds, 3),
        "telemetry": round(sum(second[6] for second in document["host"]["scheduling"]["seconds"]) / 1e9 / service.seconds, 4),
        "evidence_kb": len(json.dumps(document)) // 1024,
        "verdict": incident.verdict,
        "withheld": incident.withheld,
        "notes": list(incident.notes),
        "shares": [[share.name, round(share.share, 3)] for share in incident.attribution[:5]],
        "findings": [
            {"id": f.id, "severity": f.severity, "confidence": f.confidence, "where": f.where, "share": f.share, "claim": f.claim}
            for f in incident.findings
        ],
    }
