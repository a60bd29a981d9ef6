"""What a stage, a decorated call and a request cost, as multiples of two `time.perf_counter_ns()` calls from Python.

Every case is a generated function whose body is repeated, so that the loop does not count; the same function without the instrument is
subtracted. Cases run interleaved, each round a few milliseconds, in CPU time of the thread: wall time would measure the machine's other
work. A ratio is taken within a round. Several processes do this one after the other, because where a process happens to lie in memory moves
two clock reads by up to a fifth: the value is the median over all rounds, `low` and `high` are the lowest and the highest process.

Rows that are `reported` say what no recorder could go below: the same `with` around an object of the core that does nothing, and two
readings of the clock in C; for the twin a context manager in Python around two clock readings, and the same that also does what a stage must:
find its request and thread, keep its position, count, and give its time to the vector, with nothing that makes it safe or correct besides.
"""

from __future__ import annotations

import argparse
import array
import contextvars
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import _harness
import numpy as np
from hdrh.histogram import HdrHistogram

from inferscope.aggregate.reservoir import Reservoir
from inferscope.record import fallback
from inferscope.types import BAND_COUNT, COLUMN_LIMIT, BandSums, ClassKey, Reason, RequestRecord

try:
    from inferscope.record import _native
except ImportError as error:
    sys.exit(f"the C core is not built: {error}")

REPEAT = 40
TARGETS = [
    ("with stage() inside a request", "monotonic stage", 1.2),
    ("with stage() inside a request, TSC", "tsc stage", 0.7),
    ("@stage over the bare call", "monotonic decorated", 0.9),
    ("@stage over the bare call, TSC", "tsc decorated", 0.5),
    ("@stage coroutine over the bare await", "decorated coroutine", 1.2),
    ("disabled stage", "disabled", 0.55),
    ("request, begin to finish, with CPU and context switches", "request with cpu", 28),
    ("request, begin to finish", "request", 4),
    ("with stage(), pure-Python twin", "twin stage", 8),
    ("floor: an empty context manager in C and two clock readings", "monotonic floor", None),
    ("floor: an empty context manager in C and two TSC readings", "tsc floor", None),
    ("floor: an empty context manager in Python, made anew, around two clock readings", "python floor", None),
    ("floor: the same, and what a stage must do in a request", "python least", None),
    ("@stage, pure-Python twin", "twin decorated", None),
]


def recorder(module=_native, clock="monotonic", cpu="off", *, enabled=True):
    os.environ["INFERSCOPE_CLOCK"] = clock
    made = module.Recorder()
    made.cpu_mode = cpu
    made.enabled = enabled
    return made


def generate(body, around, kind):
    """A function that runs `body` REPEAT times a loop, inside `around` if given."""
    indent = "   " if around else "  "
    lines = [
        f"{kind} case(loops, use, request, now=now):",
        " for _ in range(loops):",
        *([f"  {around}"] if around else []),
        *[indent + body] * REPEAT,
    ]
    space = {"now": time.perf_counter_ns}
    exec("\n".join(lines), space)
    return space["case"]


def drive(coroutine):
    try:
        while True:
            coroutine.send(None)
    except StopIteration:
        return


class Case:
    """One thing measured. The body uses `use`, inside one `request` a loop if there is one; `base` names the case that is subtracted."""

    def __init__(self, name, body, use=None, base="empty", request=None, *, loops=300, coroutine=False):
        self.name, self.base, self.loops, self.coroutine = name, base, loops, coroutine
        self.function = generate(body, "with request('request'):" if request else "", "async def" if coroutine else "def")
        self.arguments = (loops, use, request)
        self.times = []

    def run(self):
        """In a context of its own: setting a context variable costs more the more of them there are, and here are many recorders."""
        self.times.append(contextvars.Context().run(self.once) / (self.loops * REPEAT))

    def once(self):
        began = time.thread_time_ns()
        if self.coroutine:
            drive(self.function(*self.arguments))
        else:
            self.function(*self.arguments)
        return time.thread_time_ns() - began


class Clock:
    """Two readings of a recorder's clock in C, and the disabled stage."""

    base = "empty"

    def __init__(self, name, made, disabled):
        self.name, self.made, self.disabled, self.times = name, made, disabled, []

    def run(self):
        self.times.append(2 * self.made._read_clock(20_000) / 20_000 + self.disabled.times[-1])


class Empty:
    """What a context manager costs in Python when it does nothing."""

    __slots__ = ("name",)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        return None


def empty(name):
    made = Empty()
    made.name = name
    return made


_SHIFT = tuple(max(bits - 8, 0) for bits in range(40))


