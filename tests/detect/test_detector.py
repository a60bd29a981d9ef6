from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulator import traffic

from inferscope.detect import SLO, Detector
from inferscope.detect.burnrate import BurnRate
from inferscope.detect.edetector import DesignEffect, MixtureDetector, Tick

S = 1_000_000_000
SCORE = SLO("score", p99_ms=20)


def armed(slo=SCORE, **keywords):
    held = Detector(slo, **keywords)
    held.mark_ready()
    return held


def feed(held, n, k, start=0, **more):
    """Firings with the second they came in."""
    found = []
    for second, (requests, slow) in enumerate(zip(np.asarray(n).tolist(), np.asarray(k).tolist(), strict=True), start + 1):
        fired = held.update(second * S, requests, slow, **{key: value[second - start - 1] for key, value in more.items()})
        if fired is not None:
            found.append((second, fired))
    return found


@pytest.mark.parametrize("rate", [2, 10, 50, 500, 5000])
def test_healthy_bursty_traffic_does_not_fire(rate):
    rng = np.random.default_rng(rate)
    assert feed(armed(), *traffic.bursty(rng, rate, 12_000, 0.005)) == []


@pytest.mark.parametrize(("length", "inside"), [(2, 0.3), (10, 0.05)])
def test_episodes_that_were_seen_before_do_not_fire(length, inside):
    rng = np.random.default_rng(3)
    held = armed()
    feed(held, *traffic.episodes(rng, 500, 4000, 0.005, length, inside))
    held._arm()
    assert len(feed(held, *traffic.episodes(rng, 500, 20_000, 0.005, length, inside), start=4000)) <= 1


@pytest.mark.parametrize(("shape", "limit"), [("independent", 3.0), ("bursty", 15.0)])
def test_five_percent_over_the_objective_is_found_in_seconds(shape, limit):
    make = getattr(traffic, shape)
    delays = []
    for seed in range(25):
        rng = np.random.default_rng(seed)
        held = armed()
        assert feed(held, *make(rng, 500, 700, 0.005)) == []
        delays.append(feed(held, *make(rng, 500, 120, 0.05), start=700)[0][0] - 700)
    assert np.median(delays) <= limit


@pytest.mark.parametrize(("rate", "limit"), [(2, 45), (10, 12)])
def test_few_requests_a_second_work_as_many_do(rate, limit):
    rng = np.random.default_rng(rate)
    held = armed()
    assert feed(held, *traffic.independent(rng, rate, 4000, 0.005)) == []
    found = feed(held, *traffic.independent(rng, rate, 600, 0.3), start=4000)
    assert found[0][0] - 4000 <= limit
    onset = found[0][1].onset_ns / S
    assert abs(onset - 4000) < 60


def test_one_burst_never_fires_however_bad():
    held = armed()
    rng = np.random.default_rng(1)
    feed(held, *traffic.independent(rng, 500, 300, 0.002))
    assert feed(held, [500, 500, 500, 500], [500, 500, 0, 0], start=300) == []


def test_a_firing_says_since_when_and_how_much():
    rng = np.random.default_rng(2)
    held = armed()
    feed(held, *traffic.independent(rng, 500, 600, 0.003))
    ((second, fired),) = feed(held, *traffic.independent(rng, 500, 60, 0.1), start=600)
    assert fired.trigger == "e_detector"
    assert fired.onset_ns == 600 * S
    assert fired.requests == pytest.approx(500 * (second - 600), rel=0.1)
    assert fired.exceeding / fired.requests == pytest.approx(0.1, rel=0.2)
    assert fired.statistic > math.log(604_800)
    assert fired.design_effect >= 1.0


def test_warm_up_ends_by_requests_by_time_or_by_word():
    held = Detector(SCORE)
    assert feed(held, [500] * 4, [500] * 4) == []
    assert (held.phase, held.warmup_requests) == ("armed", 2000)
    assert held.design_effect == 1.0  # cold requests taught nothing

    held = Detector(SCORE)
    feed(held, [0] * 50 + [1] * 299, [0] * 349)
    assert held.phase == "warming"  # time counts from the first request
    feed(held, [1] * 2, [0] * 2, start=349)
    assert held.phase == "armed"

    held = Detector(SCORE)
    held.mark_ready()
    assert held.phase == "armed"


