"""The example's account of the truth: every nanosecond once, shares that sum to one."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.risk_scoring import truth
from examples.risk_scoring.copy_engine import Copy

MS = 1_000_000


def row(end_ms: float, **phases_ms: float) -> dict[str, int]:
    """A request that ends at `end_ms`, with ms by cause (`_` for `:`)."""
    values = {cause: int(phases_ms.pop(cause.replace(":", "_"), 0) * 1e6) for cause in truth.CAUSES}
    assert not phases_ms
    return {"start_ns": int(end_ms * 1e6) - sum(values.values()), "end_ns": int(end_ms * 1e6), "status": 200, **values}


def test_planted_excess_is_found():
    rows = [row(100 * i, forward=5, copy_h2d=1 + i / 1000, unattributed=1) for i in range(100)]
    rows += [row(100 * i + 50, forward=5, copy_h2d=31, unattributed=1) for i in range(3)]
    rows += [row(100 * i + 70, forward=5, copy_h2d=1, lock_rules=20, unattributed=1) for i in range(3)]
    found = truth.attribute(rows)
    assert (found.requests, found.tail) == (106, 6)
    assert found.over_objective == pytest.approx(6 / 106)
    assert found.excess_ms == pytest.approx(25, abs=0.1)
    assert found.shares["copy:h2d"] == pytest.approx(0.6, abs=0.01)
    assert found.shares["lock:rules"] == pytest.approx(0.4, abs=0.01)
    assert found.shares["forward"] == 0
    assert sum(found.shares.values()) == pytest.approx(1)


def test_only_requests_that_end_in_the_horizon_count():
    rows = [row(10, forward=5), row(20, forward=6), row(30, forward=25)]
    assert truth.attribute(rows, from_ns=15_000_000, to_ns=25_000_000).requests == 1
    assert truth.attribute(rows, to_ns=25_000_000).tail == 0
    assert truth.attribute(rows, from_ns=10_000_000, to_ns=30_000_000).requests == 3


def test_nothing_to_say_is_said():
    empty = truth.attribute([])
    assert (empty.requests, empty.over_objective, empty.p99_ms, empty.shares) == (0, None, None, {})
    healthy = truth.attribute([row(10 * i, forward=5) for i in range(10)])
    assert (healthy.over_objective, healthy.excess_ms, healthy.shares) == (0.0, None, {})
    drowned = truth.attribute([row(100 * i, forward=50) for i in range(10)])
    assert (drowned.over_objective, drowned.shares) == (1.0, {}), "without a healthy body there is nothing to compare with"


times = st.fixed_dictionaries({cause.replace(":", "_"): st.floats(0, 30) for cause in truth.CAUSES})


@given(st.lists(times, min_size=1, max_size=60))
def test_shares_sum_to_one_whatever_the_requests(requests):
    found = truth.attribute([row(1000 * (index + 1), **phases) for index, phases in enumerate(requests)])
    if found.shares:
        assert sum(found.shares.values()) == pytest.approx(1)
        assert sum(found.by_cause_ms.values()) == pytest.approx(found.excess_ms)
        assert found.excess_ms > 0


def test_each_nanosecond_is_charged_once_and_to_the_innermost_phase():
    log, trail = truth.Log(), truth.Trail()
    trail.add("queue:threadpool", 1000)
    with trail.phase("rules"):
        time.sleep(0.002)
        with trail.phase("lock:rules"):
            time.sleep(0.005)
        trail.add("lock:rules", 100)
    log.finish(trail, 200)
    (found,) = log.rows()
    assert sum(found[cause] for cause in truth.CAUSES) == found["end_ns"] - found["start_ns"]
    assert found["lock:rules"] >= 5_000_100
    assert 1_900_000 <= found["rules"] < found["end_ns"] - found["start_ns"] - 5_000_000
    assert found["queue:threadpool"] == 1000
    assert found["status"] == 200


def test_copies_are_as_long_as_the_device_says():
    def copied(direction: str, thread: int, asked_ms: float, blocked_ms: float) -> Copy:
        asked, returned = int(asked_ms * 1e6), int((asked_ms + blocked_ms) * 1e6)
        return Copy(direction, 4, True, True, asked, asked, returned, returned, thread)

    def worked(thread: int, from_ms: float, to_ms: float) -> dict[str, int]:
        return {"thread_id": thread, "taken_ns": int(from_ms * 1e6), "left_ns": int(to_ms * 1e6)}

    rows = [row(20, copy_h2d=10, copy_d2h=2, unattributed=1) | worked(1, 7, 20), row(40, copy_h2d=5) | worked(2, 35, 40)]
    copies = [copied("d2h", 1, 18, 1.5), copied("h2d", 1, 8, 4), copied("h2d", 1, 13, 4), copied("h2d", 1, 30, 3), copied("h2d", 2, 10, 9)]
    first, second = truth.with_copies(rows, copies)
    assert (first["copy:h2d"], first["copy:d2h"], first["unattributed"]) == (8_000_000, 1_500_000, 3_500_000)
    assert (second["copy:h2d"], second["unattributed"]) == (0, 5_000_000)
    assert all(sum(each[cause] for cause in truth.CAUSES) == each["end_ns"] - each["start_ns"] for each in (first, second))


def test_copies_of_others_that_the_thread_served_while_a_request_waited_for_it_are_not_its_own():
    """Two requests came at once and one thread served both, one after the other."""
    copies = [Copy("h2d", 4, True, True, asked, asked, asked + MS, asked + MS, 1) for asked in (2 * MS, 12 * MS)]
    came = {"start_ns": 0, "status": 200, "thread_id": 1} | dict.fromkeys(truth.CAUSES, 0)
    first = came | {"end_ns": 12 * MS + 1, "taken_ns": MS, "left_ns": 10 * MS, "copy:h2d": 2 * MS, "unattributed": 10 * MS + 1}
    second = came | {
        "end_ns": 20 * MS,
        "taken_ns": 11 * MS,
        "left_ns": 19 * MS,
        "copy:h2d": 2 * MS,
        "queue:threadpool": 11 * MS,
        "unattributed": 7 * MS,
    }
    for found in truth.with_copies([first, second], copies):
        assert found["copy:h2d"] == MS
        assert sum(found[cause] for cause in truth.CAUSES) == found["end_ns"] - found["start_ns"]


def test_a_written_log_reads_back(tmp_path, capsys, monkeypatch):
    log = truth.Log()
    for _ in range(3):
        log.finish(truth.Trail(), 200)
    path = tmp_path / "deep" / "truth-1.jsonl"
    truth.write(path, log.rows())
    monkeypatch.setattr("sys.argv", ["truth", str(path)])
    truth.main()
    assert json.loads(capsys.readouterr().out)["requests"] == 3
