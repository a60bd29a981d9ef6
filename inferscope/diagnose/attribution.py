"""Which columns own the tail's excess over an ordinary request.

share(c) = (E[c | tail] - E[c | body]) / (E[wall | tail] - E[wall | body]); since every exclusive vector sums to its wall time, the shares sum to 1.
It is the Euler allocation of the tail expectation (Tasche): the derivative of E[wall | tail] with respect to each column's size.

The tail is what exceeds the objective, exactly, because the bands have an edge there; without requests above it, the slowest 1 %.
The body is P40..P60. Bands cut by the two quantiles contribute in proportion; the remaining difference to the mean wall time of that
quantile range, which the request histogram knows to 0.1 %, is placed along the slope of the neighbouring bands. No reservoir is needed, so the body has no sampling noise.

Intervals come from a bootstrap over 1-second blocks: one stall makes dozens of slow neighbours, and resampling requests would
treat those as independent (its nominal 95 % covered the truth 13 to 17 % of the time).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from inferscope.diagnose.evidence import quantile_ns
from inferscope.types import BODY, Share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferscope.diagnose.evidence import Horizon
    from inferscope.types import FloatArray, IntArray

__all__ = ["MIN_EPISODES", "Attribution", "attribute", "tail_rows"]

MIN_EPISODES: Final = 10
"""Seconds with slow requests that are needed to name a cause; around 200 give intervals of 5 points."""

_CONTAMINATED: Final = 0.30
"""Share of exceeding requests above which the horizon's own middle is no ordinary request any more."""

_REPLICATES: Final = 2000
_SEED: Final = 20_240_613
_MS: Final = 1e6


@dataclass(frozen=True, slots=True)
class Attribution:
    """The tail's excess by column."""

    shares: tuple[Share, ...]
    """By descending share; empty when there is no excess to divide."""
    withheld: str | None
    """Why the shares must not be read as a diagnosis, if so."""
    tail: str
    """What the tail is, in words."""
    body: str
    tail_requests: int
    tail_ms: float
    body_ms: float
    episodes: int
    """1-second blocks with slow requests."""
    notes: tuple[str, ...]

    @property
    def excess_ms(self) -> float:
        """How much slower the tail is than the body, on average."""
        return self.tail_ms - self.body_ms

    def share(self, label: str) -> Share | None:
        """The share of the column with that label, if it has one."""
        return next((share for share in self.shares if share.name == label), None)


def tail_rows(horizon: Horizon, threshold_ns: float) -> FloatArray:
    """1.0 for each band row above the threshold; exact when the threshold is one of the edges."""
    return (horizon.band_lower > threshold_ns).astype(np.float64)


def attribute(horizon: Horizon, threshold_ns: int | None = None, healthy: Horizon | None = None) -> Attribution:
    """Divide the tail's excess among the columns.

    Args:
        horizon: Merged evidence.
        threshold_ns: The objective; default is the first edge.
        healthy: The last healthy horizon, used as the body when over 30 % of the requests exceed the objective.
    """
    edge = threshold_ns if threshold_ns is not None else (horizon.edges_ns[0] if horizon.edges_ns else None)
    if horizon.timed == 0:
        return _nothing("no timed requests in the horizon")
    weights = tail_rows(horizon, edge) if edge is not None else np.zeros(len(horizon.band_counts))
    above = float(weights @ horizon.band_counts)
    if above and edge is not None:
        beyond, tail_name = float(edge), f"requests above {edge / _MS:g} ms"
    else:
        weights, tail_name = _fractions(horizon.band_counts, 0.99, 1.0), "the slowest 1 %"
        beyond = quantile_ns(horizon.latency, 0.99) or float("inf")
    count = float(weights @ horizon.band_counts)
    tail = (weights @ horizon.band_sums) / count
    body, body_name, notes, problem = _body(horizon, above / horizon.timed, healthy)
    excess = tail - body
    if problem or excess.sum() <= 0:
        return _nothing(problem or "the tail is no slower than the body", notes)
    intervals, reason, episodes = _intervals(horizon, beyond, excess, body)
    return Attribution(
        shares=_shares(horizon, tail, body, intervals),
        withheld=reason,
        tail=tail_name,
        body=body_name,
        tail_requests=round(count),
        tail_ms=float(tail.sum()) / _MS,
        body_ms=float(body.sum()) / _MS,
        episodes=episodes,
        notes=notes,
    )


def _nothing(reason: str, notes: tuple[str, ...] = ()) -> Attribution:
    return Attribution((), reason, "none", "none", 0, 0.0, 0.0, 0, notes)


def _shares(horizon: Horizon, tail: FloatArray, body: FloatArray, intervals: FloatArray | None) -> tuple[Share, ...]:
    excess = tail - body
    fractions = excess / excess.sum()
    largest = int(fractions.argmax())
    fractions[largest] += 1.0 - math.fsum(fractions)
    everything = horizon.band_sums.sum(axis=0)
    mean = everything / everything.sum()
    shares = [
        Share(
            name=column.label,
            kind=column.kind,
            share=float(fractions[position]),
            ci=None if intervals is None else (float(intervals[0, position]), float(intervals[1, position])),
            tail_ms=float(tail[position]) / _MS,
            body_ms=float(body[position]) / _MS,
            mean_share=float(mean[position]),
        )
        for position, column in enumerate(horizon.columns)
        if everything[position] or body[position] or position == largest
    ]
    return tuple(sorted(shares, key=lambda share: -share.share))


