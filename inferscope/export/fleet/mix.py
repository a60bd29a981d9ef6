"""Two versions of a service over the same interval, with the same mix of requests.

Versions seldom get the same requests: a canary of large ones reads as a regression. Each version's classes (request, model, class) are weighted by
their part in both versions together (direct standardisation), and inside a class sizes are, where replicas export them (`sizes`); percentiles and
shares are taken of that. A class or a size that only one of them served cannot be compared and is left out, said and counted.

The interval of a change is that of the counts and of the sampled sizes (2.5 to 97.5 % of redrawn ones), as if requests were independent; what
changes over the interval for both versions alike is in both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from inferscope import semconv
from inferscope.export.fleet.sizes import balance, banded, draw
from inferscope.export.fleet.summary import QUANTILES
from inferscope.export.otlp.buckets import Buckets, quantile, rescale

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from inferscope.export.fleet.sizes import Banded
    from inferscope.export.fleet.source import Key, Scope, Source
    from inferscope.types import FloatArray

__all__ = ["Comparison", "compare"]

_WHO: Final = (semconv.SERVICE_NAME, semconv.ATTR_REQUEST)
_CLASS: Final = (*_WHO, semconv.ATTR_MODEL, semconv.ATTR_CLASS)
_STEADY: Final = 10
"""Requests beyond a quantile that it needs in each version."""
_REDRAWN: Final = 200


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
    change: dict[float, tuple[float, float] | None]
    """95 % interval of the relative change of the adjusted percentiles."""
    shares: dict[str, tuple[float, float]]
    """Adjusted share above each objective."""
    sizes: int | None
    """Sizes (octaves) in both versions, over the classes that have them; None where no class does."""
    size_left_out: tuple[int, int]
    """Requests, by estimate, of sizes that the other version did not serve."""


@dataclass(frozen=True, slots=True)
class _Side:
    """What a source knows of one version."""

    points: Mapping[Key, Buckets]
    above: Mapping[Key, float]
    counted: Mapping[Key, float]
    items: Mapping[Key, float]
    banded: Mapping[Key, Banded]


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
    sides = tuple(_ask(source, scope.only(attribute, value)) for value in values)
    targets = source.gauges(semconv.SLO_TARGET, (semconv.SERVICE_NAME, semconv.ATTR_SLO), scope)
    found: list[Comparison] = []
    for who in sorted({key[:2] for side in sides for key in side.points}):
        shared = set(sides[0].points) & set(sides[1].points)
        both = sorted(key for key in shared if key[:2] == who and all(side.points[key].count for side in sides))
        if both:
            found.append(_one(who, both, sides, {name: at for (service, name), at in targets.items() if service == who[0]}))
    return tuple(found)


def _ask(source: Source, scope: Scope) -> _Side:
    bands = source.counters(semconv.BAND_REQUESTS, (*_CLASS, semconv.ATTR_BAND), scope)
    cells = source.counters(semconv.BAND_SIZES, (*_CLASS, semconv.ATTR_BAND, semconv.ATTR_SIZE), scope)
    squares = source.counters(semconv.BAND_SIZES_SQUARED, (*_CLASS, semconv.ATTR_BAND), scope)
    held: dict[Key, Banded] = {}
    for key in {each[:4] for each in cells}:
        found = banded(
            {each[4]: value for each, value in bands.items() if each[:4] == key},
            {(each[4], each[5]): value for each, value in cells.items() if each[:4] == key},
            {each[4]: value for each, value in squares.items() if each[:4] == key},
        )
        if found is not None:
            held[key] = found
    return _Side(
        source.distributions(semconv.REQUEST_DURATION, _CLASS, scope),
        source.counters(semconv.SLO_VIOLATIONS, (*_CLASS, semconv.ATTR_SLO), scope),
        source.counters(semconv.REQUESTS, _CLASS, scope),
        source.counters(semconv.ITEMS, _CLASS, scope),
        held,
    )


@dataclass(frozen=True, slots=True)
class _Grid:
    """Buckets that every histogram of one request fits into."""

    scale: int | None
    """None when a histogram has explicit buckets: those of different objectives do not mix."""
    offset: int
    middles: FloatArray
    """Seconds."""

    def counts(self, held: Buckets) -> FloatArray:
        """A histogram's counts in these buckets."""
        found = np.zeros(len(self.middles))
        if self.scale is not None and len(held.counts):
            coarse = rescale(held, self.scale)
            found[coarse.offset - self.offset :][: len(coarse.counts)] = coarse.counts
        return found


