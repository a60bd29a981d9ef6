"""The same numbers for an application that is scraped by Prometheus already.

    from prometheus_client import REGISTRY
    REGISTRY.register(inferscope.export.prometheus_collector())

Exact counters, and histograms whose buckets stand around the objective, which is itself one of the bounds. Names and labels are those
that a collector makes of the OTLP metrics, so that rules and dashboards fit both ways. One process is shown; with several workers behind
one port, send OTLP instead, which adds up.
"""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING, Any, Final

from inferscope import semconv
from inferscope.errors import InferscopeError
from inferscope.export.otlp.metrics import SeriesBuilder
from inferscope.export.otlp.series import Slices
from inferscope.guard import guard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from inferscope.export.otlp.metrics import ExportBatch
    from inferscope.export.otlp.series import Series

    Source = Callable[[], ExportBatch | None]

__all__ = ["PrometheusCollector", "metric_name", "prometheus_collector", "publish"]

_UNITS: Final = {"s": "_seconds", "By": "_bytes"}
_FOREIGN: Final = re.compile(r"[^a-zA-Z0-9_]")


_published: list[Source] = []
"""What the running instance offers to be scraped; empty while nothing runs."""


def publish(source: Source | None) -> None:
    """Called by the runtime: what collectors read from now on, or None when it stops."""
    _published[:] = [] if source is None else [source]


def metric_name(name: str, *, counter: bool = False) -> str:
    """What OpenTelemetry's rules for Prometheus make of a metric's name: underscores, unit, `_total` on counters."""
    return _FOREIGN.sub("_", name) + _UNITS.get(semconv.UNITS.get(name, "s"), "") + ("_total" if counter else "")


def prometheus_collector(source: Source | None = None, *, series_limit: int = 100) -> PrometheusCollector:
    """A collector for `prometheus_client` registries; it may be registered before `configure()` and is empty until then.

    Args:
        source: Gives the running totals; default the running instance's.
        series_limit: Series before the overflow series.

    Raises:
        InferscopeError: `prometheus_client` is not installed.
    """
    try:
        families = importlib.import_module("prometheus_client.core")
    except ImportError as error:
        raise InferscopeError(
            "prometheus_collector() needs prometheus_client, which is not installed: pip install prometheus-client"
        ) from error
    return PrometheusCollector(families, source, series_limit)


class PrometheusCollector:
    """Made by `prometheus_collector`."""

    def __init__(self, families: Any, source: Source | None, series_limit: int) -> None:
        self._families = families
        self._source = source
        self._limit = series_limit
        self._builder: SeriesBuilder | None = None
        self._bounds: dict[str, int] = {}

    def describe(self) -> list[Any]:
        """Nothing: names are known once there are numbers, and a registry must not collect while it registers."""
        return []

    def collect(self) -> Iterator[Any]:
        """The families of this scrape; a failure of ours gives an empty scrape, never a failed one."""
        found: list[Any] = []
        with guard("export.prometheus"):
            found = self._collect()
        yield from found

    def _collect(self) -> list[Any]:
        sources = [self._source] if self._source is not None else list(_published)
        batch = sources[0]() if sources else None
        if batch is None:
            return []
        by_name: dict[str, list[Series]] = {}
        for item in self._build(batch):
            by_name.setdefault(item.name, []).append(item)
        return [self._family(name, items) for name, items in by_name.items()]

    def _build(self, batch: ExportBatch) -> tuple[Series, ...]:
        bounds: dict[str, int] = {}
        for total in batch.totals:
            if total.name == semconv.SLO_TARGET:
                request = str(dict(total.attributes).get(semconv.ATTR_REQUEST, ""))
                threshold = round(total.value * 1e9)
                bounds[request] = min(threshold, bounds.get(request, threshold))  # the strictest of several stands in the middle
        if self._builder is None or bounds != self._bounds:
            self._builder, self._bounds = SeriesBuilder(limit=self._limit, bounds=bounds), bounds
        return self._builder.build(batch, Slices())

    def _family(self, name: str, items: list[Series]) -> Any:
        labels = sorted({key for item in items for key, _ in item.attributes})
        names = [_FOREIGN.sub("_", label) for label in labels]
        about = f"{name} ({semconv.UNITS.get(name, 's')})"
        if items[0].buckets is not None:
            family = self._families.HistogramMetricFamily(metric_name(name), about, labels=names)
            for item in items:
                if item.buckets is not None:
                    family.add_metric(_values(item, labels), list(_cumulative(item)), item.buckets.total)
            return family
        # prometheus_client adds `_total` to a counter's samples itself.
        kind = self._families.CounterMetricFamily if items[0].monotonic else self._families.GaugeMetricFamily
        family = kind(metric_name(name), about, labels=names)
        for item in items:
            family.add_metric(_values(item, labels), item.value)
        return family


def _values(item: Series, labels: Iterable[str]) -> list[str]:
    held = dict(item.attributes)
    return [_label(held.get(label, "")) for label in labels]  # an empty label counts as absent


def _label(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _cumulative(item: Series) -> Iterator[tuple[str, int]]:
    assert item.buckets is not None  # noqa: S101
    reached = 0
    for bound, count in zip((*map(repr, item.buckets.bounds), "+Inf"), item.buckets.counts.tolist(), strict=True):
        reached += count
        yield bound, reached
