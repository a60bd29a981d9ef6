"""Services with planted causes, and the truth about each: `python scenarios.py NAME [SECONDS] [SEED]` prints one diagnosis as JSON."""

# ruff: noqa: T201
from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import device_faults  # noqa: F401  (each registers its services)
import harness
import host_faults  # noqa: F401
import request_faults  # noqa: F401
from harness import Service
from planted import SCENARIOS

SECONDS = 15.0


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
        **{key: result[key] for key in ("requests", "exceeding", "p50_ms", "p99_ms", "cpu", "run_queue", "raised")},
    }


def diagnosis(name, seconds=SECONDS, seed=1):
    """Run one scenario in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), name, str(seconds), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def table(rows):
    """Lines of text, one a service."""
    lines = [f"{'service':32} {'planted':36} {'ranked first':32} {'first':5} {'in 3':5} {'other high':24} P50/P99 ms, CPUs used/waited for"]
    for row in rows:
        planted = " + ".join(row["truth"]) or "healthy"
        if "skipped" in row:
            lines.append(f"{row['name']:32} {planted:36} skipped: {row['skipped']}")
            continue
        words = {True: "yes", False: "NO"}
        others = ", ".join(row["other_high"]) or "-"
        figures = f"{row['p50_ms']:.1f}/{row['p99_ms']:.0f}  {row['cpu']:.2f}/{row['run_queue']:.2f}{'' if row['raised'] else '  priority as given'}"
        lines.append(
            f"{row['name']:32} {planted:36} {row['first']:32} {words[row['right']]:5} {words[row['in_three']]:5} {others:24} {figures}"
        )
    return lines


def verdict(rows):
    """One line over all runs."""
    ran = [row for row in rows if "skipped" not in row]
    planted, healthy = [row for row in ran if row["truth"]], [row for row in ran if not row["truth"]]
    pairs = [row for row in planted if len(row["truth"]) > 1]
    first, both = sum(row["right"] for row in planted), sum(row["in_three"] for row in pairs)
    share = f" ({100 * first / len(planted):.0f} %)" if planted else ""
    loud = sum(len(row["loud"]) for row in healthy)
    return [
        f"planted cause first: {first} of {len(planted)}{share}; pairs among the first three: {both} of {len(pairs)}; loud findings on {len(healthy)} healthy runs: {loud}"
    ]


QUICK = ("slow_lock", "copies_and_lock")
"""What a short run takes, one after another."""


def main(name, seconds=SECONDS, seed=1):
    scenario = SCENARIOS[name]
    missing = scenario.needs()
    if missing is not None:
        print(json.dumps({"skipped": missing}))
        return
    raised = harness.raise_priority()
    service = Service(seconds=float(seconds), seed=int(seed))
    scenario.build(service)
    gc.collect()
    print(json.dumps({"raised": raised, **harness.run(service)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
