"""A load, as it was asked for and as it went: one row a request."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from inferscope.types import IntArray

__all__ = ["ARRAYS", "LoadPlan", "LoadResult", "merged"]

SCHEMA: Final = 1
PERCENTILES: Final = (("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99), ("p999", 0.999))


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What to send, how often, for how long.

    Args:
        url: `http://host:port/path`, https, or `grpc://host:port/package.Service/Method`.
        rate: mean arrivals a second.
        seconds: length of the schedule.
        seed: of the arrival times and of the order of the bodies.
        process: `poisson` (independent users), `constant` (evenly spaced), or `trace:FILE` (seconds from the start, one a line).
        connections: how many may be open at once, at most 900; later arrivals wait, and that wait is part of their latency.
            In a closed loop, the number of clients.
        drain_s: how long to wait for answers after the last arrival, and for any answer at all before the target is given up.
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
    stopped: str = ""
    """Why the load ended early (the target died or hangs); empty when it did not. What was measured before is kept."""

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
            "results": {name: getattr(self, name).tolist() for name in ARRAYS},
            "stopped": self.stopped,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> LoadResult:
        """Reads what `to_json` made.

        Raises:
            ValueError: the data is of another schema.
        """
        if data.get("schema") != SCHEMA:
            raise ValueError(f"load result of schema {data.get('schema')!r}, this version reads {SCHEMA}")
        plan = LoadPlan(**data["plan"])
        columns = {name: np.asarray(data["results"][name], dtype=np.int64) for name in ARRAYS}
        return cls(plan, **columns, stopped=str(data.get("stopped", "")))


ARRAYS: Final = ("intended_ns", "launched_ns", "sent_ns", "done_ns", "status")


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


def merged(parts: Sequence[LoadResult], plan: LoadPlan) -> LoadResult:
    """What several generators did, as one run in the order in which requests were due.

    Args:
        parts: their results, instants on one clock.
        plan: the plan of the whole.
    """
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ARRAYS}
    order = np.argsort(columns["intended_ns"], kind="stable")
    stopped = next((part.stopped for part in parts if part.stopped), "")
    return LoadResult(plan, **{name: column[order] for name, column in columns.items()}, stopped=stopped)
