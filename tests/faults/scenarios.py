"""Services with planted causes, and the truth about each: `python scenarios.py NAME [SECONDS] [SEED]` prints one diagnosis as JSON."""

# ruff: noqa: T201
from __future__ import annotations

import atexit
import functools
import gc
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import device_faults  # noqa: F401  (each registers its services)
import harness
import host_faults  # noqa: F401
import request_faults  # noqa: F401
from harness import Service
from planted import SCENARIOS
from serving import Parent, serve

SECONDS = 10.2
"""Of a run: a cause is named from ten seconds with slow requests up, and forty services five times are to fit in forty minutes."""
EPISODES, OF_S, CPU, MINUTES, RUNS = 60, 15.0, 0.40, 40.0, 5
"""What a service is to yield, in how many seconds, with how much of a CPU; and how long all of them may take, each so many times."""


def judge(name, result):
    """How a diagnosis compares with the truth: None where the scenario could not run."""
    scenario = SCENARIOS[name]
    if "skipped" in result:
        return {"name": name, "truth": scenario.truth, "skipped": result["skipped"]}
    found = [finding["id"] for finding in result["findings"]]
    first = result["findings"][0] if found else {"id": "nothing", "where": "", "severity": ""}
    # what stands first at equal severity and share belongs together, such as a lock and what its holder waits for
    right = (
        not scenario.truth
        or (first["id"] == scenario.truth[0] and scenario.where in first["where"] and first["severity"] in {"high", "medium"})
        if len(scenario.truth) < 2
        else first["id"] in scenario.truth and first["severity"] in {"high", "medium"}
    )
    return {
        "name": name,
        "truth": scenario.truth,
        "first": f"{first['id']} ({first['severity']})" if found else "nothing",
        "right": right,
        "in_three": set(scenario.truth) <= set(found[:3]),
        "loud": [finding["id"] for finding in result["findings"] if finding["severity"] in {"high", "medium"}]
        if not scenario.truth
        else [],
        "other_high": [f["id"] for f in result["findings"] if f["severity"] == "high" and f["id"] not in scenario.truth],
        "episodes_15s": round(result["episodes"] * OF_S / result["seconds"], 1),
        "few": scenario.few,
        "hot": scenario.hot,
        **{
            key: result.get(key)
            for key in ("requests", "exceeding", "p50_ms", "p99_ms", "cpu", "children_cpu", "run_queue", "raised", "wall_s", "seed")
        },
    }


@functools.cache
def parent(*, with_torch):
    """The process that services of one kind are forked from."""
    started = Parent(with_torch=with_torch)
    atexit.register(started.close)
    return started


def diagnosis(name, seconds=SECONDS, seed=1):
    """Run one scenario in a process of its own.

    Raises:
        RuntimeError: It could not be run or diagnosed.
    """
    begun = time.monotonic()
    result = parent(with_torch=SCENARIOS[name].torch).run(name, seconds, seed)
    return {**result, "wall_s": round(time.monotonic() - begun, 2), "seed": seed}


def table(rows):
    """Lines of text, one a run."""
    head = f"{'service':32} {'planted':36} {'ranked first':32} {'first':5} {'in 3':5} {'other high':24}"
    lines = [f"{head} {'slow episodes':>13} {'CPU, children':>14} {'took':>7}  P50/P99 ms, waited for a CPU"]
    for row in rows:
        planted = " + ".join(row["truth"]) or "healthy"
        if "skipped" in row:
            lines.append(f"{row['name']:32} {planted:36} skipped: {row['skipped']}")
            continue
        words = {True: "yes", False: "NO"}
        others = ", ".join(row["other_high"]) or "-"
        cost = f"{row['episodes_15s']:>6.0f} in 15 s {100 * row['cpu']:>6.0f} + {100 * row['children_cpu']:>3.0f} % {row['wall_s']:>5.1f} s"
        figures = f"{row['p50_ms']:.1f}/{row['p99_ms']:.0f} {row['run_queue']:.2f}{'' if row['raised'] else '  priority as given'}"
        lines.append(
            f"{row['name']:32} {planted:36} {row['first']:32} {words[row['right']]:5} {words[row['in_three']]:5} {others:24} {cost}  {figures}"
        )
    return lines


def sparse(rows):
    """Runs of planted services with fewer slow episodes than they are to yield, without those that say why."""
    return [row for row in _ran(rows) if row["truth"] and not row["few"] and row["episodes_15s"] < EPISODES]


def hot(rows):
    """Runs that took more of a CPU than they may, without those that say why."""
    return [row for row in _ran(rows) if not row["hot"] and row["cpu"] > CPU]


def minutes(rows):
    """What all runs of one seed take, times the seeds of a full run."""
    seeds = {row["seed"] for row in _ran(rows)}
    return RUNS * sum(row["wall_s"] for row in _ran(rows)) / 60 / max(1, len(seeds))


def _ran(rows):
    return [row for row in rows if "skipped" not in row]


def verdict(rows):
    """What all runs say together."""
    ran = _ran(rows)
    planted, healthy = [row for row in ran if row["truth"]], [row for row in ran if not row["truth"]]
    pairs = [row for row in planted if len(row["truth"]) > 1]
    first, both = sum(row["right"] for row in planted), sum(row["in_three"] for row in pairs)
    share = f" ({100 * first / len(planted):.0f} %)" if planted else ""
    loud = sum(len(row["loud"]) for row in healthy)
    few, burnt = _names(sparse(rows)), _names(hot(rows))
    lines = [
        f"planted cause first: {first} of {len(planted)}{share}; pairs among the first three: {both} of {len(pairs)}; loud findings on {len(healthy)} healthy runs: {loud}",
        f"fewer than {EPISODES} slow episodes in {OF_S:g} s: {few}; over {100 * CPU:.0f} % of a CPU: {burnt}; {RUNS} seeds take {minutes(rows):.0f} minutes",
    ]
    for what, key in (("fewer episodes", "few"), ("more CPU", "hot")):
        lines += [f"  {what} by nature, {name}: {why}" for name, why in sorted({row["name"]: row[key] for row in ran if row[key]}.items())]
    return lines


def _names(rows):
    return ", ".join(sorted({row["name"] for row in rows})) or "none"


QUICK = ("slow_lock", "copies_and_lock")
"""What a short run takes, one after another."""


def main(name, seconds=SECONDS, seed=1):
    """One run; JSON types."""
    scenario = SCENARIOS[name]
    missing = scenario.needs()
    if missing is not None:
        return {"skipped": missing}
    raised = harness.raise_priority()
    harness.calibrate()
    service = Service(seconds=float(seconds), seed=int(seed))
    scenario.build(service)
    gc.collect()
    return {"raised": raised, **harness.run(service)}


if __name__ == "__main__":
    if sys.argv[1] == "--parent":
        serve(sys.argv[2:], main)
    else:
        print(json.dumps(main(*sys.argv[1:])))
