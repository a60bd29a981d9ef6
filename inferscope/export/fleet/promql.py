"""Prometheus and VictoriaMetrics: both speak PromQL, and keep exponential histograms in different ways.

What a series gained in an interval is its last value less its value at the beginning, not `increase()`: that extrapolates to the ends of the
interval, and counts would not be whole. Only series that were restarted inside take `increase()`.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from inferscope import semconv
from inferscope.errors import InferscopeError
from inferscope.export.fleet.source import LOOKBACK_S, Key, Scope, ask
from inferscope.export.otlp.buckets import SCALES, Buckets, merge
from inferscope.export.prometheus import metric_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Prometheus", "VictoriaMetrics"]

_ACCEPTED: Final = 0.35
"""How far a bucket's bounds may be from those of a whole scale; VictoriaMetrics writes four digits."""


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


class _PromQL:
    """What both have in common."""

    name = ""
    labels: ClassVar[dict[str, str]] = {semconv.SERVICE_NAME: "job", semconv.SERVICE_INSTANCE_ID: "instance"}
    """Names of resource attributes; all other attributes have underscores for dots."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self.notes: list[str] = []

    def label(self, attribute: str) -> str:
        """The label of an attribute."""
        return self.labels.get(attribute, attribute.replace(".", "_"))

    def query(self, text: str, at_s: float) -> list[dict[str, Any]]:
        """The result of an instant query.

        Raises:
            InferscopeError: It failed.
        """
        answer: Any = json.loads(ask(f"{self._url}/api/v1/query", fields={"query": text, "time": f"{at_s:.3f}"}))
        if answer.get("status") != "success":
            raise InferscopeError(f"{self.name} does not understand a query of ours: {answer.get('error', 'no reason given')}")
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def selector(self, name: str, scope: Scope) -> str:
        """Series of a name in the scope."""
        inside = ",".join(f"{self.label(key)}={_quoted(value)}" for key, value in scope.where.items())
        return f"{name}{{{inside}}}"

    def within(self, vector: str, scope: Scope) -> str:  # noqa: ARG002  (Prometheus needs it)
        """The vector's series that belong to the scope's replicas."""
        return vector

    def grown(self, name: str, scope: Scope) -> str:
        """What each series gained in the interval."""
        chosen, seconds = self.selector(name, scope), scope.seconds
        last = f"last_over_time({chosen}[{seconds}s])"
        before = f"last_over_time({chosen}[{LOOKBACK_S}s] offset {seconds}s)"
        restarted = f"(resets({chosen}[{seconds + LOOKBACK_S}s]) > 0)"
        steady = f"({last} - ({before} or {last} * 0))"
        return self.within(f"(({steady} unless {restarted}) or (increase({chosen}[{seconds}s]) and {restarted}))", scope)

    def grouped(self, vector: str, labels: Iterable[str], scope: Scope, how: str = "sum") -> list[tuple[dict[str, str], dict[str, Any]]]:
        """Labels and sample of each group."""
        found = self.query(f"{how} by ({','.join(labels)}) ({vector})", scope.to_unix_s)
        return [(sample["metric"], sample) for sample in found]

    def counters(self, metric: str, by: Sequence[str], scope: Scope) -> dict[Key, float]:
        """See `Source`."""
        name = metric_name(metric, counter=True)
        labels = [self.label(each) for each in by]
        return {
            tuple(held.get(label, "") for label in labels): float(sample["value"][1])
            for held, sample in self.grouped(self.grown(name, scope), labels, scope)
        }

    def gauges(self, metric: str, by: Sequence[str], scope: Scope) -> dict[Key, float]:
        """See `Source`."""
        labels = [self.label(each) for each in by]
        vector = self.within(f"last_over_time({self.selector(metric_name(metric), scope)}[{scope.seconds}s])", scope)
        return {
            tuple(held.get(label, "") for label in labels): float(sample["value"][1])
            for held, sample in self.grouped(vector, labels, scope, "max")
        }

    def _restarts(self, metric: str, scope: Scope) -> None:
        counter = self.selector(metric_name(metric), scope)
        found = self.query(f"count(resets({counter}[{scope.seconds}s]) > 0)", scope.to_unix_s)
        if found:
            self._note(f"{int(float(found[0]['value'][1]))} series were restarted in this time: what they gained is extrapolated.")

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


class Prometheus(_PromQL):
    """Native histograms, or classic ones where a service exports explicit buckets; versions come from `target_info`."""

    name = "prometheus"
    _targets: ClassVar[tuple[str, ...]] = (semconv.SERVICE_VERSION,)

    def selector(self, name: str, scope: Scope) -> str:
        """Without what only `target_info` knows."""
        there = {key: value for key, value in scope.where.items() if key not in self._targets}
        return super().selector(name, Scope(scope.from_unix_s, scope.to_unix_s, there))

    def within(self, vector: str, scope: Scope) -> str:
        """Joined with `target_info`, which a collector makes of the resource's attributes."""
        asked = [f"{self.label(key)}={_quoted(scope.where[key])}" for key in self._targets if key in scope.where]
        if not asked:
            return vector
        info = f"max by (job, instance) (last_over_time(target_info{{{','.join(asked)}}}[{scope.seconds}s]))"
        return f"({vector} * on (job, instance) group_left () {info})"

    def distributions(self, metric: str, by: Sequence[str], scope: Scope) -> dict[Key, Buckets]:
        """See `Source`."""
        labels = [self.label(each) for each in by]
        found: dict[Key, Buckets] = {}
        for held, sample in self.grouped(self.grown(metric_name(metric), scope), labels, scope):
            if "histogram" in sample:
                found[tuple(held.get(label, "") for label in labels)] = _native(sample["histogram"][1])
        self._restarts(metric, scope)
        return found or _classic(self, metric, labels, scope)


