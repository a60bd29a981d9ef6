"""Open-loop load: arrivals keep to their schedule whatever the server does.

A client that waits for an answer before it sends the next request stops asking exactly while the server is slow, and reports a
stall of half a second as one slow request (coordinated omission). Here the arrival times are drawn beforehand, each request is sent
at its time on an idle or a new connection, and its latency counts from the *intended* start: what a user would have waited. The
generator's own lateness is measured for each request (`lag`), so that a busy client is seen and not blamed on the server.

    python -m inferscope.bench.load --url http://127.0.0.1:8000/score --rate 80 --seconds 40 --bodies bodies.jsonl --json load.json

It should run in a process of its own (`measure` starts one, `generators.Generators` keeps several): in the server's process it would take the interpreter lock from it.
Instants are on the `time.perf_counter_ns` clock, which processes of one Linux machine share.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import gc
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import numpy as np

from inferscope.bench.arrivals import arrivals
from inferscope.bench.call_driver import CallDriver
from inferscope.bench.closed_loop import ClosedLoopDriver
from inferscope.bench.open_loop import Driver, OpenLoopDriver, drive
from inferscope.bench.result import ARRAYS, LoadPlan, LoadResult
from inferscope.bench.rpc import raw_call
from inferscope.errors import InferscopeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferscope.types import IntArray

__all__ = ["FASTEST", "MOST_ARRIVALS", "LoadPlan", "LoadResult", "arrivals", "generate", "main", "measure"]

_HASTE: Final = -10
FASTEST: Final = 100_000
"""Requests a second that this generator can't reach: so many are prepared for a closed loop without a limit of its own."""
MOST_REQUESTS: Final = 1_000_000
"""Of a closed loop, in any case."""
MOST_ARRIVALS: Final = 5_000_000
"""Of an open loop; more do not fit into a generator."""
MOST_CONNECTIONS: Final = 900
"""The driver's event loop uses select(), which takes 1024 file descriptors."""

Share = tuple[int, int]
"""The k-th (from 0) of n generators that have one load between them."""


