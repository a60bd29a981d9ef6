"""Device timing on the simulated accelerator: what a span costs, what it misses, what it disturbs.

Everything but the cost of a span and the captures runs on the simulator's virtual clock against its own log of what truly happened. The cost is CPU time of the calling
thread, span against two bare `torch.Event.record()` calls in turn. A simulator has no driver under it, and a record that costs next to nothing
would make any span look dear: the row that is judged models the driver's share with 1 us a call (insert_events was measured at 2.8 us a pair on CUDA,
pytorch#78279), where two clock readings take 0.118 us, and with as many clock readings on a machine that is slower just now: a driver's call is
the same processor's work. The row without it is reported beside, and `benchmarks/gpu/device.py` measures a real card.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import sys
import threading
import time
from dataclasses import dataclass

import torch
from _device import pairs, ratio
from _harness import Row, arguments, cpu_ns, finish, row

from inferscope.device.backends import CaptureWatch
from inferscope.device.events import DeviceTimer
from inferscope.device.events import timer as process_timer
from inferscope.device.harvest import DeviceSpan, Harvester
from inferscope.integration import Registry
from inferscope.testing import accelerator

SIM = accelerator.load()
TWO_READS_NS = 118.0
"""Two clock readings where a driver's call is taken for 1 us, ns: the machine of results/peers.json."""


@dataclass
class Rooms:
    """A timer, its harvester and what they delivered."""

    timer: DeviceTimer
    harvester: Harvester
    spans: list[DeviceSpan]
    watch: CaptureWatch

    @property
    def channel(self):
        return self.timer.channel(torch.device("sim", 0))

    def span(self, milliseconds: float, name: str = "work") -> None:
        started = self.channel.begin(None)
        SIM.kernel(milliseconds, name)
        if started is not None:
            self.channel.end(started, name)


def rooms(*, virtual: bool = True, **settings: float) -> Rooms:
    """Fresh rooms on a fresh device, one span read already."""
    SIM.reset()
    SIM.configure(**{"call_us": 0.3, **settings})
    if virtual:
        SIM.virtual_clock()
    clock = SIM.now_ns if virtual else time.perf_counter_ns
    timer, watch = DeviceTimer(clock=clock, per_second=10**9), CaptureWatch()
    made = Rooms(timer, Harvester(timer, None, watch), [], watch)
    made.harvester.sinks.append(made.spans.append)
    made.harvester.start()
    made.span(0.01, "first")
    if virtual:
        SIM.advance_ms(1.0)
    else:
        torch.accelerator.synchronize()
    made.harvester.run_once()
    made.spans.clear()
    return made


def driver_call_us() -> float:
    """What a driver's call takes here and now, us."""
    clock, loops = time.perf_counter_ns, range(20_000)

    def reads() -> None:
        for _ in loops:
            clock()
            clock()

    def nothing() -> None:
        for _ in loops:
            pass

    taken = statistics.median(cpu_ns(reads) - cpu_ns(nothing) for _ in range(9)) / len(loops)
    return max(1.0, taken / TWO_READS_NS)


def cost(rounds: int) -> list[Row]:
    """CPU time of a span against two bare records."""
    rows = []
    name = "device span / two bare records"
    for driver_us in (driver_call_us(), 0.0):
        made = rooms(virtual=False, call_us=driver_us)
        ours, plain = pairs(made.channel, rounds)
        made.harvester.after_fork()
        if driver_us:
            rows.append(ratio(ours, plain, note=f"driver call of {driver_us:.2f} us; "))
            rows.append(row("device span beyond its two records", min(ours) - min(plain), "ns", "reported"))
        else:
            rows.append(ratio(ours, plain, name=f"{name}, no driver under them", judged=False))
    return rows


def steady(spans: int) -> list[Row]:
    """Events that come into being once warm."""
    made = rooms()

    def work(count: int) -> None:
        for number in range(count):
            made.span(0.001)
            if number % 64 == 63:
                SIM.advance_ms(20.0)
                made.harvester.run_once()

    work(32_000)  # ten seconds: the ring of anchors is full
    before = SIM.counters()
    work(spans)
    after = SIM.counters()
    made.harvester.after_fork()
    created = after["events_created"] - before["events_created"]
    synchronisations = after.get("synchronizations", 0) - before.get("synchronizations", 0)
    return [
        row("events created in steady state", created, "", "0", holds=created == 0, note=f"over {spans:,} spans"),
        row("synchronisations", synchronisations, "", "0", holds=synchronisations == 0),
    ]


