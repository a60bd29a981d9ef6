"""Time by latency band and owner as counters, so that a tail can be attributed over a fleet by adding.

The recorder's bands are too many for a time-series database (220 rows of up to 64 columns). Here two neighbours become one, 24 bands of
four an octave around the objective, with the objective itself as an exact edge; of the columns the eight that own most time keep their
names and the rest is `other`. Both sums are exact: nothing is sampled, and what is added over replicas is what one process would have counted.
Where requests have a size, a sample says how many of each size a band had (`sizes`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from inferscope import semconv
from inferscope.aggregate.bands import BASE_BANDS, band_of, bounds_ns
from inferscope.clock import NS_PER_S
from inferscope.export.otlp.metrics import class_attributes
from inferscope.export.otlp.series import Total
from inferscope.export.otlp.sizes import CELLS, Sizes, sampled
from inferscope.pace import Pace
from inferscope.types import BAND_COUNT

if TYPE_CHECKING:
    from inferscope.export.otlp.series import Attributes
    from inferscope.types import ClassKey, ClassWindow, Column, IntArray, RequestRecord, Window

__all__ = ["BANDS", "OTHER", "SERIES_LIMIT", "STAGES", "Bands", "layout"]

BANDS: Final = 24
BELOW: Final = 17
"""Bands up to the objective: four octaves and a bit; ordinary requests lie there."""
STAGES: Final = 8
"""Owners of time that keep their names."""
OTHER: Final = "other"
SERIES_LIMIT: Final = 750
"""Band series of one process; a request class that would go beyond it is left out and counted."""
_OF_A_CLASS: Final = BANDS * (STAGES + 2)
_OF_SIZES: Final = 2 * BANDS
"""What sizes take beside their cells: the bands' squared weights, and `other`."""

_TAIL: Final[Attributes] = ((semconv.ATTR_TAIL, True),)
"""On the bands above the objective: query languages compare labels with texts, not with numbers."""
_WITHOUT_OBJECTIVE_NS: Final = 20_000_000
_ADMITTED_FROM: Final = 0.01
"""Share of a window's time from which a column gets a name, so that trifles at start-up do not use the names up."""


