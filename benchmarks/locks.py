"""What a named lock costs, against the same `threading.Lock` without a name.

Uncontended: generated `with` blocks in CPU time of the thread, interleaved; a ratio is taken within a round. Contended: four threads take
one lock in turn for a fixed time, raw and named in pairs whose order alternates; the row holds on the lower 95 % bound of the median
ratio of throughputs. Throughput is sections a second of the process's CPU time: with the interpreter lock one of the threads can always
run, so on an idle machine that is wall time, and on a busy one it leaves out what others took. The wall-time ratio stands beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import threading
import time
from pathlib import Path

try:
    from inferscope.record import _native
except ImportError as error:
    sys.exit(f"the C core is not built: {error}")

REPEAT = 40
THREADS = 4


def generate(body):
    space = {}
    exec("\n".join(["def case(loops, lock):", " for _ in range(loops):", *[f"  {body}"] * REPEAT]), space)
    return space["case"]


def named(*, holds):
    recorder = _native.Recorder()
    recorder.lock_holds = holds
    return recorder.lock("lock", threading.Lock())


def uncontended(rounds):
    """Ratios of the wait-only and the wait-and-hold lock to the raw one."""
    block, nothing = generate("with lock: pass"), generate("pass")
    locks = {"nothing": None, "raw": threading.Lock(), "wait": named(holds=False), "hold": named(holds=True)}
    times = {name: [] for name in locks}
    for _ in range(rounds):
        for name, lock in locks.items():
            began = time.thread_time_ns()
            (nothing if lock is None else block)(200, lock)
            times[name].append(time.thread_time_ns() - began)
    return {
        name: [(own - none) / (raw - none) for own, raw, none in zip(times[name], times["raw"], times["nothing"], strict=True)]
        for name in ("wait", "hold")
    }


def throughput(lock, seconds, work):
    """Sections of all threads together, a second of the process's CPU time and a second of wall time."""
    done = [0] * THREADS
    stop, ready = threading.Event(), threading.Barrier(THREADS + 1)

    def run(index):
        count = 0
        stopped = stop.is_set
        ready.wait()
        while not stopped():
            with lock:
                for _ in range(work):
                    count += 1
        done[index] = count // work

    threads = [threading.Thread(target=run, args=(index,)) for index in range(THREADS)]
    for thread in threads:
        thread.start()
    ready.wait()
    began, began_cpu = time.perf_counter(), time.process_time()
    time.sleep(seconds)
    stop.set()
    for thread in threads:
        thread.join()
    return sum(done) / (time.process_time() - began_cpu), sum(done) / (time.perf_counter() - began)


def contended(pairs, seconds, work):
    """Ratios of throughputs, named over raw, in pairs."""
    ratios, wall = [], []
    for number in range(pairs):
        order = ("raw", "named") if number % 2 else ("named", "raw")
        rates = {kind: throughput(named(holds=True) if kind == "named" else threading.Lock(), seconds, work) for kind in order}
        ratios.append(rates["named"][0] / rates["raw"][0])
        wall.append(rates["named"][1] / rates["raw"][1])
    return ratios, wall


def bounds(values):
    """Bootstrapped 95 % interval of the median."""
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[-50]


def row(name, values, target, *, at_least, wall=()):
    value = statistics.median(values)
    low, high = bounds(values)
    return {
        "name": name,
        "value": round(value, 4),
        "unit": "x raw",
        "target": f"{'>=' if at_least else '<='} {target}",
        "holds": low >= target if at_least else value <= target,
        "low": round(low, 4),
        "high": round(high, 4),
        **({"wall": round(statistics.median(wall), 4)} if wall else {}),
    }


def measure(*, quick):
    alone = uncontended(61 if quick else 301)
    sections, wall = contended(110 if quick else 300, 0.12, 60)
    rows = [
        row("uncontended `with`, waits counted", alone["wait"], 0.9, at_least=False),
        row("uncontended `with`, waits counted and holds timed", alone["hold"], 1.4, at_least=False),
        row("throughput of 4 threads, sections of about 2 us", sections, 0.95, at_least=True, wall=wall),
    ]
    if not quick:
        empty, wall = contended(300, 0.12, 1)
        rows.append(row("throughput of 4 threads, empty sections", empty, 0.95, at_least=True, wall=wall))
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, at most 50 s")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    rows = measure(quick=arguments.quick)
    for one in rows:
        verdict = "holds" if one["holds"] else "MISSED"
        print(
            f"{one['name']:56} {one['value']:8.4f} [{one['low']:.3f}, {one['high']:.3f}] {one['unit']:6} {one['target']:8} {verdict}",
            f"wall {one['wall']}" if "wall" in one else "",
        )
    if arguments.json:
        machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "system": platform.platform(), "load": os.getloadavg()[0]}
        arguments.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    return 0 if all(one["holds"] for one in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
