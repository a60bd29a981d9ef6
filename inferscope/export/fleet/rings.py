"""The rings of many replicas, copied into one place: exact, like a database, and needing none.

A directory is a state directory, a service's, or one worker's; every ring below it counts. A series is one lifetime: replica, attributes and
start; what it gained in an interval is its last point less the last one before the interval.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inferscope import semconv
from inferscope.errors import InferscopeError
from inferscope.export.fleet.source import LOOKBACK_S, Key, Scope
from inferscope.export.otlp.buckets import Buckets, combine, merge, rescale
from inferscope.export.ring import read_ring

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

__all__ = ["Rings"]

_Lifetime = tuple[str, str, tuple[tuple[str, str], ...], str]
_DATA: Final = ("sum", "gauge", "exponentialHistogram", "histogram")
_NOTHING: Final[dict[str, Any]] = {}
_WANTED: Final = frozenset(
    {
        semconv.REQUEST_DURATION,
        semconv.STAGE_DURATION,
        semconv.REQUESTS,
        semconv.ITEMS,
        semconv.SLO_VIOLATIONS,
        semconv.SLO_TARGET,
        semconv.BAND_TIME,
        semconv.BAND_REQUESTS,
        semconv.BAND_SIZES,
        semconv.BAND_SIZES_SQUARED,
    }
)


class _Series:
    """Last point of one lifetime, and the last one before the interval."""

    __slots__ = ("attributes", "before", "last", "last_ns")

    def __init__(self, attributes: Mapping[str, str]) -> None:
        self.attributes = attributes
        self.before: dict[str, Any] | None = None
        self.last: dict[str, Any] | None = None
        self.last_ns = 0


class Rings:
    """Reads them once for each interval.

    Args:
        directories: Where to look.

    Raises:
        InferscopeError: One is no directory.
    """

    name = "ring"

    def __init__(self, directories: Sequence[Path]) -> None:
        for directory in directories:
            if not directory.is_dir():
                raise InferscopeError(f"--from ring={directory}: no such directory")
        self._directories = tuple(directories)
        self._read: tuple[float, float] | None = None
        self._series: dict[str, dict[_Lifetime, _Series]] = {}
        self.notes: list[str] = []

    def _load(self, scope: Scope) -> None:
        if self._read == (scope.from_unix_s, scope.to_unix_s):
            return
        self._series, self._read = {}, (scope.from_unix_s, scope.to_unix_s)
        begin, end = round(scope.from_unix_s * 1e9), round(scope.to_unix_s * 1e9)
        earliest = begin - LOOKBACK_S * 1_000_000_000
        damaged: list[Path] = []
        for place in self._places():
            for request in read_ring(place, "metrics", damaged):
                for name, key, attributes, point in _points(request, str(place)):
                    at = int(point.get("timeUnixNano", 0))
                    if not earliest < at <= end:
                        continue
                    held = self._series.setdefault(name, {}).setdefault(key, _Series(attributes))
                    if at <= begin:
                        held.before = point
                    elif at >= held.last_ns:
                        held.last, held.last_ns = point, at
        if damaged:
            self.notes.append(f"{len(damaged)} lines or parts of rings are damaged and were left out.")

    def _places(self) -> Iterator[Path]:
        seen: set[Path] = set()
        for directory in self._directories:
            for path in sorted(directory.rglob("metrics*.jsonl*")):
                if path.parent not in seen:
                    seen.add(path.parent)
                    yield path.parent

    def _chosen(self, metric: str, scope: Scope) -> Iterator[_Series]:
        self._load(scope)
        for held in self._series.get(metric, {}).values():
            if held.last is not None and all(held.attributes.get(key) == value for key, value in scope.where.items()):
                yield held

    def counters(self, metric: str, by: Sequence[str], scope: Scope) -> dict[Key, float]:
        """See `Source`."""
        found: dict[Key, float] = {}
        for held in self._chosen(metric, scope):
            key = tuple(held.attributes.get(each, "") for each in by)
            found[key] = found.get(key, 0.0) + _number(held.last) - _number(held.before)
        return found

    def gauges(self, metric: str, by: Sequence[str], scope: Scope) -> dict[Key, float]:
        """See `Source`."""
        found: dict[Key, float] = {}
        for held in self._chosen(metric, scope):
            key = tuple(held.attributes.get(each, "") for each in by)
            found[key] = max(found.get(key, _number(held.last)), _number(held.last))
        return found

    def distributions(self, metric: str, by: Sequence[str], scope: Scope) -> dict[Key, Buckets]:
        """See `Source`."""
        points: dict[Key, list[Buckets]] = {}
        for held in self._chosen(metric, scope):
            last = _buckets(held.last or _NOTHING)
            if held.before is not None:
                before = _buckets(held.before)
                if before.scale is not None and last.scale is not None and before.scale != last.scale:
                    coarse: int = min(last.scale, before.scale)
                    last, before = rescale(last, coarse), rescale(before, coarse)
                last = combine(last, before, -1)
            points.setdefault(tuple(held.attributes.get(each, "") for each in by), []).append(last)
        return {key: merge(held) for key, held in points.items()}


def _points(request: dict[str, Any], place: str) -> Iterator[tuple[str, _Lifetime, dict[str, str], dict[str, Any]]]:
    for resource in request.get("resourceMetrics") or ():
        about = _attributes((resource.get("resource") or _NOTHING).get("attributes"))
        for metric in (metric for scope in resource.get("scopeMetrics") or () for metric in scope.get("metrics") or ()):
            name = metric.get("name")
            if name not in _WANTED:
                continue
            data: dict[str, Any] = next((metric[kind] for kind in _DATA if kind in metric), _NOTHING)
            for point in data.get("dataPoints") or ():
                own = _attributes(point.get("attributes"))
                start = "" if "gauge" in metric else str(point.get("startTimeUnixNano", ""))
                yield name, (place, str(about.get(semconv.PROCESS_PID, "")), tuple(sorted(own.items())), start), {**about, **own}, point


def _attributes(pairs: Any) -> dict[str, str]:
    return {str(pair["key"]): str(next(iter(pair["value"].values()), "")) for pair in pairs or ()}


def _number(point: Mapping[str, Any] | None) -> float:
    return 0.0 if point is None else float(point.get("asInt", point.get("asDouble", 0.0)))


def _buckets(point: Mapping[str, Any]) -> Buckets:
    if "explicitBounds" in point:
        counts = np.array([int(each) for each in point.get("bucketCounts") or ()], dtype=np.int64)
        return Buckets(int(counts.sum()), float(point.get("sum", 0.0)), 0, counts, bounds=tuple(map(float, point["explicitBounds"])))
    positive: dict[str, Any] = point.get("positive") or _NOTHING
    dense = np.array([int(each) for each in positive.get("bucketCounts") or ()], dtype=np.int64)
    zero = int(point.get("zeroCount", 0))
    return Buckets(
        count=zero + int(dense.sum()),
        total=float(point.get("sum", 0.0)),
        offset=int(positive.get("offset", 0)),
        counts=dense,
        zero_count=zero,
        zero_threshold=float(point.get("zeroThreshold", 0.0)),
        scale=int(point.get("scale", 0)),
    )
