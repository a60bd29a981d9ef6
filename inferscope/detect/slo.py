"""Objectives: what a request class promises, and how a window is counted against it."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from inferscope.aggregate.bands import tail
from inferscope.aggregate.histogram import above
from inferscope.clock import NS_PER_MS
from inferscope.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from inferscope.types import ClassKey, ClassWindow, Window

__all__ = ["EDGE_LIMIT", "SEVERE", "SLO", "Counts", "check_objectives", "count", "edges_by_request"]

EDGE_LIMIT: Final = 4
"""Exact edges that a request's bands can have."""

SEVERE: Final = 5
"""A request this many times over the objective is severe."""

_QUANTILES: Final = {"p95_ms": 0.95, "p99_ms": 0.99, "p999_ms": 0.999}
_LONGEST_MS: Final = 60_000.0


@dataclass(frozen=True, slots=True)
class SLO:
    """A latency objective: at most 1 - quantile of the requests take longer than the threshold.

    Args:
        name: The objective's name; also the request it judges, unless `request` says otherwise.
        p99_ms: At most 1 % of requests may take longer, milliseconds. Exactly one of `p99_ms`, `p95_ms` and `p999_ms` is given.
        p95_ms: The same for 5 %.
        p999_ms: The same for 0.1 %.
        window_s: An incident closes when the share over the threshold was below 1 - quantile for this long. 5 to 3600, default 60.
        min_requests: Requests in one tick of the detector, at least: below this many a second, ticks last longer. Default 20; raise it where
            one slow episode hits more requests than this.
        max_error_rate: Also an incident when a larger share of requests fails, between 0 and 1. Default None: errors are not judged.
        model: Only requests of this model. Default None: all.
        cls: Only requests of this class. Default None: all.
        request: The request that is judged, when several objectives share one. Default None: `name`.

    Raises:
        ConfigurationError: A keyword has a value that cannot be used.
    """

    name: str
    _: KW_ONLY
    p99_ms: float | None = None
    p95_ms: float | None = None
    p999_ms: float | None = None
    window_s: float = 60.0
    min_requests: int = 20
    max_error_rate: float | None = None
    model: str | None = None
    cls: str | None = None
    request: str | None = None

    def __post_init__(self) -> None:
        for key in ("name", "model", "cls", "request"):
            _check_text(key, getattr(self, key), optional=key != "name")
        given = {key: getattr(self, key) for key in _QUANTILES if getattr(self, key) is not None}
        if len(given) != 1:
            raise ConfigurationError(
                "slo", given or self.name, "exactly one of p99_ms, p95_ms and p999_ms, such as SLO('score', p99_ms=20)"
            )
        for key, value in given.items():
            _check_number(key, value, 0.001, _LONGEST_MS, f"milliseconds from 0.001 to {_LONGEST_MS:.0f}")
        _check_number("window_s", self.window_s, 5.0, 3600.0, "seconds from 5 to 3600")
        _check_number("min_requests", self.min_requests, 1, 1_000_000, "an integer from 1 to 1000000")
        if self.min_requests != int(self.min_requests):
            raise ConfigurationError("min_requests", self.min_requests, "an integer from 1 to 1000000")
        object.__setattr__(self, "min_requests", int(self.min_requests))  # text gives 100.0
        if self.max_error_rate is not None:
            _check_number("max_error_rate", self.max_error_rate, 0.0, 1.0, "a fraction between 0 and 1, such as 0.001")
            if not 0.0 < self.max_error_rate < 1.0:
                raise ConfigurationError("max_error_rate", self.max_error_rate, "a fraction between 0 and 1, such as 0.001")

    @property
    def quantile(self) -> float:
        """0.95, 0.99 or 0.999."""
        return next(quantile for key, quantile in _QUANTILES.items() if getattr(self, key) is not None)

    @property
    def threshold_ms(self) -> float:
        """The promised latency, milliseconds."""
        return float(next(value for key in _QUANTILES if (value := getattr(self, key)) is not None))

    @property
    def threshold_ns(self) -> int:
        """The promised latency, nanoseconds."""
        return round(self.threshold_ms * NS_PER_MS)

    @property
    def request_name(self) -> str:
        """The request that is judged."""
        return self.request or self.name

    def judges(self, key: ClassKey) -> bool:
        """Whether a request class counts towards this objective."""
        return key.request == self.request_name and self.model in {None, key.model} and self.cls in {None, key.cls}


