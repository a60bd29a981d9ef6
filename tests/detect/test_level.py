"""Levels: what opens, what closes, what keeps quiet; and which sign of trouble says what."""

from __future__ import annotations

import numpy as np
import pytest

from inferscope.aggregate import Aggregator
from inferscope.detect import SLO, Counts, Facts, Trigger
from inferscope.detect.level import DropDetector, LevelDetector, Persistence, ThroughputDetector
from inferscope.detect.signals import LIMITS, UNKNOWN, Signals, check_triggers, gpu_row, level_row
from inferscope.errors import ConfigurationError
from inferscope.record.core import Recorder

S = 1_000_000_000
MS = 1_000_000
GOOD, BAD, BETWEEN = Counts(1, 0, 1, 100_000), Counts(1, 1, 0, 900_000), Counts(1, 0, 0, 500_000)


def armed(judge):
    judge.mark_ready()
    return judge


def feed(judge, rows, start=0):
    """(second, what fired) for each firing."""
    found = [(second, judge.judge(second * S, row)) for second, row in enumerate(rows, start + 1)]
    return [(second, fired) for second, fired in found if fired is not None]


def test_it_takes_some_bad_seconds_to_open():
    judge = armed(LevelDetector("lock_wait", persistence=Persistence(5, 10)))
    assert feed(judge, [BAD, BAD, GOOD, GOOD] * 20) != []
    assert feed(armed(LevelDetector("lock_wait")), [BAD, BAD, GOOD, GOOD, GOOD] * 20) == []
    ((second, fired),) = feed(armed(LevelDetector("lock_wait")), [GOOD] * 30 + [BAD] * 30)
    assert second == 35
    assert (fired.trigger, fired.onset_ns, fired.requests, fired.exceeding, fired.statistic) == ("lock_wait", 30 * S, 5, 5, 0.9)


def test_nothing_is_judged_before_the_warm_up_is_over():
    judge = LevelDetector("lock_wait")
    assert feed(judge, [BAD] * 100) == []
    assert judge.phase == "warming"


def test_it_closes_after_good_seconds_only_and_then_cools_down():
    judge = armed(LevelDetector("lock_wait", window_s=60, cooldown_s=600))
    feed(judge, [BAD] * 10)
    assert judge.phase == "open"
    feed(judge, ([GOOD] * 50 + [BETWEEN]) * 5, start=10)
    assert judge.phase == "open", "just below the limit is not good yet: no flapping around it"
    feed(judge, [GOOD] * 61, start=265)
    assert judge.phase == "cooldown"
    assert feed(judge, [BAD] * 500, start=326) == []
    assert feed(judge, [BAD] * 200, start=826)[0][0] > judge.opened_ns // S - 1
    assert judge.phase == "open"


