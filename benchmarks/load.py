"""Does open-loop load report what users would have seen, and how exact is the generator's own clock?

    python benchmarks/load.py [--quick] [--json FILE]

A server that answers after 2 ms and stands still for 500 ms every 10 s. Requests that are due while it stands still wait for the rest of
it, so latency above the 2 ms is uniform from 0 to 500 ms for 5 % of the requests and 0 for the others: P99 = 2 + 500 · (1 - 0.01/0.05) ms.
A closed loop against the same server shows what is hidden. The generator's lateness is measured against an idle server, rate by rate; its
stated rate is the highest of these at which the P99 stays within 1 ms. Server and generator are scheduled ahead of other
programs where that is allowed; elsewhere the generator needs an idle core.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import time

import _harness
import numpy as np

from inferscope.bench import load
from inferscope.bench.metrics import little
from inferscope.bench.stats import observed
from inferscope.bench.targets import free_port

PERIOD, STALL, SERVICE = 10.0, 0.5, 0.002
WITHIN, LAG_MS, STATED = 0.05, 1.0, 500
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
        plan = load.LoadPlan(url, 1.0, seconds / 2, seed=1, connections=4, mode="closed")
        closed = load.measure(plan)
    rows.append(
        row("P99 of a closed loop of 4 against the same server", p99(closed.latency_ns), "ms", "reported", note="what hides the stall")
    )
    rates = (100, 500, 1000) if options.quick else (50, 100, 200, 500, 1000, 2000)
    kept, lag_at = 0, {}
    for rate in rates:
        lag_at[rate] = p99(lateness(rate, 3.0 if options.quick else 10.0).lag_ns)
        rows.append(row(f"generator lateness, P99, at {rate}/s", lag_at[rate], "ms", "reported"))
        kept = rate if lag_at[rate] <= LAG_MS else kept
    rows.append(row(f"generator lateness, P99, at the stated {STATED}/s", lag_at[STATED], "ms", f"<= {LAG_MS:g}", holds=lag_at[STATED] <= LAG_MS,
                    note=f"{scheduled}, load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"))  # fmt: skip
    rows.append(row("highest rate here with lateness P99 within 1 ms", kept, "1/s", "reported"))
    return _harness.finish(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
