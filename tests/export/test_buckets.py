"""HDR counts to OTLP buckets against direct computations."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscope.export.otlp.buckets import (
    SCALES,
    combine,
    explicit,
    exponential,
    exponential_index,
    hdr_bounds,
    merge,
    objective_bounds,
    quantile,
    rescale,
)
from inferscope.testing.receiver import percentile
from inferscope.types import Distribution

LAYOUTS = {"request": (3, 1000, 18432), "stage": (2, 1, 3840)}


def counted(values, kind="request"):
    digits, lowest, length = LAYOUTS[kind]
    low, _ = hdr_bounds(digits, lowest, length)
    counts = np.zeros(length, dtype=np.int64)
    np.add.at(counts, np.searchsorted(low, np.asarray(values, dtype=np.int64), side="right") - 1, 1)
    return Distribution(kind, ("score",), digits, lowest, counts, len(values), int(sum(values)), 0)


def direct_index(seconds: Fraction, scale: int) -> int:
    """The index whose (lower, upper] holds the value, in exact arithmetic: raise to 2**scale instead of taking a root."""
    power = seconds ** (1 << scale)
    index = math.ceil(math.log2(float(seconds)) * (1 << scale)) - 1
    while power > Fraction(2) ** (index + 1):
        index += 1
    while power <= Fraction(2) ** index:
        index -= 1
    return index


@given(st.integers(1, 60_000_000_000), st.sampled_from(list(SCALES)))
def test_index_is_that_of_exact_arithmetic(nanoseconds, scale):
    found = exponential_index(np.array([nanoseconds / 1e9]), scale)[0]
    assert found == direct_index(Fraction(nanoseconds / 1e9), scale)


@pytest.mark.parametrize("scale", SCALES)
def test_powers_of_two_belong_to_the_bucket_that_they_close(scale):
    powers = np.arange(-29, 6)
    assert (exponential_index(2.0**powers, scale) == powers * (1 << scale) - 1).all()
    assert (exponential_index(np.nextafter(2.0**powers, np.inf), scale) == powers * (1 << scale)).all()


@pytest.mark.parametrize("kind", LAYOUTS)
def test_slots_are_those_of_hdrhistogram(kind):
    histogram = pytest.importorskip("hdrh.histogram")
    digits, lowest, length = LAYOUTS[kind]
    oracle = histogram.HdrHistogram(lowest, 60_000_000_000, digits)
    low, high = hdr_bounds(digits, lowest, length)
    assert oracle.counts_len == length
    for index in [*range(0, length, 97), length - 1]:
        assert low[index] == oracle.get_value_from_index(index)
        assert high[index] == oracle.get_highest_equivalent_value(int(low[index]))


@given(st.lists(st.integers(0, 60_000_000_000), max_size=60), st.sampled_from(list(SCALES)), st.sampled_from(list(LAYOUTS)))
def test_every_count_lands_once_where_its_slot_lies(values, scale, kind):
    source = counted(values, kind)
    found = exponential(source, scale)
    low, high = hdr_bounds(source.digits, source.lowest_ns, len(source.counts))
    expected: dict[int, int] = {}
    for slot in source.counts.nonzero()[0]:
        if slot:
            index = direct_index(Fraction((int(low[slot]) + int(high[slot])) / 2 / 1e9), scale)
            expected[index] = expected.get(index, 0) + int(source.counts[slot])
    assert {found.offset + i: int(n) for i, n in enumerate(found.counts) if n} == expected
    assert found.zero_count == source.counts[0]
    assert found.count == len(values) == found.zero_count + found.counts.sum()
    assert found.total == pytest.approx(sum(values) / 1e9)


def test_zero_values_stay_out_of_the_buckets():
    found = exponential(counted([0, 0, 5], "stage"), 5)
    assert (found.zero_count, found.zero_threshold, int(found.counts.sum())) == (2, 0.0, 1)
    below_resolution = exponential(counted([0, 511, 512]), 5)
    assert (below_resolution.zero_count, below_resolution.zero_threshold) == (2, 511e-9)


def test_nothing_is_capped_nor_collapsed_at_the_low_end():
    values = [2_000, 60_000_000_000]
    found = exponential(counted(values), 8)
    assert len(found.counts) > 6000
    assert found.counts[0] == 1 == found.counts[-1]


def test_an_empty_distribution_is_an_empty_point():
    found = exponential(counted([]), 5)
    assert (found.count, found.counts.size, found.low, found.high) == (0, 0, None, None)


@given(
    st.lists(st.integers(1_000, 10_000_000_000), min_size=1, max_size=50),
    st.lists(st.integers(1_000, 10_000_000_000), min_size=1, max_size=50),
)
def test_points_of_replicas_add_and_differences_undo_it(first, second):
    one, two, both = (exponential(counted(values), 5) for values in (first, second, first + second))
    added = combine(one, two)
    assert (added.offset, added.counts.tolist(), added.count) == (both.offset, both.counts.tolist(), both.count)
    assert (added.low, added.high) == (both.low, both.high)
    back = combine(both, two, -1)
    assert (back.offset, back.counts.tolist(), back.count) == (one.offset, one.counts.tolist(), one.count)


def test_adding_nothing_and_taking_everything():
    empty, full = exponential(counted([]), 5), exponential(counted([5_000, 0]), 5)
    for added in (combine(empty, full), combine(full, empty)):
        assert (added.offset, added.counts.tolist(), added.count, added.zero_count) == (full.offset, [1], 2, 1)
    nothing = combine(full, full, -1)
    assert (nothing.offset, nothing.counts.size, nothing.count, nothing.low) == (0, 0, 0, None)


def test_different_scales_do_not_add():
    with pytest.raises(ValueError, match="different scales"):
        combine(exponential(counted([5_000]), 5), exponential(counted([5_000]), 4))


SAMPLES = {
    "lognormal": lambda rng, n: rng.lognormal(math.log(9e6), 0.35, n),
    "bimodal": lambda rng, n: np.where(rng.random(n) < 0.015, rng.normal(46e6, 3e6, n), rng.normal(9e6, 1e6, n)),
    "cache": lambda rng, n: np.where(rng.random(n) < 0.7, rng.normal(50e3, 5e3, n), rng.normal(20e6, 2e6, n)),
    "pareto": lambda rng, n: 1e6 * (1 + rng.pareto(1.5, n)),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_percentiles_are_within_half_a_bucket(name):
    values = np.clip(SAMPLES[name](np.random.default_rng(3), 100_000), 2_000, 59e9).astype(np.int64)
    found = exponential(counted(values), 5)
    for q in (0.5, 0.95, 0.99, 0.999):
        exact = float(np.quantile(values, q)) / 1e9
        assert percentile(found, q) == pytest.approx(exact, rel=0.012)


def test_three_replicas_of_different_shape_merge_exactly():
    rng = np.random.default_rng(5)
    parts = [SAMPLES[name](rng, 40_000).clip(2_000, 59e9).astype(np.int64) for name in ("lognormal", "bimodal", "cache")]
    merged = merge(exponential(counted(part), 5) for part in parts)
    whole = np.concatenate(parts)
    assert merged.counts.tolist() == exponential(counted(whole), 5).counts.tolist()
    for q in (0.5, 0.95, 0.99, 0.999):
        assert percentile(merged, q) == pytest.approx(float(np.quantile(whole, q)) / 1e9, rel=0.012)


def test_explicit_buckets_have_an_edge_at_the_objective():
    bounds = objective_bounds(20_000_000)
    assert 0.02 in bounds
    assert list(bounds) == sorted(bounds)
    values = [1_000_000] * 90 + [19_900_000] * 5 + [20_100_000] * 4 + [5_000_000_000]
    found = explicit(counted(values), bounds)
    assert found.counts[bounds.index(0.02) + 1 :].sum() == 5
    assert found.count == 100 == found.counts.sum()


@pytest.mark.parametrize("scale", [3, 4, 5])
def test_a_coarser_form_is_what_the_coarser_scale_would_have_counted(make, scale):
    values = np.random.default_rng(21).lognormal(15, 2, 20_000).astype(np.int64)
    source = make.distribution(np.clip(values, 1000, 59_000_000_000))
    fine, direct = exponential(source, 7), exponential(source, scale)
    coarse = rescale(fine, scale)
    assert (coarse.offset, coarse.scale, coarse.count) == (direct.offset, scale, direct.count)
    np.testing.assert_array_equal(coarse.counts, direct.counts)
    with pytest.raises(ValueError, match="no form at scale"):
        rescale(coarse, scale + 1)


def test_points_of_several_scales_merge_at_the_coarsest_and_lose_nothing(make):
    parts = [np.random.default_rng(seed).lognormal(16, 0.5, 5_000).astype(np.int64) for seed in range(3)]
    merged = merge(exponential(make.distribution(part), scale) for part, scale in zip(parts, (5, 3, 4), strict=True))
    assert (merged.scale, merged.count) == (3, 15_000)
    assert int(merged.counts.sum()) + merged.zero_count == 15_000
    exact = np.quantile(np.concatenate(parts), 0.99) / 1e9
    assert quantile(merged, 0.99) == pytest.approx(exact, rel=0.044)


def test_explicit_points_merge_only_with_their_own_bounds(make):
    source = make.distribution([9_000_000] * 10)
    with pytest.raises(ValueError, match="do not add"):
        merge([explicit(source, (0.01, 0.02)), explicit(source, (0.01, 0.03))])
    with pytest.raises(ValueError, match="do not add"):
        merge([explicit(source, (0.01, 0.02)), exponential(source, 5)])
    with pytest.raises(ValueError, match="no points"):
        merge([])


def test_quantiles_of_explicit_buckets_are_interpolated_between_bounds(make):
    point = replace(explicit(make.distribution([5_000_000] * 50 + [15_000_000] * 50), (0.01, 0.02)), low=None, high=None)
    assert quantile(point, 0.25) == pytest.approx(0.005)
    assert quantile(point, 0.75) == pytest.approx(0.015)
    above = replace(explicit(make.distribution([90_000_000]), (0.01, 0.02)), low=None, high=None)
    assert quantile(above, 0.5) == 0.02, "above all bounds nothing better is known than the last bound"


@pytest.mark.parametrize("q", [0.0, 0.001, 0.5, 0.99, 1.0])
def test_quantiles_stay_between_the_extremes_and_empty_points_have_none(make, q):
    point = exponential(make.distribution([3_000_000, 9_000_000, 46_000_000]), 5)
    assert point.low <= quantile(point, q) <= point.high
    assert quantile(exponential(make.distribution([]), 5), q) is None
    assert quantile(exponential(make.distribution([1]), 5), q) <= 512e-9, "the zero bucket"
