from __future__ import annotations

import numpy as np
import pytest
from hdrh.histogram import HdrHistogram
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inferscope.aggregate import histogram as hist
from inferscope.types import Distribution

LAYOUTS = {hist.REQUESTS: HdrHistogram(1000, hist.HIGHEST_NS, 3), hist.STAGES: HdrHistogram(1, hist.HIGHEST_NS, 2)}
durations = st.one_of(
    st.integers(0, hist.HIGHEST_NS), st.integers(0, 5_000), st.sampled_from([2**k + d for k in range(36) for d in (-1, 0, 1)])
)
layouts = st.sampled_from(list(LAYOUTS))


def distribution(values, within=hist.REQUESTS):
    counts = np.zeros(within.size, np.int64)
    np.add.at(counts, hist.indices_of(np.array(values, np.int64), within), 1)
    return Distribution("request", ("r", "", ""), within.digits, within.lowest_ns, counts, len(values), int(sum(values)), 0)


def reference(values, within=hist.REQUESTS):
    oracle = HdrHistogram(within.lowest_ns, hist.HIGHEST_NS, within.digits)
    for value in values:
        oracle.record_value(int(value))
    return oracle


def test_sizes_are_those_of_the_package():
    assert [within.size for within in LAYOUTS] == [18432, 3840]
    for within, oracle in LAYOUTS.items():
        assert within.size == oracle.counts_len


@settings(max_examples=400)
@given(durations, layouts)
def test_index_and_bounds_are_those_of_the_package(value, within):
    oracle = LAYOUTS[within]
    index = hist.index_of(value, within)
    assert index == oracle._counts_index_for(value)
    lowest, median, highest = hist.value_at_index(index, within)
    assert lowest <= value <= highest
    assert lowest == oracle.get_lowest_equivalent_value(value)
    assert highest == oracle.get_highest_equivalent_value(value)
    assert median == oracle._hdr_median_equiv_value(value)
    assert hist.indices_of(np.array([value]), within)[0] == index


def test_out_of_range_is_clamped():
    assert hist.index_of(-5, hist.STAGES) == 0
    assert hist.index_of(10**15, hist.STAGES) == hist.index_of(hist.HIGHEST_NS, hist.STAGES) < hist.STAGES.size
    assert hist.index_of(10**15, hist.REQUESTS) < hist.REQUESTS.size


@settings(max_examples=120)
@given(
    st.lists(durations, min_size=1, max_size=80),
    st.lists(st.sampled_from([0.0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0]), min_size=1, max_size=6),
    layouts,
)
@example([7], [0.0, 0.5, 1.0], hist.STAGES)
def test_percentiles_are_those_of_the_package_and_of_sorted_lists(values, quantiles, within):
    ours = hist.percentiles(distribution(values, within), quantiles)
    oracle = reference(values, within)
    ordered = sorted(values)
    for quantile, value in zip(quantiles, ours, strict=True):
        rank = oracle.get_target_count_at_percentile(quantile * 100)
        exact = ordered[rank - 1]
        edges = hist.value_at_index(hist.index_of(exact, within), within)
        assert value == (edges[2] if quantile else edges[0])
        assert value == oracle.get_value_at_percentile(quantile * 100)


def test_relative_error_is_a_thousandth():
    values = np.random.default_rng(3).lognormal(16, 0.8, 20_000).astype(np.int64)
    p99 = hist.percentiles(distribution(values), [0.99])[0]
    assert abs(p99 / np.sort(values)[19_799] - 1) < 1e-3


def test_nothing_counted_has_no_percentiles():
    nothing = distribution([])
    assert hist.percentiles(nothing, [0.5, 0.99]) == [None, None]
    assert hist.mean_ns(nothing) is None
    assert hist.longest_ns(nothing) is None
    assert hist.bucket_mean_ns(nothing) is None


@settings(max_examples=15)
@given(st.lists(durations, min_size=1, max_size=50), st.lists(durations, max_size=50))
def test_merge_equals_counting_together(left, right):
    merged = hist.merge([distribution(left), distribution(right)])
    together = distribution(left + right)
    assert np.array_equal(merged.counts, together.counts)
    assert (merged.count, merged.sum_ns) == (together.count, together.sum_ns)
    assert hist.mean_ns(merged) == sum(left + right) / len(left + right)
    assert hist.bucket_mean_ns(merged) == pytest.approx(reference(left + right).get_mean_value(), rel=1e-12)
    longest = hist.longest_ns(merged)
    assert longest == hist.value_at_index(hist.index_of(max(left + right), hist.REQUESTS), hist.REQUESTS)[2]


def test_merge_refuses_other_layouts_and_nothing():
    with pytest.raises(ValueError, match="layouts"):
        hist.merge([distribution([1]), distribution([1], hist.STAGES)])
    with pytest.raises(ValueError, match="no distribution"):
        hist.merge([])


def test_above_counts_only_what_is_surely_above():
    counted = distribution([10_000_000, 20_000_000, 20_000_001, 20_100_000, 40_000_000])
    assert hist.above(counted, 20_000_000) == 2
    assert hist.above(counted, 60 * 10**9) == 0