class VictoriaMetrics(_PromQL):
    """One series a bucket (`vmrange`), never rescaled: ranges of several scales are brought to the coarsest here."""

    name = "victoriametrics"
    labels: ClassVar[dict[str, str]] = {semconv.SERVICE_NAME: "service_name", semconv.SERVICE_INSTANCE_ID: "service_instance_id"}

    def distributions(self, metric: str, by: Sequence[str], scope: Scope) -> dict[Key, Buckets]:
        """See `Source`."""
        labels = [self.label(each) for each in by]
        vector = self.grown(f"{metric_name(metric)}_bucket", scope)
        ranges: dict[Key, list[tuple[float, float, float]]] = {}
        for held, sample in self.grouped(vector, [*labels, "vmrange"], scope):
            low, dots, high = held.get("vmrange", "").partition("...")
            if dots:
                place = ranges.setdefault(tuple(held.get(label, "") for label in labels), [])
                place.append((float(low), float(high), float(sample["value"][1])))
        found = {key: _exponential(held, 0.0) for key, held in ranges.items()}
        return found or _classic(self, metric, labels, scope)


def _native(histogram: dict[str, Any]) -> Buckets:
    """A native histogram as the API writes it: `[boundary rule, lower, upper, count]` for each bucket."""
    ranges: list[tuple[float, float, float]] = []
    for _, low, high, count in histogram.get("buckets") or ():
        ranges.append((max(0.0, float(low)), float(high), float(count)))
    return _exponential(ranges, float(histogram.get("sum") or 0.0))


def _exponential(ranges: Iterable[tuple[float, float, float]], total: float) -> Buckets:
    """Buckets of (lower, upper, count) in seconds; of several scales, at the coarsest.

    Raises:
        InferscopeError: A range is none of an exponential histogram.
    """
    scales: dict[int, dict[int, int]] = {}
    zero, threshold = 0, 0.0
    for low, high, count in ranges:
        whole = round(count)
        if low <= 0.0:
            zero, threshold = zero + whole, max(threshold, high)
            continue
        exact = -math.log2(math.log2(high / low)) if high > low else math.inf
        if not math.isfinite(exact) or abs(exact - round(exact)) > _ACCEPTED or not 0 <= round(exact) <= SCALES.stop:
            raise InferscopeError(f"a bucket from {low:g} to {high:g} s is of no exponential histogram: other series have this name")
        scale = round(exact)
        held = scales.setdefault(scale, {})
        index = round(math.log2(high) * 2**scale) - 1
        held[index] = held.get(index, 0) + whole
    points = [_dense(held, scale) for scale, held in scales.items()] or [Buckets(0, 0.0, 0, np.zeros(0, np.int64), scale=SCALES.start)]
    merged = merge(points)
    return Buckets(merged.count + zero, total, merged.offset, merged.counts, zero, threshold, merged.scale)


def _dense(held: dict[int, int], scale: int) -> Buckets:
    offset = min(held)
    counts = np.zeros(max(held) - offset + 1, dtype=np.int64)
    for index, count in held.items():
        counts[index - offset] = count
    return Buckets(int(counts.sum()), 0.0, offset, counts, scale=scale)


def _classic(source: _PromQL, metric: str, labels: Sequence[str], scope: Scope) -> dict[Key, Buckets]:
    """Explicit buckets, which are counted from below."""
    reached: dict[Key, dict[float, float]] = {}
    for held, sample in source.grouped(source.grown(f"{metric_name(metric)}_bucket", scope), [*labels, "le"], scope):
        if held.get("le"):
            reached.setdefault(tuple(held.get(label, "") for label in labels), {})[float(held["le"])] = float(sample["value"][1])
    found: dict[Key, Buckets] = {}
    for key, below in reached.items():
        bounds = sorted(below)
        counts = np.diff([0, *(round(below[bound]) for bound in bounds)]).astype(np.int64)
        found[key] = Buckets(int(counts.sum()), 0.0, 0, counts, bounds=tuple(bounds[:-1]))
    return found
