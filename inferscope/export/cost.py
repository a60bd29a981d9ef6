"""What a backend holds of a fleet: counted from what the services of this machine exported last, multiplied by replicas."""

from __future__ import annotations

import gzip
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from inferscope.export.replay import to_protobuf
from inferscope.export.ring import read_ring

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["Cost", "costs"]

_PLAIN: Final = 2
"""Series that VictoriaMetrics keeps of a histogram beside its buckets: sum and count."""


@dataclass(frozen=True, slots=True)
class Cost:
    """One replica of a service, all its workers together, in one export."""

    service: str
    workers: int
    histograms: int
    buckets: int
    """Non-empty ones of all histograms; explicit buckets count all."""
    counters: int
    gauges: int
    sent_bytes: int
    """OTLP/protobuf, gzip."""
    interval_s: float | None
    """Between the last two exports; None with one."""

    @property
    def series(self) -> int:
        """As Prometheus counts them: a native histogram is one; `target_info` of each worker is another."""
        return self.histograms + self.counters + self.gauges + self.workers

    @property
    def victoriametrics_series(self) -> int:
        """A series for each bucket, and two more for each histogram."""
        return self.buckets + _PLAIN * self.histograms + self.counters + self.gauges

    @property
    def points(self) -> int:
        """Rows that ClickHouse adds with each export."""
        return self.histograms + self.counters + self.gauges


def costs(state_dir: Path, service: str | None = None) -> tuple[Cost, ...]:
    """What each service costs a backend, as of the newest export of each of its workers.

    Args:
        state_dir: Where services keep their rings.
        service: Directory name of one service; None is all.
    """
    found: list[Cost] = []
    for place in sorted(path for path in state_dir.glob(service or "*") if path.is_dir()):
        held: Counter[str] = Counter()
        intervals: list[float] = []
        for worker in sorted(path for path in place.iterdir() if path.is_dir() and path.name.isdecimal()):
            last, interval_s = _newest(worker)
            if last is None:
                continue
            held["workers"] += 1
            held["sent"] += len(gzip.compress(to_protobuf("metrics", last), 6, mtime=0))
            held.update(_kinds(last))
            if interval_s:
                intervals.append(interval_s)
        if held["workers"]:
            found.append(
                Cost(
                    service=place.name,
                    workers=held["workers"],
                    histograms=held["histograms"],
                    buckets=held["buckets"],
                    counters=held["sum"],
                    gauges=held["gauge"],
                    sent_bytes=held["sent"],
                    interval_s=min(intervals) if intervals else None,
                )
            )
    return tuple(found)


def _newest(worker: Path) -> tuple[dict[str, Any] | None, float | None]:
    last: dict[str, Any] | None = None
    times: list[int] = []
    for request in read_ring(worker, "metrics"):
        last = request
        times = [*times[-1:], max((int(point["timeUnixNano"]) for _, point in _points(request)), default=0)]
    return last, (times[-1] - times[0]) / 1e9 if len(times) > 1 else None


def _points(request: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for resource in request.get("resourceMetrics") or ():
        for metric in (metric for scope in resource.get("scopeMetrics") or () for metric in scope.get("metrics") or ()):
            for kind in ("sum", "gauge", "exponentialHistogram", "histogram"):
                for point in metric[kind].get("dataPoints") or () if kind in metric else ():
                    yield kind, point


def _kinds(request: dict[str, Any]) -> Counter[str]:
    found: Counter[str] = Counter()
    for kind, point in _points(request):
        if kind in {"sum", "gauge"}:
            found[kind] += 1
            continue
        found["histograms"] += 1
        positive: dict[str, Any] = point.get("positive") or {}
        counts: list[Any] = point.get("bucketCounts") or positive.get("bucketCounts") or []
        found["buckets"] += len(counts) if kind == "histogram" else sum(int(each) > 0 for each in counts)
    return found
