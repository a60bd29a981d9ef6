"""How often the trigger fires on healthy bursty traffic, how long it takes on a broken service, who captures when a whole fleet breaks, and
how soon slow requests are caught.

    python benchmarks/trigger.py [--quick] [--json FILE] [--trigger e_detector|burn_rate]

Each simulated second is one `Detector.update`, warm-up, cooldown and closing included, as the worker does it. Healthy: half the allowed
share is slow, in 30 ms stalls. A replica-day is 86400 seconds of one seed with a detector of its own. False triggers of one replica hold
on the exact upper 95 % bound of a Poisson rate in the full run (100 replica-days a rate), on the count alone with `--quick` (3 days).

The fewest requests any test could need: to tell a share p1 from p0 with a mean time to a false alarm of g requests takes, on average, at
least ln(g) / KL(p1 || p0) requests (Lorden, 1971); g is what a week of that rate brings.

A fleet: a thousand replicas with 500 requests/s break in the same second, each judges for itself with the threshold of a fleet and draws its
lot; a capture counts for the 30 s that profiles are collected at most.
"""

from __future__ import annotations

import math
import os
import sys
from concurrent.futures import ProcessPoolExecutor

import _harness as harness
import numpy as np

sys.path.insert(0, str(harness.ROOT / "tests"))

from simulator import traffic

from inferscope.capture.incident import CAPTURE_S
from inferscope.detect import SLO, Detector
from inferscope.detect.edetector import RUN_SECONDS
from inferscope.detect.fleet import ROUND_S, SelfSelection
from inferscope.types import Breach

RATES = (2, 10, 50, 500, 5000)
FALSE_A_DAY = 0.1
FLEET = 800
REPLICAS = 1000
INDEPENDENT_S, BURSTY_S = 3.0, 15.0
FRESH = 1000
"""First seed of the runs that judge the draw: its constants were chosen on seeds 0 to 99."""
S = 1_000_000_000
DAY = 86400
OBJECTIVE = SLO("score", p99_ms=20)
BREACH = Breach("b", "score", "score", 20.0, 0.99, 0, 0, 0, 0, 0, "e_detector", 0.0, 1.0)


def detector(kind, fleet=1):
    held = Detector(OBJECTIVE, trigger=kind, fleet_size=fleet)
    held.mark_ready()
    return held


def firings(held, n, k, start=0):
    """Seconds at which a detector fired."""
    found = []
    for second, (requests, slow) in enumerate(zip(n.tolist(), k.tolist(), strict=True), start + 1):
        if held.update(second * S, requests, slow) is not None:
            found.append(second)
    return found


MAKERS = {
    "bursty": lambda rng, rate: traffic.bursty(rng, rate, DAY, 0.005),
    "independent": lambda rng, rate: traffic.independent(rng, rate, DAY, 0.005),
    "bursty p=0.9 %": lambda rng, rate: traffic.bursty(rng, rate, DAY, 0.009),
    "stalls of 0.3 s": lambda rng, rate: traffic.bursty(rng, rate, DAY, 0.005, stall_s=0.3),
    "stalls of 3 s": lambda rng, rate: traffic.bursty(rng, rate, DAY, 0.005, stall_s=3.0),
    "2 s episodes of 30 %": lambda rng, rate: traffic.episodes(rng, rate, DAY, 0.005, 2, 0.3),
    "30 s episodes of 3 %": lambda rng, rate: traffic.episodes(rng, rate, DAY, 0.005, 30, 0.03),
}


def false_triggers(job):
    """Of one replica-day: (alone, with the threshold of the fleet)."""
    kind, rate, day, make = job
    n, k = MAKERS[make](np.random.default_rng(1_000_003 * rate + day), rate)
    return len(firings(detector(kind), n, k)), len(firings(detector(kind, FLEET), n, k))


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


