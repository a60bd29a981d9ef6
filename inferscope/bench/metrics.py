"""What a run says: quantiles with intervals, throughput, jitter, errors, and whether it may be believed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inferscope.bench.closed_loop import corrected
from inferscope.bench.compare import QUANTILES
from inferscope.bench.stats import estimate, observed, proportion_bounds
from inferscope.bench.steady import Event, last_event
from inferscope.bench.warmup import mser5

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferscope.bench.result import LoadResult
    from inferscope.types import FloatArray

__all__ = ["LAG_LIMIT_MS", "LAG_SHARE", "cost_per_million", "describe", "generator_bound", "little", "warm_up"]

LAG_LIMIT_MS: Final = 1.0
LAG_SHARE: Final = 0.05
"""The generator's own lateness (P99) may be so much of the measured P99."""
_JITTER_BLOCK: Final = 100
"""A P99 of fewer requests is their maximum."""
_AGREE: Final = 0.10
_LEVEL: Final = 0.95


def warm_up(result: LoadResult, asked: int | None, events: Sequence[Event] = ()) -> tuple[int, str]:
    """How many leading requests to leave out, and how that was decided.

    Steady is what MSER-5 calls steady and where nothing is compiled, tuned or newly allocated any more.

    Args:
        result: the whole run.
        asked: so many, or None to find out.
        events: warm-up work that the target was seen to do, see `steady`.
    """
    after, what = last_event(result, events)
    if asked is not None:
        late = f"; warm-up work went on after that: {what}, until request {after}" if after > asked else ""
        return min(asked, int(result.status.size)), f"the first {asked} requests, as asked{late}"
    cut, how = _mser(result)
    if not what or after <= cut:
        return cut, how
    if 2 * after > result.status.size:
        return cut, f"{how}; no steady state: {what} until request {after} of {result.status.size}"
    return after, f"{how} after {cut} requests, then {what} until request {after}"


def _mser(result: LoadResult) -> tuple[int, str]:
    fine = result.fine
    latency = ((result.done_ns - result.intended_ns)[fine]) / 1e6
    cut = mser5(latency)
    if cut is None:
        return 0, "no steady state was found (MSER-5), nothing was cut" if latency.size >= 100 else "too few requests to find a warm-up"
    # From the cut-th good request back to its place among all.
    return (int(np.flatnonzero(fine)[cut]) if cut else 0), "MSER-5"


def generator_bound(result: LoadResult, *, skip: int = 0, limit_ms: float = LAG_LIMIT_MS) -> str | None:
    """Why a run says more about the generator than about the service; None when it does not.

    Args:
        result: the run; a closed loop has no schedule to be late for.
        skip: requests of the warm-up to leave out.
        limit_ms: the greatest P99 of the generator's lateness; the other limit is 5 % of the measured P99.
    """
    launched = result.launched_ns[skip:]
    started = launched > 0
    if result.plan.mode == "closed" or not np.any(started):
        return None
    lag = observed(np.sort((launched - result.intended_ns[skip:])[started] / 1e6), 0.99)
    latency = np.sort((result.done_ns - result.intended_ns)[skip:][result.fine[skip:]] / 1e6)
    if lag > limit_ms:
        return f"generator-bound: its own lateness has a P99 of {lag:.2f} ms, over {limit_ms:g} ms"
    if latency.size and lag > LAG_SHARE * observed(latency, 0.99):
        return f"generator-bound: its own lateness has a P99 of {lag:.3f} ms, over {100 * LAG_SHARE:g} % of the measured P99"
    return None


def little(result: LoadResult, *, skip: int = 0) -> dict[str, Any] | None:
    """Little's law over the run: requests in the system against throughput times latency.

    They are counted independently (in flight inside the window; completions inside it), so they disagree when a queue grows, when
    answers are missing, or when the clock is wrong. `in_system` of a closed loop is its number of clients. None for an empty run.
    """
    start_ns, done = result.intended_ns[skip:], result.done_ns[skip:]
    if start_ns.size < 2 or start_ns[-1] <= start_ns[0]:
        return None
    first, last = int(start_ns[0]), int(start_ns[-1])
    ended = done > 0
    inside = np.minimum(np.where(ended, done, last), last) - start_ns
    in_system = float(np.maximum(inside, 0).sum() / (last - first))
    if result.plan.mode == "closed":
        in_system = float(result.plan.connections)
    within = ended & (done <= last)
    if not np.any(within):
        return None
    rate = float(np.count_nonzero(within) / ((last - first) / 1e9))
    residence = float((done - start_ns)[within].mean() / 1e9)
    gap = abs(rate * residence - in_system) / in_system if in_system else 0.0
    return {"in_system": in_system, "rate_times_latency": rate * residence, "gap": gap, "holds": gap <= _AGREE}


