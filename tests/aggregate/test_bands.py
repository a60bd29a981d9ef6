from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from inferscope.aggregate import bands as b
from inferscope.types import BandSums

latencies = st.one_of(st.integers(0, 10**11), st.integers(0, 5000), st.integers(15_000_000, 25_000_000))
edge_lists = st.lists(st.one_of(st.integers(1_000, 10**9), st.integers(19_000_000, 20_900_000)), max_size=4, unique=True).map(
    lambda edges: tuple(sorted(edges))
)


@given(latencies, edge_lists)
def test_a_latency_lies_within_the_bounds_of_its_band(wall, edges):
    band = b.band_of(wall, edges)
    low, high = b.bounds_ns(band, edges)
    assert low <= wall <= high
    assert b.bands_of(np.array([wall]), edges)[0] == band
    assert b.band_of(low, edges) == band
    assert b.band_of(min(high, 2**50), edges) == band


@given(st.lists(latencies, min_size=1, max_size=60), edge_lists)
def test_rows_sort_by_latency_and_tails_are_exact(walls, edges):
    values = np.array(walls, np.int64)
    sums = b.merge([fold(values, edges)], edges)
    lows = [b.bounds_ns(int(band), edges)[0] for band in sums.bands]
    assert lows == sorted(lows)
    for position, edge in enumerate(edges):
        count, time = b.tail(sums, edges, position)
        assert count == (values > edge).sum()
        assert time.sum() == values[values > edge].sum()


def test_eight_bands_an_octave():
    assert [b.band_of(v) for v in (0, 1023, 1024, 1151, 1152, 2047, 2048)] == [0, 0, 0, 0, 1, 7, 8]
    assert b.band_of(10**12) == 215
    assert b.bounds_ns(215)[1] == 2**63 - 1


@given(st.lists(latencies, max_size=40), st.lists(latencies, max_size=40), edge_lists)
def test_merge_adds(left, right, edges):
    a, c = np.array(left, np.int64), np.array(right, np.int64)
    merged = b.merge([fold(a, edges), fold(c, edges, columns=5)], edges)
    whole = fold(np.concatenate([a, c]), edges, columns=5)
    whole = b.merge([whole], edges)
    assert np.array_equal(merged.bands, whole.bands)
    assert np.array_equal(merged.counts, whole.counts)
    assert merged.sums.sum() == whole.sums.sum() == a.sum() + c.sum()


def test_body_takes_the_middle_and_cuts_bands_in_proportion():
    sums = BandSums(np.array([10, 11, 12]), np.array([40, 40, 20]), np.array([[400], [800], [10_000]]))
    count, time = b.body(sums, (0.4, 0.6))
    assert count == 20
    assert time.tolist() == [400.0]
    assert b.body(b.empty(3))[0] == 0


def fold(values, edges, columns=3):
    rows = b.bands_of(values, edges)
    ids = np.unique(rows)
    counts = np.array([(rows == i).sum() for i in ids], np.int64)
    sums = np.zeros((len(ids), columns), np.int64)
    for n, i in enumerate(ids):
        sums[n, 0] = (values[rows == i] // 3).sum()
        sums[n, 2] = values[rows == i].sum() - sums[n, 0]
    return BandSums(ids.astype(np.int64), counts, sums)
