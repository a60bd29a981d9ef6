"""Measure until a percentile is known so closely: rounds of load, each as long as all before it, put together into one run."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inferscope.bench.compare import QUANTILES
from inferscope.bench.result import ARRAYS, LoadPlan, LoadResult
from inferscope.bench.stats import estimate
from inferscope.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferscope.types import IntArray

__all__ = ["Precision", "parse_precision", "rounds", "stitched"]

_FORM: Final = re.compile(r"\s*(p\d+)\s*(?:±|\+-|\+/-)\s*([0-9.]+)\s*%\s*\Z")
_SETTLE_NS: Final = 500_000_000
"""Left out of each round but the first: connections open and caches fill again."""
_SHORTEST_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Precision:
    """How closely a percentile is to be known.

    Args:
        text: as it was asked for.
        metric: which percentile.
        share: of its value: half the width of its interval may be so much.
        level: of the interval.
    """

    text: str
    metric: str
    share: float
    level: float = 0.95

    def half_width(self, result: LoadResult, skip: int = 0, blocks: int | None = None) -> float | None:
        """The longer arm of the interval as a share of the value; None when there are too few requests to say.

        Args:
            result: the run.
            skip: requests of the warm-up to leave out.
            blocks: see `stats.estimate`.
        """
        fine = result.fine[skip:]
        if not fine.any():
            return None
        intended = result.intended_ns[skip:][fine]
        latency = (result.done_ns[skip:][fine] - intended) / 1e6
        found = estimate(latency, intended, QUANTILES[self.metric], level=self.level, blocks=blocks)
        if not found.value or found.low is None or found.high is None:
            return None
        return max(found.high - found.value, found.value - found.low) / found.value

    def reached(self, result: LoadResult, skip: int = 0, blocks: int | None = None) -> bool:
        """Whether it is known closely enough."""
        width = self.half_width(result, skip, blocks)
        return width is not None and width <= self.share

    def to_json(self, result: LoadResult, skip: int, blocks: int | None) -> dict[str, Any]:
        """What was asked for and what came of it, as data."""
        width = self.half_width(result, skip, blocks)
        return {"asked": self.text, "reached": width is not None and width <= self.share, "half_width": width}


def parse_precision(text: str) -> Precision:
    """A precision from `p99±5%` or `p99+-5%`.

    Raises:
        ConfigurationError: another form.
    """
    match = _FORM.match(text)
    try:
        share = float(match[2]) / 100 if match else 0.0
    except ValueError:
        share = 0.0
    if match is None or match[1] not in QUANTILES or not 0 < share < 1:
        raise ConfigurationError("until", text, f"PERCENTILE±SHARE% as in p99±5% with {', '.join(QUANTILES)}")
    return Precision(text.strip(), match[1], share)


def rounds(
    measured: Callable[[LoadPlan], LoadResult],
    plan: LoadPlan,
    enough: Callable[[LoadResult], bool],
    max_s: float,
    clock: Callable[[], float] = time.monotonic,
    moved: Callable[[int], object] | None = None,
) -> LoadResult:
    """Measure, and as much again, until it is enough, the target stops, or the time is over.

    Args:
        measured: runs one plan.
        plan: the first round.
        enough: whether to stop, asked after each round of all that was measured so far.
        max_s: no round lasts beyond this many seconds from now.
        clock: seconds.
        moved: told of each further round by how many ns its instants were moved back.
    """
    began = clock()
    total = measured(plan)
    times = 1
    while not total.stopped and not enough(total):
        left = max_s - (clock() - began)
        if left < _SHORTEST_S or not total.status.size:
            break
        # An open loop's own schedule is what lasts; a closed loop of so many requests has all the time that is left.
        seconds = min(plan.seconds * times, left) if plan.mode == "open" or not plan.requests else left
        part = measured(replace(plan, seed=plan.seed + 1009 * times, seconds=seconds, requests=plan.requests * times))
        total, back = stitched(total, part, plan)
        if moved is not None:
            moved(back)
        times *= 2
    return total


def stitched(first: LoadResult, then: LoadResult, plan: LoadPlan) -> tuple[LoadResult, int]:
    """Two rounds as one run, without the pause between them and without the beginning of the second.

    Args:
        first: what was measured before.
        then: the next round.
        plan: of the whole.

    Returns:
        The run, and by how many ns the second round's instants were moved back.
    """
    if not first.status.size or not then.status.size:
        return replace(first, stopped=then.stopped), 0
    settled = int(np.count_nonzero(np.less(then.intended_ns, int(then.intended_ns[0]) + _SETTLE_NS)))
    settled = settled if settled < then.status.size else 0
    size = int(first.status.size)
    if plan.mode == "closed":
        resume = int(np.maximum(first.done_ns, first.intended_ns).max())
    else:
        begin, last = int(first.intended_ns[0]), int(first.intended_ns[-1])
        resume = last + (last - begin) // max(size - 1, 1)
    back = int(then.intended_ns[settled]) - resume
    columns: dict[str, Any] = {}
    for name in ARRAYS:
        column: IntArray = getattr(then, name)[settled:]
        if name != "status":
            column = np.where(column > 0, np.subtract(column, back), 0).astype(np.int64)
        columns[name] = np.concatenate([getattr(first, name), column])
    return LoadResult(plan, **columns, stopped=then.stopped), back
