"""Climbing load step by step: when to stop, and which step was the last worth taking."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferscope.bench.acceptance import Objective

__all__ = ["knee", "over"]


def over(rung: dict[str, Any], objectives: Sequence[Objective]) -> bool:
    """Whether to climb no further: more than 1 % of errors, or a P99 over three times its limit."""
    share, p99 = rung["metrics"]["error_rate"]["share"], rung["metrics"]["latency"]["p99"]["ms"]
    limits = [each.limit for each in objectives if each.metric == "p99"]
    return share is None or share > 0.01 or (p99 is not None and any(p99 > 3 * limit for limit in limits))


def knee(rungs: Sequence[dict[str, Any]]) -> int | None:
    """The last rung that met every objective and gained at least 10 % of throughput for each doubling; None when the first did not."""
    found: int | None = None
    before: tuple[int, float] | None = None
    for each in rungs:
        rate: float | None = each["metrics"]["throughput"]["requests_per_s"]
        if (
            rate is None
            or (each["metrics"]["error_rate"]["share"] or 0) > 0.01
            or any(row["word"] == "BROKEN" for row in each["acceptance"])
        ):
            break
        if before is not None and rate / before[1] < 1.1 ** math.log2(each["rung"] / before[0]):
            break
        found, before = each["rung"], (each["rung"], rate)
    return found