def test_a_repeated_cause_doubles_the_cooldown():
    judge = armed(LevelDetector("lock_wait", window_s=5, cooldown_s=10))
    lengths = []
    second = 0
    for _ in range(4):
        while judge.phase != "open":
            second += 1
            judge.judge(second * S, BAD)
        while judge.phase == "open":
            second += 1
            judge.judge(second * S, GOOD)
        judge.note_cause("score:lock")
        lengths.append(judge.until_ns // S - second)
    assert lengths == [10, 20, 40, 80]


def test_a_second_nobody_could_judge_is_no_second():
    judge = armed(LevelDetector("gpu_memory"))
    feed(judge, [BAD] * 4 + [UNKNOWN] * 100)
    assert judge.phase == "armed"
    assert feed(judge, [BAD], start=104)[0][0] == 105


def test_one_bad_process_of_a_pod_is_enough_and_all_must_be_good_again():
    judge = armed(LevelDetector("lock_wait", window_s=5))
    feed(judge, [Counts(4, 1, 3, 2_000_000)] * 10)
    assert judge.phase == "open"
    feed(judge, [Counts(4, 0, 3, 2_000_000)] * 30, start=10)
    assert judge.phase == "open"
    feed(judge, [Counts(4, 0, 4, 2_000_000)] * 7, start=40)
    assert judge.phase == "cooldown"


@pytest.mark.parametrize("make", [lambda: LevelDetector("x"), lambda: ThroughputDetector(100), lambda: DropDetector(0.5)])
@pytest.mark.parametrize("jump", [-10_000, -1, 10_000])
def test_a_clock_that_jumps_opens_nothing(make, jump):
    judge = armed(make())
    row = Counts(1, 0, 1, 1) if isinstance(judge, LevelDetector) and type(judge) is LevelDetector else Counts(500, 3_000_000)
    assert feed(judge, [row] * 200, start=20_000) == []
    assert feed(judge, [row] * 200, start=20_200 + jump) == []


def test_ticks_between_seconds_are_no_seconds():
    judge = armed(LevelDetector("lock_wait"))
    assert [judge.judge(S + tick * 1_000_000, BAD) for tick in range(200)] == [None] * 200
    assert judge.phase == "armed"


def flows(rate, waiting, seconds):
    return [Counts(rate, int(waiting * 1_000_000))] * seconds


def test_low_throughput_counts_only_while_requests_wait():
    judge = armed(ThroughputDetector(100))
    assert feed(judge, flows(20, 0.2, 100)) == [], "an idle service breaks no promise"
    assert feed(judge, flows(150, 5, 100), start=100) == []
    ((second, fired),) = feed(judge, flows(60, 5, 60), start=200)
    assert (fired.trigger, 205 <= second <= 220) == ("throughput", True)
    feed(judge, flows(0, 0, 100), start=260)
    assert judge.phase == "open", "nothing finishes and nothing says that the queue is empty"
    feed(judge, flows(30, 0.1, 80), start=360)
    assert judge.phase == "cooldown"


def test_a_service_that_stops_with_a_full_queue_is_seen():
    judge = armed(ThroughputDetector(100))
    feed(judge, flows(150, 5, 30))
    ((_, fired),) = feed(judge, flows(0, 0, 30), start=30)
    assert fired.statistic < 100


def test_a_drop_is_measured_against_what_was_usual():
    judge = armed(DropDetector(0.5))
    assert feed(judge, flows(200, 2, 300)) == []
    assert feed(judge, flows(120, 2, 100), start=300) == [], "by less than a half"
    assert feed(judge, flows(40, 0.1, 100), start=400) == [], "less is asked for"
    ((_, fired),) = feed(judge, flows(40, 3, 60), start=500)
    assert fired.trigger == "throughput_drop"


def test_a_drop_needs_to_know_the_service():
    assert feed(armed(DropDetector(0.5)), flows(200, 2, 30) + flows(20, 3, 20)) == []


@pytest.fixture
def window():
    """One second of a real recorder, with what a test puts into it."""
    recorder = Recorder()
    aggregator = Aggregator(recorder, lambda: S)

    def make(*intervals, requests=0, errors=0, length_s=1.0):
        aggregator._last_ns = S
        for kind, name, ms in intervals:
            recorder.interval(kind, name, 0, int(ms * MS))
        for number in range(requests):
            with recorder.request("score") as request:
                request.error = "E" if number < errors else None
        return aggregator.tick(S + int(length_s * S))

    return make


NOTHING = Facts()


def row(limits, window, facts=NOTHING):
    (found,) = Signals(check_triggers(limits)).rows(window, facts)
    return found[:3]


def test_lock_waits(window):
    limit = {"lock_wait_ms": 10}
    assert row(limit, window()) == (1, 0, 1)
    assert row(limit, window(*[("lock", "rules", 1)] * 200, ("lock", "rules", 50))) == (1, 0, 1), "one of two hundred"
    assert row(limit, window(*[("lock", "rules", 1)] * 50, ("lock", "rules", 50))) == (1, 1, 0)
    assert row(limit, window(("lock", "rules", 9.6))) == (1, 0, 0), "neither"


def test_gc_pauses(window):
    assert row({"gc_pause_ms": 50}, window(*[("gc", "gen0", 1)] * 200, ("gc", "gen2", 80))) == (1, 1, 0)
    assert row({"gc_pause_ms": 50}, window(("gc", "gen2", 30))) == (1, 0, 1)


def test_an_idle_device_matters_while_requests_wait(window):
    limit = {"device_idle": 0.5}
    waiting = ("queue", "threadpool", 3000)
    assert row(limit, window(waiting)) == (0, 0, 0), "nothing told how busy it is"
    assert row(limit, window(waiting), Facts(device_busy=0.1)) == (1, 1, 0)
    assert row(limit, window(waiting), Facts(device_busy=0.9)) == (1, 0, 1)
    assert row(limit, window(("queue", "threadpool", 300)), Facts(device_busy=0.0)) == (1, 0, 1)


def test_memory_headroom_is_the_devices_or_the_containers(window):
    limit = {"memory_headroom": 0.1}
    assert row(limit, window()) == (0, 0, 0)
    assert row(limit, window(), Facts(memory_free=0.5, gpu_used=0.95)) == (1, 1, 0)
    assert row(limit, window(), Facts(memory_free=0.05)) == (1, 1, 0)
    assert row(limit, window(), Facts(memory_free=0.105)) == (1, 0, 0)
    assert row(limit, window(), Facts(memory_free=0.5)) == (1, 0, 1)


def test_errors_of_all_requests(window):
    assert row({"error_rate": 0.1}, window(requests=20, errors=3)) == (20, 3, 0)


def test_a_predicate_of_the_users(window, monkeypatch):
    monkeypatch.setenv("INFERSCOPE_STRICT", "0")
    assert row({"predicate": lambda seen: seen.end_ns > 0}, window()) == (1, 1, 0)
    assert row({"predicate": lambda seen: []}, window()) == (1, 0, 1)
    assert row({"predicate": lambda seen: 1 / 0}, window()) == (0, 0, 0)


def test_device_memory_by_fraction_and_by_bytes():
    facts = Facts(gpu_used=0.95, gpu_used_bytes=9 << 30)
    assert gpu_row(0.9, facts)[:3] == (1, 1, 0)
    assert gpu_row(0.97, facts)[:3] == (1, 0, 0)
    assert gpu_row(8 << 30, facts)[:3] == (1, 1, 0)
    assert gpu_row(16 << 30, facts)[:3] == (1, 0, 1)
    assert gpu_row(0.9, Facts()) == UNKNOWN
    assert level_row(float("nan"), 1.0) == UNKNOWN


@pytest.mark.parametrize(
    "value",
    [3, "nonsense=1", {"lock_wait_ms": 0}, {"lock_wait_ms": True}, {"gc_pause_ms": "soon"}, {"error_rate": 1.5}, {"predicate": 5},
     {"memory_headroom": float("nan")}, "lock_wait_ms"],
)  # fmt: skip
def test_triggers_that_cannot_be_used_are_named(value):
    with pytest.raises(ConfigurationError, match="triggers"):
        check_triggers(value)


def test_triggers_as_text():
    assert check_triggers("lock_wait_ms=50, error_rate=0.01") == {"lock_wait_ms": 50.0, "error_rate": 0.01}
    assert set(LIMITS) == {"lock_wait_ms", "gc_pause_ms", "device_idle", "memory_headroom", "error_rate", "throughput_drop"}


def seconds(trigger, rows, count, start=0):
    found = [trigger.update(second * S, rows) for second in range(start + 1, start + count + 1)]
    return [breach for breach in found if breach is not None]


def test_a_trigger_opens_an_incident_of_its_own():
    trigger = Trigger([SLO("score", p99_ms=20)], limits={"lock_wait_ms": 10})
    trigger.mark_ready()
    assert seconds(trigger, [Counts(500, 1), GOOD], 30) == []
    (breach,) = seconds(trigger, [Counts(500, 1), BAD], 10, start=30)
    assert (breach.slo, breach.request, breach.trigger, breach.threshold_ms) == ("lock_wait", "process", "lock_wait", 0.0)
    trigger.note_cause("lock_wait", "score:lock", "lock_wait")
    state = trigger.state
    assert (state["lock_wait"].phase, state["score"].phase) == ("open", "armed")
    seconds(trigger, [Counts(500, 1), GOOD], 70, start=40)
    assert trigger.take_closed() == (breach.id,)


def test_a_trigger_is_told_of_the_busiest_request():
    recorder = Recorder()
    aggregator = Aggregator(recorder, lambda: 0)
    trigger = Trigger([SLO("fast", request="score", p99_ms=20)], limits={"gc_pause_ms": 1})
    trigger.mark_ready()
    found = []
    for second in range(1, 6):
        for name in ("rank", "score", "score"):
            with recorder.request(name):
                pass
        recorder.interval("gc", "gen2", 0, 50 * MS)
        found.append(trigger.update(second * S, aggregator.tick(second * S)))
    (breach,) = [breach for breach in found if breach is not None]
    assert (breach.slo, breach.request, breach.threshold_ms, breach.trigger) == ("gc_pause", "score", 20.0, "gc_pause")


def test_what_else_an_objective_promises_is_watched_beside_its_latency():
    slo = SLO("score", p99_ms=500, jitter_ms=5, min_throughput=100, max_gpu_mem=0.9)
    trigger = Trigger([slo, SLO("rank", p95_ms=5)])
    assert list(trigger.state) == ["score", "score:jitter", "score:throughput", "score:gpu_memory", "rank"]
    assert trigger.width == 5
    trigger.mark_ready()
    good = [Counts(500, 0), Counts(500, 1), Counts(500, 0), GOOD, Counts(0, 0)]
    assert seconds(trigger, good, 60) == []
    (breach,) = seconds(trigger, [good[0], Counts(500, 60), *good[2:]], 20, start=60)
    assert (breach.slo, breach.trigger, breach.threshold_ms) == ("score", "jitter", 500.0)
    (breach,) = seconds(trigger, [good[0], good[1], Counts(50, 9_000_000), *good[3:]], 30, start=80)
    assert (breach.slo, breach.trigger) == ("score", "throughput")
    state = trigger.state["score:throughput"]
    assert (state.unit, state.requests > 60, 3 <= state.exceeding <= 25) == ("seconds", True, True)
    (breach,) = seconds(trigger, [*good[:3], BAD, good[4]], 30, start=110)
    assert (breach.slo, breach.trigger) == ("score", "gpu_memory")
    trigger.note_cause("score", "score:copy", "gpu_memory")
    trigger.note_cause("score", "score:copy", "gpu_memory")
    lengths = {name: held.cooldown_s for name, held in trigger.state.items()}
    assert lengths == {"score": 600, "score:jitter": 600, "score:throughput": 600, "score:gpu_memory": 1200, "rank": 600}


def test_the_error_rate_of_everything_is_tested_as_a_share():
    trigger = Trigger([], limits={"error_rate": 0.01}, warmup_requests=0, warmup_s=0)
    rng = np.random.default_rng(3)
    for second in range(1, 600):
        assert trigger.update(second * S, [Counts(500, int(rng.binomial(500, 0.005)))]) is None
    found = [trigger.update(second * S, [Counts(500, int(rng.binomial(500, 0.05)))]) for second in range(600, 640)]
    (breach,) = [breach for breach in found if breach is not None]
    assert (breach.slo, breach.trigger, breach.exceeding > 20) == ("error_rate", "error_rate", True)


def test_another_trigger_goes_on_where_the_old_one_stood():
    old = Trigger([SLO("score", p99_ms=20), SLO("rank", p99_ms=20)], limits={"lock_wait_ms": 10})
    old.mark_ready()
    rng = np.random.default_rng(1)
    for second in range(1, 200):
        k = int(rng.binomial(10, 0.3)) * 10
        old.update(second * S, [Counts(5000, k), Counts(500, 1), GOOD])
    (breach,) = seconds(old, [Counts(5000, 2500), Counts(500, 1), GOOD], 20, start=200)
    learned = old.state["score"].design_effect
    assert learned > 2
    new = Trigger([SLO("score", p99_ms=20), SLO("rank", p99_ms=30)], limits={"lock_wait_ms": 20})
    new.adopt(old)
    assert new.ready
    assert (new.state["score"].phase, new.state["score"].breach, new.state["score"].design_effect) == ("open", breach.id, learned)
    assert (new.state["rank"].requests, new.state["lock_wait"].requests) == (0, 0), "they are other ones"
    newest = Trigger([SLO("score", p99_ms=25)])
    newest.adopt(new)
    assert newest.take_closed() == (breach.id,), "its objective is gone"


def test_too_much_to_watch_is_said():
    with pytest.raises(ConfigurationError, match="at most 16 objectives"):
        Trigger([SLO(f"s{n}", p99_ms=20) for n in range(17)])
    with pytest.raises(ConfigurationError, match="at most 40"):
        Trigger([SLO(f"s{n}", p99_ms=20, jitter_ms=3, min_throughput=1) for n in range(14)])
