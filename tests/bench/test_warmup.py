"""The end of a warm-up, found in runs whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest

from inferscope.bench.warmup import mser5


def warming(seed, constant, size=2000, height=10.0):
    rng = np.random.default_rng(seed)
    return 8.0 * rng.lognormal(0, 0.25, size) * (1 + height * np.exp(-np.arange(size) / constant))


@pytest.mark.parametrize("constant", [20, 60])
def test_what_is_left_is_steady(constant):
    left = [run[cut:].mean() for seed in range(60) if (cut := mser5(run := warming(seed, constant))) is not None]
    assert len(left) == 60
    assert np.mean(left) / (8.0 * np.exp(0.25**2 / 2)) == pytest.approx(1, abs=0.02)


def test_a_steady_run_is_left_nearly_whole():
    cuts = [mser5(warming(seed, 1, height=0.0)) for seed in range(40)]
    assert np.median([cut for cut in cuts if cut is not None]) < 400


def test_a_run_that_never_settles_has_no_cut():
    assert mser5(np.linspace(50.0, 5.0, 1000)) is None
    assert mser5(np.ones(99)) is None


def test_a_stall_in_the_first_half_is_no_warm_up():
    run = warming(3, 1, height=0.0)
    run[500:530] += 400.0
    cut = mser5(run)
    assert cut is not None
    assert cut < 500
