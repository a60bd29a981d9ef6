"""How windows are counted against objectives, and what becomes of requests that were not simply served.

    outcome         said by                                        judged   above the objective        error
    served                                                         yes      when it took longer        no
    failed          an exception, or `request.error = "..."`       yes      when it took longer        yes
    past deadline   `request.error = "deadline"`                   yes      always                     yes
    cancelled       CancelledError, GeneratorExit or "cancelled"   only when it already took longer    no
    shed            `request.error = "shed"`                       no       no                         no
    profiled        a capture was tried on it                      no       no                         as it was
    in warm-up      before the warm-up ended                       no       no                         no

Those that are not judged are counted: a shed request was refused on purpose and a quick refusal must not make the service look fast; a
caller that gave up early says nothing of how long it would have taken, one that gave up late does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from inferscope.aggregate.bands import above_edge, tail
from inferscope.aggregate.histogram import above, layout, value_at_index
from inferscope.types import Reason

if TYPE_CHECKING:
    from inferscope.detect.slo import SLO
    from inferscope.types import ClassKey, ClassWindow, FloatArray, Window

__all__ = ["FIRST_BYTE", "SEVERE", "Counts", "Jitter", "SizeFilter", "count", "flow", "plus"]

SEVERE: Final = 5
"""A request this many times over the objective is severe."""
FIRST_BYTE: Final = "first_byte"
"""Kind of the series that holds the time to the first byte, labelled with the request's name."""
_KEEP: Final = 0.9
"""A tick old sample of sizes counts this much: about ten seconds of memory, as long as the recorder's reservoir lasts."""


class Counts(NamedTuple):
    """What an objective is judged by, since the previous counts."""

    requests: int
    exceeding: int
    """Requests above the threshold."""
    errors: int = 0
    severe: int = 0
    """Requests more than five times above it."""
    excluded: int = 0
    """Requests that are not judged: profiled, shed, cancelled early; not in `requests` nor `exceeding`."""


def plus(one: Counts, other: Counts) -> Counts:
    """Sum by field."""
    return Counts(*(a + b for a, b in zip(one, other, strict=True)))


def count(slo: SLO, window: Window) -> Counts:
    """Count a window against an objective; profiled requests are left out, because capturing made them slow.

    Requests come from the band sums, as those above the threshold do: read apart, the two could disagree by the requests in between. An
    objective on the first byte is counted from that series, whose buckets are 1 % wide.
    """
    total = Counts(0, 0)
    for held in window.classes:
        if slo.judges(held.key):
            total = plus(total, _count_class(slo, held))
    if slo.until == FIRST_BYTE:
        n = k = severe = 0
        for series in window.series:
            if series.kind == FIRST_BYTE and series.labels[:1] == (slo.request_name,) and series.count:
                n, k = n + series.count, k + above(series, slo.threshold_ns)
                severe += above(series, SEVERE * slo.threshold_ns)
        return Counts(n, min(k, n), min(total.errors, n), min(severe, k), total.excluded)
    return total


def _count_class(slo: SLO, held: ClassWindow) -> Counts:
    requests = int(held.bands.counts.sum())
    threshold = slo.threshold_ns
    if threshold in held.edges_ns:
        edge = held.edges_ns.index(threshold)
        exceeding = tail(held.bands, held.edges_ns, edge)[0] + (held.overdue[edge] if held.overdue else 0)
    else:  # the edge was not set before these requests: the histogram knows it to a thousandth
        exceeding = min(above(held.latency, threshold), requests)
    severe = min(above(held.latency, SEVERE * threshold), exceeding)
    return Counts(requests, min(exceeding, requests), held.errors, severe, _withheld(held))


def _withheld(held: ClassWindow) -> int:
    """Requests that are counted and not judged."""
    return held.excluded + held.shed + held.cancelled