@functools.lru_cache(maxsize=64)
def layout(edges_ns: tuple[int, ...]) -> tuple[IntArray, tuple[str, ...]]:
    """Band of each of the recorder's rows, shape (220,), and the bands' upper bounds in seconds as they are written.

    Args:
        edges_ns: Edges of the class; the first one is the objective.
    """
    objective = edges_ns[0] if edges_ns else _WITHOUT_OBJECTIVE_NS
    middle = band_of(objective)
    base = np.arange(BASE_BANDS)
    groups = np.zeros(BAND_COUNT, dtype=np.int64)
    groups[:BASE_BANDS] = np.where(base <= middle, BELOW - 1 - (middle - base) // 2, BELOW + (base - middle) // 2).clip(0, BANDS - 1)
    for position, edge in enumerate(edges_ns):
        row = band_of(edge)
        groups[BASE_BANDS + position] = BELOW if row == middle else groups[row]
    rows = [middle - 2 * (BELOW - 1 - group) if group < BELOW else middle + 1 + 2 * (group - BELOW) for group in range(BANDS)]
    uppers = [_seconds(bounds_ns(row)[1] + 1) if 0 <= row < BASE_BANDS else "0" for row in rows]
    uppers[BELOW - 1] = _seconds(objective)
    uppers[-1] = "+Inf"
    return groups, tuple(uppers)


def _seconds(nanoseconds: int) -> str:
    return f"{nanoseconds / NS_PER_S:.9g}"


@dataclass(slots=True)
class _Class:
    groups: IntArray
    uppers: tuple[str, ...]
    counts: IntArray = field(default_factory=lambda: np.zeros(BANDS, np.int64))
    sums: IntArray = field(default_factory=lambda: np.zeros((BANDS, STAGES + 1), np.int64))
    """Nanoseconds; the last column is `other`."""
    shown: IntArray = field(default_factory=lambda: np.zeros((BANDS, STAGES + 1), np.int64))
    """The most that was said of each sum: device time that settles late moves between owners, and a counter that falls reads as a restart."""
    names: dict[int, int] = field(default_factory=dict[int, int])
    """Place of each column that has a name."""
    sizes: Sizes | None = None
    """From the first request that has one."""


class Bands:
    """Running totals; `add` comes from the worker, `totals` from the export thread."""

    def __init__(self) -> None:
        self._columns: tuple[Column, ...] = ()
        self._classes: dict[tuple[ClassKey, tuple[int, ...]], _Class] = {}
        self._refused: set[ClassKey] = set()
        self._unsized: set[ClassKey] = set()

    def clear(self) -> None:
        """Start from zero, in a forked child."""
        self._columns, self._classes, self._refused, self._unsized = (), {}, set(), set()

    def add(self, window: Window) -> None:
        """Add one window."""
        self._columns = window.columns
        rest = Pace()
        found: dict[tuple[ClassKey, int], list[RequestRecord]] = {}
        for record in window.records:
            if sampled(record):
                found.setdefault((record.key, record.band), []).append(record)
            rest()
        for item in window.classes:
            held = self._held(item) if len(item.bands.bands) else self._classes.get((item.key, item.edges_ns))
            if held is None:
                continue
            if len(item.bands.bands):
                _add(held, item)
            self._size(held, item, [rows for (key, _), rows in found.items() if key == item.key], rest)

    def _held(self, item: ClassWindow) -> _Class | None:
        key = item.key, item.edges_ns
        held = self._classes.get(key)
        if held is None:
            if self._room() < _OF_A_CLASS:
                self._refused.add(item.key)
                return None
            held = self._classes[key] = _Class(*layout(item.edges_ns))
        return held

    def _room(self) -> int:
        """Series that may still be made."""
        sized = [each.sizes for each in self._classes.values() if each.sizes is not None]
        return SERIES_LIMIT - len(self._classes) * _OF_A_CLASS - sum(_OF_SIZES + each.named for each in sized)

    def _size(self, held: _Class, item: ClassWindow, found: list[list[RequestRecord]], rest: Pace) -> None:
        if held.sizes is None:
            if item.key in self._unsized or all(record.size is None for rows in found for record in rows):
                return
            if self._room() < _OF_SIZES + CELLS:
                self._unsized.add(item.key)
                return
            held.sizes = Sizes(BANDS)
        held.sizes.expect(item.bands)
        for rows in found:
            held.sizes.add(rows, held.groups, self._room())
            rest()

    def totals(self) -> tuple[Total, ...]:
        """The counters; bands without requests and owners without time are left out."""
        found: list[Total] = []
        for (key, _), held in tuple(self._classes.items()):
            named = {place: self._columns[column].label for column, place in tuple(held.names.items())} | {STAGES: OTHER}
            np.maximum(held.shown, held.sums, out=held.shown)
            occupied: list[int] = np.flatnonzero(held.counts).tolist()
            for band in occupied:
                about: Attributes = (*class_attributes(key), (semconv.ATTR_BAND, held.uppers[band]), *(_TAIL if band >= BELOW else ()))
                found.append(Total(semconv.BAND_REQUESTS, int(held.counts[band]), about))
                found += [
                    Total(semconv.BAND_TIME, int(held.shown[band, place]) / NS_PER_S, (*about, (semconv.ATTR_STAGE, named[place])))
                    for place in np.flatnonzero(held.shown[band]).tolist()
                ]
            found += _sizes(key, held)
        for reason, refused in (("band_class", self._refused), ("band_sizes", self._unsized)):
            if refused:
                found.append(Total(semconv.SELF_DROPPED, len(refused), ((semconv.ATTR_REASON, reason),)))
        return tuple(found)


def _sizes(key: ClassKey, held: _Class) -> list[Total]:
    if held.sizes is None:
        return []
    about, uppers = class_attributes(key), held.uppers
    found = [
        Total(semconv.BAND_SIZES, number, (*about, (semconv.ATTR_BAND, uppers[band]), (semconv.ATTR_SIZE, size)))
        for (band, size), number in tuple(held.sizes.cells.items())
    ]
    occupied: list[int] = np.flatnonzero(held.sizes.squares).tolist()
    return found + [
        Total(semconv.BAND_SIZES_SQUARED, float(held.sizes.squares[band]), (*about, (semconv.ATTR_BAND, uppers[band]))) for band in occupied
    ]


def _add(held: _Class, item: ClassWindow) -> None:
    sums, groups = item.bands.sums, held.groups[item.bands.bands]
    spent = sums.sum(axis=0)
    least = _ADMITTED_FROM * int(spent.sum())
    for column in np.argsort(-spent, kind="stable").tolist():
        if len(held.names) >= STAGES or spent[column] <= least:
            break
        held.names.setdefault(column, len(held.names))
    places = np.full(sums.shape[1], STAGES, np.int64)
    for column, place in held.names.items():
        if column < len(places):
            places[column] = place
    np.add.at(held.counts, groups, item.bands.counts)
    np.add.at(held.sums, (groups[:, None], places[None, :]), sums)
