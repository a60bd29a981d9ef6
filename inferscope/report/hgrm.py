"""A latency distribution as HdrHistogram's percentile table (`.hgrm`), for its plotter; milliseconds.

The steps are HdrHistogram's: five reporting ticks for each halving of the distance to 100 %.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["render"]

_TICKS: Final = 5
_MS: Final = 1e6


def render(latency: Sequence[tuple[float, float, int]]) -> str:
    """Write the percentile table.

    Args:
        latency: (lowest, highest, count) of each occupied histogram bucket, ascending, ns, as in a merged horizon's `latency`.
    """
    total = sum(bucket[2] for bucket in latency)
    lines = [f"{'Value':>12} {'Percentile':>14} {'TotalCount':>10} {'1/(1-Percentile)':>14}", ""]
    lines += _rows(latency, total) if total else []
    mean = sum((low + high) / 2 * count for low, high, count in latency) / total / _MS if total else 0.0
    square = sum(((low + high) / 2 / _MS - mean) ** 2 * count for low, high, count in latency) / total if total else 0.0
    highest = latency[-1][1] / _MS if latency else 0.0
    lines += [
        f"#[Mean    = {mean:12.3f}, StdDeviation   = {math.sqrt(square):12.3f}]",
        f"#[Max     = {highest:12.3f}, Total count    = {total:12d}]",
    ]
    return "\n".join(lines) + "\n"


def _rows(latency: Sequence[tuple[float, float, int]], total: int) -> Iterator[str]:
    target, seen = 0.0, 0
    for _, high, count in latency:
        seen += count
        while target * total <= seen + 1e-6:  # the steps add up in binary fractions
            yield f"{high / _MS:12.3f} {target:2.12f} {seen:10d} {1 / (1 - target):14.2f}"
            halvings = math.floor(math.log2(1 / (1 - target))) + 1
            target += 1 / (_TICKS * 2.0**halvings)
            if seen == total:
                yield f"{high / _MS:12.3f} {1.0:2.12f} {seen:10d}"
                return
