"""One row for each request of each service: what a fleet's percentiles, errors, violations and tail are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from inferscope import semconv
from inferscope.export.fleet.tail import Tail, attribute
from inferscope.export.otlp.buckets import quantile

if TYPE_CHECKING:
    from inferscope.export.fleet.source import Key, Scope, Source
    from inferscope.export.otlp.buckets import Buckets

__all__ = ["QUANTILES", "FleetRow", "Judged", "summarise"]

QUANTILES: Final = (0.5, 0.95, 0.99, 0.999)
_WHO: Final = (semconv.SERVICE_NAME, semconv.ATTR_REQUEST)
_JUDGED: Final = (*_WHO, semconv.ATTR_SLO)
_QUANTILE: Final = "inferscope.slo.quantile"


@dataclass(frozen=True, slots=True)
class Judged:
    """An objective over the whole fleet."""

    name: str
    quantile: float
    threshold_ms: float
    violations: int
    share: float
    """Of the requests; both are counted, not estimated."""

    @property
    def broken(self) -> bool:
        """Whether more requests lie above it than it allows."""
        return self.share > 1.0 - self.quantile + 1e-12


@dataclass(frozen=True, slots=True)
class FleetRow:
    """One request of one service, over all replicas."""

    service: str
    request: str
    replicas: int
    requests: int
    errors: int
    latency_ms: dict[float, float | None]
    """By quantile."""
    bucket_error: float | None
    """Half a bucket: how far a percentile can be off, as a fraction."""
    objectives: tuple[Judged, ...]
    tail: Tail

    @property
    def broken(self) -> bool:
        """Whether an objective is broken."""
        return any(each.broken for each in self.objectives)


def summarise(source: Source, scope: Scope) -> tuple[FleetRow, ...]:
    """Ask the source for everything.

    Raises:
        InferscopeError: It does not answer.
    """
    counted = source.counters(semconv.REQUESTS, (*_WHO, semconv.ERROR_TYPE), scope)
    instances = source.counters(semconv.REQUESTS, (*_WHO, semconv.SERVICE_INSTANCE_ID), scope)
    points = source.distributions(semconv.REQUEST_DURATION, _WHO, scope)
    violations = source.counters(semconv.SLO_VIOLATIONS, _JUDGED, scope)
    targets = source.gauges(semconv.SLO_TARGET, (*_JUDGED, _QUANTILE), scope)
    bands = source.counters(semconv.BAND_REQUESTS, (*_WHO, semconv.ATTR_BAND), scope)
    times = source.counters(semconv.BAND_TIME, (*_WHO, semconv.ATTR_BAND, semconv.ATTR_STAGE), scope)
    rows: list[FleetRow] = []
    for who in sorted({key[:2] for key in counted} | set(points)):
        requests = round(sum(value for key, value in counted.items() if key[:2] == who))
        if requests <= 0 or not who[1]:
            continue
        judged = tuple(_judged(who, requests, violations, targets))
        strictest = min((each.threshold_ms for each in judged), default=None)
        buckets = points.get(who)
        rows.append(
            FleetRow(
                service=who[0],
                request=who[1],
                replicas=sum(key[:2] == who and value > 0 for key, value in instances.items()),
                requests=requests,
                errors=round(sum(value for key, value in counted.items() if key[:2] == who and key[2])),
                latency_ms={each: _milliseconds(buckets, each) for each in QUANTILES},
                bucket_error=None if buckets is None or buckets.scale is None else 2 ** (2.0**-buckets.scale / 2) - 1,
                objectives=judged,
                tail=_tail(who, bands, times, strictest, buckets),
            )
        )
    return tuple(rows)


def _milliseconds(buckets: Buckets | None, q: float) -> float | None:
    """None where fewer than 1/(1-q) requests would answer."""
    if buckets is None or buckets.count * (1.0 - q) < 1.0 - 1e-9:
        return None
    found = quantile(buckets, q)
    return None if found is None else found * 1e3


def _judged(who: Key, requests: int, violations: dict[Key, float], targets: dict[Key, float]) -> list[Judged]:
    found: list[Judged] = []
    for (service, request, name, allowed), threshold in sorted(targets.items()):
        exceeding = violations.get((service, request, name))
        if (service, request) == who and exceeding is not None and allowed:
            number = round(exceeding)
            found.append(Judged(name, float(allowed), threshold * 1e3, number, number / requests))
    return found


def _tail(who: Key, bands: dict[Key, float], times: dict[Key, float], threshold_ms: float | None, latency: Buckets | None) -> Tail:
    if threshold_ms is None:
        return Tail((), "no objective is exported for it")
    counts = {key[2]: value for key, value in bands.items() if key[:2] == who}
    spent = {(key[2], key[3]): value for key, value in times.items() if key[:2] == who}
    return attribute(counts, spent, threshold_ms / 1e3, latency)
