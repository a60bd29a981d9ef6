"""The example's own account of where each request's time went, to hold a diagnosis against. inferscope never reads it.

It has clock reads of its own around every phase, takes what copies took from the device's log, and applies the definition that inferscope states: the tail is every request over the
objective, the body is P40 to P60, and a cause's share is what it takes more in the tail than in the body, over the whole difference.

    python -m examples.risk_scoring.truth truth-4711.jsonl [--from-ns N] [--to-ns N]
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import json
import threading
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from examples.risk_scoring.copy_engine import Copy

__all__ = ["CAUSES", "Attribution", "Log", "Trail", "attribute", "with_copies", "write"]

CAUSES: Final = ("copy:h2d", "copy:d2h", "lock:rules", "forward", "preprocess", "rules", "queue:threadpool", "unattributed")
"""Who may own time, by the names that inferscope prints; the last takes what the others leave."""
_COPIES: Final = ("copy:h2d", "copy:d2h")
OBJECTIVE_MS: Final = 20.0
KEPT: Final = 200_000


class Trail:
    """One request's phases; each nanosecond is charged to the innermost phase that is open."""

    __slots__ = ("_open", "end_ns", "left_ns", "phases", "start_ns", "status", "taken_ns", "thread_id")

    def __init__(self) -> None:
        self.start_ns = time.perf_counter_ns()
        self.end_ns = 0
        self.status = 0
        self.thread_id = 0
        """Native id of the thread that scored it."""
        self.taken_ns = self.left_ns = 0
        """While that thread worked for it: before and after, it may have worked for others."""
        self.phases: dict[str, int] = {}
        self._open: list[str] = []

    def add(self, cause: str, nanoseconds: int) -> None:
        """Charges time to `cause`, and takes it from the phase that is open."""
        self.phases[cause] = self.phases.get(cause, 0) + nanoseconds
        if self._open:
            self.phases[self._open[-1]] = self.phases.get(self._open[-1], 0) - nanoseconds

    @contextmanager
    def phase(self, cause: str) -> Generator[None, None, None]:
        """Charges the time inside to `cause`."""
        begin = time.perf_counter_ns()
        self._open.append(cause)
        try:
            yield
        finally:
            self._open.pop()
            self.add(cause, time.perf_counter_ns() - begin)

    @contextmanager
    def worker(self) -> Generator[None, None, None]:
        """Notes the thread that scores it, and when it does."""
        self.thread_id, self.taken_ns = threading.get_native_id(), time.perf_counter_ns()
        try:
            yield
        finally:
            self.left_ns = time.perf_counter_ns()

    def row(self) -> dict[str, int]:
        """The finished request as one flat row: instants, status, ns by cause; causes sum to the whole."""
        row = {name: getattr(self, name) for name in ("start_ns", "end_ns", "status", "thread_id", "taken_ns", "left_ns")}
        row.update({cause: self.phases.get(cause, 0) for cause in CAUSES[:-1]})
        row[CAUSES[-1]] = self.end_ns - self.start_ns - sum(self.phases.values())
        return row


class Log:
    """The finished requests of this process, newest `KEPT`."""

    def __init__(self) -> None:
        self._rows: deque[dict[str, int]] = deque(maxlen=KEPT)

    def finish(self, trail: Trail, status: int) -> None:
        """Notes a request that ends now."""
        trail.end_ns, trail.status = time.perf_counter_ns(), status
        self._rows.append(trail.row())

    def rows(self) -> list[dict[str, int]]:
        """What is noted so far."""
        return list(self._rows)


