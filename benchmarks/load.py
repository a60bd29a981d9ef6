"""Does open-loop load report what users would have seen, and how exact is the generator's own clock?

    python benchmarks/load.py [--quick] [--json FILE]

A server that answers after 2 ms and stands still for 500 ms every 10 s. Requests that are due while it stands still wait for the rest of
it, so latency above the 2 ms is uniform from 0 to 500 ms for 5 % of the requests and 0 for the others: P99 = 2 + 500 · (1 - 0.01/0.05) ms.
A closed loop against the same server shows what is hidden, and is warned about. The generator's lateness is measured against an idle server,
rate by rate; up to its stated rate the P99 stays within 1 ms, and far beyond it the run is INVALID. Server and generator are scheduled
ahead of other programs where that is allowed; elsewhere the generator needs an idle core.

Then it is set beside other generators in one run: each gets one core and 16 connections for the same time against the same server, in turns.
wrk and hey come from Debian, k6 where it is installed, Locust from build/locust-venv; what is not there is said. They are closed loops:
how fast they ask is how fast they are, and their latency is that of the server and of themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import _harness
import numpy as np

from inferscope.bench import load, metrics, text
from inferscope.bench.metrics import generator_bound, little
from inferscope.bench.stats import observed
from inferscope.bench.targets import free_port

PERIOD, STALL, SERVICE = 10.0, 0.5, 0.002
WITHIN, LAG_MS, STATED = 0.05, 1.0, 500
BEYOND, CONNECTIONS = 40_000, 16
LOCUST = _harness.ROOT / "build" / "locust-venv" / "bin" / "locust"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Serve(asyncio.Protocol):
    """Answers each request after `SERVICE` seconds."""

    def __init__(self, delay):
        self.delay = delay

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        for _ in range(data.count(b"\r\n\r\n")):
            if self.delay:
                asyncio.get_running_loop().call_later(self.delay, self.answer)
            else:
                self.answer()

    def answer(self):
        if not self.transport.is_closing():
            self.transport.write(ANSWER)


async def serve(port, delay, stall):
    loop = asyncio.get_running_loop()
    await loop.create_server(lambda: Serve(delay), "127.0.0.1", port, backlog=1024)
    if not stall:
        await asyncio.Event().wait()
    start = loop.time()
    for number in range(10**6):
        # Due times, not intervals: the stalls keep to their share of the time.
        await asyncio.sleep(max(start + (number + 0.5) * PERIOD - loop.time(), 0))
        time.sleep(STALL)  # noqa: ASYNC251  (standing still is the point)


class Server:
    """The server in a process of its own."""

    def __init__(self, *, delay=SERVICE, stall=False):
        self.port = free_port()
        self.process = multiprocessing.Process(target=_run, args=(self.port, delay, stall), daemon=True)

    def __enter__(self):
        self.process.start()
        time.sleep(0.5)
        return f"http://127.0.0.1:{self.port}/"

    def __exit__(self, *_):
        self.process.terminate()
        self.process.join()


def _run(port, delay, stall):
    asyncio.run(serve(port, delay, stall))


def p99(values_ns):
    return observed(np.sort(values_ns / 1e6), 0.99)


def ahead():
    """Puts this process and those that it starts ahead of other programs, where that is allowed: their load is not what is measured."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except (AttributeError, OSError):
        return False
    return True


def lateness(rate, seconds):
    with Server(delay=0.001) as url:
        return load.measure(load.LoadPlan(url, rate, seconds, seed=rate))


def warned(closed):
    """Whether a report of a closed loop says what it hides."""
    document = {
        "settings": {"target": closed.plan.url, "mode": "closed", "connections": closed.plan.connections, "price_per_hour": None},
        "metrics": metrics.describe(closed), "problems": [], "warmup": {"cut": 0, "method": "none"}, "fingerprint": {"sha256": "-"},
    }  # fmt: skip
    return any("closed loop: the tail is optimistic" in line for line in text.run_lines(document, ["p99"]))


def ours(url, seconds, core):
    plan = load.LoadPlan(url, 1.0, seconds, connections=CONNECTIONS, mode="closed")
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        result = load.measure(plan)
    finally:
        os.sched_setaffinity(0, before)
    lasted = (result.done_ns.max() - result.intended_ns[0]) / 1e9
    return np.count_nonzero(result.fine) / lasted, p99(result.latency_ns)


def said(command, core, **environment):
    done = subprocess.run(["taskset", "-c", str(core), *command], capture_output=True, text=True, timeout=60, check=False,
                          env={**os.environ, **environment})  # fmt: skip
    return done.stdout + done.stderr


def wrk(url, seconds, core):
    out = said(["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{round(seconds)}s", "--latency", url], core)
    unit = {"us": 1e-3, "ms": 1.0, "s": 1e3}
    tail = re.search(r"99%\s+([\d.]+)(us|ms|s)", out)
    return float(re.search(r"Requests/sec:\s+([\d.]+)", out)[1]), float(tail[1]) * unit[tail[2]]


def hey(url, seconds, core):
    out = said(["hey", "-z", f"{seconds:g}s", "-c", str(CONNECTIONS), url], core, GOMAXPROCS="1")
    return float(re.search(r"Requests/sec:\s+([\d.]+)", out)[1]), float(re.search(r"99%+ in ([\d.]+) secs", out)[1]) * 1e3