class Least:
    """What a stage in Python must do, and nothing else: no failure, hook, error, second entry, late or overlapping span is looked for."""

    __slots__ = ("column", "end_ns", "flags", "parent", "request", "stage", "start_ns")
    aux = 0

    def __enter__(self):
        self.request = request = current()
        self.parent = request.top
        self.flags = 0 if get_ident() == request.ident else 1
        spans = request.spans
        if len(spans) < 64:
            spans.append(self)
        request.top = self
        self.start_ns = clock()
        return self

    def __exit__(self, kind, error, trace):
        self.end_ns = end = clock()
        duration = end - self.start_ns
        stage = self.stage
        shift = _SHIFT[duration.bit_length()]
        stage.counts[(shift << 7) + (duration >> shift)] += 1
        stage.series.sum_ns += duration
        request = self.request
        request.top = parent = self.parent
        vector = request.vector
        vector[self.column] += duration
        vector[parent.column] -= duration


clock, get_ident = time.perf_counter_ns, threading.get_ident


def least(made):
    """Makes such stages for requests of a twin."""
    global current
    current, stages = made.context.get, {"stage": made.registry.define_stage("stage")}

    def stage(name):
        one = Least()
        one.stage = definition = stages[name]
        one.column = definition.column
        return one

    return stage


def bare():
    pass


async def bare_async():
    pass


def cases():
    native, tsc, twin, off = recorder(), recorder(clock="tsc"), recorder(fallback), recorder(enabled=False)
    yield Case("empty", "pass")
    yield Case("two clocks", "now(); now()")
    disabled = Case("disabled", "with use('stage'): pass", off.stage)
    yield disabled
    yield Case("python floor", "with use('stage'): now(); now()", empty)
    for name, made in (("monotonic", native), ("tsc", tsc), ("twin", twin)):
        if name == "tsc" and made.clock_source != "tsc":
            continue
        if name != "twin":
            yield Clock(f"{name} floor", made, disabled)
        yield Case(f"{name} nothing", "pass", request=made.request)
        yield Case(f"{name} stage", "with use('stage'): pass", made.stage, f"{name} nothing", made.request)
        if name == "twin":
            yield Case("python least", "with use('stage'): pass", least(made), f"{name} nothing", made.request)
        yield Case(f"{name} calls", "use()", bare, request=made.request)
        yield Case(f"{name} decorated", "use()", made.stage("decorated")(bare), f"{name} calls", made.request)
    yield Case("awaits", "await use()", bare_async, request=native.request, coroutine=True)
    yield Case("decorated coroutine", "await use()", native.stage("coroutine")(bare_async), "awaits", native.request, coroutine=True)
    yield Case("request", "with use('request'): pass", native.request, loops=80)
    yield Case("request with cpu", "with use('request'): pass", recorder(cpu="on").request, loops=20)


def measure(rounds):
    """In this process: for each case the ratios of all rounds, and two clock reads in ns."""
    measured = {case.name: case for case in cases()}
    for _ in range(rounds):
        for case in measured.values():
            case.run()
    floor = [two - none for two, none in zip(measured["two clocks"].times, measured["empty"].times, strict=True)]
    found = {"two clocks": floor}
    for _, name, _ in TARGETS:
        if name in measured:
            base = measured[measured[name].base].times
            found[name] = [(own - other) / two for own, other, two in zip(measured[name].times, base, floor, strict=True)]
    return found


def measure_apart(processes, rounds):
    """The same in processes of their own, one after the other."""
    found = []
    for _ in range(processes):
        run = subprocess.run([sys.executable, __file__, "--worker", str(rounds)], capture_output=True, text=True, check=True)
        found.append(json.loads(run.stdout))
    return found


def rows_of(found):
    rows = []
    for title, name, target in TARGETS:
        own = [each[name] for each in found if name in each]
        if not own:
            continue
        medians = [statistics.median(each) for each in own]
        value = statistics.median([ratio for each in own for ratio in each])
        said = "reported" if target is None else f"<= {target}"
        row = _harness.row(title, value, "x two clock reads", said, holds=target is None or value <= target)
        rows.append(
            row | {"low": round(min(medians), 4), "high": round(max(medians), 4), "note": f"[{min(medians):.3f}, {max(medians):.3f}]"}
        )
    return rows


