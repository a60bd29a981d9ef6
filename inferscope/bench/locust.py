"""A Locust scenario with the arrivals of a plan, for loads that one machine cannot make.

Locust's own users wait for an answer before they ask again. This scenario does not: a greenlet a request, started when it is due, whatever
the others do; worker k of n takes every n-th arrival, and latency counts from the intended start, as in `open_loop`. Every worker sends its
rows to the master, which writes them as a load that `inferscope` reads.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import numpy as np

from inferscope.bench.load import schedule
from inferscope.bench.result import ARRAYS, LoadPlan, LoadResult
from inferscope.errors import InferscopeError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["command", "read_rows", "scenario"]

_TEMPLATE: Final = '''"""Load on {url}: {what}; written by inferscope, run by Locust.

On one machine:   locust -f THIS_FILE --headless
On several:       locust -f THIS_FILE --headless --master --expect-workers N      and on each:  locust -f - --worker --master-host HOST
INFERSCOPE_ROWS names the file for the rows of all requests.
"""

import base64
import json
import os
import time

import gevent
import locust.runners
from locust import FastHttpUser, events, task

# A worker that sends is busy; three seconds without a heartbeat are no reason to give it up.
locust.runners.HEARTBEAT_LIVENESS = 30

PLAN = json.loads({plan!r})
PATH = {path!r}
DUE_S = json.loads({due!r})
BODIES = [base64.b64decode(body) for body in json.loads({bodies!r})]
ORDER = json.loads({order!r})
ROWS = []


class Asker(FastHttpUser):
    """One a worker: it starts a greenlet for each arrival that is this worker's."""

    host = {host!r}
    concurrency = PLAN["connections"]
    network_timeout = connection_timeout = PLAN["drain_s"] + PLAN["seconds"]

    @task
    def load(self):
        runner = self.environment.runner
        rank, count = max(getattr(runner, "worker_index", 0), 0), int(os.environ.get("INFERSCOPE_WORKERS", "1"))
        start = time.perf_counter_ns() + 500_000_000
        greenlets = []
        for index in range(rank, len(DUE_S), count):
            intended = start + int(DUE_S[index] * 1e9)
            gevent.sleep(max(intended - time.perf_counter_ns(), 0) / 1e9)
            greenlets.append(gevent.spawn(self.one, index, intended, start))
        gevent.joinall(greenlets, timeout=PLAN["drain_s"])
        if runner is not None and hasattr(runner, "send_message") and type(runner).__name__ == "WorkerRunner":
            for first in range(0, len(ROWS), 2000):
                runner.send_message("inferscope_rows", ROWS[first : first + 2000])
            runner.send_message("inferscope_done", len(ROWS))
            gevent.sleep(3600)
        else:
            finish(self.environment)

    def one(self, index, intended, start):
        launched = time.perf_counter_ns()
        headers = {{"Content-Type": "application/json"}}
        body = BODIES[ORDER[index]] if BODIES else None
        with self.client.request("POST" if BODIES else "GET", PATH, data=body, headers=headers if BODIES else None, catch_response=True) as answer:
            status, done = answer.status_code or 0, time.perf_counter_ns()
            if not 200 <= status < 300:
                answer.failure(f"status {{status}}")
            else:
                answer.success()
        # Offsets from the schedule's own begin: clocks of several machines share no zero.
        ROWS.append([index] + [each - start if each else 0 for each in (intended, launched, launched)] + [done - start if status else 0, status])


def finish(environment):
    target = os.environ.get("INFERSCOPE_ROWS")
    if target:
        with open(target, "w", encoding="ascii") as file:
            json.dump(ROWS, file)
    environment.runner.quit()


@events.init.add_listener
def on_init(environment, **_):
    if type(environment.runner).__name__ != "MasterRunner":
        return
    left = [int(os.environ.get("INFERSCOPE_WORKERS", "1"))]

    def rows(environment, msg, **_):
        ROWS.extend(msg.data)

    def done(environment, msg, **_):
        left[0] -= 1
        if not left[0]:
            finish(environment)

    environment.runner.register_message("inferscope_rows", rows)
    environment.runner.register_message("inferscope_done", done)
'''


def scenario(plan: LoadPlan, bodies: Sequence[bytes]) -> str:
    """The scenario as a Locust file.

    Args:
        plan: an open loop over HTTP.
        bodies: JSON bodies; none means GET.

    Raises:
        InferscopeError: the plan is closed, or its address is not HTTP.
        ValueError: the plan makes no arrivals.
    """
    import base64

    parts = urlsplit(plan.url)
    if plan.mode != "open" or parts.scheme not in {"http", "https"}:
        raise InferscopeError("a Locust scenario is an open loop over http(s): give --rate and such an address")
    due = schedule(plan)
    order = np.random.default_rng((plan.seed, 1)).integers(0, max(len(bodies), 1), due.size)
    return _TEMPLATE.format(
        url=plan.url,
        what=f"{plan.rate:g} requests/s for {plan.seconds:g} s, {plan.process}, seed {plan.seed}",
        host=f"{parts.scheme}://{parts.netloc}",
        path=(parts.path or "/") + (f"?{parts.query}" if parts.query else ""),
        plan=json.dumps(asdict(plan)),
        due=json.dumps([round(each / 1e9, 9) for each in due.tolist()]),
        bodies=json.dumps([base64.b64encode(body).decode() for body in bodies]),
        order=json.dumps(order.tolist()),
    )


def command(locust: Sequence[str], file: str, workers: int, port: int) -> list[str]:
    """How the master of a distributed run is started; with no workers, how it runs alone.

    Args:
        locust: the program, as words.
        file: the scenario.
        workers: how many connect.
        port: where they connect.
    """
    words = [*locust, "-f", file, "--headless", "--users", str(max(workers, 1)), "--spawn-rate", str(max(workers, 1)), "--only-summary"]
    if not workers:
        return words
    return [*words, "--master", "--expect-workers", str(workers), "--master-bind-port", str(port)]


def read_rows(content: bytes, plan: LoadPlan) -> LoadResult:
    """The load that a scenario's rows are.

    Raises:
        InferscopeError: they are damaged.
    """
    try:
        found: Any = json.loads(content)
        rows = np.reshape(np.asarray(found, dtype=np.int64), (-1, 6))
    except (ValueError, TypeError) as error:
        raise InferscopeError(f"the rows that Locust wrote are damaged ({type(error).__name__})") from error
    rows = rows[np.argsort(rows[:, 1], kind="stable")]
    # 0 means "never"; the first instant is put at 1 s.
    columns = {name: np.where(rows[:, at] > 0, rows[:, at], 0) for at, name in enumerate(ARRAYS, 1)}
    shifted = {name: np.where(column > 0, column + 1_000_000_000, 0) if name != "status" else column for name, column in columns.items()}
    shifted["intended_ns"] = rows[:, 1] + 1_000_000_000
    shifted["launched_ns"] = rows[:, 2] + 1_000_000_000
    shifted["sent_ns"] = rows[:, 3] + 1_000_000_000
    return LoadResult(plan, **shifted, stopped="")
