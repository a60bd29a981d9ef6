"""One object for all host evidence."""

from __future__ import annotations

import gc
import json
import time

import pytest

from inferscope.clock import now_ns
from inferscope.host.gc import GcPauses
from inferscope.host.watch import HostWatch
from inferscope.types import ClassKey, Reason, RequestRecord


class Listener:
    def interval(self, *args, **kwargs):
        pass


def record(number, *, reasons=Reason.BREACH, name="score", start=None):
    return RequestRecord(
        number, ClassKey(name, None, None), start or now_ns(), 1000, 3, reasons, 7, 4.0, 1, None, 500, 1, 0, False, (1000,), ()
    )


@pytest.fixture
def watch():
    made = HostWatch(GcPauses(Listener()), slow=3, ordinary=2)
    yield made
    made.reset()


def test_evidence_is_json_and_bounded(watch):
    begin = now_ns()
    watch.tick(begin, [])
    records = [record(n) for n in range(5)] + [record(n, reasons=Reason.RESERVOIR) for n in range(10, 15)]
    records += [record(20, name="other"), record(21, reasons=Reason.SLOWEST), record(22, reasons=Reason.PROFILED | Reason.BREACH)]
    watch.tick(now_ns(), records)
    assert watch.period_s > 0.1
    assert watch.arm() == (watch.sampler.reason is None)
    assert watch.sampler.reason is not None or watch.period_s == 0.010
    watch.sample()
    time.sleep(0.002)
    watch.sample()
    found = json.loads(json.dumps(watch.evidence("score", begin, now_ns())))
    assert [row["id"] for row in found["requests"]] == [3, 4, 13, 14]
    assert [row["slow"] for row in found["requests"]] == [True, True, False, False]
    assert found["requests"][0]["size"] == 4.0
    assert found["first_request_ns"] == min(row.start_ns for row in records)
    if watch.sampler.reason is None:
        assert found["samples"]["samples"] == 2
    if watch.scheduling.reason is None:
        assert len(found["scheduling"]["seconds"]) == 1


def test_long_pauses_keep_their_position():
    pauses = GcPauses(Listener())
    watch = HostWatch(pauses)
    held = [[{}] for _ in range(60_000)]
    pauses.start()
    begin = now_ns()
    gc.collect()
    pauses.stop()
    assert len(held) == 60_000
    found = [row for row in watch.evidence("score", begin, now_ns())["gc"] if row[2] == 2]
    assert len(found) == 1
    assert begin <= found[0][0] < found[0][1]
    assert found[0][1] - found[0][0] == pauses.pauses[2][2]


def test_a_forked_child_starts_empty(watch):
    watch.tick(now_ns(), [record(1)])
    watch.reset()
    assert watch.evidence("score", 0, now_ns() + 1)["requests"] == []
    assert watch.evidence("score", 0, now_ns() + 1)["first_request_ns"] is None


def test_a_healthy_process_is_looked_at_in_bursts_and_all_the_time_while_an_objective_burns(watch, monkeypatch):
    if watch.sampler.reason is not None:
        pytest.skip(watch.sampler.reason)
    wait = [400_000_000]
    monkeypatch.setattr(watch._duty, "wait_ns", lambda _: wait[0])
    watch.sample()
    assert watch.sampler.samples == 0
    assert watch.period_s == 0.4
    assert watch.status()["sampler"] == "one part in 16"
    wait[0] = 0
    watch.sample()
    assert (watch.sampler.samples, watch.period_s) == (1, 0.010)
    wait[0] = 10**9
    watch.sample()
    assert (watch.sampler.samples, watch.period_s) == (1, 0.5)
    assert watch.arm(burning=True)
    watch.sample()
    assert (watch.sampler.samples, watch.period_s) == (2, 0.010)
    watch.disarm()
    watch.sample()
    assert watch.sampler.samples == 2


def test_an_objective_that_burns_for_hours_is_not_sampled_all_the_time(watch, monkeypatch):
    """Two minutes at first; then one part in sixteen of the time beside the bursts; an incident is sampled whatever was before it."""
    moment = [10**12]
    monkeypatch.setattr("inferscope.host.watch.now_ns", lambda: moment[0])
    armed = []
    for _ in range(4 * 3600):
        watch.arm(burning=True)
        armed.append(watch._always)
        moment[0] += 10**9
    assert all(armed[:120])
    assert not any(armed[121:1000])
    assert sum(armed[120:]) <= len(armed) / 16
    assert max(len(run) for run in "".join("x" if on else " " for on in armed[121:]).split()) <= 61
    watch.arm()
    assert watch._always, "an incident pays for itself"
    watch.disarm()
    moment[0] += 3600 * 10**9
    watch.arm(burning=True)
    assert watch._always, "another day, another fire"


def test_an_incident_begins_with_what_was_sampled_before_it(watch, monkeypatch):
    if watch.sampler.reason is not None:
        pytest.skip(watch.sampler.reason)
    monkeypatch.setattr(watch._duty, "wait_ns", lambda _: 0)
    watch.sample()
    monkeypatch.setattr("inferscope.host.watch._CHAPTER_NS", 0)
    watch.sample()  # a minute later, as it were
    watch.arm()
    watch.sample()
    watch.sample()
    found = watch.evidence("score", 0, now_ns())
    assert [part["samples"] for part in found["earlier_samples"]] == [1]
    assert found["samples"]["samples"] == 3, "an open incident keeps its chapter"
    assert len(found["samples"]["spans"]) == 1
    watch.stop()
    watch.sample()
    assert watch.status()["sampler"] == "off"
