"""The knee, and the search for the highest rate, on services whose truth is known."""

from __future__ import annotations

import pytest

from inferscope.bench import ladder
from inferscope.bench.acceptance import parse_objective

OBJECTIVE = [parse_objective("p99<=20ms")]


def rung(number, *, rate, p99=10.0, word="HOLDS", errors=0.0, problems=()):
    metrics = {"throughput": {"requests_per_s": rate}, "error_rate": {"share": errors}, "latency": {"p99": {"ms": p99}}}
    return {"rung": number, "metrics": metrics, "acceptance": [{"word": word}], "problems": list(problems), "stopped": ""}


def saturating(clients):
    """100 requests/s a client up to 8 of them; then they wait."""
    return rung(clients, rate=100.0 * min(clients, 8), p99=10.0 * max(1, clients / 8), word="HOLDS" if clients <= 16 else "BROKEN")


def test_the_knee_is_the_last_rung_that_gained():
    found = ladder.climb(saturating, [1, 2, 4, 8, 16, 32], OBJECTIVE)
    assert ladder.knee(found) == 8
    assert [each["rung"] for each in found] == [1, 2, 4, 8, 16, 32]
    short = ladder.climb(saturating, [1, 2, 4, 8, 16, 32], OBJECTIVE, to_knee=True)
    assert [each["rung"] for each in short] == [1, 2, 4, 8, 16]
    assert ladder.knee(short) == 8


def test_a_ladder_ends_where_it_is_over():
    for broken in ({"errors": 0.02}, {"p99": 61.0}):
        found = ladder.climb(lambda number, more=broken: rung(number, rate=1.0, **(more if number == 2 else {})), [1, 2, 3], OBJECTIVE)
        assert [each["rung"] for each in found] == [1, 2]
    assert ladder.knee([rung(1, rate=10.0, word="BROKEN")]) is None


def limited(limit, *, log=None, inconclusive=(), generator=10**9):
    def measured(rate, times):
        if log is not None:
            log.append((rate, times))
        if rate > generator:
            return rung(rate, rate=rate, problems=["generator-bound: its own lateness"])
        if rate > limit:
            return rung(rate, rate=limit, p99=90.0, word="BROKEN")
        unsure = any(abs(rate - each) < 1 for each in inconclusive) and times == 1
        return rung(rate, rate=rate, word="INCONCLUSIVE" if unsure else "HOLDS")

    return measured


@pytest.mark.parametrize("limit", [37.0, 410.0, 5000.0])
def test_the_highest_rate_is_found_to_five_percent(limit):
    found = ladder.find_max_rate(limited(limit), 50.0)
    assert 0.94 * limit <= found.rate <= limit
    assert found.beyond > limit
    assert found.limited_by == "the service"
    assert f"{found.rate:g}/s" in found.text()


def test_an_open_question_is_asked_again_for_longer():
    log = []
    found = ladder.find_max_rate(limited(450.0, log=log, inconclusive=(100.0,)), 50.0)
    assert (100.0, 2) in log
    assert found.rate > 400


def test_the_generator_may_be_what_is_too_slow():
    found = ladder.find_max_rate(limited(1e9, generator=900.0), 100.0)
    assert found.limited_by == "the generator"
    assert 800 <= found.rate <= 900
    assert "too much for the generator" in found.text()


def test_nothing_holds_and_everything_holds():
    nothing = ladder.find_max_rate(limited(0.1), 100.0)
    assert nothing.rate is None
    assert "none" in nothing.text()
    all_of_it = ladder.find_max_rate(limited(1e9), 100.0, ceiling=1000.0)
    assert (all_of_it.rate, all_of_it.beyond) == (1000.0, None)


def test_a_rate_that_is_not_kept_up_with_does_not_hold():
    behind = rung(100, rate=80.0)
    assert ladder.holds(behind, 100.0) == "the service"
    assert ladder.holds(rung(100, rate=99.0), 100.0) == ""
