"""What-if estimates against a recomputation over every request."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from inferscope.diagnose import attribute, merge, plan
from inferscope.diagnose.whatif import capped_wall_ns, medians_ns, weighted_quantile


@pytest.fixture(scope="module")
def planned(document):
    horizon = merge([document], "score")
    return plan(horizon, attribute(horizon), 20.0, also=("forward",))


def test_estimates_are_within_a_tenth(service, requests, planned):
    assert len(planned.entries) == 4
    for entry in planned.entries:
        expected = service.capped_p99(requests, [service.LABELS.index(label) for label in entry.fix])
        assert entry.p99_ms == pytest.approx(expected, rel=0.10), entry


def test_the_causes_overlap_so_that_only_both_meet_the_objective(planned):
    assert {entry.fix: entry.meets_objective for entry in planned.entries} == {
        ("copy:h2d",): False,
        ("lock:rules",): False,
        ("copy:h2d", "lock:rules"): True,
        ("forward",): False,
    }
    assert planned.greedy == ("copy:h2d", "lock:rules")


def test_the_model_changes_nothing(planned):
    assert planned.p99_ms("forward") > 30
    assert planned.p99_ms("rules") is None


def test_sample_is_calibrated_against_the_histogram(planned):
    assert planned.calibration == pytest.approx(1.0, abs=0.05)
    assert planned.notes == ()


def test_bad_calibration_is_said(document):
    bent = copy.deepcopy(document)
    for row in bent["classes"][0]["reservoir"]:
        row["weight"] *= 1.0 if row["wall_ns"] < 20_000_000 else 0.1
    bent["classes"][0]["bands"]["counts"] = [0] * len(bent["classes"][0]["bands"]["counts"])
    horizon = merge([bent], "score")
    found = plan(horizon, attribute(merge([document], "score")), 20.0)
    assert found.calibration < 0.9
    assert "times the measured one" in found.notes[0]


def test_bands_without_a_kept_vector_are_stood_for_by_their_mean(document):
    thin = copy.deepcopy(document)
    thin["classes"][0]["reservoir"] = []
    horizon = merge([thin], "score")
    assert horizon.reservoir.weights.sum() == pytest.approx(horizon.timed)
    assert plan(horizon, attribute(horizon), 20.0).calibration == pytest.approx(1.0, abs=0.1)


def test_objective_at_another_quantile(document):
    horizon = merge([document], "score")
    found = plan(horizon, attribute(horizon), 20.0, quantile=0.95)
    assert all(entry.meets_objective for entry in found.entries)


def test_nothing_sampled_says_so(document):
    empty = copy.deepcopy(document)
    empty["classes"][0]["reservoir"] = []
    empty["classes"][0]["bands"] = {"ids": [], "counts": [], "sums": []}
    horizon = merge([empty], "score")
    assert plan(horizon, attribute(horizon), 20.0).notes == ("No sampled requests: no what-if.",)


def test_weighted_quantile_is_the_quantile_of_repeated_values():
    rng = np.random.default_rng(1)
    values = rng.lognormal(0, 1, 400)
    weights = rng.integers(1, 9, 400).astype(float)
    repeated = np.repeat(values, weights.astype(int))
    for q in (0.1, 0.5, 0.9, 0.99):
        assert weighted_quantile(values, weights, q) == pytest.approx(np.quantile(repeated, q), rel=0.03)


def test_capping_never_lengthens_a_request(document):
    horizon = merge([document], "score")
    sample = horizon.reservoir
    assert np.all(capped_wall_ns(sample, range(len(horizon.columns))) <= sample.wall_ns)
    assert np.array_equal(capped_wall_ns(sample, []), sample.wall_ns)
    assert medians_ns(sample)[horizon.labels.index("forward")] == pytest.approx(5.3e6, rel=0.05)
