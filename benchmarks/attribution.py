"""How true the diagnosis is: shares, intervals and what-ifs against a simulated service whose causes are known, and what a large trace costs.

The service has two planted causes (a copy path that stalls, a lock that is held long) which come as episodes, 1.2 a second. Its evidence
goes through the same JSON as a worker's. The truth is taken from the raw vectors: of the very sample (does the summary lose anything?), of
20 000 seconds (does the sample suffice?), and of a second service that lacks the cause (does the what-if come true?).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from _evidence import blame_rows, cost_rows, scenario_rows

from inferscope.diagnose import attribute, merge, plan

ROOT = Path(__file__).resolve().parents[1]
CAUSES = ("copy:h2d", "lock:rules")
TRACE_BYTES, LARGE_BYTES = 100 << 20, 500 << 20
RATE = 2000

CHILD = """
import re, sys, time
from pathlib import Path
started = time.process_time()
if Path(sys.argv[1]).is_dir():
    from inferscope.diagnose.__main__ import main
    result = main(sys.argv[1:])
else:
    from inferscope.diagnose import read_trace
    result = read_trace(Path(sys.argv[1])).events
# ru_maxrss would start with what the parent held when it forked
peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
print(result, time.process_time() - started, int(peak[1]) / 1024)
"""


def load_service():
    """The generator that the tests use."""
    spec = importlib.util.spec_from_file_location("planted_service", ROOT / "tests" / "diagnose" / "service.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


S = load_service()
EDGE = 20 * S.MS
LABEL = {name: position for position, name in enumerate(S.LABELS)}


def attributed(requests, keep=1):
    horizon = merge([S.evidence(requests, [EDGE], keep=keep)], "score")
    return horizon, attribute(horizon, EDGE)


def population(seconds):
    """Shares over a time so long that its sampling error does not matter."""
    parts = [S.simulate(seconds / 8, 150, seed=10_000 + i) for i in range(8)]
    whole = S.Requests(np.concatenate([part.start for part in parts]), np.concatenate([part.vectors for part in parts]))
    return S.truth(whole, EDGE)


def sample_rows(runs):
    """The summary against the raw vectors of the same requests."""
    worst, residual = 0.0, 0.0
    for seed in range(runs):
        requests = S.simulate(60, 300, seed=seed)
        for edge in (12 * S.MS, EDGE, 35 * S.MS):
            horizon = merge([S.evidence(requests, [edge], keep=1)], "score")
            found = attribute(horizon, edge)
            expected = S.truth(requests, edge)
            worst = max([worst, *(100 * abs(share.share - expected[LABEL[share.name]]) for share in found.shares)])
            parts = sum(share.tail_ms for share in found.shares)
            residual = max(residual, 1e6 * abs(parts - requests.wall[requests.wall > edge].mean() / S.MS))
    return [
        row("share error against the same requests, worst", worst, "points", "<= 1", worst <= 1),
        row("parts of a slow request against its measured time, worst", residual, "ns/request", "<= 1000", residual <= 1000),
    ]


def long_rows(runs, truth):
    """Five minutes at 2000 requests/s, as the target says, against the population: episodes decide the error, and at a lower rate each holds fewer requests."""
    errors = []
    for seed in range(runs):
        _, found = attributed(S.simulate(300, RATE, seed=500 + seed))
        errors.append(100 * max(abs(found.share(label).share - truth[LABEL[label]]) for label in CAUSES))
    typical, high = float(np.median(errors)), float(np.quantile(errors, 0.9))
    return [
        row(f"share error against the population after 300 s, median of {runs}", typical, "points", "<= 5", typical <= 5),
        row(f"share error against the population after 300 s, p90 of {runs}", high, "points", "<= 5", high <= 5),
    ]


def coverage_rows(runs, truth):
    """How often the 95 % interval holds the population's share."""
    held, widths, top = [], [], []
    for seed in range(runs):
        _, found = attributed(S.simulate(100, 100, seed=2000 + seed))
        for label in CAUSES:
            share = found.share(label)
            held.append(share.ci[0] <= truth[LABEL[label]] <= share.ci[1])
            widths.append(100 * (share.ci[1] - share.ci[0]))
        top.append(found.shares[0].name == CAUSES[0])
    rate = float(np.mean(held))
    return [
        row(f"95 % intervals that hold the truth, 100 s, {len(held)} intervals", rate, "fraction", ">= 0.90", rate >= 0.90),
        row("mean width of these intervals", float(np.mean(widths)), "points", "reported", holds=True),
        row("largest cause named first, 100 s", float(np.mean(top)), "fraction", ">= 0.85", float(np.mean(top)) >= 0.85),
    ]


def what_if_rows(runs):
    """Estimates from 64 vectors a band against capping every request, and against a service without the cause."""
    capped, again, calibration = [], [], []
    for seed in range(runs):
        requests = S.simulate(300, 300, seed=seed)
        horizon, found = attributed(requests, keep=64)
        planned = plan(horizon, found, 20.0)
        calibration.append(abs(planned.calibration - 1))
        for fix, rates in (
            ((CAUSES[0],), {"copy_rate": 0.0}),
            ((CAUSES[1],), {"lock_rate": 0.0}),
            (CAUSES, {"copy_rate": 0.0, "lock_rate": 0.0}),
        ):
            estimate = planned.p99_ms(*fix)
            capped.append(abs(estimate / S.capped_p99(requests, [LABEL[label] for label in fix]) - 1))
            fixed = float(np.quantile(S.simulate(2000, 150, seed=900 + seed, **rates).wall, 0.99)) / S.MS
            again.append(abs(estimate / fixed - 1))
    median, p90 = float(np.median(again)), float(np.quantile(capped, 0.9))
    return [
        row("what-if P99 against capping every request, p90", 100 * p90, "%", "<= 10", p90 <= 0.10),
        row("what-if P99 against a service without the cause, median", 100 * median, "%", "<= 10", median <= 0.10),
        row("sample's P99 against the histogram's, worst", 100 * max(calibration), "%", "<= 10", max(calibration) <= 0.10),
    ]


