"""Whether a run meets its objective."""

from __future__ import annotations

import numpy as np
import pytest

from inferscope.bench.acceptance import accept, design_effect, exit_code, parse_objective
from inferscope.bench.load import LoadPlan, LoadResult
from inferscope.errors import ConfigurationError


def run_of(latency_ms, rate=100.0, failed=0):
    count = len(latency_ms)
    intended = (np.arange(count) * (1e9 / rate)).astype(np.int64) + 1
    status = np.full(count, 200)
    status[:failed] = 500
    done = intended + (np.asarray(latency_ms) * 1e6).astype(np.int64)
    return LoadResult(LoadPlan("", rate, count / rate), intended, intended, intended, done, status)


def with_misses(count, missed, **kwargs):
    latency = np.full(count, 10.0)
    latency[:: max(count // max(missed, 1), 1)][:missed] = 30.0
    latency[np.linspace(0, count - 1, missed).astype(int)] = 30.0
    return run_of(latency, **kwargs)


@pytest.mark.parametrize(
    ("text", "metric", "limit"), [("p99<=20ms", "p99", 20.0), ("p999 <= 0.5s", "p999", 500.0), ("error_rate<=0.1%", "error_rate", 0.001)]
)
def test_objectives_are_read(text, metric, limit):
    found = parse_objective(text)
    assert (found.metric, found.limit) == (metric, pytest.approx(limit))


@pytest.mark.parametrize("text", ["p99<20ms", "p99<=20", "p42<=20ms", "p99<=20%", "error_rate<=1ms", "p99<=0ms", "p99<=1.2.3ms", ""])
def test_other_forms_are_refused(text):
    with pytest.raises(ConfigurationError, match="p99<=20ms"):
        parse_objective(text)


@pytest.mark.parametrize(
    ("missed", "count", "word"),
    [(0, 300, "INCONCLUSIVE"), (0, 400, "HOLDS"), (20, 4000, "HOLDS"), (40, 4000, "INCONCLUSIVE"), (80, 4000, "BROKEN")],
)
def test_the_verdict_follows_exact_bounds(missed, count, word):
    latency = np.full(count, 10.0)
    if missed:
        latency[np.linspace(0, count - 1, missed).astype(int)] = 30.0
    found = accept(parse_objective("p99<=20ms"), run_of(latency))
    assert (found.word, found.missed) == (word, missed)
    assert found.low <= missed / count <= found.high


def test_bursts_count_as_fewer_requests():
    latency = np.full(4000, 10.0)
    latency[1000:1060] = 30.0
    spread = np.full(4000, 10.0)
    spread[np.linspace(0, 3999, 60).astype(int)] = 30.0
    objective = parse_objective("p99<=20ms")
    assert accept(objective, run_of(spread)).word == "BROKEN"
    burst = accept(objective, run_of(latency))
    assert burst.word == "INCONCLUSIVE"
    assert burst.design_effect > 10


def test_failed_requests_miss_every_objective():
    failing = run_of(np.full(1000, 1.0), failed=100)
    assert accept(parse_objective("p99<=20ms"), failing).missed == 100
    assert accept(parse_objective("error_rate<=1%"), failing).word == "BROKEN"
    assert exit_code([accept(parse_objective("p99<=20ms"), failing)]) == 2
    empty = run_of(np.empty(0))
    assert accept(parse_objective("p99<=20ms"), empty).word == "INCONCLUSIVE"
    assert exit_code([accept(parse_objective("p99<=20ms"), empty)]) == 3


def test_independent_blocks_have_a_design_effect_of_about_one():
    rng = np.random.default_rng(0)
    requests = np.full(300, 500.0)
    assert design_effect(rng.binomial(500, 0.01, 300).astype(float), requests) == pytest.approx(1.05, abs=0.2)