def _latency(values: FloatArray, at_ns: Any, level: float, blocks: int | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, quantile in QUANTILES.items():
        each = estimate(values, at_ns, quantile, level=level, blocks=blocks)
        row = {"ms": each.value, "low_ms": each.low, "high_ms": each.high, "method": each.method, "needed": each.needed}
        found[name] = row if level == _LEVEL else {**row, "level": level}
    return found


def _jitter(values: FloatArray, at_ns: Any, latency: dict[str, Any]) -> dict[str, float | None]:
    """Spread: IQR, P99 - P50, and the standard deviation of the P99 of 1-s blocks (those of at least 100 requests)."""
    if not values.size:
        return {"iqr_ms": None, "p99_minus_p50_ms": None, "p99_spread_ms": None}
    ordered = np.sort(values)
    seconds = (at_ns - at_ns[0]) // 1_000_000_000
    blocks = [np.sort(values[seconds == number]) for number in np.unique(seconds)]
    tails = [observed(block, 0.99) for block in blocks if block.size >= _JITTER_BLOCK]
    p99 = latency["p99"]["ms"]
    return {
        "iqr_ms": observed(ordered, 0.75) - observed(ordered, 0.25),
        "p99_minus_p50_ms": None if p99 is None else p99 - observed(ordered, 0.5),
        "p99_spread_ms": float(np.std(tails, ddof=1)) if len(tails) > 1 else None,
    }


def describe(
    result: LoadResult,
    *,
    skip: int = 0,
    items: int = 1,
    lag_limit_ms: float = LAG_LIMIT_MS,
    level: float = _LEVEL,
    blocks: int | None = None,
) -> dict[str, Any]:
    """All metrics of a run, as data; what was not measured is None.

    Args:
        result: the run.
        skip: requests of the warm-up to leave out.
        items: pieces of work a request holds (the batch size).
        lag_limit_ms: see `generator_bound`.
        level: of the intervals.
        blocks: see `stats.estimate`.
    """
    fine, intended, done = result.fine[skip:], result.intended_ns[skip:], result.done_ns[skip:]
    values, at_ns = (done - intended)[fine] / 1e6, intended[fine]
    count, good = int(fine.size), int(np.count_nonzero(fine))
    latency = (
        _latency(values, at_ns, level, blocks)
        if good
        else {name: {"ms": None, "method": "no request was answered well"} for name in QUANTILES}
    )
    # From the first due to the last answer: what was served while the load lasted.
    lasted = (int(done.max()) - int(intended[0])) / 1e9 if good else 0.0
    low, high = proportion_bounds(count - good, count, level)
    launched = result.launched_ns[skip:]
    lag = np.sort((launched - intended)[launched > 0] / 1e6)
    found: dict[str, Any] = {
        "requests": count,
        "failed": count - good,
        "latency": latency,
        "throughput": {"requests_per_s": good / lasted if lasted else None, "items_per_s": good * items / lasted if lasted else None},
        "jitter": _jitter(values, at_ns, latency),
        "error_rate": {"share": (count - good) / count if count else None, "low": low, "high": high},
        "little": little(result, skip=skip),
        "lag_p99_ms": observed(lag, 0.99) if lag.size and result.plan.mode == "open" else None,
        "generator_bound": generator_bound(result, skip=skip, limit_ms=lag_limit_ms),
    }
    if good and result.plan.mode == "closed":
        fixed = np.sort(corrected(values, float(np.median(values))))
        found["corrected"] = {name: observed(fixed, quantile) for name, quantile in QUANTILES.items()}
    return found


def cost_per_million(price_per_hour: float | None, requests_per_s: float | None) -> float | None:
    """What a million requests cost at the measured throughput, in the unit of the price; None when either is unknown."""
    if price_per_hour is None or not requests_per_s:
        return None
    return price_per_hour / 3600 / requests_per_s * 1e6