def _body(horizon: Horizon, above: float, healthy: Horizon | None) -> tuple[FloatArray, str, tuple[str, ...], str | None]:
    """The mean vector of an ordinary request, its name, notes, and why there is none."""
    low, high = BODY
    if above <= _CONTAMINATED:
        return _slice_mean(horizon, low, high), "P40-P60", (), None
    percent = f"{100 * above:.0f} % of the requests exceed the objective"
    if healthy is not None and healthy.timed:
        mean = np.zeros(len(horizon.columns))
        for column, value in zip(healthy.columns, _slice_mean(healthy, low, high), strict=True):
            mean[horizon.columns.index(column) if column in horizon.columns else 1] += value
        return mean, "P40-P60 of the last healthy horizon", (f"{percent}: the body is the last healthy horizon.",), None
    note = f"{percent} and no healthy horizon is kept: the body is the middle fifth of the requests within the objective."
    if above >= 1.0:
        return (
            np.zeros(len(horizon.columns)),
            "none",
            (f"{percent}.",),
            "every request exceeds the objective and no healthy horizon is kept",
        )
    within = 1.0 - above
    return _slice_mean(horizon, low * within, high * within), "the middle fifth within the objective", (note,), None


def _fractions(counts: IntArray, low: float, high: float) -> FloatArray:
    """How much of each row lies between two quantiles."""
    total = float(counts.sum())
    ends = np.cumsum(counts, dtype=np.float64)
    starts = ends - counts
    overlap = np.minimum(ends, high * total) - np.maximum(starts, low * total)
    part: FloatArray = np.maximum(overlap, 0.0) / np.maximum(counts, 1)
    return part


def _slice_mean(horizon: Horizon, low: float, high: float) -> FloatArray:
    """The mean vector between two quantiles (see the module's docstring)."""
    weights = _fractions(horizon.band_counts, low, high)
    mean: FloatArray = (weights @ horizon.band_sums) / float(weights @ horizon.band_counts)
    wall = _wall_mean(horizon.latency, low, high)
    rows = np.flatnonzero(horizon.band_counts)
    inside = np.flatnonzero(weights[rows])
    first, last = max(int(inside[0]) - 1, 0), min(int(inside[-1]) + 1, len(rows) - 1)
    if wall is None or first == last:
        return mean
    left = horizon.band_sums[rows[first]] / horizon.band_counts[rows[first]]
    right = horizon.band_sums[rows[last]] / horizon.band_counts[rows[last]]
    slope: FloatArray = _normalised((right - left)[None, :])[0]
    moved: FloatArray = mean + slope * float(wall - mean.sum())
    return moved


def _wall_mean(latency: Sequence[tuple[float, float, int]], low: float, high: float) -> float | None:
    """Mean wall time between two quantiles of the request histogram, ns."""
    if not latency:
        return None
    table = np.array(latency, dtype=np.float64)
    weights = _fractions(table[:, 2].astype(np.int64), low, high) * table[:, 2]
    return float(weights @ (table[:, 0] + table[:, 1]) / 2.0 / weights.sum())


def _episodes(horizon: Horizon, edge: float) -> tuple[FloatArray, FloatArray]:
    """Slow requests and their nanoseconds by second, for the seconds that have any: shapes (n,) and (n, columns).

    The blocks count what exceeds the first edge. For any other tail the sampled requests stand in; their sampling noise widens the intervals.
    """
    if horizon.edges_ns and edge == horizon.edges_ns[0]:
        slow = np.flatnonzero(horizon.blocks.tail_counts)
        return horizon.blocks.tail_counts[slow].astype(np.float64), horizon.blocks.tail_sums[slow]
    sample = horizon.reservoir
    rows = np.flatnonzero((sample.wall_ns > edge) & (sample.seconds >= 0))
    seconds, places = np.unique(sample.seconds[rows], return_inverse=True)
    counts, sums = np.zeros(len(seconds)), np.zeros((len(seconds), len(horizon.columns)))
    np.add.at(counts, places, sample.weights[rows])
    np.add.at(sums, places, sample.weights[rows, None] * sample.vectors[rows])
    return counts, sums


def _intervals(horizon: Horizon, edge: float, excess: FloatArray, body: FloatArray) -> tuple[FloatArray | None, str | None, int]:
    """95 % intervals (2, columns) of the shares, or why there are none, and the number of seconds with slow requests.

    The body is held fixed: it averages a fifth of all requests, so its variance is small beside the tail's.
    """
    slow, sums = _episodes(horizon, edge)
    if len(slow) < MIN_EPISODES:
        reason = f"not enough evidence: {len(slow)} slow episodes, about {MIN_EPISODES} are needed to name a cause and 200 for intervals of 5 points"
        return None, reason, len(slow)
    generator = np.random.default_rng(_SEED)
    total = max(len(horizon.blocks.counts), len(slow))
    # Only seconds with slow requests matter to the ratio, but how many of them a resample holds is random: hence the last, empty cell.
    cells = np.append(np.full(len(slow), 1.0 / total), 1.0 - len(slow) / total).clip(0.0)
    draws = generator.multinomial(total, cells / cells.sum(), size=_REPLICATES)[:, :-1].astype(np.float64)
    counts = draws @ slow
    usable = counts > 0
    spread = _normalised((draws[usable] @ sums) / counts[usable, None] - body)
    centre = _normalised((sums.sum(axis=0) / slow.sum() - body)[None, :])
    shift = excess / excess.sum() - centre[0]
    return np.quantile(spread, (0.025, 0.975), axis=0) + shift, None, len(slow)


def _normalised(excess: FloatArray) -> FloatArray:
    """Each row over its sum; a row without an excess, which a resample may be, is left as it is."""
    totals = excess.sum(axis=1, keepdims=True)
    shares: FloatArray = excess / np.where(np.abs(totals) < 1.0, 1.0, totals)
    return shares
