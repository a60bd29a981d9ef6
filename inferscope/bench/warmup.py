"""Where the warm-up of a run ends, found after the fact, so that load never pauses between warm-up and measurement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from inferscope.types import FloatArray

__all__ = ["LEAST", "mser5"]

BATCH: Final = 5
LEAST: Final = 100
"""Fewer requests say nothing about a warm-up."""


def mser5(latency: FloatArray) -> int | None:
    """Number of leading requests to leave out (White, 1997: MSER-5).

    Of all truncations, the one whose remaining batch means (of 5) have the smallest standard error. Values are first clipped at the
    95th percentile of the second half: a stall in the first half is no warm-up, and leaving it out would flatter the tail.

    Args:
        latency: in the order of arrival, shape (requests,).

    Returns:
        A multiple of 5, at most half of the run; None when the best truncation lies beyond half of it (no steady state was reached) or
        when there are fewer than 100 requests.
    """
    if latency.size < LEAST:
        return None
    clipped = np.minimum(latency, np.quantile(latency[latency.size // 2 :], 0.95))
    batches: FloatArray = np.mean(np.reshape(clipped[: clipped.size // BATCH * BATCH], (-1, BATCH)), axis=1)
    kept = np.arange(batches.size, 0, -1, dtype=np.float64)
    centred = batches - batches.mean()
    sums, squares = np.cumsum(centred[::-1])[::-1], np.cumsum((centred * centred)[::-1])[::-1]
    error = np.maximum(squares - sums * sums / kept, 0.0) / (kept * kept)
    # The last few batches may agree by chance: MSER is searched where at least ten are left.
    cut = int(np.argmin(error[: batches.size - 10])) * BATCH
    return cut if 2 * cut <= latency.size else None
