"""Whose time the tail of a fleet is: the attribution of an incident, from band sums that replicas export and a backend adds up.

share(c) = (E[c | tail] - E[c | body]) / (E[wall | tail] - E[wall | body]). The tail is what lies above the objective, exactly, because the
bands have an edge there; the body is P40 to P60. Bands cut by the two quantiles count in proportion; what then differs from the mean latency
between them, which the histogram knows better than four bands an octave, is placed along the slope of the neighbouring bands. No intervals and no what-if:
those need the vectors of single requests, which an incident keeps and a time-series database does not (`inferscope explain DIR…`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from inferscope.types import BODY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inferscope.export.otlp.buckets import Buckets
    from inferscope.types import FloatArray

__all__ = ["FleetShare", "Tail", "attribute"]

_LEAST: Final = 100
"""Requests above the objective below which no cause is named; without single seconds nothing says how many episodes they are."""
_CONTAMINATED: Final = 0.30
"""Part of the requests above the objective from which the middle of all requests is no ordinary one; as for an incident."""
_CLOSE: Final = 1e-6


@dataclass(frozen=True, slots=True)
class FleetShare:
    """One owner's part of the tail's excess over the body."""

    name: str
    share: float
    """Fraction; all shares add to 1."""
    tail_ms: float
    body_ms: float


@dataclass(frozen=True, slots=True)
class Tail:
    """The tail's excess by owner of the time."""

    shares: tuple[FleetShare, ...]
    """By descending share."""
    withheld: str | None
    """Why nothing is attributed, if so."""
    requests: int = 0
    """Requests above the objective in the bands; profiled ones are not."""
    tail_ms: float = 0.0
    body_ms: float = 0.0


def attribute(
    counts: Mapping[str, float], times: Mapping[tuple[str, str], float], threshold_s: float, latency: Buckets | None = None
) -> Tail:
    """Divide the excess.

    Args:
        counts: Requests by the band's upper bound as exported (`inferscope.band`).
        times: Seconds by upper bound and owner.
        threshold_s: The objective; it must be one of the bounds.
        latency: The requests' histogram, which sharpens the body.
    """
    bands = sorted((each for each in counts if counts[each] > 0), key=float)
    if not bands:
        return Tail((), "no band sums are exported: configure(export_bands=True) or INFERSCOPE_EXPORT_BANDS=1 in every replica adds them")
    upper = np.array([float(each) for each in bands])
    if upper[-1] > threshold_s * (1 + _CLOSE) and not _edge(counts, times, threshold_s):
        return Tail(
            (), f"no band ends at the objective of {threshold_s * 1e3:g} ms: replicas disagree about it, or it changed in this time"
        )
    above = (upper > threshold_s * (1 + _CLOSE)).astype(np.float64)
    number = np.array([counts[each] for each in bands])
    names = sorted({name for _, name in times})
    sums = np.array([[times.get((band, name), 0.0) for name in names] for band in bands])
    slow = float(above @ number)
    if slow < _LEAST:
        return Tail((), f"{slow:.0f} requests above the objective; {_LEAST} are needed to name a cause", round(slow))
    if slow > _CONTAMINATED * number.sum():
        part = 100 * slow / number.sum()
        return Tail(
            (),
            f"{part:.0f} % of the requests exceed the objective, so an ordinary one is not known; an incident keeps the last healthy time",
            round(slow),
        )
    return _divide(names, sums, number, above, latency)


def _edge(counts: Mapping[str, float], times: Mapping[tuple[str, str], float], threshold_s: float) -> bool:
    bounds = {*counts, *(band for band, _ in times)}
    return any(math.isclose(float(bound), threshold_s, rel_tol=_CLOSE) for bound in bounds)


def _divide(names: list[str], sums: FloatArray, number: FloatArray, above: FloatArray, latency: Buckets | None) -> Tail:
    slow = float(above @ number)
    tail = (above @ sums) / slow
    body = _body(sums, number, latency)
    excess = tail - body
    if excess.sum() <= 0:
        return Tail((), "the tail is no slower than the body", round(slow))
    shares = excess / excess.sum()
    found = [
        FleetShare(name, float(shares[place]), float(tail[place]) * 1e3, float(body[place]) * 1e3)
        for place, name in enumerate(names)
        if tail[place] or body[place]
    ]
    return Tail(tuple(sorted(found, key=lambda each: -each.share)), None, round(slow), float(tail.sum()) * 1e3, float(body.sum()) * 1e3)


def _part(number: FloatArray) -> FloatArray:
    """How much of each cell lies between the body's quantiles."""
    ends = np.cumsum(number)
    low, high = (quantile * ends[-1] for quantile in BODY)
    inside: FloatArray = np.maximum(np.minimum(ends, high) - np.maximum(ends - number, low), 0.0) / np.maximum(number, 1e-300)
    return inside


def _body(sums: FloatArray, number: FloatArray, latency: Buckets | None) -> FloatArray:
    """The mean vector of an ordinary request, seconds."""
    weights = _part(number)
    mean: FloatArray = (weights @ sums) / float(weights @ number)
    wall = _wall(latency)
    inside = np.flatnonzero(weights)
    first, last = max(int(inside[0]) - 1, 0), min(int(inside[-1]) + 1, len(number) - 1)
    if wall is None or first == last:
        return mean
    slope = sums[last] / number[last] - sums[first] / number[first]
    rise = float(slope.sum())
    moved: FloatArray = mean + slope / rise * (wall - float(mean.sum())) if rise > 0 else mean
    return moved


def _wall(latency: Buckets | None) -> float | None:
    """Mean latency between the body's quantiles, seconds."""
    if latency is None or latency.scale is None or not latency.counts.size:
        return None
    middle = 2.0 ** ((latency.offset + np.arange(len(latency.counts)) + 0.5) / 2.0**latency.scale)
    counts = latency.counts.astype(np.float64)
    weights = _part(np.concatenate([[float(latency.zero_count)], counts]))[1:] * counts
    return float(weights @ middle / weights.sum()) if weights.sum() else None
