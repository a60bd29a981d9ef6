"""Shares against the truth of the same requests, known by their raw vectors."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscope.diagnose import attribute, merge
from inferscope.diagnose.attribution import MIN_EPISODES


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("edge_ms", [12, 20, 35])
def test_shares_match_the_sample(service, seed, edge_ms):
    requests = service.simulate(120, 200, seed=seed)
    edge = edge_ms * service.MS
    found = attribute(merge([service.evidence(requests, [edge], keep=1)], "score"), edge)
    expected = dict(zip(service.LABELS, service.truth(requests, edge), strict=True))
    assert max(abs(share.share - expected[share.name]) for share in found.shares) < 0.01
    assert {share.name for share in found.shares} == set(service.LABELS) - {"other"}


def test_shares_sum_to_one_and_parts_to_the_excess(service, document):
    found = attribute(merge([document], "score"))
    assert math.fsum(share.share for share in found.shares) == pytest.approx(1.0, abs=1e-15)
    assert sum(share.tail_ms - share.body_ms for share in found.shares) == pytest.approx(found.excess_ms, rel=1e-12)
    assert [share.name for share in found.shares][:2] == ["copy:h2d", "lock:rules"]


def test_tail_is_exact_at_the_edge(service, requests, document):
    edge = 20 * service.MS
    found = attribute(merge([document], "score"), edge)
    above = requests.wall > edge
    assert found.tail_requests == above.sum()
    assert found.tail_ms == pytest.approx(requests.wall[above].mean() / 1e6, rel=1e-12)


def test_mean_profile_blames_the_model_and_the_share_does_not(document):
    found = attribute(merge([document], "score"))
    forward = found.share("forward")
    assert forward.mean_share > 0.5
    assert abs(forward.share) < 0.01


def test_intervals_are_deterministic_and_hold_the_share(document):
    first, second = (attribute(merge([document], "score")) for _ in range(2))
    assert first == second
    for share in first.shares:
        assert share.ci[0] <= share.share <= share.ci[1]


def test_intervals_come_from_seconds_not_requests(service):
    """Doubling every request in place must not narrow the interval."""
    requests = service.simulate(60, 200, seed=5)
    twice = service.Requests(np.repeat(requests.start, 2), np.repeat(requests.vectors, 2, axis=0))
    widths = []
    for held in (requests, twice):
        low, high = attribute(merge([service.evidence(held, [20 * service.MS], keep=1)], "score")).share("copy:h2d").ci
        widths.append(high - low)
    assert widths[1] == pytest.approx(widths[0], rel=0.05)


def test_withheld_with_the_number_of_episodes(service):
    requests = service.simulate(30, 200, seed=8, copy_rate=0.1, lock_rate=0.1)
    found = attribute(merge([service.evidence(requests, [20 * service.MS], keep=1)], "score"))
    assert 0 < found.episodes < MIN_EPISODES
    assert found.withheld.startswith(f"not enough evidence: {found.episodes} slow episodes")
    assert all(share.ci is None for share in found.shares)


def test_without_slow_requests_the_slowest_percent_is_the_tail(service):
    requests = service.simulate(30, 200, seed=8)
    found = attribute(merge([service.evidence(requests, [500 * service.MS])], "score"))
    assert found.tail == "the slowest 1 %"
    assert found.tail_requests == round(0.01 * len(requests.wall))
    expected = np.sort(requests.wall)[-found.tail_requests :].mean() / 1e6
    assert found.tail_ms == pytest.approx(expected, rel=0.05)
    assert (found.withheld is None) is (found.episodes >= MIN_EPISODES)


def test_another_objective_than_the_first_takes_intervals_from_the_sample(service, requests):
    edges = [20 * service.MS, 35 * service.MS]
    horizon = merge([service.evidence(requests, edges)], "score")
    found = attribute(horizon, edges[1])
    assert found.tail_requests == (requests.wall > edges[1]).sum()
    assert found.withheld is None
    exact = attribute(merge([service.evidence(requests, edges[1:])], "score"), edges[1])
    for share, other in zip(found.shares, exact.shares, strict=True):
        assert share.share == pytest.approx(other.share, abs=1e-3)
        assert share.ci[0] <= share.share <= share.ci[1]
    width, exact_width = (held.shares[0].ci[1] - held.shares[0].ci[0] for held in (found, exact))
    assert 0.9 * exact_width < width < 2 * exact_width


def test_mostly_slow_horizon_takes_the_healthy_one_as_body(service):
    slow, healthy = service.simulate(60, 200, seed=2, slow=6.0), service.simulate(60, 200, seed=1)
    edge = [16 * service.MS]
    horizon, base = (merge([service.evidence(held, edge, keep=1)], "score") for held in (slow, healthy))
    found = attribute(horizon, edge[0], base)
    assert found.body == "P40-P60 of the last healthy horizon"
    assert "exceed the objective" in found.notes[0]
    assert found.shares[0].name == "preprocess"
    alone = attribute(horizon, edge[0])
    assert alone.body == "the middle fifth within the objective"
    assert alone.body_ms < 16


def test_everything_slow_and_nothing_healthy_is_withheld(service):
    requests = service.simulate(20, 100, seed=2)
    found = attribute(merge([service.evidence(requests, [service.MS], keep=1)], "score"))
    assert found.shares == ()
    assert found.withheld == "every request exceeds the objective and no healthy horizon is kept"


def test_no_requests_is_withheld(document):
    empty = copy.deepcopy(document)
    empty["classes"][0]["bands"] = {"ids": [], "counts": [], "sums": []}
    assert attribute(merge([empty], "score")).withheld == "no timed requests in the horizon"


@settings(max_examples=40)
@given(st.lists(st.lists(st.integers(0, 80_000_000), min_size=7, max_size=7), min_size=30, max_size=60), st.integers(0, 2**32 - 1))
def test_any_vectors_sum_to_one_or_are_withheld(service, rows, seed):
    rng = np.random.default_rng(seed)
    requests = service.Requests(np.sort(rng.integers(0, 30 * 10**9, len(rows))), np.array(rows, dtype=np.int64))
    found = attribute(merge([service.evidence(requests, [20 * service.MS])], "score"))
    if found.shares:
        assert math.fsum(share.share for share in found.shares) == pytest.approx(1.0, abs=1e-9)
        assert found.excess_ms > 0
    else:
        assert found.withheld
