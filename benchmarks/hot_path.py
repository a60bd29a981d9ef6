"""What a stage, a decorated call and a request cost, as multiples of two `time.perf_counter_ns()` calls from Python.

Every case is a generated function whose body is repeated, so that the loop does not count; the same function without the instrument is
subtracted. Cases run interleaved, each round a few milliseconds, in CPU time of the thread: wall time would measure the machine's other
work. A ratio is taken within a round, and the value is the median over the rounds; `low` and `high` are its 95 % interval.
"""

from __future__ import annotations

import argparse
import array
import contextvars
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

from hdrh.histogram import HdrHistogram

from inferscope.record import fallback

try:
    from inferscope.record import _native
except ImportError as error:
    sys.exit(f"the C core is not built: {error}")

REPEAT = 40


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


def bare():
    pass


async def bare_async():
    pass


def cases():
    native, tsc, twin, off = recorder(), recorder(clock="tsc"), recorder(fallback), recorder(enabled=False)
    yield Case("empty", "pass")
    yield Case("two clocks", "now(); now()")
    yield Case("disabled", "with use('stage'): pass", off.stage)
    for name, made in (("monotonic", native), ("tsc", tsc), ("twin", twin)):
        if name == "tsc" and made.clock_source != "tsc":
            continue
        yield Case(f"{name} nothing", "pass", request=made.request)
        yield Case(f"{name} stage", "with use('stage'): pass", made.stage, f"{name} nothing", made.request)
        yield Case(f"{name} calls", "use()", bare, request=made.request)
        yield Case(f"{name} decorated", "use()", made.stage("decorated")(bare), f"{name} calls", made.request)
    yield Case("awaits", "await use()", bare_async, request=native.request, coroutine=True)
    yield Case("decorated coroutine", "await use()", native.stage("coroutine")(bare_async), "awaits", native.request, coroutine=True)
    yield Case("request", "with use('request'): pass", native.request, loops=80)
    yield Case("request with cpu", "with use('request'): pass", recorder(cpu="on").request, loops=20)


def interval(values):
    """Median, and the 95 % interval of it by ranks."""
    ordered = sorted(values)
    spread = int(0.98 * len(ordered) ** 0.5)
    middle = len(ordered) // 2
    return statistics.median(ordered), ordered[max(middle - spread, 0)], ordered[min(middle + spread, len(ordered) - 1)]


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
    return ratios


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory():
    """Bytes of series whose every count is in use, and of a request class with all of its bands."""
    now = [0]
    made = _native.Recorder(clock=lambda: now[0])
    every = array.array("q", sorted({int(1.01**i) for i in range(2600) if 1.01**i < 6e10}))
    before = resident()
    for number in range(200):
        made._record_values("stage", f"stage-{number}", every)
    stage = (resident() - before) / 200
    before = resident()
    classes = 24
    for number in range(classes):
        for value in every:
            with made.request("request", cls=str(number)):
                now[0] += value
        made.drain()
        made.begin_epoch()
    length = next(entry[5] for entry in made.series() if entry[1] == "request")
    whole = (resident() - before) / classes
    return stage, length * 8, max(whole - length * 8, 220 * 64 * 8)


def row(name, unit, target, values):
    value, low, high = interval(values)
    return {
        "name": name,
        "value": round(value, 4),
        "unit": unit,
        "target": f"<= {target}",
        "holds": value <= target,
        "low": round(low, 4),
        "high": round(high, 4),
    }


def measure(rounds):
    measured = {case.name: case for case in cases()}
    for _ in range(rounds):
        for case in measured.values():
            case.run()
    floor = [two - none for two, none in zip(measured["two clocks"].times, measured["empty"].times, strict=True)]
    targets = [
        ("with stage() inside a request", "monotonic stage", 1.2),
        ("with stage() inside a request, TSC", "tsc stage", 0.7),
        ("@stage over the bare call", "monotonic decorated", 0.9),
        ("@stage over the bare call, TSC", "tsc decorated", 0.5),
        ("@stage coroutine over the bare await", "decorated coroutine", 1.2),
        ("disabled stage", "disabled", 0.55),
        ("request, begin to finish, with CPU and context switches", "request with cpu", 28),
        ("request, begin to finish", "request", 4),
        ("with stage(), pure-Python twin", "twin stage", 8),
    ]
    rows = []
    for name, case, target in targets:
        if case in measured:
            base = measured[measured[case].base].times
            ratios = [(own - other) / two for own, other, two in zip(measured[case].times, base, floor, strict=True)]
            rows.append(row(name, "x two clock reads", target, ratios))
    rows.append(row("one value into a histogram in C over HdrHistogram.record_value", "ratio", 0.02, histogram_ratio(max(rounds // 2, 15))))
    stage, request, bands = memory()
    rows.append(row("memory of a stage or lock series", "KB", 32, [stage / 1000]))
    rows.append(row("memory of a request series", "KB", 150, [request / 1000]))
    rows.append(row("memory of a request class's bands", "KB", 400, [bands / 1000]))
    return rows, statistics.median(floor)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, at most 50 s")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    rows, floor = measure(61 if arguments.quick else 301)
    for one in rows:
        print(
            f"{one['name']:64} {one['value']:9.4f} [{one['low']:.3f}, {one['high']:.3f}] {one['unit']:18} {one['target']:8} {'holds' if one['holds'] else 'MISSED'}"
        )
    print(f"two clock reads: {floor:.1f} ns")
    if arguments.json:
        machine = {
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "system": platform.platform(),
            "load": os.getloadavg()[0],
            "two_clock_reads_ns": floor,
        }
        arguments.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    return 0 if all(one["holds"] for one in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
