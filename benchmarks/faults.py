"""Planted faults: how often a diagnosis ranks the planted cause first, and how often it cries wolf.

Each service of tests/faults runs in a process of its own, under open load, watched as the runtime watches one, and is diagnosed from its
evidence alone. The figures depend on how busy the machine is: what other processes take from a service is a cause as well, so each
service's own CPU time and run-queue delay stand beside its row. `--quick` runs a subset and proves little; the full run is the measurement.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

from _harness import ROOT, arguments, finish, row


def load():
    spec = importlib.util.spec_from_file_location("fault_scenarios", ROOT / "tests" / "faults" / "scenarios.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def extend(parser):
    parser.add_argument("--seeds", type=int, default=1, help="runs of each service (1)")
    parser.add_argument("--only", nargs="*", help="names of services")
    parser.add_argument("--others", type=Path, metavar="FILE", help="count the runs of the other services from FILE, which --json wrote")


def said(rows, key):
    """Which runs, with what each was measured at."""
    return ", ".join(f"{each['name']} {each[key]:g}" for each in rows)


def main():
    options = arguments(__doc__, extend)
    scenarios = load()
    names = options.only or [*(scenarios.QUICK if options.quick else scenarios.SCENARIOS), *(("healthy",) if options.quick else ())]
    judged, failed = [], []
    for seed in range(1, options.seeds + 1):
        for name in names:
            try:
                judged.append(scenarios.judge(name, scenarios.diagnosis(name, seed=seed)))
                print("\n".join(scenarios.table(judged[-1:])[len(judged) > 1 :]), flush=True)
            except RuntimeError as error:
                failed.append(str(error))
                print(error, file=sys.stderr)
    if options.others:
        judged = [each for each in json.loads(options.others.read_text())["services"] if each["name"] not in names] + judged
    ran = [each for each in judged if "skipped" not in each]
    planted, healthy = [each for each in ran if each["truth"]], [each for each in ran if not each["truth"]]
    pairs = [each for each in planted if len(each["truth"]) > 1]
    subset = f" (a subset of {len(scenarios.SCENARIOS)}, --quick)" if options.quick else ""
    rows = [row("services that could not be run or diagnosed", len(failed), "runs", "== 0", holds=not failed)]
    if planted:
        first = sum(each["right"] for each in planted) / len(planted)
        rows.append(row(f"planted cause ranked first, {len(planted)} runs{subset}", 100 * first, "%", ">= 95", holds=first >= 0.95))
        found = sum(each["in_three"] for each in planted) / len(planted)
        rows.append(row(f"planted causes all among the first three, {len(planted)} runs", 100 * found, "%", "reported"))
    if pairs:
        both = sum(each["in_three"] for each in pairs)
        rows.append(
            row(f"planted pairs, both among the first three, of {len(pairs)}", both, "pairs", f"== {len(pairs)}", holds=both == len(pairs))
        )
    if healthy:
        loud = sum(len(each["other_high"]) for each in healthy)
        rows.append(row(f"findings of high severity on {len(healthy)} healthy runs", loud, "", "== 0", holds=loud == 0))
    few, hot, minutes = scenarios.sparse(judged), scenarios.hot(judged), scenarios.minutes(judged)
    rows += [
        row(
            f"runs with fewer than {scenarios.EPISODES} slow episodes in {scenarios.OF_S:g} s, of services whose fault permits more",
            len(few), "runs", "== 0", holds=not few, note=said(few, "episodes_15s"),
        ),
        row(
            f"runs that take more than {100 * scenarios.CPU:.0f} % of a CPU, of services whose fault does not",
            len(hot), "runs", "== 0", holds=not hot, note=said(hot, "cpu"),
        ),
        row(f"all these services {scenarios.RUNS} times, one after another", minutes, "minutes", f"<= {scenarios.MINUTES:g}", holds=minutes <= scenarios.MINUTES),
    ]  # fmt: skip
    rows.append(row("services skipped", sum("skipped" in each for each in judged), "", "reported"))
    return finish(rows, options.json, services=judged)


if __name__ == "__main__":
    sys.exit(main())
