"""Kept vectors, as evidence has them."""

from __future__ import annotations

import numpy as np

from inferscope.aggregate.reservoir import Reservoir
from inferscope.types import BandSums, ClassKey, Reason, RequestRecord


def record(number: int, band: int, vector: tuple[int, ...]) -> RequestRecord:
    wall = sum(vector)
    return RequestRecord(
        number,
        ClassKey("score", None, None),
        0,
        wall,
        band,
        int(Reason.RESERVOIR),
        1,
        None,
        1,
        None,
        None,
        None,
        None,
        False,
        vector,
        (),
        None,
    )


def test_a_band_that_was_filled_before_a_column_appeared_keeps_its_vectors():
    reservoir = Reservoir((), horizon_ns=10**12)
    early, late = record(1, 100, (1, 2, 3, 4)), record(2, 110, (1, 2, 3, 4, 5, 6))
    for kept in (early, late):
        sums = BandSums(np.array([kept.band]), np.array([1]), np.array([kept.vector]))
        reservoir.add([kept], sums, 1000)
    rows = list(reservoir.entries(-1, 2000, {100: 1, 110: 1}, 6))
    assert [row["vector"] for row in rows] == [[1, 2, 3, 4, 0, 0], [1, 2, 3, 4, 5, 6]]
