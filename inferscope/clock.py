"""The only place outside the core that reads time.

Everything is measured on `time.perf_counter_ns`, which is CLOCK_MONOTONIC on Linux and the clock of the C core; wall time is only
ever derived from it, so that a stepped clock moves no duration.
"""

from __future__ import annotations

import time
from typing import Final

__all__ = ["NS_PER_MS", "NS_PER_S", "now_ns", "unix_offset_ns"]

NS_PER_MS: Final = 1_000_000
NS_PER_S: Final = 1_000_000_000

now_ns = time.perf_counter_ns
"""Nanoseconds on the monotonic clock."""


def unix_offset_ns() -> int:
    """What to add to `now_ns()` to get Unix nanoseconds, as the two clocks stand at this moment.

    The wall clock is read between two monotonic reads and matched to their middle; of three tries the tightest counts, because a
    preempted one is off by a scheduling slice.
    """
    best_width, best = 1 << 62, 0
    for _ in range(3):
        before = time.perf_counter_ns()
        wall = time.time_ns()
        after = time.perf_counter_ns()
        if after - before < best_width:
            best_width, best = after - before, wall - (before + after) // 2
    return best