def k6(url, seconds, core):
    with tempfile.TemporaryDirectory() as folder:
        script, result = Path(folder, "s.js"), Path(folder, "r.json")
        script.write_text(f"import http from 'k6/http'; export default () => {{ http.get('{url}'); }}")
        said(["k6", "run", "--vus", str(CONNECTIONS), "--duration", f"{seconds:g}s", "--summary-trend-stats", "p(99)",
              "--summary-export", str(result), str(script)], core, GOMAXPROCS="1")  # fmt: skip
        found = json.loads(result.read_text())["metrics"]
    return found["http_reqs"]["rate"], found["http_req_duration"]["p(99)"]


def locust(url, seconds, core):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "l.py").write_text(
            "from locust import FastHttpUser, task\nclass U(FastHttpUser):\n    @task\n    def t(self): self.client.get('/')\n"
        )
        said([str(LOCUST), "-f", f"{folder}/l.py", "--headless", "-u", str(CONNECTIONS), "-r", "1000", "-t", f"{max(seconds, 2):g}s",
              "--host", url.rstrip("/"), "--csv", f"{folder}/c", "--only-summary"], core)  # fmt: skip
        line = Path(folder, "c_stats.csv").read_text().strip().splitlines()[-1].split(",")
    return float(line[9]), float(line[18])


def peers(seconds, rounds):
    """Rows of all generators that are here, each with its own core, in turns; requests/s is the median of the rounds."""
    core = max(os.sched_getaffinity(0))
    cases = {"inferscope": ours}
    cases |= {name: call for name, call in (("wrk", wrk), ("hey", hey), ("k6", k6)) if shutil.which(name)}
    cases |= {"locust": locust} if LOCUST.exists() else {}
    absent = [name for name in ("wrk", "hey", "k6", "locust") if name not in cases]
    found = {name: [] for name in cases}
    with Server(delay=0) as url:
        for _ in range(rounds):
            for name, call in cases.items():
                with contextlib.suppress(subprocess.SubprocessError, OSError, TypeError, ValueError, KeyError, IndexError):
                    found[name].append(call(url, seconds, core))
    rows = []
    for name, values in found.items():
        if not values:
            absent.append(f"{name} (failed)")
            continue
        rate, tail = np.median(np.array(values), axis=0)
        rows.append(_harness.row(f"{name}: requests/s on one core, {CONNECTIONS} connections, closed loop", rate, "1/s", "reported",
                                 note=f"its P99 {tail:.2f} ms, {len(values)} rounds of {seconds:g} s"))  # fmt: skip
    if absent:
        print(f"not here: {', '.join(absent)}")
    return rows


def main():
    options = _harness.arguments(__doc__)
    rows, row = [], _harness.row
    scheduled = "real-time scheduling" if ahead() else "ordinary scheduling"
    seconds = 20.0 if options.quick else 60.0
    with Server(stall=True) as url:
        result = load.measure(load.LoadPlan(url, 200.0, seconds, seed=1, process="constant", connections=400))
    expected = SERVICE * 1e3 + STALL * 1e3 * (1 - 0.01 / (STALL / PERIOD))
    measured, error = p99(result.latency_ns), p99(result.latency_ns) / expected - 1
    law = little(result)
    rows += [
        row(f"open-loop P99 under a {STALL * 1e3:g} ms stall every {PERIOD:g} s, off the analytic {expected:.0f} ms by", abs(error), "",
            f"<= {WITHIN}", holds=abs(error) <= WITHIN, note=f"{measured:.1f} ms, {result.status.size} requests"),
        row("requests that were answered", float(result.fine.mean()), "", ">= 1", holds=bool(result.fine.all())),
        row("Little's law, gap", law["gap"], "", "<= 0.1", holds=law["holds"]),
    ]  # fmt: skip
    with Server(stall=True) as url:
        plan = load.LoadPlan(url, 1.0, PERIOD * 0.65 if options.quick else seconds / 2, seed=1, connections=4, mode="closed")
        closed = load.measure(plan)
    rows.append(
        row("P99 of a closed loop of 4 against the same server", p99(closed.latency_ns), "ms", "reported", note="what hides the stall")
    )
    rows.append(row("that closed loop is warned about", warned(closed), "", ">= 1", holds=warned(closed)))
    rates = (100, 500, 1000) if options.quick else (50, 100, 200, 500, 1000, 2000)
    kept, lag_at = 0, {}
    for rate in rates:
        lag_at[rate] = p99(lateness(rate, 2.0 if options.quick else 10.0).lag_ns)
        rows.append(row(f"generator lateness, P99, at {rate}/s", lag_at[rate], "ms", "reported"))
        kept = rate if lag_at[rate] <= LAG_MS else kept
    rows.append(row(f"generator lateness, P99, at the stated {STATED}/s", lag_at[STATED], "ms", f"<= {LAG_MS:g}", holds=lag_at[STATED] <= LAG_MS,
                    note=f"{scheduled}, load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"))  # fmt: skip
    limits = [lag for rate, lag in lag_at.items() if rate <= STATED]
    rows.append(row(f"generator lateness, P99, worst rate up to {STATED}/s", max(limits), "ms", "reported"))
    with Server(delay=0.001) as url:
        far = load.measure(load.LoadPlan(url, float(BEYOND), 0.5, seed=9, drain_s=3.0))
    invalid = generator_bound(far) is not None
    rows.append(
        row(
            f"INVALID at {BEYOND}/s, beyond what it can send",
            invalid,
            "",
            ">= 1",
            holds=invalid,
            note=f"lateness P99 {p99(far.lag_ns):.0f} ms",
        )
    )
    rows += peers(1.0 if options.quick else 5.0, 1 if options.quick else 3)
    rows.append(row("highest rate here with lateness P99 within 1 ms", kept, "1/s", "reported"))
    return _harness.finish(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