def _grid(points: Sequence[Buckets]) -> _Grid:
    scales = [each.scale for each in points if each.scale is not None]
    if len(scales) != len(points):
        return _Grid(None, 0, np.zeros(0))
    scale = min(scales)
    held = [rescale(each, scale) for each in points if len(each.counts)]
    first = min((each.offset for each in held), default=0)
    last = max((each.offset + len(each.counts) for each in held), default=0)
    middles: FloatArray = np.exp2((np.arange(first, last) + 0.5) / 2.0**scale)
    return _Grid(scale, first, middles)


@dataclass(frozen=True, slots=True)
class _Part:
    """One class in one version."""

    count: int
    counts: FloatArray
    zero: float
    """Requests below every bucket."""
    banded: Banded | None

    def redrawn(self, rng: np.random.Generator) -> _Part:
        """Another one that might have been seen."""
        held = None if self.banded is None else draw(self.banded, rng)
        return _Part(self.count, rng.poisson(self.counts).astype(np.float64), self.zero, held)


@dataclass(frozen=True, slots=True)
class _Fair:
    """One class with the same mix in both versions."""

    mass: float
    """Requests that each version's weighted ones add to."""
    weights: tuple[FloatArray, FloatArray]
    """Of a request in each bucket."""
    plain: tuple[float, float]
    """Of a request whose latency is no matter."""
    sizes: int | None
    left_out: tuple[float, float]


def _balance(grid: _Grid, pair: tuple[_Part, _Part]) -> _Fair:
    a, b = pair[0].banded, pair[1].banded
    if a is None or b is None or grid.scale is None:
        mass = float(pair[0].count + pair[1].count)
        plain = mass / pair[0].count, mass / pair[1].count
        flat = np.ones(len(grid.middles))
        return _Fair(mass, (flat * plain[0], flat * plain[1]), plain, None, (0.0, 0.0))
    both, common = balance((a, b))
    mass = float(a.requests @ both[0].bands)
    plain = mass / pair[0].count, mass / pair[1].count
    along: list[FloatArray] = []
    for part, weights, each in zip(pair, both, plain, strict=True):
        found = weights.along(grid.middles, part.counts)
        summed = float(part.counts @ found)
        along.append(found * ((mass - part.zero * each) / summed) if summed > 0 else found)
    outside = [
        float(each.requests.sum() - sum(n for size, n in zip(each.sizes, each.totals.tolist(), strict=True) if size in common))
        for each in (a, b)
    ]
    return _Fair(mass, (along[0], along[1]), plain, len(common), (outside[0], outside[1]))


def _one(who: Key, both: Sequence[Key], sides: Sequence[_Side], targets: Mapping[str, float]) -> Comparison:
    mine = [{key: each for key, each in side.points.items() if key[:2] == who} for side in sides]
    grid = _grid([each for side in mine for each in side.values()])
    parts = {key: _pair_of(key, grid, sides) for key in both}
    fair = {key: _balance(grid, pair) for key, pair in parts.items()}
    mixed = [_mixture(parts, fair, n) for n in (0, 1)]
    served = [sum((grid.counts(each) for each in side.values()), np.zeros(len(grid.middles))) for side in mine]
    zeros = [float(sum(each.zero_count for each in side.values())) for side in mine]
    enough = [sum(pair[n].count for pair in parts.values()) for n in (0, 1)]
    counts = [sum(each.count for each in side.values()) for side in mine]
    sized = [each for each in fair.values() if each.sizes is not None]
    return Comparison(
        service=who[0],
        request=who[1],
        requests=_pair(counts),
        classes=len(both),
        items=_both(_items({key: each.mass for key, each in fair.items()}, side.items, side.counted) for side in sides),
        left_out=_pair(sum(each.count for key, each in side.items() if key not in fair) for side in mine),
        raw_ms={q: _both(_quantile(grid, served[n], zeros[n], q, counts[n]) for n in (0, 1)) for q in QUANTILES},
        adjusted_ms={q: _both(_quantile(grid, *mixed[n], q, enough[n]) for n in (0, 1)) for q in QUANTILES},
        change=_changes(grid, parts, enough),
        shares=_shares(both, sides, fair, parts, grid, targets),
        sizes=max((each.sizes or 0 for each in sized), default=None) if len(sized) == len(fair) else None,
        size_left_out=_pair(round(sum(each.left_out[n] for each in sized)) for n in (0, 1)),
    )