def fewest_requests(rate, share, allowed=0.01):
    """What any test needs on average; see the module's text."""
    divergence = share * math.log(share / allowed) + (1.0 - share) * math.log((1.0 - share) / (1.0 - allowed))
    return math.log(RUN_SECONDS * rate) / divergence


def quiet(pool, kind, *, quick):
    days = 3 if quick else 100
    jobs = [(kind, rate, day, "bursty") for rate in RATES for day in range(days)]
    found = list(pool.map(false_triggers, jobs, chunksize=1 if quick else 5))
    alone, fleet = [], []
    for position, rate in enumerate(RATES):
        mine = found[position * days : (position + 1) * days]
        count, together = sum(each[0] for each in mine), sum(each[1] for each in mine)
        bound = upper_bound(count, days)
        alone.append(
            harness.row(
                f"false triggers, healthy bursty p=0.5 %, {rate}/s",
                count / days,
                "1/day",
                f"<= {FALSE_A_DAY}",
                holds=(count / days if quick else bound) <= FALSE_A_DAY,
                upper_95=round(bound, 4),
                days=days,
                note=f"<= {bound:.3f} at 95 %, {days} replica-days",
            )
        )
        name = f"false triggers with the threshold of a fleet of {FLEET}, {rate}/s"
        fleet.append(harness.row(name, together, "", "0", holds=together == 0, days=days, note=f"in {days} replica-days"))
    return alone + fleet


def prompt(pool, kind, *, quick):
    jobs = [
        (kind, rate, 0.05, shape, (60 if rate >= 50 else 20) * (1 if quick else 5), 7 + rate)
        for rate in RATES
        for shape in ("independent", "bursty")
    ]
    for (_, rate, share, shape, _, _), runs in zip(jobs, pool.map(delays, jobs), strict=True):
        middle, late = (float(np.quantile(runs, q)) for q in (0.5, 0.9))
        limit = {"independent": INDEPENDENT_S, "bursty": BURSTY_S}[shape] if rate == 500 else None
        fewest = fewest_requests(rate, share)
        yield harness.row(
            f"median delay, 5 % over the objective, {rate}/s, {shape}",
            middle,
            "s",
            "reported" if limit is None else f"<= {limit:g}",
            holds=limit is None or middle <= limit,
            p90=round(late, 2),
            runs=len(runs),
            requests=round(middle * rate),
            fewest_requests=round(fewest),
            note=f"p90 {late:.1f} s; {middle * rate:.0f} requests, any test needs {fewest:.0f} on average",
        )


def fleet_breaks(job):
    """(largest share of the fleet that captures at one moment, seconds until the first capture) of one fault that hits all replicas."""
    kind, seed = job
    rng = np.random.default_rng(seed)
    begun = []
    for _ in range(REPLICAS):
        held = detector(kind, REPLICAS)
        firings(held, *traffic.independent(rng, 500, 300, 0.005))
        late = rng.random()
        n, k = traffic.independent(rng, 500, 60, 0.05)
        k[0] = rng.binomial(k[0], 1.0 - late)
        fired = firings(held, n, k, 300)
        if not fired:
            continue
        selection = SelfSelection(REPLICAS, rng.random)
        selection.offer(BREACH, fired[0] * S)
        if selection.drawn:
            moment = fired[0]
            while selection.take(moment * S) is None:
                moment += 1
            begun.append(moment - 300 - late)
    begun.sort()
    worst = max((sum(moment <= other < moment + CAPTURE_S for other in begun) for moment in begun), default=0)
    return worst / REPLICAS, begun[0] if begun else math.inf