def slow_stream() -> list[Row]:
    """One stream that takes a minute, another with 500 short spans."""
    made = rooms()
    with torch.Stream("sim"):
        made.span(60_000.0, "slow")
    for _ in range(500):
        made.span(0.001, "fast")
    SIM.advance_ms(20.0)
    asked = []
    original, stream_of = made.channel.done, {id(entry[1]): entry[2] for entry in made.channel.inbox}
    made.channel.done = lambda event: asked.append(stream_of.get(id(event))) or original(event)
    made.harvester.run_once()
    delivered = sum(span.name == "fast" for span in made.spans)
    most = max(asked.count(stream) for stream in set(asked) - {None})  # None is an anchor's
    made.harvester.after_fork()
    return [
        row("delivered before the slow stream ends", delivered, "", "500", holds=delivered == 500),
        row("queries of a stream in a pass", most, "", "<= 3", holds=most <= 3),
    ]


def execution(spans: int) -> list[Row]:
    """Three threads, three streams, harvested while they issue."""
    made = rooms(drift_ppm=80)
    channel = made.channel
    SIM.clear_log()

    def work(number: int) -> None:
        luck = random.Random(number)
        with torch.Stream("sim"):
            for index in range(spans // 3):
                while channel.created - len(channel.pool) > 3_000:
                    time.sleep(0.001)  # back-pressure is no matter of this row
                made.span(luck.choice([0.02, 0.2, 2.0]), f"{number}:{index}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        SIM.advance_ms(100.0)
        made.harvester.run_once()
    SIM.advance_ms(10_000.0)
    made.harvester.run_once()
    truth = {op.name: op.end_ns - op.start_ns for op in SIM.operations()}
    errors = sorted(abs(span.exec_ns - truth[span.name]) / 1e3 for span in made.spans)
    p95 = errors[int(0.95 * len(errors))]
    counts = made.channel.counts()
    made.harvester.after_fork()
    return [
        row(
            "execution error, p95", p95, "us", "<= 1", holds=p95 <= 1.0, note=f"{len(errors)} spans, median {statistics.median(errors):.2f}"
        ),
        row("spans lost without a fault", counts.lost + counts.dropped, "", "0", holds=counts.lost + counts.dropped == 0),
    ]


def alignment(seconds: float) -> list[Row]:
    """Starts against the truth at four utilisations, with jitter in the launches and a drifting clock."""
    errors: list[tuple[float, float]] = []
    for seed, busy in enumerate((0.35, 0.7, 0.9, 0.98)):
        luck = random.Random(seed)
        made = rooms(call_us=0.5, launch_us=4.0, jitter_us=1.5, drift_ppm=80, offset_s=3.0, log_events=1)
        SIM.clear_log()
        until, index = SIM.now_ns() + int(seconds * 1e9), 0
        while SIM.now_ns() < until:
            length = luck.expovariate(1 / 8.0)
            made.span(length, str(index))
            index += 1
            SIM.advance_ms(length / busy * luck.uniform(0.6, 1.4))
            made.harvester.run_once()
        SIM.advance_ms(10_000.0)
        made.harvester.run_once()
        truth = SIM.reached_ns()
        errors += [(abs(span.start_ns - truth[span.name]), span.error_ns) for span in made.spans if span.start_ns is not None]
        made.harvester.after_fork()
    near = 100 * sum(error <= 15_000 for error, _ in errors) / len(errors)
    covered = 100 * sum(error <= bar for error, bar in errors) / len(errors)
    median = statistics.median(error for error, _ in errors) / 1e3
    bar = statistics.median(bar for _, bar in errors) / 1e3
    return [
        row(
            "starts within 15 us, drift 80 ppm",
            near,
            "%",
            ">= 99.6",
            holds=near >= 99.6,
            note=f"{len(errors)} spans, median {median:.1f} us",
        ),
        row("starts within their error bar", covered, "%", ">= 99", holds=covered >= 99, note=f"median bar +-{bar:.1f} us"),
    ]


def captures(number: int) -> list[Row]:
    """Graph captures in the global mode beside a harvester that never rests; without the integration that watches them as the control."""
    killed = {}
    sys.setswitchinterval(1e-4)
    for watched in (True, False):
        SIM.reset()
        registry = Registry()
        if watched:
            registry.instrument(["torch"])
        harvester = Harvester(process_timer, None)
        harvester.start()
        channel = process_timer.channel(torch.device("sim", 0))
        value, stop = torch.ones(16, device="sim"), threading.Event()

        def harvest(harvester: Harvester = harvester, stop: threading.Event = stop) -> None:
            while not stop.is_set():
                harvester.run_once()

        def serve(channel=channel, stop: threading.Event = stop) -> None:
            while not stop.is_set():  # another request's work, so that the harvester has something to ask during a capture
                started = channel.begin(None)
                SIM.kernel(0.2)
                if started is not None:
                    channel.end(started, "neighbour")
                time.sleep(0.0005)

        threads = [threading.Thread(target=harvest), threading.Thread(target=serve)]
        for thread in threads:
            thread.start()
        side = torch.Stream("sim")
        for _ in range(number if watched else number // 5):
            for _ in range(4):
                started = channel.begin(None)
                SIM.kernel(0.5)
                if started is not None:
                    channel.end(started, "work")
            graph = torch.accelerator.Graph(capture_error_mode="global")
            with contextlib.suppress(RuntimeError), side, graph:
                for _ in range(8):
                    value.mul(2.0)
        stop.set()
        for thread in threads:
            thread.join()
        killed[watched] = SIM.counters().get("captures_killed", 0)
        made = SIM.counters()["captures"]
        if watched and made != number:
            killed[True] += number - made  # one that did not begin is as bad
        harvester.stop()
        registry.uninstrument()
        harvester.after_fork()
    sys.setswitchinterval(5e-3)
    note = f"of {number:,}; without the watch {killed[False]}, after which the device is left alone"
    holds = killed[True] == 0 and killed[False] > 0
    return [row("graph captures killed by us", killed[True], "", "0", holds=holds, note=note)]


CALLS = ("record", "query", "elapsed", "event_create", "stream_create", "synchronize", "wait", "allocate")
"""Calls of a driver; what the application itself asks for (a launch, a copy) is left alone, its failures are its own."""


def faults(spans: int) -> list[Row]:
    """Each call fails now and then, never three times in a row; who is timed sees nothing of it."""
    missing = uncounted = reached_host = planted = 0
    for call in CALLS:
        made = rooms()
        if call == "stream_create":
            made.harvester._devices.clear()  # the private stream is made anew, which fails at first
        asked = 0
        for number in range(spans // len(CALLS)):
            if number % 50 == 25:
                SIM.fail(call)
                planted += 1
            try:
                started = made.channel.begin(None)
                SIM.kernel(0.05)
                if started is not None:
                    made.channel.end(started, "work")
            except RuntimeError:
                reached_host += 1
            asked += 1
            if number % 20 == 19:
                SIM.advance_ms(10.0 if number % 400 else 200.0)
                made.harvester.run_once()
                SIM.heal()
        SIM.advance_ms(100.0)
        made.harvester.run_once()
        made.harvester.run_once()
        read = sum(not span.device_error for span in made.spans)
        counts = made.channel.counts()
        missing += asked - read
        uncounted += abs(asked - read - counts.lost - counts.refused)
        reached_host += bool(made.channel.off)
        made.harvester.after_fork()
    return [
        row("spans missing that no fault took", uncounted, "", "0", holds=uncounted == 0, note=f"{missing} of {spans:,} are missing"),
        row(
            "spans that faults took",
            missing,
            "",
            f"<= {planted}",
            holds=0 < missing <= planted,
            note=f"{planted} planted in {len(CALLS)} calls",
        ),
        row("faults of ours that the host saw", reached_host, "", "0", holds=reached_host == 0),
    ]


def main() -> int:
    asked = arguments(__doc__)
    quick = asked.quick
    rows = [
        *cost(60 if quick else 300),
        *steady(100_000 if quick else 1_000_000),
        *slow_stream(),
        *execution(3_000 if quick else 15_000),
        *alignment(10.0 if quick else 600.0),
        *captures(1_000),
        *faults(4_000 if quick else 40_000),
    ]
    return finish(rows, asked.json, distributions=("torch",), device="simulated")


if __name__ == "__main__":
    sys.exit(main())
