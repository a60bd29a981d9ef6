"""Two versions of a service over the same interval, with the same mix of requests.

Versions seldom get the same requests: a canary of large ones reads as a regression. Each version's classes (request, model, class) are weighted by
their part in both versions together (direct standardisation), and percentiles and shares are taken of that. A class that only one of them
served cannot be compared and is left out, said and counted. Sizes are told apart as far as `request(cls=…)` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from inferscope import semconv
from inferscope.export.fleet.summary import QUANTILES
from inferscope.export.otlp.buckets import Buckets, quantile, rescale

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from inferscope.export.fleet.source import Key, Scope, Source

__all__ = ["Comparison", "compare"]

_WHO: Final = (semconv.SERVICE_NAME, semconv.ATTR_REQUEST)
_CLASS: Final = (*_WHO, semconv.ATTR_MODEL, semconv.ATTR_CLASS)
_STEADY: Final = 10
"""Requests beyond a quantile that it needs in each version."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One request of one service in two versions; `a` first."""

    service: str
    request: str
    requests: tuple[int, int]
    classes: int
    items: tuple[float | None, float | None]
    """Items a request of the classes in both, with the mix of both: where they differ, sizes do, and the classes do not tell them apart."""
    left_out: tuple[int, int]
    """Requests of classes that the other version did not serve."""
    raw_ms: dict[float, tuple[float | None, float | None]]
    """Percentiles as they were, by quantile."""
    adjusted_ms: dict[float, tuple[float | None, float | None]]
    """The same with the mix of both."""
    shares: dict[str, tuple[float, float]]
    """Adjusted share above each objective."""


def compare(source: Source, scope: Scope, attribute: str, values: tuple[str, str]) -> tuple[Comparison, ...]:
    """Compare the replicas of two values of an attribute.

    Args:
        source: Where they export to.
        scope: The interval.
        attribute: `service.version`, say.
        values: The two.

    Raises:
        InferscopeError: The source does not answer.
    """
    sides = tuple(scope.only(attribute, value) for value in values)
    points = tuple(source.distributions(semconv.REQUEST_DURATION, _CLASS, side) for side in sides)
    above = tuple(source.counters(semconv.SLO_VIOLATIONS, (*_CLASS, semconv.ATTR_SLO), side) for side in sides)
    counted = tuple(source.counters(semconv.REQUESTS, _CLASS, side) for side in sides)
    items = tuple(source.counters(semconv.ITEMS, _CLASS, side) for side in sides)
    found: list[Comparison] = []
    for who in sorted({key[:2] for side in points for key in side}):
        both = sorted(key for key in set(points[0]) & set(points[1]) if key[:2] == who and points[0][key].count and points[1][key].count)
        if both:
            found.append(_one(who, both, points, above, counted, items))
    return tuple(found)


def _one(
    who: Key,
    both: Sequence[Key],
    points: Sequence[Mapping[Key, Buckets]],
    above: Sequence[Mapping[Key, float]],
    counted: Sequence[Mapping[Key, float]],
    items: Sequence[Mapping[Key, float]],
) -> Comparison:
    mix = {key: float(points[0][key].count + points[1][key].count) for key in both}
    everything = sum(mix.values())
    weights = [{key: mix[key] / everything / side[key].count for key in both} for side in points]
    mine = [[(side[key], 1.0) for key in side if key[:2] == who] for side in points]
    fair = [[(side[key], weight[key]) for key in both] for side, weight in zip(points, weights, strict=True)]
    names = sorted({key[4] for side in above for key in side if key[:4] in mix})
    shares = {
        name: (
            *(
                sum(mix[key] / everything * side.get((*key, name), 0.0) / max(number.get(key, 0.0), 1.0) for key in both)
                for side, number in zip(above, counted, strict=True)
            ),
        )
        for name in names
    }
    return Comparison(
        service=who[0],
        request=who[1],
        requests=_pair(sum(each.count for each, _ in side) for side in mine),
        classes=len(both),
        items=_both(_items(mix, side, number) for side, number in zip(items, counted, strict=True)),
        left_out=_pair(sum(side[key].count for key in side if key[:2] == who and key not in mix) for side in points),
        raw_ms={q: _both(_quantile(side, q) for side in mine) for q in QUANTILES},
        adjusted_ms={q: _both(_quantile(side, q) for side in fair) for q in QUANTILES},
        shares={name: (values[0], values[1]) for name, values in shares.items()},
    )


def _items(mix: Mapping[Key, float], items: Mapping[Key, float], counted: Mapping[Key, float]) -> float | None:
    """Items a request with the mix of both versions; None where a class counts none."""
    if any(counted.get(key, 0.0) <= 0 or key not in items for key in mix):
        return None
    return sum(mix[key] * items[key] / counted[key] for key in mix) / sum(mix.values())


def _pair(values: Iterable[int]) -> tuple[int, int]:
    first, second = values
    return first, second


def _both(values: Iterable[float | None]) -> tuple[float | None, float | None]:
    first, second = values
    return first, second


def _quantile(parts: Sequence[tuple[Buckets, float]], q: float) -> float | None:
    """Milliseconds of a weighted mixture; None with too few requests beyond it."""
    if not parts or sum(each.count for each, _ in parts) * (1.0 - q) < _STEADY:
        return None
    scales = [each.scale for each, _ in parts if each.scale is not None]
    if len(scales) != len(parts):
        return None  # explicit buckets of different objectives do not mix
    chosen = [(rescale(each, min(scales)), weight) for each, weight in parts]
    first = min((each.offset for each, _ in chosen if len(each.counts)), default=0)
    last = max((each.offset + len(each.counts) for each, _ in chosen if len(each.counts)), default=0)
    mixed = np.zeros(max(last - first, 0))
    for each, weight in chosen:
        if len(each.counts):
            mixed[each.offset - first : each.offset - first + len(each.counts)] += each.counts * weight
    # Whole counts of a fine enough unit, for the one function that reads quantiles.
    unit = 1e12 / max(mixed.sum() + sum(each.zero_count * weight for each, weight in chosen), 1e-300)
    counts = np.rint(mixed * unit).astype(np.int64)
    zero = round(sum(each.zero_count * weight for each, weight in chosen) * unit)
    found = quantile(Buckets(int(counts.sum()) + zero, 0.0, first, counts, zero, scale=min(scales)), q)
    return None if found is None else found * 1e3
