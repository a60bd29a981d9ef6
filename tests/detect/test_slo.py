from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulator.recorder import ArrayRecorder
from simulator.service import COLUMNS, simulate

from inferscope.aggregate import Aggregator
from inferscope.detect import SLO, check_objectives, count, edges_by_request
from inferscope.errors import ConfigurationError
from inferscope.types import ClassKey


def test_an_objective_says_quantile_and_threshold():
    assert (SLO("score", p99_ms=20).quantile, SLO("score", p99_ms=20).threshold_ns) == (0.99, 20_000_000)
    assert (SLO("score", p95_ms=7.5).quantile, SLO("score", p95_ms=7.5).threshold_ns) == (0.95, 7_500_000)
    assert SLO("score", p999_ms=50).quantile == 0.999
    assert SLO("score", p99_ms=20, min_requests=100.0).min_requests == 100
    slo = SLO("fast", p99_ms=20, request="score", cls="gold")
    assert pickle.loads(pickle.dumps(slo)) == slo
    with pytest.raises(AttributeError):
        slo.p99_ms = 3


@pytest.mark.parametrize(
    ("key", "keywords"),
    [
        ("slo", {}),
        ("slo", {"p99_ms": 20, "p95_ms": 10}),
        ("p99_ms", {"p99_ms": 0}),
        ("p99_ms", {"p99_ms": -1}),
        ("p99_ms", {"p99_ms": float("nan")}),
        ("p99_ms", {"p99_ms": "20"}),
        ("p99_ms", {"p99_ms": True}),
        ("p95_ms", {"p95_ms": 1e9}),
        ("window_s", {"p99_ms": 20, "window_s": 1}),
        ("window_s", {"p99_ms": 20, "window_s": None}),
        ("min_requests", {"p99_ms": 20, "min_requests": 0}),
        ("min_requests", {"p99_ms": 20, "min_requests": 2.5}),
        ("max_error_rate", {"p99_ms": 20, "max_error_rate": 0}),
        ("max_error_rate", {"p99_ms": 20, "max_error_rate": 1.0}),
        ("model", {"p99_ms": 20, "model": ""}),
        ("cls", {"p99_ms": 20, "cls": 3}),
        ("request", {"p99_ms": 20, "request": " "}),
    ],
)
def test_what_cannot_be_used_is_named_with_the_accepted_form(key, keywords):
    with pytest.raises(ConfigurationError) as caught:
        SLO("score", **keywords)
    assert caught.value.key == key
    assert caught.value.accepted
    assert key in str(caught.value)


@pytest.mark.parametrize("name", ["", None, 7, "x" * 121])
def test_a_name_is_needed(name):
    with pytest.raises(ConfigurationError, match="name"):
        SLO(name, p99_ms=20)


def test_objectives_are_checked_together():
    one = SLO("score", p99_ms=20)
    assert check_objectives([one, {"name": "rank", "p95_ms": 5.0}]) == (one, SLO("rank", p95_ms=5.0))
    with pytest.raises(ConfigurationError, match="one name for each"):
        check_objectives([one, SLO("score", p999_ms=50)])
    assert len(check_objectives([one, SLO("score-999", request="score", p999_ms=50)])) == 2
    with pytest.raises(ConfigurationError, match="at most 4"):
        check_objectives([SLO(f"s{i}", request="score", p99_ms=10 + i) for i in range(5)])
    with pytest.raises(ConfigurationError, match=r"slo\.p98_ms"):
        check_objectives([{"name": "score", "p98_ms": 3}])
    with pytest.raises(ConfigurationError, match=r"slo\.name"):
        check_objectives([{"p99_ms": 3}])


def test_edges_ascend_by_request():
    slos = [SLO("a", p99_ms=20), SLO("b", request="a", p95_ms=8), SLO("c", request="a", p999_ms=20), SLO("d", p99_ms=1)]
    assert edges_by_request(slos) == {"a": (8_000_000, 20_000_000), "d": (1_000_000,)}


@given(st.sampled_from([None, "m", "n"]), st.sampled_from([None, "x"]), st.sampled_from([None, "m", "n"]), st.sampled_from([None, "x"]))
def test_an_objective_without_model_judges_every_model(model, cls, key_model, key_cls):
    judged = SLO("score", p99_ms=1, model=model, cls=cls).judges(ClassKey("score", key_model, key_cls))
    assert judged == ((model is None or model == key_model) and (cls is None or cls == key_cls))
    assert not SLO("score", p99_ms=1).judges(ClassKey("rank", key_model, key_cls))


@pytest.fixture(scope="module")
def window():
    recorder = ArrayRecorder(COLUMNS, (8_000_000, 20_000_000))
    aggregator = Aggregator(recorder)
    traffic = simulate(5, 9)
    recorder.feed(traffic.start_ns, traffic.wall_ns, traffic.vectors, errors=4, profiled=6)
    return traffic.wall_ns[6:], aggregator.tick()


def test_counts_are_exact_and_leave_profiled_requests_out(window):
    wall, seen = window
    counts = count(SLO("score", p99_ms=20), seen)
    assert counts[:3] == (len(wall), int((wall > 20_000_000).sum()), 4)
    assert counts.excluded == 6
    assert count(SLO("b", request="score", p95_ms=8), seen).exceeding == (wall > 8_000_000).sum()
    assert count(SLO("rank", p99_ms=20), seen) == (0, 0, 0, 0, 0)


def test_without_an_exact_edge_the_histogram_answers(window):
    wall, seen = window
    counts = count(SLO("score", p99_ms=30), seen)
    assert counts.exceeding == pytest.approx((wall > 30_000_000).sum(), abs=5)
    severe = count(SLO("score", p99_ms=8), seen).severe
    assert severe == pytest.approx((wall > 40_000_000).sum(), abs=5)
    assert np.quantile(wall, 0.999) > 40_000_000


def test_the_severe_floor_is_an_option():
    assert SLO("score", p99_ms=20).severe
    (one,) = check_objectives([{"name": "score", "p99_ms": 20.0, "severe": 0.0}])
    assert one.severe is False
    for wrong in ("no", 2, None, [0]):
        with pytest.raises(ConfigurationError, match="severe"):
            SLO("score", p99_ms=20, severe=wrong)