def _pair_of(key: Key, grid: _Grid, sides: Sequence[_Side]) -> tuple[_Part, _Part]:
    a, b = (
        _Part(side.points[key].count, grid.counts(side.points[key]), float(side.points[key].zero_count), side.banded.get(key))
        for side in sides
    )
    return a, b


def _mixture(parts: Mapping[Key, tuple[_Part, _Part]], fair: Mapping[Key, _Fair], n: int) -> tuple[FloatArray, float]:
    """A version's weighted histogram over all classes, and what lies below every bucket."""
    counts = np.sum([parts[key][n].counts * each.weights[n] for key, each in fair.items()], axis=0)
    return counts, sum(parts[key][n].zero * each.plain[n] for key, each in fair.items())


def _changes(grid: _Grid, parts: Mapping[Key, tuple[_Part, _Part]], enough: Sequence[int]) -> dict[float, tuple[float, float] | None]:
    rng = np.random.default_rng(1)
    found: dict[float, list[float]] = {q: [] for q in QUANTILES}
    for _ in range(_REDRAWN if grid.scale is not None else 0):
        drawn = {key: (a.redrawn(rng), b.redrawn(rng)) for key, (a, b) in parts.items()}
        fair = {key: _balance(grid, pair) for key, pair in drawn.items()}
        first, second = (_mixture(drawn, fair, n) for n in (0, 1))
        for q, changes in found.items():
            a, b = _quantile(grid, *first, q, enough[0]), _quantile(grid, *second, q, enough[1])
            if a and b is not None:
                changes.append(b / a - 1)
    return {q: _interval(changes) for q, changes in found.items()}


def _interval(changes: Sequence[float]) -> tuple[float, float] | None:
    if len(changes) < _REDRAWN // 2:
        return None
    low, high = np.quantile(changes, (0.025, 0.975)).tolist()
    return low, high


def _shares(
    both: Sequence[Key],
    sides: Sequence[_Side],
    fair: Mapping[Key, _Fair],
    parts: Mapping[Key, tuple[_Part, _Part]],
    grid: _Grid,
    targets: Mapping[str, float],
) -> dict[str, tuple[float, float]]:
    """Share above each objective: exact counts, weighted as the histogram's part above it is."""
    everything = sum(each.mass for each in fair.values())

    def weighted(n: int, key: Key, name: str) -> float:
        side, part, weights = sides[n], parts[key][n], fair[key].weights[n]
        beyond = part.counts * (grid.middles > targets.get(name, 0.0))
        mean = float(beyond @ weights / beyond.sum()) if beyond.sum() > 0 else fair[key].plain[n]
        return side.above.get((*key, name), 0.0) / max(side.counted.get(key, 0.0), 1.0) * part.count * mean

    names = sorted({key[4] for side in sides for key in side.above if key[:4] in fair})
    return {name: _pair_f(sum(weighted(n, key, name) for key in both) / everything for n in (0, 1)) for name in names}


def _items(mix: Mapping[Key, float], items: Mapping[Key, float], counted: Mapping[Key, float]) -> float | None:
    """Items a request with the mix of both versions; None where a class counts none."""
    if any(counted.get(key, 0.0) <= 0 or key not in items for key in mix):
        return None
    return sum(mix[key] * items[key] / counted[key] for key in mix) / sum(mix.values())


def _pair(values: Iterable[int]) -> tuple[int, int]:
    first, second = values
    return first, second


def _pair_f(values: Iterable[float]) -> tuple[float, float]:
    first, second = values
    return first, second


def _both(values: Iterable[float | None]) -> tuple[float | None, float | None]:
    first, second = values
    return first, second


def _quantile(grid: _Grid, counts: FloatArray, zero: float, q: float, requests: int) -> float | None:
    """Milliseconds of a weighted histogram; None with too few requests beyond it."""
    if grid.scale is None or requests * (1.0 - q) < _STEADY:
        return None
    # Whole counts of a fine enough unit, for the one function that reads quantiles.
    unit = 1e12 / max(float(counts.sum()) + zero, 1e-300)
    whole = np.rint(counts * unit).astype(np.int64)
    nothing = round(zero * unit)
    found = quantile(Buckets(int(whole.sum()) + nothing, 0.0, grid.offset, whole, nothing, scale=grid.scale), q)
    return None if found is None else found * 1e3
