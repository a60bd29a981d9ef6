"""Running totals of one request class."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

from inferscope.record.pure.bands import EDGE_ROW, BandTable, band_of, row_of
from inferscope.types import COLUMN_LIMIT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferscope.record.pure.histogram import Series

__all__ = ["RequestClass"]

_SMOOTHING: Final = 16
_MILLISECOND: Final = 1_000_000
_SAMPLED: Final = 64
_random: Final = random.Random()  # noqa: S311 - a sample; and never the application's own generator
_GIVEN_UP: Final = frozenset({"cancelled", "CancelledError", "GeneratorExit"})


class RequestClass:
    """What is counted for requests of one name, model and class.

    Args:
        index: Position in the recorder's list.
        key: Request name, model, class.
        series: Wall times.
        edges: Objective edges in ns, ascending.
    """

    __slots__ = (
        "bands", "cancelled", "cls", "count", "cpu_ns", "cpu_requests", "cpu_wall_ns", "drawn", "edges", "errors", "excluded", "heap", "index", "items",
        "late_spans", "model", "name", "overdue", "seen", "series", "shed", "started", "truncated", "typical_ns", "violations", "wall_ns",
    )  # fmt: skip

    def __init__(self, index: int, key: tuple[str, str | None, str | None], series: Series, edges: tuple[int, ...]) -> None:
        self.index = index
        self.name, self.model, self.cls = key
        self.series = series
        self.edges = edges
        self.clear()

    def clear(self) -> None:
        """Forget everything that was counted."""
        self.bands = BandTable(COLUMN_LIMIT)
        self.count = self.errors = self.items = self.excluded = self.late_spans = self.truncated = 0
        self.shed = self.cancelled = 0
        self.wall_ns = self.cpu_ns = self.cpu_wall_ns = self.cpu_requests = 0
        self.violations = [0] * len(self.edges)
        self.overdue = [0] * len(self.edges)
        self.started = self.drawn = 0
        self.typical_ns = 0
        self.heap: list[int] = []
        self.seen: dict[int, int] = {}

    def set_edges(self, edges: tuple[int, ...]) -> None:
        """Put other edges in force; rows of the old ones return to their bands."""
        if edges != self.edges:
            kept = dict(zip(self.edges, self.violations, strict=True))
            late = dict(zip(self.edges, self.overdue, strict=True))
            self.bands.fold_edges(self.edges)
            self.violations = [kept.get(edge, 0) for edge in edges]
            self.overdue = [late.get(edge, 0) for edge in edges]
            self.edges = edges

    def row_of(self, wall_ns: int) -> int:
        """The band row of a wall time."""
        return row_of(wall_ns, self.edges)

    def base_of(self, row: int) -> int:
        """The band that a row was cut from, or that it is."""
        return row if row < EDGE_ROW else band_of(self.edges[row - EDGE_ROW])

    def cpu_weight(self) -> int:
        """For how many requests the next one stands when `auto` measures it; 0 when it does not.

        Requests of 1 ms or more are measured always, of shorter ones one of each 64, drawn: every 64th would be the same one of
        traffic that comes in turns. Of the first 64 it is the first, because nobody knows yet how long they take.
        """
        number = self.started
        self.started = number + 1
        place = number % _SAMPLED
        if place == 0:
            self.drawn = _random.randrange(_SAMPLED) if number else 0
        if number == 0 or self.typical_ns >= _MILLISECOND:
            return 1
        return _SAMPLED if place == self.drawn else 0

    def withhold(self, wall_ns: int, error: str | None) -> bool:
        """Count a request that nobody judges, and say whether it is one: it was refused, or its caller gave up before it was late."""
        shed = error == "shed"
        if not shed and (error not in _GIVEN_UP or (self.edges and wall_ns > self.edges[0])):
            return False
        self.count += 1
        self.wall_ns += wall_ns
        self.shed += shed
        self.cancelled += not shed
        return True

    def count_request(self, wall_ns: int, items: int, error: str | None, *, profiled: bool) -> None:
        """Count what holds for every request that is judged, profiled or not."""
        self.count += 1
        self.items += items
        self.wall_ns += wall_ns
        if error is not None and error not in _GIVEN_UP:
            self.errors += 1
        overdue = error == "deadline"
        for index, edge in enumerate(self.edges):
            above = wall_ns > edge
            self.violations[index] += above or overdue
            self.overdue[index] += overdue and not above and not profiled
        self.typical_ns = self.typical_ns + (wall_ns - self.typical_ns) // _SMOOTHING if self.typical_ns else wall_ns

    def count_latency(self, wall_ns: int, vector: Sequence[int]) -> int:
        """Count the wall time and fold the exclusive vector; gives the band row."""
        row = self.row_of(wall_ns)
        self.series.record(wall_ns)
        self.bands.add(row, vector)
        return row

    def count_cpu(self, cpu_ns: int, wall_ns: int, weight: int) -> None:
        """Count a request whose thread CPU time is known, and for how many it stands."""
        self.cpu_ns += weight * cpu_ns
        self.cpu_wall_ns += weight * wall_ns
        self.cpu_requests += 1

    def read(self) -> dict[str, int | tuple[int, ...]]:
        """The running totals by name."""
        return {
            "count": self.count,
            "errors": self.errors,
            "items": self.items,
            "excluded": self.excluded,
            "shed": self.shed,
            "cancelled": self.cancelled,
            "late_spans": self.late_spans,
            "truncated": self.truncated,
            "violations": tuple(self.violations),
            "overdue": tuple(self.overdue),
            "wall_ns": self.wall_ns,
            "cpu_ns": self.cpu_ns,
            "cpu_wall_ns": self.cpu_wall_ns,
            "cpu_requests": self.cpu_requests,
        }
