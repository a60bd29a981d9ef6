"""How often the trigger fires on healthy bursty traffic, and how long it takes on a broken service.

    python benchmarks/trigger.py [--quick] [--json FILE] [--trigger e_detector|burn_rate]

Each simulated second is one `Detector.update`, warm-up, cooldown and closing included, as the worker does it. Healthy: half the allowed
share is slow, in 30 ms stalls. False triggers are counted over simulated days and stated with the exact upper 95 % bound of a Poisson rate:
the full run (96 days a rate) holds the target against that bound, `--quick` (4 days) against the count alone.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent.parent / "tests")]

from simulator import traffic  # noqa: E402  (the two roots above must be on the path)

from inferscope.detect import SLO, Detector  # noqa: E402

RATES = (2, 10, 50, 500, 5000)
FALSE_A_DAY = 0.1
INDEPENDENT_S, BURSTY_S = 3.0, 15.0
S = 1_000_000_000
OBJECTIVE = SLO("score", p99_ms=20)


def detector(kind):
    held = Detector(OBJECTIVE, trigger=kind)
    held.mark_ready()
    return held


def firings(held, n, k, start=0):
    """Seconds at which a detector fired."""
    found = []
    for second, (requests, slow) in enumerate(zip(n.tolist(), k.tolist(), strict=True), start + 1):
        if held.update(second * S, requests, slow) is not None:
            found.append(second)
    return found


def false_triggers(job):
    kind, rate, days, seed, make = job
    rng = np.random.default_rng(seed)
    held, found = detector(kind), 0
    for day in range(days):
        n, k = MAKERS[make](rng, rate)
        found += len(firings(held, n, k, day * 86400))
    return found


MAKERS = {
    "bursty": lambda rng, rate: traffic.bursty(rng, rate, 86400, 0.005),
    "independent": lambda rng, rate: traffic.independent(rng, rate, 86400, 0.005),
    "bursty p=0.9 %": lambda rng, rate: traffic.bursty(rng, rate, 86400, 0.009),
    "stalls of 0.3 s": lambda rng, rate: traffic.bursty(rng, rate, 86400, 0.005, stall_s=0.3),
    "stalls of 3 s": lambda rng, rate: traffic.bursty(rng, rate, 86400, 0.005, stall_s=3.0),
    "2 s episodes of 30 %": lambda rng, rate: traffic.episodes(rng, rate, 86400, 0.005, 2, 0.3),
    "30 s episodes of 3 %": lambda rng, rate: traffic.episodes(rng, rate, 86400, 0.005, 30, 0.03),
}


def delays(job):
    """Delay of each run: healthy until the detector knows the service, then broken; the fault begins between two ticks of the worker."""
    kind, rate, share, shape, runs, seed = job
    rng = np.random.default_rng(seed)
    make = traffic.bursty if shape == "bursty" else traffic.independent
    healthy = 900 if rate >= 50 else 6000
    found = []
    for _ in range(runs):
        held = detector(kind)
        before = firings(held, *make(rng, rate, healthy, 0.005))
        if before and held.phase != "armed":
            continue
        late = rng.random()  # the part of its first second that the fault leaves healthy
        n, k = make(rng, rate, 3000, share)
        k[0] = min(n[0], rng.binomial(k[0], 1.0 - late))
        fired = None
        for second, (requests, slow) in enumerate(zip(n.tolist(), k.tolist(), strict=True), 1):
            if held.update((healthy + second) * S, requests, slow) is not None:
                fired = second - late
                break
        found.append(math.inf if fired is None else fired)
    return found


def upper_bound(count, days):
    """Upper 95 % bound of a Poisson rate (Garwood, 1936), by bisection."""
    low, high = 0.0, count + 10.0 * math.sqrt(count + 1.0) + 10.0
    for _ in range(100):
        middle = (low + high) / 2.0
        below = math.exp(-middle) * sum(middle**i / math.factorial(i) for i in range(count + 1))
        low, high = (middle, high) if below > 0.05 else (low, middle)
    return high / days


def row(name, value, unit, target, holds, **more):
    return {"name": name, "value": value, "unit": unit, "target": target, "holds": holds, **more}


def measure(pool, kind, quick):
    chunks, days = (2, 2) if quick else (8, 12)
    jobs = [(kind, rate, days, 1000 * rate + chunk, "bursty") for rate in RATES for chunk in range(chunks)]
    delay_jobs = [
        (kind, rate, 0.05, shape, (60 if rate >= 50 else 20) * (1 if quick else 5), 7 + rate)
        for rate in RATES
        for shape in ("independent", "bursty")
    ]
    found = pool.map(false_triggers, jobs)
    waits = pool.map(delays, delay_jobs)
    rows = []
    counts = list(found)
    for position, rate in enumerate(RATES):
        total, length = sum(counts[position * chunks : (position + 1) * chunks]), chunks * days
        bound = upper_bound(total, length)
        rows.append(
            row(
                f"false triggers, healthy bursty p=0.5 %, {rate}/s",
                total / length,
                "1/day",
                f"<= {FALSE_A_DAY}",
                (total / length if quick else bound) <= FALSE_A_DAY,
                upper_95=round(bound, 4),
                days=length,
            )
        )
    for (_, rate, _, shape, _, _), runs in zip(delay_jobs, waits, strict=True):
        middle, late = (float(np.quantile(runs, q)) for q in (0.5, 0.9))
        limit = {"independent": INDEPENDENT_S, "bursty": BURSTY_S}[shape] if rate == 500 else None
        rows.append(
            row(
                f"median delay, 5 % over the objective, {rate}/s, {shape}",
                round(middle, 2),
                "s",
                "reported" if limit is None else f"<= {limit:g}",
                True if limit is None else middle <= limit,
                p90=round(late, 2),
                runs=len(runs),
            )
        )
    return rows


def first_minutes(job):
    kind, rate, starts, seed = job
    rng = np.random.default_rng(seed)
    return sum(len(firings(Detector(OBJECTIVE, trigger=kind), *traffic.bursty(rng, rate, 300, 0.005))) for _ in range(starts))


def extras(pool, kind):
    """Beyond the targets: other kinds of healthy traffic, and the first five minutes after a restart."""
    shapes = ("independent", "bursty p=0.9 %", "stalls of 0.3 s", "stalls of 3 s", "2 s episodes of 30 %", "30 s episodes of 3 %")
    jobs = [(kind, rate, 4, rate + 5, shape) for shape in shapes for rate in (50, 500, 5000)]
    for (_, rate, days, _, shape), total in zip(jobs, pool.map(false_triggers, jobs), strict=True):
        yield row(f"false triggers, healthy, {shape}, {rate}/s", total / days, "1/day", "reported", holds=True, days=days)
    starts = [(kind, rate, 400, rate) for rate in (500, 5000)]
    for (_, rate, count, _), total in zip(starts, pool.map(first_minutes, starts), strict=True):
        yield row(f"false triggers, first 300 s after a start, {rate}/s", total / count, "1/start", "reported", holds=True, starts=count)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less simulated time, at most 50 s")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--trigger", choices=("e_detector", "burn_rate"), default="e_detector")
    arguments = parser.parse_args()
    began = time.perf_counter()
    with ProcessPoolExecutor(max_workers=min(os.cpu_count() or 1, 8)) as pool:
        rows = measure(pool, arguments.trigger, arguments.quick)
        if not arguments.quick:
            rows += extras(pool, arguments.trigger)
    for one in rows:
        detail = f"p90 {one['p90']}" if "p90" in one else f"<= {one['upper_95']} at 95 %, {one['days']} days" if "upper_95" in one else ""
        print(f"{one['name']:64} {one['value']:8.3f} {one['unit']:6} {one['target']:9} {'holds' if one['holds'] else 'MISSED':7} {detail}")
    print(f"{time.perf_counter() - began:.0f} s, trigger {arguments.trigger}")
    if arguments.json:
        machine = {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "numpy": np.__version__,
        }
        arguments.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    return 0 if all(one["holds"] for one in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
