"""Current numbers, as `inferscope.snapshot()` gives them to people and tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from inferscope.aggregate.histogram import percentiles
from inferscope.clock import NS_PER_S
from inferscope.types import SeriesSnapshot, Snapshot

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from inferscope.aggregate.window import ClassTotals
    from inferscope.types import Distribution

__all__ = ["take"]

_QUANTILES = (0.50, 0.95, 0.99, 0.999, 1.0)


def _series(held: Distribution) -> SeriesSnapshot:
    values = [None if value is None else float(value) / NS_PER_S for value in percentiles(held, _QUANTILES)]
    return SeriesSnapshot(held.kind, held.labels, held.count, held.sum_ns / NS_PER_S, *values)


_COUNTED: Final = ("count", "errors", "items", "excluded", "shed", "cancelled")


def take(cumulative: Iterable[Distribution], totals: Iterable[ClassTotals], counters: Mapping[str, int], taken_unix_ns: int) -> Snapshot:
    """Percentiles of running totals; classes of one request name are added in `requests`."""
    requests: dict[str, dict[str, int]] = {}
    for item in totals:
        row = requests.setdefault(item.key.request, dict.fromkeys((*_COUNTED, "violations"), 0))
        for key in _COUNTED:
            row[key] += getattr(item, key)
        row["violations"] += item.violations[0] if item.violations else 0
    return Snapshot(taken_unix_ns, tuple(_series(held) for held in cumulative), requests, dict(counters))