def herd(pool, kind, *, quick):
    found = list(pool.map(fleet_breaks, [(kind, seed) for seed in range(4 if quick else 40)]))
    worst, first = [each[0] for each in found], [each[1] for each in found]
    # lots are independent: some fault draws more than any number
    share, middle = float(np.quantile(worst, 0.95, method="higher")), float(np.median(first))
    runs, many, nobody = len(found), sum(each > 0.005 for each in worst), sum(math.isinf(each) for each in first)
    yield harness.row(
        f"fleet of {REPLICAS} that breaks at once: capturing at the worst moment",
        100 * share,
        "%",
        "<= 0.5",
        holds=share <= 0.005,
        runs=runs,
        mean=100 * float(np.mean(worst)),
        largest=100 * max(worst),
        note=f"95th percentile of {runs} faults; more than 0.5 % in {many} of them, largest {100 * max(worst):.1f} %",
    )
    yield harness.row(
        f"fleet of {REPLICAS} that breaks at once: first capture",
        middle,
        "s",
        "<= 6",
        holds=middle <= 6.0,
        nobody=nobody,
        note=f"median of {runs} faults, detection included; in {nobody} the first of the rounds drew nobody, the next is {ROUND_S:.0f} s later",
    )


def caught(*, quick):
    """Slow requests kept within 30 s of a breach; not in a pool, because torch is loaded for it."""
    import _keeping

    runs = 20 if quick else 100
    stalls = _keeping.measured(quick=quick)
    took = sorted(start + stop for start, stop, _ in stalls["dropped"])
    middle, late = (took[int(q * (len(took) - 1))] / 1e6 for q in (0.5, 0.99))
    yield harness.row(
        "stall of an attempt that is dropped", middle, "ms", "reported", p99=late, note=f"P99 {late:.2f} ms, {len(took)} attempts"
    )
    for shape in ("bursty", "independent"):
        found = [_keeping.kept((shape, seed), stalls) for seed in range(FRESH, FRESH + runs)]
        share = sum(slow >= 5 for slow, _, _ in found) / runs
        over, attempts = (float(np.mean([each[place] for each in found])) for place in (1, 2))
        yield harness.row(
            f"five slow requests kept within 30 s, 4 % over, 100/s, {shape}",
            100 * share,
            "%",
            ">= 95",
            holds=share >= 0.95,
            runs=runs,
            note=f"{runs} seeded runs, {100 * over:.1f} % over, {attempts:.0f} attempts each",
        )


def first_minutes(job):
    kind, rate, starts, seed = job
    rng = np.random.default_rng(seed)
    return sum(len(firings(Detector(OBJECTIVE, trigger=kind), *traffic.bursty(rng, rate, 300, 0.005))) for _ in range(starts))


def extras(pool, kind):
    """Beyond the targets: other kinds of healthy traffic, and the first five minutes after a restart."""
    shapes = [shape for shape in MAKERS if shape != "bursty"]
    jobs = [(kind, rate, day, shape) for shape in shapes for rate in (50, 500, 5000) for day in range(4)]
    found = [each[0] for each in pool.map(false_triggers, jobs, chunksize=4)]
    for position in range(0, len(jobs), 4):
        _, rate, _, shape = jobs[position]
        total = sum(found[position : position + 4])
        yield harness.row(f"false triggers, healthy, {shape}, {rate}/s", total / 4, "1/day", "reported", days=4)
    starts = [(kind, rate, 400, rate) for rate in (500, 5000)]
    for (_, rate, count, _), total in zip(starts, pool.map(first_minutes, starts), strict=True):
        yield harness.row(f"false triggers, first 300 s after a start, {rate}/s", total / count, "", "reported", note=f"{count} starts")


def main():
    arguments = harness.arguments(
        __doc__, lambda parser: parser.add_argument("--trigger", choices=("e_detector", "burn_rate"), default="e_detector")
    )
    kind, quick = arguments.trigger, arguments.quick
    with ProcessPoolExecutor(max_workers=min(os.cpu_count() or 1, 8)) as pool:
        rows = [*quiet(pool, kind, quick=quick), *prompt(pool, kind, quick=quick), *herd(pool, kind, quick=quick)]
        if not quick:
            rows += extras(pool, kind)
    rows += caught(quick=quick)
    return harness.finish(rows, arguments.json, trigger=kind)


if __name__ == "__main__":
    sys.exit(main())
