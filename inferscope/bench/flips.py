"""How surely two versions differ, from what would have been measured had the blocks of each pair changed places.

A pair's two blocks were measured side by side. If the versions are the same, which of the two is called A is a coin's choice, so the
difference must stand out among those that come about when coins are thrown (a sign-flip test; Fisher, 1935). That holds exactly, whatever the
latencies are like: bursts, drift, a few blocks far off all others. The interval is the same question turned round: it has every change
after whose removal the candidate can no longer be told from the base. Under the simulated noise of `benchmarks/compare.py` it covers the
truth in 93 to 96 % of the cases and finds a P99 that is 25 % worse in 79 %, a resampled interval with Student's factor in 63 % (400 and 200 comparisons at
95 %, 20 pairs; both were wrong about equal versions in 3 %).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferscope.types import FloatArray

__all__ = ["places", "reach"]

_LEAST: Final = 1000
_BEYOND: Final = 5
"""So many of all throws may lie beyond the interval, at the least, or its end is too coarse."""
_MOST: Final = 20_000


def places(pairs: int, level: float, seed: int) -> FloatArray:
    """Throws of a coin for each pair, as weights of its blocks.

    Args:
        pairs: how many.
        level: of the interval: a high one takes more throws.
        seed: of the coins.

    Returns:
        Shape (2 · throws, 2 · pairs): columns are the blocks of the base, then those of the candidate. The first half of the rows says which
        make the base, the second half which make the candidate; the first throw leaves all as it was measured.
    """
    throws = min(max(_LEAST, math.ceil(_BEYOND / (1.0 - level))), _MOST)
    stay = (np.random.default_rng((seed, 3)).random((throws, pairs)) < 0.5).astype(np.float64)
    stay[0] = 1.0
    return np.vstack([np.hstack([stay, 1.0 - stay]), np.hstack([1.0 - stay, stay])])


def reach(thrown: Callable[[float], FloatArray], level: float, *, shifts: bool = True) -> tuple[float, float]:
    """How far the interval reaches to both sides of the measured difference, and how often chance alone makes one as large.

    Args:
        thrown: differences in each throw after so much was taken off the candidate; the first is that which was measured.
        level: of the interval.
        shifts: whether something can be taken off; if not, all throws are of the blocks as they were measured.

    Returns:
        The half width, less than the measured difference exactly when the test at `level` rejects "no difference"; and the share of
        throws with a difference at least as large.
    """
    as_measured = thrown(0.0)
    sizes = np.sort(np.abs(as_measured))[::-1]
    difference = abs(float(as_measured[0]))
    beyond = int((1.0 - level) * sizes.size + 1e-9)
    limit = float(sizes[beyond])
    chance = int(np.count_nonzero(sizes >= difference - 1e-12)) / sizes.size
    if not shifts:
        return limit, chance
    alike = float(np.sort(np.abs(thrown(float(as_measured[0]))[1:]))[::-1][beyond])
    if limit >= difference:
        return max(limit, alike), chance
    # Between "no difference" and the measured one the limit goes from `limit` to `alike` in proportion; the end is where it is met.
    return alike / (1.0 - (limit - alike) / difference), chance
