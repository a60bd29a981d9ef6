"""How often a verdict is wrong, on a simulated service whose truth is known.

    python benchmarks/compare.py [--quick] [--json FILE]

The service: 8 ms with lognormal noise, bursts of 5 requests that are 8 ms slower on average (six in a thousand requests), on a machine whose
speed wanders by 5 % (first-order autoregressive from block to block). 20 pairs of blocks of 1000 requests in the order A B B A, the gates of
`inferscope ab`. With them the 95 % interval of P99's change is 0.38 wide on the log scale. `--quick` compares 200, the full run 600.
Warm-up: 2000 requests whose latency begins eleven times too high and decays with a constant of 60 requests; cut by MSER-5.
"""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # one process a core below

import _harness
import numpy as np

from inferscope.bench import compare, warmup
from inferscope.bench.interleave import order, until_decided
from inferscope.bench.stats import proportion_bounds

PAIRS, REQUESTS = 20, 1000
FALSE, SMALL, TAIL, BIAS = 0.05, 0.95, 0.65, 0.02
GATES = compare.parse_gates(compare.GATES)


class Machine:
    """Blocks of two versions of one service on one drifting machine."""

    def __init__(self, seed, slower=1.0, sd=0.05, rho=0.8):
        self.rng = np.random.default_rng(seed)
        self.slower, self.sd, self.rho = slower, sd, rho
        self.level = self.rng.normal() * sd

    def block(self, arm, _=0):
        self.level = self.rho * self.level + self.rng.normal() * self.sd * (1 - self.rho**2) ** 0.5
        latency = self.rng.lognormal(np.log(8.0), 0.25, REQUESTS)
        for start in self.rng.integers(0, REQUESTS, self.rng.poisson(6)):
            latency[start : start + self.rng.geometric(0.2)] += self.rng.exponential(8.0)
        return compare.Block(latency * np.exp(self.level) * (self.slower if arm == "b" else 1.0))


def pairs_of(machine):
    blocks = {"a": [], "b": []}
    for pair in range(PAIRS):
        for arm in order(pair):
            blocks[arm].append(machine.block(arm))
    return blocks["a"], blocks["b"]


def fixed(job):
    """Words and width of P99's interval at 20 pairs, as `ab --no-extend` judges."""
    seed, slower = job
    found = compare.judge(*pairs_of(Machine(seed, slower)), GATES, level=compare.look_level(0, 1), seed=seed)
    width = next(np.log1p(each.high) - np.log1p(each.low) for each in found if each.metric == "p99")
    return {each.metric: each.word for each in found}, float(width)


def extended(seed):
    """Words when the comparison goes on until everything is decided, at most 160 pairs."""
    machine, ticks = Machine(seed), iter(range(10**6))
    found = until_decided(machine.block, GATES, max_s=160, clock=lambda: float(next(ticks)), seed=seed)
    return {each.metric: each.word for each in found.verdicts}, found.pairs


def bias(seeds, constant=60, height=10.0, size=2000):
    rng, kept = np.random.default_rng(1), []
    for _ in range(seeds):
        run = 8.0 * rng.lognormal(0, 0.25, size) * (1 + height * np.exp(-np.arange(size) / constant))
        cut = warmup.mser5(run)
        if cut is not None:
            kept.append(run[cut:].mean())
    return abs(float(np.mean(kept)) / (8.0 * np.exp(0.25**2 / 2)) - 1), len(kept)


def share(words, metric, wanted):
    return sum(each[metric] in wanted for each in words) / len(words)


def rows_of(pool, quick):
    row = _harness.row
    same, small, large, long = (200, 40, 100, 20) if quick else (600, 100, 600, 200)
    aa = list(pool.map(fixed, [(seed, 1.0) for seed in range(same)], chunksize=5))
    words = [each for each, _ in aa]
    rows = []
    for metric in ("p50", "p95", "p99"):
        wrong = share(words, metric, {"IMPROVED", "REGRESSED"})
        low, high = proportion_bounds(round(wrong * same), same)
        rows.append(
            row(f"A/A false verdicts, {metric}", wrong, "", f"<= {FALSE}", holds=(low if quick else wrong) <= FALSE,
                note=f"[{low:.3f}, {high:.3f}] of {same}; no change {share(words, metric, {'NO CHANGE'}):.2f}", comparisons=same)
        )  # fmt: skip
    slower = [each for each, _ in pool.map(fixed, [(10_000 + seed, 1.10) for seed in range(small)], chunksize=5)]
    found = share(slower, "p50", {"REGRESSED"})
    rows.append(row("+10 % on P50 found", found, "", f">= {SMALL}", holds=found >= SMALL, note=f"of {small}"))
    tail = [each for each, _ in pool.map(fixed, [(20_000 + seed, 1.25) for seed in range(large)], chunksize=5)]
    found = share(tail, "p99", {"REGRESSED"})
    low, high = proportion_bounds(round(found * large), large)
    rows.append(
        row(
            "+25 % on P99 found at 20 pairs",
            found,
            "",
            f">= {TAIL}",
            holds=(high if quick else found) >= TAIL,
            note=f"[{low:.2f}, {high:.2f}] of {large}",
        )
    )
    called = share(tail, "p99", {"NO CHANGE", "IMPROVED"})
    rows.append(row("+25 % on P99 called no change or better", called, "", "<= 0", holds=called <= 0, note=f"of {large}"))
    rows.append(row("width of P99's interval, log scale", float(np.mean([width for _, width in aa])), "", "reported"))
    ext = list(pool.map(extended, range(30_000, 30_000 + long), chunksize=2))
    for metric in ("p50", "p95", "p99"):
        wrong = share([each for each, _ in ext], metric, {"IMPROVED", "REGRESSED"})
        low, high = proportion_bounds(round(wrong * long), long)
        note = f"[{low:.3f}, {high:.3f}] of {long}; mean pairs {np.mean([pairs for _, pairs in ext]):.0f}"
        rows.append(row(f"A/A false verdicts, extended to 160 pairs, {metric}", wrong, "", f"<= {FALSE}", holds=low <= FALSE, note=note))
    left, counted = bias(300)
    rows.append(row("warm-up bias left by MSER-5, constant of 60 requests", left, "", f"<= {BIAS}", holds=left <= BIAS and counted == 300))
    return rows


def main():
    options = _harness.arguments(__doc__)
    began = time.perf_counter()
    with ProcessPoolExecutor(max_workers=min(os.cpu_count() or 1, 8)) as pool:
        rows = rows_of(pool, options.quick)
    status = _harness.finish(rows, options.json)
    print(f"{time.perf_counter() - began:.0f} s")
    return status


if __name__ == "__main__":
    sys.exit(main())
