from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from simulator import traffic
from simulator.service import COLUMNS, simulate


@pytest.fixture(scope="module")
def run():
    return simulate(120, 17)


def test_vectors_sum_exactly_and_the_tail_is_what_was_planted(run):
    assert np.array_equal(run.vectors.sum(axis=1), run.wall_ns)
    assert 7.5 < run.quantile_ms(0.5) < 9.5
    assert 35 < run.quantile_ms(0.99) < 60
    shares = run.shares(20_000_000)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["copy:h2d"] + shares["lock:rules"] > 0.9
    assert abs(shares["stage:forward"]) < 0.02
    mean = run.vectors.mean(axis=0)
    assert COLUMNS[int(mean.argmax())] == ("stage", "forward")  # the wrong answer that averages give


def test_each_cause_can_be_removed_and_the_same_seed_repeats(run):
    assert np.array_equal(simulate(120, 17).wall_ns, run.wall_ns)
    fixed = simulate(120, 17, copy_stalls=False, lock_holds=False)
    assert fixed.quantile_ms(0.99) < 18
    assert len(fixed.wall_ns) == len(run.wall_ns)


def test_traffic_has_the_share_and_the_bursts_asked_for():
    rng = np.random.default_rng(1)
    n, k = traffic.independent(rng, 500, 40_000, 0.005)
    assert k.sum() / n.sum() == pytest.approx(0.005, rel=0.05)
    assert k.var() / k.mean() == pytest.approx(1.0, rel=0.05)
    n, k = traffic.bursty(rng, 500, 40_000, 0.005)
    assert k.sum() / n.sum() == pytest.approx(0.005, rel=0.1)
    assert k.var() / k.mean() == pytest.approx(16.0, rel=0.1)  # 15 requests in a stall
    n, k = traffic.episodes(rng, 500, 200_000, 0.005, 10, 0.05)
    assert k.sum() / n.sum() == pytest.approx(0.005, rel=0.25)
    n, k = traffic.joined((n[:3], k[:3]), (n[3:5], k[3:5]))
    assert len(n) == len(k) == 5