def write_trace(path, size):
    """A CUDA server's trace in Kineto's shape: operators, launches, kernels, pageable copies; returns the events and the pairs."""
    events = pairs = 0
    with path.open("w") as file:
        file.write('{"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "synthetic"}], "traceEvents": [\n')
        while file.tell() < size:
            rows = []
            for _ in range(500):
                ts, tid, correlation = 40.0 * events, 100 + events % 8, events + 1
                details = (
                    f'"External id": {correlation}, "Record function id": 0, "Input Dims": [[8, 512, 768], [768, 768]], "Ev Idx": {events}'
                )
                args = f'"External id": {correlation}, "cbid": 211, "correlation": {correlation}'
                device = f'"device": 0, "context": 1, "stream": 7, "correlation": {correlation}, "bytes": 65536, "grid": [96, 1, 1], "block": [256, 1, 1]'
                rows += [
                    f'{{"ph": "X", "cat": "cpu_op", "name": "aten::addmm", "pid": 9, "tid": {tid}, "ts": {ts}, "dur": 30.5, "args": {{{details}}}}}',
                    f'{{"ph": "X", "cat": "cpu_op", "name": "aten::copy_", "pid": 9, "tid": {tid}, "ts": {ts + 1}, "dur": 20.5, "args": {{{details}}}}}',
                    f'{{"ph": "X", "cat": "cuda_runtime", "name": "cudaMemcpyAsync", "pid": 9, "tid": {tid}, "ts": {ts + 2}, "dur": 4.5, "args": {{{args}}}}}',
                    f'{{"ph": "X", "cat": "cuda_runtime", "name": "cudaStreamSynchronize", "pid": 9, "tid": {tid}, "ts": {ts + 8}, "dur": 9, "args": {{{args}}}}}',
                    f'{{"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pageable -> Device)", "pid": 0, "tid": 7, "ts": {ts + 5}, "dur": 6, "args": {{{device}}}}}',
                ]
                events += 5
                pairs += 1
            file.write(("" if events == 2500 else ",\n") + ",\n".join(rows))
        file.write('\n], "baseTimeNanoseconds": 1700000000000000000}\n')
    return events, pairs


def child(path):
    """Result, CPU seconds and peak resident MiB of a diagnosis in a process of its own: on one core, whatever else the machine does."""
    done = subprocess.run([sys.executable, "-c", CHILD, str(path)], capture_output=True, text=True, check=True, cwd=ROOT)
    return tuple(float(value) for value in done.stdout.split())


def trace_rows():
    """Time and memory for 100 MB, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.trace.json"
        events, _ = write_trace(path, TRACE_BYTES)
        megabytes = path.stat().st_size / 2**20
        seen, seconds, peak = child(path)
    return [
        row(f"trace of {megabytes:.0f} MB, events read", seen, "events", f"== {events}", seen == events),
        row("trace of 100 MB, CPU time", seconds, "s", "<= 20", seconds <= 20),
        row("trace of 100 MB, peak resident memory", peak, "MiB", "<= 200", peak <= 200),
    ]


def large_rows():
    """Memory for 500 MB; the full run only, since writing and reading it takes a minute."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.trace.json"
        write_trace(path, LARGE_BYTES)
        _, seconds, peak = child(path)
    return [
        row("trace of 500 MB, CPU time", seconds, "s", "reported", holds=True),
        row("trace of 500 MB, peak resident memory", peak, "MiB", "<= 200", peak <= 200),
    ]


def incident_rows():
    """The child process on an incident of five minutes at 500 requests/s."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "score" / "0" / "incidents" / "x"
        directory.mkdir(parents=True)
        (directory / "breach.json").write_text(json.dumps(S.breach()))
        (directory / "evidence-0-1.json").write_text(json.dumps(S.evidence(S.simulate(300, 500, seed=1), [EDGE])))
        _, seconds, peak = child(directory)
    return [
        row("diagnosis of an incident, CPU time of the child process", seconds, "s", "<= 10", seconds <= 10),
        row("diagnosis of an incident, peak resident memory", peak, "MiB", "<= 200", peak <= 200),
    ]


def row(name, value, unit, target, holds):
    return {"name": name, "value": round(float(value), 4), "unit": unit, "target": target, "holds": bool(holds)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, at most 50 s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there as well")
    options = parser.parse_args()
    truth = population(8_000 if options.quick else 40_000)
    rows = [
        *incident_rows(),
        *trace_rows(),
        *([] if options.quick else large_rows()),
        *scenario_rows(1 if options.quick else 5),
        *blame_rows(1 if options.quick else 5, 4.0 if options.quick else 20.0),
        *cost_rows(41 if options.quick else 201),
        *sample_rows(2 if options.quick else 20),
        *long_rows(10 if options.quick else 100, truth),
        *coverage_rows(100 if options.quick else 1000, truth),
        *what_if_rows(2 if options.quick else 10),
    ]
    width = max(len(entry["name"]) for entry in rows)
    for entry in rows:
        print(
            f"{entry['name']:{width}}  {entry['value']:>12g} {entry['unit']:<11} {entry['target']:<10} {'holds' if entry['holds'] else 'MISSED'}"
        )
    if options.json:
        machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "system": platform.platform(), "load": os.getloadavg()[0]}
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    return 0 if all(entry["holds"] for entry in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
