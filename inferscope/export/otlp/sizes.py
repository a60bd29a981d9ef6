"""How large the requests of each latency band were, as counters, so that two versions can be compared with the same mix of sizes.

Not every request's size is kept, but the recorder keeps a uniform sample of each of its bands, and all requests above the objective as far
as it can. Each kept request stands for (requests of its band since the last kept one) / (kept ones), as in the reservoir (aggregate/reservoir.py),
so the sums estimate how many requests of each size a band had, without bias. The sum of the squared weights says how much of a sample that is:
the effective number is (sum of weights)^2 / (sum of squares) (Kish, "Survey Sampling", 1965).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from inferscope.types import Reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferscope.types import BandSums, FloatArray, IntArray, RequestRecord

__all__ = ["CELLS", "OTHER_SIZES", "UNKNOWN", "Sizes", "sampled", "size_label"]

CELLS: Final = 80
"""Pairs of band and size that one request class may have; what comes later is `other`."""
OTHER_SIZES: Final = "other"
UNKNOWN: Final = "none"
"""Of a request without a size, in a class that has some."""
_LEAST: Final = -20
_MOST: Final = 50


def size_label(size: float | None) -> str:
    """Upper bound of the octave that a size lies in, `(2^(k-1), 2^k]`; the same for every process, so that counts add."""
    if size is None or math.isnan(size):
        return UNKNOWN
    if size <= 0:
        return "0"
    if math.isinf(size):
        return f"{2**_MOST}"
    fraction, exponent = math.frexp(size)
    exponent -= fraction == 0.5  # an exact power is the end of its octave, not the beginning of the next
    exponent = min(max(exponent, _LEAST), _MOST)
    return f"{2**exponent}" if exponent >= 0 else f"{2.0**exponent:.9g}"


class Sizes:
    """Of one request class.

    Args:
        bands: How many bands are exported.
    """

    def __init__(self, bands: int) -> None:
        self.cells: dict[tuple[int, str], float] = {}
        """Requests by band and size."""
        self.squares: FloatArray = np.zeros(bands)
        """Sum of squared weights by band."""
        self.named = 0
        """Pairs of band and size without `other`."""
        self._pending: dict[int, int] = {}

    def expect(self, sums: BandSums) -> None:
        """Say how many requests a window's records stand for; before its records are added."""
        for row, count in zip(sums.bands.tolist(), sums.counts.tolist(), strict=True):
            self._pending[row] = self._pending.get(row, 0) + count

    def add(self, records: Sequence[RequestRecord], groups: IntArray, room: int) -> None:
        """Count the records of one of the recorder's bands.

        Args:
            records: All of one row that are part of the sample.
            groups: Exported band of each row.
            room: How many more pairs there may be, beside `other`.
        """
        row = records[0].band
        weight = max(self._pending.pop(row, 0) / len(records), 1.0)
        band = int(groups[row])
        for record in records:
            key = band, size_label(record.size)
            if key not in self.cells:
                if room > 0 and self.named < CELLS:
                    room -= 1
                    self.named += 1
                else:
                    key = band, OTHER_SIZES
            self.cells[key] = self.cells.get(key, 0.0) + weight
        self.squares[band] += weight * weight * len(records)


def sampled(record: RequestRecord) -> bool:
    """Whether a record is part of the sample."""
    return bool(record.reasons & (Reason.RESERVOIR | Reason.BREACH)) and not record.profiled
