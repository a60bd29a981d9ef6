from __future__ import annotations

import re

import numpy as np
import pytest
from simulator import traffic
from simulator.recorder import ArrayRecorder
from simulator.service import COLUMNS, simulate

from inferscope.aggregate import Aggregator
from inferscope.detect import SLO, Counts, Trigger, breach_id
from inferscope.errors import ConfigurationError

S = 1_000_000_000
EPOCH = 1_800_000_000 * S


def pooled(trigger, seconds, *rows, start=0):
    """The same counts every second; returns what opened."""
    found = []
    for second in range(start + 1, start + seconds + 1):
        breach = trigger.update(second * S, rows)
        if breach is not None:
            found.append(breach)
    return found


def ready(*slos, **keywords):
    trigger = Trigger(slos or [SLO("score", p99_ms=20)], unix_offset_ns=lambda: EPOCH, **keywords)
    trigger.mark_ready()
    return trigger


def test_an_objective_burns_while_more_is_bad_than_it_allows():
    trigger = ready(SLO("fast", p99_ms=20), SLO("slow", p95_ms=200))
    calm = [Counts(1000, 9), Counts(1000, 45)]
    assert not trigger.burns(calm)
    assert trigger.burns([Counts(1000, 11), Counts(1000, 0)])
    assert trigger.burns([Counts(1000, 0), Counts(1000, 51)])
    assert not trigger.burns([Counts(10, 2), Counts(10, 0)]), "two bad requests are no fire"


def test_a_breach_says_all_an_incident_needs():
    trigger = ready(SLO("fast", p99_ms=20, request="score/v1"))
    assert pooled(trigger, 300, (500, 1, 0)) == []
    (breach,) = pooled(trigger, 30, (500, 40, 0), start=300)
    assert re.fullmatch(r"20270115T08\d{4}Z-score_v1-[0-9a-f]{4}", breach.id)
    assert (breach.slo, breach.request, breach.threshold_ms, breach.quantile) == ("fast", "score/v1", 20.0, 0.99)
    assert (breach.onset_ns, breach.detected_ns) == (300 * S, 303 * S)
    assert breach.detected_unix_ns == EPOCH + breach.detected_ns
    assert (breach.requests, breach.exceeding, breach.trigger) == (1500, 120, "e_detector")
    state = trigger.state["fast"]
    assert (state.phase, state.breach, state.opened_ns) == ("open", breach.id, breach.detected_ns)
    assert state.requests == 330 * 500


def test_it_closes_once_and_names_what_closed():
    trigger = ready()
    (breach,) = pooled(trigger, 60, (500, 40, 0))
    assert trigger.take_closed() == ()
    assert pooled(trigger, 70, (500, 1, 0), start=60) == []
    assert trigger.take_closed() == (breach.id,)
    assert trigger.take_closed() == ()
    state = trigger.state["score"]
    assert (state.phase, state.breach) == ("cooldown", None)
    trigger.note_cause("score", "copy|lock")
    trigger.note_cause("score", "copy|lock")
    trigger.note_cause("unknown", "copy|lock")
    assert trigger.state["score"].cooldown_s == 1200


def test_two_objectives_that_fire_together_are_both_told():
    trigger = ready(SLO("a", p99_ms=20), SLO("b", p99_ms=20))
    found = pooled(trigger, 10, (500, 40, 0), Counts(500, 40))
    assert sorted(breach.slo for breach in found) == ["a", "b"]
    assert found[0].id != found[1].id


def test_windows_are_judged_by_exact_counts():
    clock = [0]
    recorder = ArrayRecorder(COLUMNS)
    aggregator = Aggregator(recorder, lambda: clock[0])
    trigger = ready()
    healthy = simulate(40, 21, rate=400, copy_stalls=False, lock_holds=False)
    broken = simulate(40, 22, rate=400)
    found = []
    for second in range(1, 71):
        run = healthy if second <= 35 else broken
        inside = (run.end_ns > (second % 35) * S) & (run.end_ns <= (second % 35 + 1) * S)
        slow = run.wall_ns[inside] + (0 if second <= 35 else 11_500_000)
        vectors = run.vectors[inside].copy()
        vectors[:, 0] += slow - run.wall_ns[inside]
        recorder.feed(run.start_ns[inside], slow, vectors, profiled=1)
        clock[0] = second * S
        breach = trigger.update(clock[0], aggregator.tick())
        if breach:
            found.append(breach)
    (breach,) = found
    assert breach.detected_ns > 35 * S
    assert trigger.state["score"].excluded == 70


def test_warm_up_requests_are_counted_and_not_judged():
    trigger = Trigger([SLO("score", p99_ms=20)], warmup_requests=5000)
    assert not trigger.ready
    assert pooled(trigger, 9, (500, 500, 0)) == []
    assert not trigger.ready
    pooled(trigger, 1, (500, 500, 0), start=9)
    assert trigger.ready
    assert (trigger.state["score"].warmup_requests, trigger.state["score"].requests) == (5000, 0)


def test_without_objectives_readiness_is_a_matter_of_time():
    trigger = Trigger([], warmup_s=5)
    for second in range(5):
        assert trigger.update(second * S, []) is None
    assert not trigger.ready
    trigger.update(5 * S, [])
    assert trigger.ready
    assert trigger.manual(5 * S).request == "process"


def test_a_manual_breach_opens_nothing():
    trigger = ready()
    breach = trigger.manual(7 * S)
    assert (breach.trigger, breach.request, breach.threshold_ms, breach.onset_ns) == ("manual", "score", 20.0, 7 * S)
    assert trigger.manual(7 * S, "other").slo == "other"
    assert trigger.state["score"].phase == "armed"


def test_names_are_checked():
    with pytest.raises(ConfigurationError, match="one name"):
        Trigger([SLO("a", p99_ms=1), SLO("a", p99_ms=2)])
    assert re.fullmatch(r"20270115T080000Z-request-[0-9a-f]{4}", breach_id(EPOCH, "../.."))
    assert breach_id(EPOCH, "a b/c").split("-")[1] == "a_b_c"


def test_burn_rate_can_be_chosen():
    rng = np.random.default_rng(1)
    trigger = ready(trigger="burn_rate")
    found = [
        trigger.update((i + 1) * S, [(int(n), int(k), 0)])
        for i, (n, k) in enumerate(zip(*traffic.independent(rng, 500, 100, 0.1), strict=True))
    ]
    assert [breach.trigger for breach in found if breach] == ["burn_rate"]
