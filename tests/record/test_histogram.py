"""Counts against a sorted list and against the `hdrhistogram` package."""

from __future__ import annotations

from array import array

import pytest
from hdrh.histogram import HdrHistogram
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

HIGHEST = 60_000_000_000
durations = st.one_of(st.integers(0, 5000), st.integers(0, 10**7), st.integers(0, HIGHEST))
shared = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def oracle(digits: int, lowest: int) -> HdrHistogram:
    return HdrHistogram(lowest, HIGHEST, digits)


@shared
@given(values=st.lists(durations, min_size=1, max_size=60))
def test_index_is_that_of_the_hdrhistogram_package(implementation, reader, values):
    recorder = implementation()
    coarse, fine = oracle(2, 1), oracle(3, 1000)
    clock = [0]
    timed = implementation(clock=lambda: clock[0])
    for value in values:
        recorder.interval("copy", "h2d", 0, value)
        coarse.record_value(value)
        with timed.request("r"):
            clock[0] += value
        fine.record_value(value)
    counts, count, total, clamped = reader(recorder).counts("copy", "h2d")
    assert (counts, count, total, clamped) == (list(coarse.counts), len(values), sum(values), 0)
    counts, count, total, clamped = reader(timed).counts("request", "r", "", "")
    assert (counts, count, total, clamped) == (list(fine.counts), len(values), sum(values), 0)


@shared
@given(values=st.lists(durations, min_size=1, max_size=200), quantile=st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_quantiles_keep_the_bound_of_a_sorted_list(implementation, reader, values, quantile):
    recorder = implementation()
    for value in values:
        recorder.interval("copy", "h2d", 0, value)
    counts = reader(recorder).counts("copy", "h2d")[0]
    rank = max(1, -(-int(quantile * 1000) * len(values) // 1000))
    exact = sorted(values)[rank - 1]
    seen, index = 0, -1
    while seen < rank:
        index += 1
        seen += counts[index]
    histogram = oracle(2, 1)
    found = histogram.get_value_from_index(index)
    assert abs(found - exact) <= max(1, exact / 100)


@shared
@given(first=st.lists(durations, max_size=30), second=st.lists(durations, max_size=30), third=st.lists(durations, max_size=30))
def test_merging_is_addition_in_any_order(implementation, reader, first, second, third):
    def counts(*parts):
        recorder = implementation()
        recorder.interval("copy", "x", 0, 7)
        for part in parts:
            for value in part:
                recorder.interval("copy", "x", 0, value)
        return reader(recorder).counts("copy", "x")[0]

    def add(a, b):
        return [x + y for x, y in zip(a, b, strict=True)]

    one, two, three, none = counts(first), counts(second), counts(third), counts()
    whole = add(add(one, two), three)
    assert whole == add(one, add(three, two))
    assert whole == add(add(counts(third, first, second), none), none)


def test_out_of_range_durations_are_clamped_and_counted(recorder, reader):
    recorder.interval("copy", "x", 0, HIGHEST + 1)
    recorder.interval("copy", "x", 0, 10 * HIGHEST)
    recorder.interval("copy", "x", 5, 0)
    counts, count, total, clamped = reader(recorder).counts("copy", "x")
    expected = oracle(2, 1)
    expected.record_value(HIGHEST, 2)
    expected.record_value(0)
    assert counts == list(expected.counts)
    assert (count, total, clamped) == (3, 11 * HIGHEST + 1, 2)
    assert recorder.counters()["clamped"] == 2


def test_layouts_are_those_promised(recorder):
    with recorder.request("r"), recorder.stage("s"):
        pass
    layouts = {kind: (digits, lowest, length) for _, kind, _, digits, lowest, length in recorder.series()}
    assert layouts == {"request": (3, 1000, 18432), "stage": (2, 1, 3840)}


def test_a_short_or_foreign_buffer_is_refused(recorder):
    recorder.interval("copy", "x", 0, 1)
    with pytest.raises(ValueError, match=r"buffer|bytes"):
        recorder.read_counts(0, array("q", [0]))
    with pytest.raises(IndexError):
        recorder.read_counts(99, array("q", bytes(8 * 3840)))


def test_a_numpy_buffer_is_filled(recorder):
    import numpy as np

    recorder.interval("copy", "x", 0, 3)
    counts = np.zeros(3840, dtype=np.int64)
    assert recorder.read_counts(0, counts) == (1, 3, 0)
    assert counts[3] == 1
    assert counts.sum() == 1
