"""Bounds against exact sums and published values; intervals against how often they cover."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscope.bench import stats


def exact_cdf(k, n, p):
    return sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1))


@given(st.integers(1, 60), st.data())
def test_the_binomial_distribution_is_exact(n, data):
    k, p = data.draw(st.integers(-1, n)), data.draw(st.floats(0.001, 0.999))
    assert stats.binomial_cdf(k, n, p) == pytest.approx(exact_cdf(k, n, p) if k >= 0 else 0.0, abs=1e-9)


@pytest.mark.parametrize(
    ("probability", "degrees", "expected"), [(0.975, 19, 2.0930), (0.975, 5, 2.5706), (0.995, 39, 2.7079), (0.975, 10_000, 1.9602)]
)
def test_students_quantiles_are_those_of_the_tables(probability, degrees, expected):
    assert stats.student_quantile(probability, degrees) == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize(("k", "n", "low", "high"), [(0, 100, 0.0, 0.036217), (5, 100, 0.016432, 0.112835), (100, 100, 0.963783, 1.0)])
def test_proportion_bounds_are_clopper_and_pearsons(k, n, low, high):
    assert stats.proportion_bounds(k, n) == pytest.approx((low, high), abs=1e-5)


@pytest.mark.parametrize(("quantile", "least"), [(0.99, 368), (0.999, 3688), (0.5, 6), (0.95, 72)])
def test_a_quantile_needs_so_many_requests(quantile, least):
    assert stats.needed(quantile) == least
    ordered = np.arange(1.0, least + 1)
    assert stats.order_interval(ordered, quantile) is not None
    assert stats.order_interval(ordered[:-1], quantile) is None
    few = stats.estimate(ordered[:-1], np.zeros(least - 1, dtype=np.int64), quantile)
    assert few.value is None
    assert few.method == f"n/a, needs ≥ {least} requests"


def test_order_statistics_cover_as_often_as_they_say():
    rng = np.random.default_rng(5)
    truth = -math.log(0.01)
    covered = 0
    for _ in range(300):
        low, high = stats.order_interval(np.sort(rng.exponential(1.0, 2000)), 0.99)
        covered += low <= truth <= high
    assert 0.92 <= covered / 300 <= 0.99


def test_blocks_cover_bursts_where_independence_does_not():
    """Stalls of 0.3 s hit everybody under way: 100 requests/s for 100 s."""
    rng, truth, covered, alone = np.random.default_rng(11), None, 0, 0
    at = np.arange(10_000) * 10_000_000

    def run(size=10_000):
        latency = rng.lognormal(2.0, 0.2, size)
        for start in rng.integers(0, size, rng.poisson(size / 400)):
            latency[start : start + 30] += rng.exponential(20.0)
        return latency

    truth = np.quantile(run(1_000_000), 0.95)
    for seed in range(40):
        latency = run()
        found = stats.estimate(latency, at, 0.95, seed=seed)
        low, high = stats.order_interval(np.sort(latency), 0.95)
        covered += found.low <= truth <= found.high
        alone += low <= truth <= high
    assert covered >= 34
    assert alone < covered - 10


def test_resampled_quantiles_are_those_of_the_drawn_blocks():
    rng = np.random.default_rng(3)
    blocks = [rng.exponential(1.0 + index % 3, 40 + index) for index in range(25)]
    weights = stats.block_weights(25, 0, 200)
    assert weights.sum(axis=1).tolist() == [25.0] * 200
    found = stats.resampled_quantiles(blocks, 0.9, weights)
    for row, value in zip(weights, found, strict=True):
        drawn = np.sort(np.concatenate([block for block, times in zip(blocks, row, strict=True) for _ in range(int(times))]))
        assert value == pytest.approx(stats.observed(drawn, 0.9), rel=0.02)


def test_a_sample_of_one_value_has_that_value():
    blocks = [np.full(50, 7.0) for _ in range(20)]
    assert set(stats.resampled_quantiles(blocks, 0.99, stats.block_weights(20, 0, 50)).tolist()) == {7.0}