def histogram_ratio(rounds):
    """One value in C over `HdrHistogram.record_value`, which has the same counts."""
    made, peer = recorder(), HdrHistogram(1, 60_000_000_000, 2)
    values = array.array("q", [(7 ** (i % 20)) % 50_000_000 + i for i in range(20_000)])
    few = list(values[:1000])
    ratios = []
    for _ in range(rounds):
        ours = made._record_values("stage", "bulk", values) / len(values)
        began = time.thread_time_ns()
        for value in few:
            peer.record_value(value)
        ratios.append(ours / ((time.thread_time_ns() - began) / len(few)))
    return statistics.median(ratios)


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory():
    """Bytes of a series whose every count is in use, of a request's, and of a class's bands with every band in use."""
    now = [0]
    made = _native.Recorder(clock=lambda: now[0])
    every = array.array("q", sorted({int(1.01**i) for i in range(2600) if 1.01**i < 6e10}))
    before = resident()
    for number in range(200):
        made._record_values("stage", f"stage-{number}", every)
    stage = (resident() - before) / 200
    classes = 24
    for number in range(-4, classes):  # the first ones fill what every class shares: the queue, the free lists
        if number == 0:
            before = resident()
        for value in every:
            with made.request("request", cls=str(number)):
                now[0] += value
        made.drain()
        made.begin_epoch()
    length = next(entry[5] for entry in made.series() if entry[1] == "request")
    whole = (resident() - before) / classes
    return stage, length * 8, max(whole - length * 8, BAND_COUNT * COLUMN_LIMIT * 8)


def reservoir_bytes():
    """The largest that a reservoir's arrays grow, with every band and every column in use."""
    made, largest = Reservoir((20_000_000,)), 0
    vector = (1000,) * COLUMN_LIMIT
    for turn in range(80):
        bands = np.arange(216)
        counts = np.full(216, 100)
        common = {"size": None, "items": 1, "error": None, "cpu_ns": None, "voluntary_switches": None, "involuntary_switches": None}
        common |= {"truncated": False, "vector": vector, "spans": ()}
        records = [RequestRecord(n, ClassKey("r", None, None), turn, 64_000, n, Reason.RESERVOIR, 1, **common) for n in range(216)]
        made.add(records, BandSums(bands, counts, np.zeros((216, COLUMN_LIMIT), np.int64)), turn)
        largest = max(largest, made.nbytes)
    return largest


def flat(requests):
    """Bytes that a recorder grows by between the first and the last quarter of so many requests: 40 threads, 500 series, a reader."""
    made, threads, classes, stages = recorder(), 40, 50, 410
    names = [f"stage {number}" for number in range(stages)]
    locks = [made.lock(f"lock {number}", threading.Lock()) for number in range(20)]
    for number in range(classes):
        made.set_edges(f"request {number}", [1_000_000])

    def work(number):
        for step in range(requests // threads):
            turn = step * threads + number
            with made.request(f"request {turn % classes}"), made.stage(names[turn % stages]), locks[turn % 20]:
                pass

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    samples, buffers = [], {}
    while any(worker.is_alive() for worker in workers):
        made.drain()
        for index, *_, length in made.series():
            made.read_counts(index, buffers.setdefault(index, array.array("q", bytes(8 * length))))
        made.begin_epoch()
        samples.append(resident())
        time.sleep(0.05)
    quarter = max(len(samples) // 4, 1)
    return max(samples[-quarter:]) - max(samples[quarter : 2 * quarter] or samples[:1]), len(buffers)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, at most 50 s")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--worker", type=int, metavar="ROUNDS", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(measure(arguments.worker)))
        return 0
    stage, request, bands = memory()  # before anything frees memory that its series would live in
    found = measure_apart(5, 15) if arguments.quick else measure_apart(9, 61)
    rows = rows_of(found)
    ratio = histogram_ratio(15 if arguments.quick else 61)
    rows.append(
        _harness.row("one value into a histogram in C over HdrHistogram.record_value", ratio, "ratio", "<= 0.02", holds=ratio <= 0.02)
    )
    requests = 1_000_000 if arguments.quick else 10_000_000
    grown, series = flat(requests)
    for name, value, unit, limit in (
        ("memory of a stage or lock series", stage / 1000, "KB", 32),
        ("memory of a request series", request / 1000, "KB", 150),
        ("memory of a request class: bands and reservoir", (bands + reservoir_bytes()) / 1000, "KB", 400),
        (f"memory grown over {requests // 1_000_000} million requests, 40 threads, {series} series", grown / 1e6, "MB", 4),
    ):
        rows.append(_harness.row(name, value, unit, f"<= {limit}", holds=value <= limit))
    two = statistics.median([each for one in found for each in one["two clocks"]])
    print(f"two clock reads: {two:.1f} ns")
    return _harness.finish(rows, arguments.json, two_clock_reads_ns=two, processes=len(found))


if __name__ == "__main__":
    sys.exit(main())
