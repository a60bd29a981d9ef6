"""Open-loop HTTP load: arrivals keep to their schedule whatever the server does.

A client that waits for an answer before it sends the next request stops asking exactly while the server is slow, and reports a
stall of half a second as one slow request (coordinated omission). Here the arrival times are drawn beforehand, each request is sent
at its time on an idle or a new connection, and its latency counts from the *intended* start: what a user would have waited. The
generator's own lateness is measured for each request (`lag`), so that a busy client is seen and not blamed on the server.

    python -m inferscope.bench.load --url http://127.0.0.1:8000/score --rate 80 --seconds 40 --bodies bodies.jsonl --json load.json

It should run in its own process (`measure` starts one): in the server's process it would take the interpreter lock from it.
Instants are on the `time.perf_counter_ns` clock, which processes of one Linux machine share.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import urlsplit

import numpy as np

from inferscope.bench.closed_loop import ClosedLoopDriver
from inferscope.bench.open_loop import OpenLoopDriver, drive

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from inferscope.types import IntArray

__all__ = ["LoadPlan", "LoadResult", "arrivals", "generate", "main", "measure"]

SCHEMA: Final = 1
_HASTE: Final = -10
FASTEST: Final = 30_000
"""Requests a second that this generator can't reach: so many are prepared for a closed loop without a limit of its own."""
MOST_REQUESTS: Final = 1_000_000
"""Of a closed loop, in any case."""
MOST_CONNECTIONS: Final = 900
"""The driver's event loop uses select(), which takes 1024 file descriptors."""
PERCENTILES: Final = (("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99), ("p999", 0.999))


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What to send, how often, for how long.

    Args:
        url: `http://host:port/path`, or https.
        rate: mean arrivals a second.
        seconds: length of the schedule.
        seed: of the arrival times and of the order of the bodies.
        process: `poisson` (independent users), `constant` (evenly spaced), or `trace:FILE` (seconds from the start, one a line).
        connections: how many may be open at once, at most 900; later arrivals wait, and that wait is part of their latency.
            In a closed loop, the number of clients.
        drain_s: how long to wait for answers after the last arrival.
        mode: `open` keeps to the schedule; `closed` has each client wait for its answer, and ignores rate and process.
        requests: how many to send at most; 0 is no limit but the time.
    """

    url: str
    rate: float
    seconds: float
    seed: int = 0
    process: str = "poisson"
    connections: int = 256
    drain_s: float = 10.0
    mode: Literal["open", "closed"] = "open"
    requests: int = 0


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Every request of a run, in arrival order; each array has shape (requests,), instants in ns, 0 = never happened."""

    plan: LoadPlan
    intended_ns: IntArray
    launched_ns: IntArray
    """When the generator got to it; later than intended only through the generator's own fault."""
    sent_ns: IntArray
    """When it was written to a connection; later than launched when one had to be opened or waited for."""
    done_ns: IntArray
    """When the last byte of the answer was read."""
    status: IntArray
    """HTTP status, 0 when there was no whole answer."""

    @property
    def answered(self) -> NDArray[np.bool_]:
        """Which requests got a whole answer, shape (requests,)."""
        return np.greater(self.status, 0)

    @property
    def fine(self) -> NDArray[np.bool_]:
        """Which requests got a whole answer with a 2xx status, shape (requests,)."""
        return np.logical_and(np.greater_equal(self.status, 200), np.less(self.status, 300))

    @property
    def latency_ns(self) -> IntArray:
        """Intended start to last byte, of the answered requests."""
        return np.subtract(self.done_ns, self.intended_ns)[self.answered]

    @property
    def service_ns(self) -> IntArray:
        """Sent to last byte, of the answered requests: what a closed-loop client would have reported."""
        return np.subtract(self.done_ns, self.sent_ns)[self.answered]

    @property
    def lag_ns(self) -> IntArray:
        """The generator's own lateness, of the launched requests."""
        launched = np.greater(self.launched_ns, 0)
        return np.subtract(self.launched_ns, self.intended_ns)[launched]

    def share_over(self, threshold_ms: float) -> float | None:
        """Share of all requests whose latency is over `threshold_ms` or that were never answered; None when there were none."""
        if not self.status.size:
            return None
        within = int(np.count_nonzero(np.less_equal(self.latency_ns, threshold_ms * 1e6)))
        return 1 - within / self.status.size

    def summary(self) -> dict[str, Any]:
        """Counts and percentiles (ms); percentiles are over the answered requests, None when too few to say."""
        count, answered = int(self.status.size), int(np.count_nonzero(self.answered))
        codes: list[int] = self.status.tolist()
        span_s = (int(self.intended_ns[-1]) - int(self.intended_ns[0])) / 1e9 if count > 1 else 0.0
        return {
            "requests": count,
            "answered": answered,
            "unanswered": count - answered,
            "ok": int(np.count_nonzero((self.status >= 200) & (self.status < 300))),
            "status": {str(code): number for code, number in sorted(Counter(codes).items())},
            "rate": (count - 1) / span_s if span_s else None,
            "latency_ms": _percentiles(self.latency_ns),
            "service_ms": _percentiles(self.service_ns),
            "lag_ms": _percentiles(self.lag_ns),
        }

    def to_json(self) -> dict[str, Any]:
        """The whole run as JSON data; `from_json` reads it back."""
        plan = self.plan
        return {
            "schema": SCHEMA,
            "plan": asdict(plan),
            "summary": self.summary(),
            "results": {name: getattr(self, name).tolist() for name in _ARRAYS},
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> LoadResult:
        """Reads what `to_json` made.

        Raises:
            ValueError: the data is of another schema.
        """
        if data.get("schema") != SCHEMA:
            raise ValueError(f"load result of schema {data.get('schema')!r}, this version reads {SCHEMA}")
        return cls(LoadPlan(**data["plan"]), **{name: np.asarray(data["results"][name], dtype=np.int64) for name in _ARRAYS})


_ARRAYS: Final = ("intended_ns", "launched_ns", "sent_ns", "done_ns", "status")


def _percentiles(values_ns: IntArray) -> dict[str, float | None]:
    """Observed values (no interpolation) in ms; None where fewer than one value lies beyond the quantile."""
    size = values_ns.size
    ordered = np.sort(values_ns)
    found: dict[str, float | None] = {}
    for name, quantile in PERCENTILES:
        enough = size > 0 and size * (1 - quantile) >= 1 - 1e-9
        found[name] = float(ordered[max(int(np.ceil(size * quantile)) - 1, 0)]) / 1e6 if enough else None
    found["max"] = float(ordered[-1]) / 1e6 if size else None
    return found


def arrivals(rate: float, seconds: float, seed: int, process: str = "poisson") -> IntArray:
    """Arrival times in ns from the start, ascending, all below `seconds`.

    Args:
        rate: mean arrivals a second.
        seconds: length of the schedule.
        seed: same seed, same times.
        process: `poisson` draws exponential gaps (a Poisson process); `constant` spaces them by 1/rate.

    Raises:
        ValueError: a rate or length that is not positive, or an unknown process.
    """
    if not (rate > 0 and seconds > 0):
        raise ValueError(f"rate and seconds must be above 0, not {rate} and {seconds}")
    if process.startswith("trace:"):
        times = _trace(Path(process.removeprefix("trace:")))
        return times[times < seconds * 1e9]
    if process == "constant":
        return (np.arange(int(rate * seconds)) * (1e9 / rate)).astype(np.int64)
    if process != "poisson":
        raise ValueError(f"arrivals are poisson or constant or trace:FILE, not {process!r}")
    generator = np.random.default_rng(seed)
    # Enough gaps to pass the end with near certainty: mean + 8 standard deviations of the count.
    draws = int(rate * seconds + 8 * (rate * seconds) ** 0.5) + 16
    times = np.cumsum(generator.exponential(1e9 / rate, draws))
    return times[times < seconds * 1e9].astype(np.int64)


def _trace(path: Path) -> IntArray:
    """Recorded arrival times, in ns from the first line's zero."""
    try:
        seconds = np.array([float(line) for line in path.read_text(encoding="utf-8").split()], dtype=np.float64)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"arrivals {path}: {error.strerror if isinstance(error, OSError) else 'not one number of seconds a line'}"
        ) from error
    if not seconds.size or not np.isfinite(seconds).all() or seconds[0] < 0 or (np.diff(seconds) < 0).any():
        raise ValueError(f"arrivals {path}: need ascending seconds from 0, one a line")
    return (seconds * 1e9).astype(np.int64)


def _payload(url: str, body: bytes | None) -> bytes:
    parts = urlsplit(url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    head = f"{'GET' if body is None else 'POST'} {target} HTTP/1.1\r\nHost: {parts.netloc}\r\nAccept: */*\r\n"
    if body is None:
        return f"{head}\r\n".encode()
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def _drawn(plan: LoadPlan, distinct: list[bytes], count: int) -> list[bytes]:
    return [distinct[int(index)] for index in np.random.default_rng((plan.seed, 1)).integers(0, len(distinct), count)]


def _place(plan: LoadPlan) -> tuple[str, int, bool]:
    """Host, port and whether it speaks TLS."""
    url = urlsplit(plan.url)
    tls = url.scheme == "https"
    return url.hostname or "127.0.0.1", url.port or (443 if tls else 80), tls


def _open(plan: LoadPlan, distinct: list[bytes]) -> OpenLoopDriver:
    offsets = arrivals(plan.rate, plan.seconds, plan.seed, plan.process)[: plan.requests or None]
    host, port, tls = _place(plan)
    payloads = _drawn(plan, distinct, len(offsets))
    most = min(plan.connections, MOST_CONNECTIONS)
    return OpenLoopDriver(host, port, payloads, offsets.tolist(), connections=most, drain_s=plan.drain_s, tls=tls)


def _closed(plan: LoadPlan, distinct: list[bytes]) -> OpenLoopDriver:
    host, port, tls = _place(plan)
    payloads = _drawn(plan, distinct, plan.requests or min(int(plan.seconds * FASTEST) + 1, MOST_REQUESTS))
    clients = min(plan.connections, MOST_CONNECTIONS)
    return ClosedLoopDriver(host, port, payloads, seconds=plan.seconds, connections=clients, drain_s=plan.drain_s, tls=tls)


def generate(plan: LoadPlan, bodies: Sequence[bytes] = ()) -> LoadResult:
    """Runs the plan from this process, in a new event loop; better call `measure`.

    Args:
        plan: what to send.
        bodies: JSON bodies, drawn in seeded random order; none means GET.

    Raises:
        ValueError: a URL that is not http or https, or a plan that makes no arrivals.
    """
    if urlsplit(plan.url).scheme not in {"http", "https"}:
        raise ValueError(f"load goes to http:// or https:// addresses, not {plan.url!r}")
    distinct = [_payload(plan.url, body) for body in bodies] or [_payload(plan.url, None)]
    driver = _open(plan, distinct) if plan.mode == "open" else _closed(plan, distinct)
    drive(driver)
    return LoadResult(plan, **{name: np.asarray(getattr(driver, name), dtype=np.int64) for name in _ARRAYS})


def measure(plan: LoadPlan, bodies: Sequence[bytes] = ()) -> LoadResult:
    """Runs the plan in a separate process and returns its result.

    Raises:
        subprocess.CalledProcessError: the generator failed; its message is in `stderr`.
    """
    with tempfile.TemporaryDirectory(prefix="inferscope-load-") as folder:
        result, lines = Path(folder, "load.json"), Path(folder, "bodies.jsonl")
        lines.write_bytes(b"\n".join(bodies))
        command = [sys.executable, "-m", "inferscope.bench.load", "--url", plan.url, "--json", str(result), "--bodies", str(lines)]
        for name in ("rate", "seconds", "seed", "process", "connections", "drain_s", "mode", "requests"):
            command += [f"--{name.removesuffix('_s')}", str(getattr(plan, name))]
        done = subprocess.run(command, check=False, capture_output=True)
        if not result.exists():  # with a result, status 1 means that nothing was answered, which the result says better
            raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
        return LoadResult.from_json(json.loads(result.read_text("utf-8")))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m inferscope.bench.load", description="Open-loop HTTP load.")
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
    options = _arguments(argv)
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
    gc.disable()  # a collection in here would read as a slow server
    try:
        result = generate(plan, bodies)
    except ValueError as error:
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
