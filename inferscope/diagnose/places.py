"""The line of the application that slow requests spend a stage's time at: samples of their threads laid over the stage by time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from inferscope.diagnose.waits import segments

if TYPE_CHECKING:
    from inferscope.diagnose.evidence import Horizon

__all__ = ["Place", "costliest"]

_MOST: Final = 0.4
"""Part of the sampled time from which one line is worth naming."""
_LEAST_NS: Final = 20_000_000
"""Sampled time below which no line is named."""


class Place(NamedTuple):
    """One line."""

    site: str
    """`function (file:line)`."""
    part: float
    """Of the sampled time in the stage."""
    sampled_ms: float


def costliest(horizon: Horizon, label: str, threshold_ns: float) -> Place | None:
    """The line at which slow requests spend most of a stage; None when too little of it was sampled or no line stands out.

    Args:
        horizon: Evidence with thread samples.
        label: The stage's.
        threshold_ns: Requests above it are slow.
    """
    if label not in horizon.labels:
        return None
    wanted, spent = horizon.labels.index(label), dict[str, float]()
    kinds = [column.kind for column in horizon.columns]
    threads = {(rows.slot, rows.thread): rows for rows in horizon.host.threads if rows.places}
    for request in horizon.host.requests:
        if request.wall_ns <= threshold_ns or not request.spans:
            continue
        for column, thread, start, end, _ in segments(request, kinds, request.vector):
            rows = threads.get((request.slot, thread))
            if column != wanted or rows is None:
                continue
            low, high = int(np.searchsorted(rows.ends, start, "right")), int(np.searchsorted(rows.starts, end, "left"))
            for index in range(low, high):
                both = min(float(rows.ends[index]), end) - max(float(rows.starts[index]), start)
                # where the thread was at the end of an interval says little of one that ended long after the stage
                if both > 0 and rows.ends[index] <= end + 0.5 * both:
                    spent[rows.places[index]] = spent.get(rows.places[index], 0.0) + both
    total = sum(spent.values())
    site = max(spent, key=lambda name: spent[name], default="")
    if not site or total < _LEAST_NS or spent[site] < _MOST * total:
        return None
    return Place(site, spent[site] / total, total / 1e6)