def flow(slo: SLO | None, window: Window) -> Counts:
    """Items that finished and the microseconds that requests waited in queues: a row of flow. Without an objective: of all requests.

    Queues are not told apart by request: one objective's backlog is the process's.
    """
    items = sum(held.items for held in window.classes if slo is None or slo.judges(held.key))
    waited = sum(series.sum_ns for series in window.series if series.kind == "queue")
    return Counts(items, waited // 1000)


class Jitter:
    """Counts requests above the current P50 plus `jitter_ms`: P99 - P50 is above it exactly when more than 1 % of the requests are.

    The P50 is that of the latest `window_s`, discounted; until 100 requests were seen nothing is counted.

    Args:
        slo: The objective, with `jitter_ms`.
    """

    def __init__(self, slo: SLO) -> None:
        self._slo = slo
        self._held: dict[ClassKey, FloatArray] = {}

    def count(self, window: Window) -> Counts:
        """Count one window."""
        total = Counts(0, 0)
        keep = max(0.0, 1.0 - (window.end_ns - window.start_ns) / 1e9 / self._slo.window_s)
        for held in window.classes:
            if self._slo.judges(held.key):
                total = plus(total, self._count_class(held, keep))
        return total

    def _count_class(self, held: ClassWindow, keep: float) -> Counts:
        latency = held.latency
        known = self._held.get(held.key)
        if not latency.count:
            return Counts(0, 0, excluded=_withheld(held))
        if known is None or len(known) != len(latency.counts):
            known = self._held[held.key] = np.zeros(len(latency.counts))
        known *= keep
        known += latency.counts
        sums: FloatArray = np.cumsum(known)
        if sums[-1] < 100:
            return Counts(0, 0, excluded=_withheld(held))
        middle = value_at_index(int(np.count_nonzero(sums < sums[-1] / 2.0)), layout(latency))[1]
        exceeding = above(latency, middle + round((self._slo.jitter_ms or 0.0) * 1e6))
        return Counts(latency.count, min(exceeding, latency.count), excluded=_withheld(held))


class SizeFilter:
    """Counts only requests whose `size` lies in the objective's range.

    Classes are not split by size. Where all requests of a latency band were retained in a window, as those above the lowest objective are up
    to 2048 in ten seconds, the count is exact; elsewhere (64 a band and ten seconds are sampled) it is the share among the sampled ones of
    the latest ten seconds, applied to the exact count of the band. A request without a size is in no range.

    Args:
        slo: The objective, with `size`.
    """

    def __init__(self, slo: SLO) -> None:
        self._slo = slo
        low, high = slo.size or (None, None)
        self._low, self._high = -np.inf if low is None else low, np.inf if high is None else high
        self._shares: dict[tuple[ClassKey, int], list[float]] = {}
        self._now: dict[tuple[ClassKey, int], list[float]] = {}
        self._carry = [0.0, 0.0, 0.0, 0.0]

    def count(self, window: Window) -> Counts:
        """Count one window."""
        self._learn(window)
        found = np.zeros(4)
        excluded = 0
        for held in window.classes:
            if self._slo.judges(held.key):
                found += self._estimate(held)
                excluded += _withheld(held)
        whole = [0, 0, 0, 0]
        for position, value in enumerate(found):
            self._carry[position] += float(value)
            whole[position] = int(self._carry[position])
            self._carry[position] -= whole[position]
        n, k, errors, severe = whole
        return Counts(n, min(k, n), min(errors, n), min(severe, k, n), excluded)

    def _learn(self, window: Window) -> None:
        for share in self._shares.values():
            share[0] *= _KEEP
            share[1] *= _KEEP
        self._now = {}
        for record in window.records:
            if record.profiled or not record.reasons & (Reason.BREACH | Reason.RESERVOIR) or not self._slo.judges(record.key):
                continue
            inside = record.size is not None and self._low <= record.size < self._high
            for held in (
                self._shares.setdefault((record.key, record.band), [0.0, 0.0]),
                self._now.setdefault((record.key, record.band), [0.0, 0.0]),
            ):
                held[0] += inside
                held[1] += 1

    def _estimate(self, held: ClassWindow) -> FloatArray:
        bands, threshold = held.bands, self._slo.threshold_ns
        if not len(bands.bands):
            return np.zeros(4)
        mine = [self._shares.get((held.key, int(band)), (0.0, 0.0)) for band in bands.bands]
        inside, seen = sum(share[0] for share in mine), sum(share[1] for share in mine)
        typical = inside / seen if seen else 0.0
        counts = np.zeros(len(mine))
        for position, (band, share) in enumerate(zip(bands.bands, mine, strict=True)):
            now = self._now.get((held.key, int(band)), (0, 0))
            total = int(bands.counts[position])
            counts[position] = now[0] if now[1] == total else total * (share[0] / share[1] if share[1] > 0.0 else typical)
        requests = float(counts.sum())
        if threshold in held.edges_ns:
            over = above_edge(bands.bands, held.edges_ns, held.edges_ns.index(threshold))
            exceeding = float(counts[over].sum())
        else:
            exceeding = min(typical * above(held.latency, threshold), requests)
        overall = requests / max(float(bands.counts.sum()), 1.0)
        return np.array([requests, exceeding, overall * held.errors, min(overall * above(held.latency, SEVERE * threshold), exceeding)])