def write(path: Path, rows: Iterable[dict[str, int]]) -> None:
    """Writes one JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")


def with_copies(rows: Iterable[dict[str, int]], copies: Iterable[Copy]) -> list[dict[str, int]]:
    """The account with each copy as long as the device says that it kept its caller; what the phase around it took more is unattributed.

    Args:
        rows: as `Log.rows` gives them.
        copies: the device's log.
    """
    by_thread: dict[int, list[Copy]] = {}
    for copy in copies:
        by_thread.setdefault(copy.thread_id, []).append(copy)
    starts: dict[int, list[int]] = {}
    for thread, made in by_thread.items():
        made.sort(key=lambda copy: copy.asked_ns)
        starts[thread] = [copy.asked_ns for copy in made]
    settled: list[dict[str, int]] = []
    for row in rows:
        found = dict(row)
        thread = row["thread_id"]
        mine = by_thread.get(thread, [])
        first = bisect.bisect_left(starts.get(thread, []), row["taken_ns"])
        blocked: dict[str, int] = dict.fromkeys(_COPIES, 0)
        for copy in itertools.islice(mine, first, None):
            if copy.asked_ns >= row["left_ns"]:
                break
            blocked[f"copy:{copy.direction}"] += copy.returned_ns - copy.asked_ns
        for cause, nanoseconds in blocked.items():
            found[CAUSES[-1]] += found[cause] - nanoseconds
            found[cause] = nanoseconds
        settled.append(found)
    return settled


@dataclass(frozen=True, slots=True)
class Attribution:
    """Where the tail's extra time went, over the requests that ended in a horizon."""

    from_ns: int
    to_ns: int
    requests: int
    tail: int
    over_objective: float | None
    """Share of the requests over the objective."""
    p50_ms: float | None
    p99_ms: float | None
    excess_ms: float | None
    """Mean of the tail minus mean of the body."""
    by_cause_ms: dict[str, float]
    shares: dict[str, float]
    """Share of the excess by cause, summing to 1; empty without a tail or a body."""


def attribute(rows: Iterable[dict[str, int]], *, from_ns: int = 0, to_ns: int = 1 << 62, objective_ms: float = OBJECTIVE_MS) -> Attribution:
    """The true attribution over the requests that ended in [from_ns, to_ns].

    Args:
        rows: as `Log.rows` gives them.
        from_ns: first instant, `time.perf_counter_ns` clock.
        to_ns: last instant.
        objective_ms: the tail is what lies above.
    """
    chosen = [row for row in rows if from_ns <= row["end_ns"] <= to_ns]
    wall = np.array([row["end_ns"] - row["start_ns"] for row in chosen], dtype=np.float64) / 1e6
    if not wall.size:
        return Attribution(from_ns, to_ns, 0, 0, None, None, None, None, {}, {})
    time_ms = np.array([[row[cause] for cause in CAUSES] for row in chosen], dtype=np.float64) / 1e6
    tail = wall > objective_ms
    low, high = np.quantile(wall, [0.4, 0.6], method="inverted_cdf")
    body = (wall >= low) & (wall <= high) & ~tail
    p50, p99 = (float(value) for value in np.quantile(wall, [0.5, 0.99], method="inverted_cdf"))
    share_over = float(tail.mean())
    if not tail.any() or not body.any():
        return Attribution(from_ns, to_ns, len(chosen), int(tail.sum()), share_over, p50, p99, None, {}, {})
    excess = time_ms[tail].mean(axis=0) - time_ms[body].mean(axis=0)
    whole = float(excess.sum())
    by_cause = {cause: float(value) for cause, value in zip(CAUSES, excess, strict=True)}
    return Attribution(
        from_ns,
        to_ns,
        len(chosen),
        int(tail.sum()),
        share_over,
        p50,
        p99,
        whole,
        by_cause,
        {cause: value / whole for cause, value in by_cause.items()},
    )


def main() -> None:
    """The command line: prints the attribution of a written log as JSON."""
    parser = argparse.ArgumentParser(description="Attributes the tail from the example's own log.")
    parser.add_argument("log", type=Path, nargs="+")
    parser.add_argument("--from-ns", type=int, default=0)
    parser.add_argument("--to-ns", type=int, default=1 << 62)
    parser.add_argument("--objective-ms", type=float, default=OBJECTIVE_MS)
    options = parser.parse_args()
    rows = [json.loads(line) for path in options.log for line in path.read_text("utf-8").splitlines()]
    found = attribute(rows, from_ns=options.from_ns, to_ns=options.to_ns, objective_ms=options.objective_ms)
    print(json.dumps(asdict(found), indent=2))


if __name__ == "__main__":
    main()
