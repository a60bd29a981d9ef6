"""Climbing load step by step: when to stop, which step was the last worth taking, and how much a service can take under an objective."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from inferscope.bench.acceptance import Objective

__all__ = ["MaxRate", "climb", "find_max_rate", "knee", "over"]

Rung = dict[str, Any]
"""`rung` (clients or requests/s), `metrics`, `acceptance` (verdicts as data), `problems`."""
_MOST_RUNGS: Final = 24
_KEEPS_UP: Final = 0.95
"""Of the offered rate, so much must be answered while it is offered."""
GENERATOR: Final = "the generator"
SERVICE: Final = "the service"


def failing(rung: Rung) -> bool:
    """Whether more than 1 % of the requests failed."""
    share: float | None = rung["metrics"]["error_rate"]["share"]
    return share is None or share > 0.01


def over(rung: Rung, objectives: Sequence[Objective]) -> bool:
    """Whether to climb no further: more than 1 % of errors, a P99 over three times its limit, or a target that is gone."""
    p99: float | None = rung["metrics"]["latency"]["p99"]["ms"]
    limits = [each.limit for each in objectives if each.metric == "p99"]
    return failing(rung) or bool(rung.get("stopped")) or (p99 is not None and any(p99 > 3 * limit for limit in limits))


def gains(before: tuple[int, float], rung: int, rate: float) -> bool:
    """Whether a rung has at least 10 % more throughput for each doubling."""
    return rate / before[1] >= math.pow(1.1, math.log2(rung / before[0]))


def knee(rungs: Sequence[Rung]) -> int | None:
    """The last rung that met every objective and gained at least 10 % of throughput for each doubling; None when the first did not."""
    found: int | None = None
    before: tuple[int, float] | None = None
    for each in rungs:
        rate: float | None = each["metrics"]["throughput"]["requests_per_s"]
        if rate is None or failing(each) or any(row["word"] == "BROKEN" for row in each["acceptance"]):
            break
        if before is not None and not gains(before, each["rung"], rate):
            break
        found, before = each["rung"], (each["rung"], rate)
    return found


def climb(measured: Callable[[int], Rung], rungs: Sequence[int], objectives: Sequence[Objective], *, to_knee: bool = False) -> list[Rung]:
    """Measure rung by rung until one is over.

    Args:
        measured: measures one.
        rungs: in rising order.
        objectives: what decides when it is over.
        to_knee: stop as well at the first rung that was not worth taking.
    """
    found: list[Rung] = []
    for rung in rungs:
        found.append(measured(rung))
        if over(found[-1], objectives) or (to_knee and knee(found) != rung):
            break
    return found


@dataclass(frozen=True, slots=True)
class MaxRate:
    """What the search for the highest rate found."""

    rungs: list[Rung]
    """In the order in which they were measured."""
    rate: float | None
    """The highest at which every objective was shown to hold, requests/s; None when there is none."""
    limited_by: str
    """`the service`, `the generator` (then a machine with more generators may show more), or `the search` when it ended first."""
    beyond: float | None
    """The lowest rate that does not hold; None when all did."""
    open: float | None
    """A higher rate than `rate` that nothing speaks against, but with too few requests to show it; None when there is none."""

    def text(self) -> str:
        """The result in one line."""
        found = "none" if self.rate is None else f"{self.rate:g}/s"
        more = f"; {self.beyond:g}/s is too much for {self.limited_by}" if self.beyond is not None else "; no limit was reached"
        if self.rate is None and self.open is None and self.limited_by == GENERATOR:
            more = f"; the generator is late even at {self.beyond:g}/s: this machine is busy with something else"
        unsure = "" if self.open is None else f"; nothing speaks against {self.open:g}/s, but it takes a longer --duration to show it"
        return f"highest rate under the objectives: {found}{more}{unsure}"


HOLDS: Final = "holds"
OPEN: Final = "open"


def outcome(rung: Rung, offered: float) -> str:
    """`holds`; `open` when nothing speaks against it but the requests are too few; else what does not hold it: `the generator`, `the service`."""
    if any("generator-bound" in problem for problem in rung["problems"]):
        return GENERATOR
    rate = rung["metrics"]["throughput"]["requests_per_s"]
    kept_up = rate is not None and rate >= _KEEPS_UP * rung["metrics"].get("offered_per_s", offered)
    if not kept_up or failing(rung) or rung.get("stopped"):
        return SERVICE
    if all(row["word"] == "HOLDS" for row in rung["acceptance"]):
        return HOLDS
    good = all(
        row["word"] == "HOLDS" or (row["word"] == "INCONCLUSIVE" and (row["share"] or 0.0) <= row["allowed"]) for row in rung["acceptance"]
    )
    return OPEN if good else SERVICE


def find_max_rate(
    measured: Callable[[float, int], Rung], start: float, *, precision: float = 0.05, most: int = _MOST_RUNGS, ceiling: float = 1e6
) -> MaxRate:
    """The highest rate at which every objective holds: doubled until one does not, then halved in between (on the log scale).

    A rate with too few requests for a verdict is measured once more for twice as long; if it stays open, the search goes on above it, where there
    are more requests, but it is not what is found.

    Args:
        measured: measures a rate for so many times the usual length.
        start: the first rate.
        precision: how close the two ends come, as a fraction.
        most: rungs at most.
        ceiling: no rate above this is tried.
    """
    rungs: list[Rung] = []
    good: float | None = None
    floor: float | None = None  # the highest rate that nothing speaks against
    bad: float | None = None
    why, rate = "the search", start
    while len(rungs) < most:
        rungs.append(measured(rate, 1))
        late, found = why == GENERATOR, outcome(rungs[-1], rate)
        if found == OPEN:
            rungs.append(measured(rate, 2))
            found = outcome(rungs[-1], rate)
        if found in {HOLDS, OPEN}:
            floor = rate
            good = rate if found == HOLDS else good
        else:
            bad, why = rate, found
        if (bad is not None and floor is not None and bad / floor <= 1 + precision) or (bad is None and rate >= ceiling):
            break
        # Late at half the rate as well: it is not the rate, the machine is busy.
        if floor is None and bad is not None and (bad <= start / 64 or (late and found == GENERATOR)):
            break
        rate = math.sqrt(floor * bad) if floor and bad else min(rate * 2, ceiling) if bad is None else rate / 2
        rate = float(f"{rate:.3g}")
        if rate in {floor, bad}:
            break
    return MaxRate(rungs, good, why, bad, floor if floor != good else None)