class Counts(NamedTuple):
    """What an objective is judged by, since the previous counts."""

    requests: int
    exceeding: int
    """Requests above the threshold."""
    errors: int = 0
    severe: int = 0
    """Requests more than five times above it."""
    excluded: int = 0
    """Profiled requests; not in `requests` nor `exceeding`."""


def count(slo: SLO, window: Window) -> Counts:
    """Count a window against an objective; profiled requests are left out, because capturing made them slow.

    Requests come from the band sums, as those above the threshold do: read apart, the two could disagree by the requests in between.
    """
    total = Counts(0, 0)
    for held in window.classes:
        if slo.judges(held.key):
            total = Counts(*(a + b for a, b in zip(total, _count_class(slo, held), strict=True)))
    return total


def _count_class(slo: SLO, held: ClassWindow) -> Counts:
    requests = int(held.bands.counts.sum())
    threshold = slo.threshold_ns
    if threshold in held.edges_ns:
        exceeding = tail(held.bands, held.edges_ns, held.edges_ns.index(threshold))[0]
    else:  # the edge was not set before these requests: the histogram knows it to a thousandth
        exceeding = min(above(held.latency, threshold), requests)
    return Counts(requests, exceeding, held.errors, min(above(held.latency, SEVERE * threshold), exceeding), held.excluded)


def edges_by_request(slos: Iterable[SLO]) -> dict[str, tuple[int, ...]]:
    """Thresholds of every judged request, ascending, ns: what the recorder is given as exact edges."""
    edges: dict[str, set[int]] = {}
    for slo in slos:
        edges.setdefault(slo.request_name, set()).add(slo.threshold_ns)
    return {request: tuple(sorted(values)) for request, values in edges.items()}


def check_objectives(slos: Iterable[SLO | Mapping[str, Any]]) -> tuple[SLO, ...]:
    """Objectives as values, checked together.

    Args:
        slos: `SLO` values, or mappings of its keywords from a file or the environment.

    Raises:
        ConfigurationError: A keyword is unknown or its value unusable, a name is used twice, or a request has more than 4 thresholds.
    """
    checked: list[SLO] = []
    for item in slos:
        slo = item if isinstance(item, SLO) else _from_mapping(item)
        if any(slo.name == other.name for other in checked):
            raise ConfigurationError("slo", slo.name, "one name for each objective; give the second its own and say request=...")
        checked.append(slo)
    for request, edges in edges_by_request(checked).items():
        if len(edges) > EDGE_LIMIT:
            raise ConfigurationError("slo", request, f"at most {EDGE_LIMIT} different thresholds for one request")
    return tuple(checked)


def _from_mapping(keywords: Mapping[str, Any]) -> SLO:
    known = [name for name in SLO.__dataclass_fields__ if name != "_"]
    for key, value in keywords.items():
        if key not in known:
            raise ConfigurationError(f"slo.{key}", value, f"a keyword of SLO: {', '.join(known)}")
    if "name" not in keywords:
        raise ConfigurationError("slo.name", None, "the name of a request, such as 'score'")
    return SLO(**keywords)


def _check_text(key: str, value: object, *, optional: bool) -> None:
    if value is None and optional:
        return
    if not isinstance(value, str) or not value.strip() or len(value) > 120:
        raise ConfigurationError(key, value, "a name of 1 to 120 characters")


def _check_number(key: str, value: object, low: float, high: float, accepted: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or not low <= value <= high:
        raise ConfigurationError(key, value, accepted)