def _payload(url: str, body: bytes | None) -> bytes:
    parts = urlsplit(url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    head = f"{'GET' if body is None else 'POST'} {target} HTTP/1.1\r\nHost: {parts.netloc}\r\nAccept: */*\r\n"
    if body is None:
        return f"{head}\r\n".encode()
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def _drawn(plan: LoadPlan, distinct: list[bytes], count: int, share: Share) -> list[bytes]:
    order = np.random.default_rng((plan.seed, 1)).integers(0, len(distinct), count)[share[0] :: share[1]]
    return [distinct[int(index)] for index in order]


def _part(total: int, share: Share) -> int:
    """This generator's part of a whole number of clients or requests."""
    return total // share[1] + (share[0] < total % share[1])


def schedule(plan: LoadPlan) -> IntArray:
    """When each request of an open loop is due, ns from the start.

    Raises:
        ValueError: the plan makes more arrivals than a generator can hold, or is impossible.
    """
    if plan.rate * plan.seconds > MOST_ARRIVALS and not plan.process.startswith("trace:"):
        raise ValueError(
            f"{plan.rate:g} requests/s for {plan.seconds:g} s are more than the {MOST_ARRIVALS} that can be prepared; use a shorter time or a lower rate"
        )
    return arrivals(plan.rate, plan.seconds, plan.seed, plan.process)[: plan.requests or None]


def _driver(plan: LoadPlan, bodies: Sequence[bytes], share: Share, start_ns: int | None) -> Driver:
    """What sends this generator's part of the plan."""
    rpc = urlsplit(plan.url).scheme == "grpc"
    distinct = [body if rpc else _payload(plan.url, body) for body in bodies] or [b"" if rpc else _payload(plan.url, None)]
    connections = max(_part(min(plan.connections, MOST_CONNECTIONS * share[1]), share), 1)
    offsets: list[int] | None = None
    if plan.mode == "open":
        due = schedule(plan)
        payloads = _drawn(plan, distinct, due.size, share)
        offsets = due[share[0] :: share[1]].tolist()
    else:
        count = _part(plan.requests, share) if plan.requests else min(int(plan.seconds * FASTEST) + 1, MOST_REQUESTS)
        payloads = _drawn(plan, distinct, count * share[1], share)
    if rpc:
        call, close = raw_call(plan.url, plan.drain_s + (plan.seconds if plan.mode == "open" else 0.0))
        return CallDriver(
            call, payloads, offsets, connections=connections, seconds=plan.seconds, drain_s=plan.drain_s, start_ns=start_ns, close=close
        )
    url = urlsplit(plan.url)
    tls = url.scheme == "https"
    host, port = url.hostname or "127.0.0.1", url.port or (443 if tls else 80)
    if offsets is None:
        return ClosedLoopDriver(host, port, payloads, seconds=plan.seconds, connections=connections, drain_s=plan.drain_s, tls=tls)
    return OpenLoopDriver(host, port, payloads, offsets, connections=connections, drain_s=plan.drain_s, tls=tls, start_ns=start_ns)


def generate(plan: LoadPlan, bodies: Sequence[bytes] = (), *, share: Share = (0, 1), start_ns: int | None = None) -> LoadResult:
    """Runs the plan from this process, in a new event loop; better call `measure`.

    Args:
        plan: what to send.
        bodies: JSON bodies (serialised messages for gRPC), drawn in seeded random order; none means GET (an empty message).
        share: which part of the plan, of how many generators.
        start_ns: when the schedule begins; default soon.

    Raises:
        ValueError: a URL that is not http, https or grpc, or a plan that makes no arrivals or too many.
    """
    if urlsplit(plan.url).scheme not in {"http", "https", "grpc"}:
        raise ValueError(f"load goes to http://, https:// or grpc:// addresses, not {plan.url!r}")
    driver = _driver(plan, bodies, share, start_ns)
    drive(driver)
    return LoadResult(plan, **{name: np.asarray(getattr(driver, name), dtype=np.int64) for name in ARRAYS}, stopped=driver.stopped)


def measure(plan: LoadPlan, bodies: Sequence[bytes] = ()) -> LoadResult:
    """Runs the plan in a separate process and returns its result.

    Raises:
        ServiceError: the generator failed.
    """
    from inferscope.bench.generators import Generators

    with Generators() as generators:
        return generators.measure(plan, bodies)


def serve() -> int:
    """One job a line on stdin, as `generators` writes them; an answer a line on stdout."""
    for line in sys.stdin:
        job: dict[str, Any] = json.loads(line)
        try:
            bodies = [base64.b64decode(body) for body in json.loads(Path(job["bodies"]).read_text("ascii"))]
            gc.freeze()
            found = generate(LoadPlan(**job["plan"]), bodies, share=(job["share"][0], job["share"][1]), start_ns=job["start_ns"])
            np.savez(job["answer"], **{name: getattr(found, name) for name in ARRAYS})
            answer = {"error": None, "stopped": found.stopped}
        except (InferscopeError, ValueError, OSError) as error:
            answer = {"error": str(error), "stopped": ""}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
        gc.unfreeze()
        gc.collect()
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m inferscope.bench.load", description="Open-loop load.")
    parser.add_argument("--url", required=True)
    parser.add_argument("--rate", type=float, required=True, help="mean arrivals a second")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--process", default="poisson", help="arrivals: poisson, constant or trace:FILE (poisson)")
    parser.add_argument("--mode", choices=("open", "closed"), default="open", help="closed: each connection waits for its answer (open)")
    parser.add_argument("--requests", type=int, default=0, help="at most so many (0: as many as the time allows)")
    parser.add_argument("--connections", type=int, default=256, help="most open at once (256, at most 900)")
    parser.add_argument("--drain", type=float, default=10.0, help="seconds to wait for the last answers (10)")
    parser.add_argument("--bodies", type=Path, help="file with one JSON body a line; without it, GET")
    parser.add_argument("--json", type=Path, help="write every result here")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 0, or 1 when nothing was answered, 64 for a bad argument."""
    gc.disable()  # a collection in here would read as a slow server
    words = sys.argv[1:] if argv is None else argv
    if list(words) == ["--serve"]:
        return serve()
    options = _arguments(words)
    bodies = [line for line in options.bodies.read_bytes().splitlines() if line.strip()] if options.bodies else []
    plan = LoadPlan(
        options.url,
        options.rate,
        options.seconds,
        options.seed,
        options.process,
        options.connections,
        options.drain,
        options.mode,
        options.requests,
    )
    gc.freeze()
    try:
        result = generate(plan, bodies)
    except (InferscopeError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 64
    summary = result.summary()
    if options.json:
        options.json.write_text(json.dumps(result.to_json()), "utf-8")
    sys.stdout.write(json.dumps(summary) + "\n")
    return 0 if summary["answered"] else 1


if __name__ == "__main__":
    with contextlib.suppress(OSError):
        os.nice(_HASTE)  # where it is allowed: a generator that waits for a busy processor reads as a slow service
    sys.exit(main())