def test_opens_closes_cools_down_and_opens_again():
    rng = np.random.default_rng(5)
    held = armed()
    feed(held, *traffic.independent(rng, 500, 600, 0.003))
    assert len(feed(held, *traffic.independent(rng, 500, 200, 0.2), start=600)) == 1
    assert held.phase == "open"
    feed(held, *traffic.independent(rng, 500, 55, 0.003), start=800)
    assert held.phase == "open"  # the objective must hold for its window
    feed(held, *traffic.independent(rng, 500, 45, 0.003), start=855)
    assert held.phase == "cooldown"
    until = held.until_ns // S
    assert feed(held, *traffic.independent(rng, 500, until - 900 - 20, 0.003), start=900) == []
    again = feed(held, *traffic.independent(rng, 500, 60, 0.2), start=until - 20)
    assert [second > until for second, _ in again] == [True]
    assert again[0][0] <= until + 4  # the long fault before did not teach it to be slow


def test_an_incident_whose_traffic_stops_is_closed():
    held = armed()
    feed(held, [500] * 60, [50] * 60)
    assert held.phase == "open"
    feed(held, [0] * 700, [0] * 700, start=60)
    assert held.phase != "open"


def test_the_cooldown_doubles_while_the_cause_repeats():
    held = armed()
    lengths = []
    for cause in ("copy", "copy", "copy", "copy", "copy", "lock"):
        held.note_cause(cause)
        lengths.append(held.cooldown_s)
    assert lengths == [600, 1200, 2400, 3600, 3600, 600]

    held = armed(cooldown_s=60)
    feed(held, [500] * 60, [50] * 60)
    feed(held, [500] * 70, [0] * 70, start=60)
    assert held.phase == "cooldown"
    before = held.until_ns
    held.note_cause("copy")
    held.note_cause("copy")
    assert held.until_ns == before + 60 * S


def test_severe_requests_need_no_full_tick():
    slo = SLO("score", p99_ms=20, min_requests=1000)
    held = armed(slo)
    found = feed(held, [2] * 20, [2] * 20, severe=[2] * 20)
    second, fired = found[0]
    assert (fired.trigger, second) == ("severe", 3)
    assert fired.requests == fired.exceeding == 6
    without = armed(SLO("score", p99_ms=20, min_requests=1000, severe=False))
    assert feed(without, [2] * 20, [2] * 20, severe=[2] * 20) == [], "it is an option"
    # three in ten seconds at 5000 a second are no breach of a P99
    assert feed(armed(slo), [5000] * 10, [1] * 10, severe=[1] * 10) == []
    # one hang answers everything in one second
    assert feed(armed(slo), [0, 0, 20, 2, 2], [0, 0, 20, 0, 0], severe=[0, 0, 20, 0, 0]) == []


def test_errors_are_judged_by_their_own_rate():
    held = armed(SLO("score", p99_ms=20, max_error_rate=0.001))
    assert feed(held, [500] * 300, [0] * 300, errors=[0] * 300) == []
    ((_, fired),) = feed(held, [500] * 60, [0] * 60, start=300, errors=[10] * 60)
    assert fired.trigger == "error_rate"
    assert held.phase == "open"
    feed(held, [500] * 120, [0] * 120, start=360, errors=[10] * 120)
    assert held.phase == "open"
    feed(held, [500] * 120, [0] * 120, start=480, errors=[0] * 120)
    assert held.phase == "cooldown"


def test_a_fleet_needs_more_evidence():
    assert MixtureDetector(0.01, 1000).threshold - MixtureDetector(0.01).threshold == pytest.approx(math.log(1000))
    delays = []
    for fleet in (1, 100_000):
        rng = np.random.default_rng(4)
        held = armed(fleet_size=fleet)
        feed(held, *traffic.bursty(rng, 500, 900, 0.005))
        delays.append(feed(held, *traffic.bursty(rng, 500, 300, 0.05), start=900)[0][0])
    assert delays[0] < delays[1]


@pytest.mark.parametrize("slo", [SLO("a", p95_ms=20), SLO("a", p999_ms=20)])
def test_other_quantiles(slo):
    allowed = 1 - slo.quantile
    rng = np.random.default_rng(6)
    held = armed(slo)
    assert feed(held, *traffic.independent(rng, 500, 1500, allowed / 2)) == []
    assert feed(held, *traffic.independent(rng, 500, 120, 5 * allowed), start=1500)[0][0] <= 1530


def test_burn_rate_fires_slower_and_not_on_bursts():
    rng = np.random.default_rng(7)
    held = armed(trigger="burn_rate")
    assert feed(held, *traffic.bursty(rng, 500, 20_000, 0.005)) == []
    ((second, fired),) = feed(held, *traffic.bursty(rng, 500, 120, 0.05), start=20_000)
    assert 20_020 < second < 20_080
    assert fired.trigger == "burn_rate"
    assert fired.statistic >= 3.0
    assert abs(fired.onset_ns / S - 20_000) < 15


def test_a_young_burn_rate_is_not_judged_by_one_tick():
    rate = BurnRate(0.01)
    assert not any(rate.update(Tick(i * S, (i + 1) * S, 500, 20)) for i in range(20))
    assert any(rate.update(Tick(i * S, (i + 1) * S, 500, 20)) for i in range(20, 60))
    rate.reset()
    assert rate.statistic == 0.0


@pytest.mark.parametrize("jump", [-10_000_000, -3600, -1, 3600, 10_000_000])
def test_a_clock_that_jumps_fires_nothing_and_stops_nothing(jump):
    rng = np.random.default_rng(13)
    held = armed()
    assert feed(held, *traffic.bursty(rng, 500, 600, 0.005), start=20_000_000) == []
    start = 20_000_600 + jump
    assert feed(held, *traffic.bursty(rng, 500, 600, 0.005), start=start) == []
    ((second, _),) = feed(held, *traffic.bursty(rng, 500, 60, 0.2), start=start + 600)
    assert second <= start + 610
    # while open and while cooling down, too
    feed(held, *traffic.independent(rng, 500, 100, 0.001), start=start + 660 + jump)
    assert held.phase == "cooldown"
    feed(held, *traffic.independent(rng, 500, 700, 0.001), start=start + 760)
    assert held.phase == "armed"


@given(st.lists(st.integers(-(10**15), 10**15), min_size=1, max_size=60))
def test_no_clock_breaks_the_machine(moments):
    held = armed(SLO("score", p99_ms=20, max_error_rate=0.01))
    for moment in moments:
        held.update(moment, 100, 1, 1)
    assert held.phase in {"armed", "open", "cooldown"}


@given(st.lists(st.tuples(st.integers(1, 10_000), st.floats(0, 1)), min_size=1, max_size=200), st.sampled_from([0.05, 0.01, 0.001]))
def test_no_counts_break_the_arithmetic(ticks, allowed):
    held = MixtureDetector(allowed)
    for second, (n, share) in enumerate(ticks):
        fired = held.update(Tick(second * S, (second + 1) * S, n, int(n * share)))
        assert math.isfinite(held.statistic)
        assert held.design_effect >= 1.0
        onset, requests, bad = held.onset()
        assert 0 <= onset <= (second + 1) * S
        assert bad <= requests
        if fired:
            held.reset()
    assert held.remember().copy().update(10, 1) >= 1.0


def test_the_design_effect_is_the_size_of_bursts_and_ignores_a_new_level():
    rng = np.random.default_rng(8)
    effect = DesignEffect(0.01)
    for n, k in zip(*traffic.bursty(rng, 500, 3000, 0.005), strict=True):
        value = effect.update(int(n), int(k))
    assert 12 < value < 24
    effect = DesignEffect(0.01)
    for n, k in zip(*traffic.independent(rng, 500, 3000, 0.005), strict=True):
        value = effect.update(int(n), int(k))
    assert value < 1.6
    for n, k in zip(*traffic.independent(rng, 500, 20, 0.05), strict=True):
        value = effect.update(int(n), int(k))
    assert value < 2.0


@pytest.mark.parametrize("rate", [500, 5000])
def test_a_restart_does_not_fire_on_the_first_stalls(rate):
    rng = np.random.default_rng(11)
    assert sum(len(feed(Detector(SCORE), *traffic.bursty(rng, rate, 120, 0.005))) for _ in range(60)) == 0


@pytest.mark.parametrize("stall_s", [0.1, 1.0])
def test_longer_stalls_of_a_healthy_service_do_not_fire(stall_s):
    rng = np.random.default_rng(12)
    assert feed(armed(), *traffic.bursty(rng, 500, 20_000, 0.005, stall_s=stall_s)) == []
