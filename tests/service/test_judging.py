"""Detection as it is wired: workers of a pod add up, the leader judges, what broke waits its turn."""

from __future__ import annotations

import pytest

from inferscope import pod
from inferscope.aggregate import Aggregator
from inferscope.capture.incident import CAPTURE_S
from inferscope.clock import now_ns
from inferscope.detect import SLO, Counts
from inferscope.detect.fleet import HostBudget
from inferscope.errors import CaptureRefusedError
from inferscope.record.core import Recorder
from inferscope.rooms.judging import Judging
from inferscope.settings import Settings

S = 1_000_000_000
MS = 1_000_000


class Device:
    def levels(self, from_ns, to_ns):
        return None, ()


class Keeper:
    """Remembers what was opened."""

    def __init__(self, root=True):
        self.current, self.opened, self.root = None, [], root

    def open(self, breach, now_ns):
        if self.current is not None or not self.root:
            return False
        self.current = breach.id
        self.opened.append(breach)
        return True


class Worker:
    """One worker of a pod, second by second."""

    def __init__(self, settings, state_dir):
        self.place = pod.Pod(pod.lease(state_dir, "svc"))
        self.judging = Judging(settings)
        self.recorder = Recorder()
        self.aggregator = Aggregator(self.recorder, lambda: 0)
        self.keeper = Keeper()

    def second(self, number, *intervals, requests=0):
        for kind, name, ms in intervals:
            self.recorder.interval(kind, name, 0, int(ms * MS))
        for _ in range(requests):
            with self.recorder.request("score"):
                pass
        self.judging.count(self.aggregator.tick(number * S), Device(), number * S)
        rows = self.judging.pooled(self.place, number * S)
        breach = self.judging.trigger.update(number * S, rows) if rows is not None else None
        self.judging.follow(self.keeper, breach, number * S)
        return rows


@pytest.fixture
def workers(tmp_path):
    made = []

    def make(count=2, **settings):
        made.extend(Worker(Settings(state_dir=tmp_path, **settings), tmp_path) for _ in range(count))
        for worker in made:
            worker.judging.trigger.mark_ready()
        assert made[0].place.leads()
        return made

    yield make
    for worker in made:
        worker.judging.host.release()
        worker.place.retire()


def test_a_worker_that_does_not_lead_is_seen_by_the_one_that_does(workers):
    leader, other = workers(slo=(SLO("score", p99_ms=20),), triggers={"lock_wait_ms": 10})
    for number in range(1, 12):
        other.second(number, ("lock", "rules", 50), requests=5)
        leader.second(number, requests=5)
    assert (leader.place.leading, other.place.leading) == (True, False)
    (breach,) = leader.keeper.opened
    assert (breach.slo, breach.trigger) == ("lock_wait", "lock_wait")
    assert other.keeper.opened == []


def test_more_than_eight_rows_are_added_up(workers):
    leader, other = workers(slo=tuple(SLO(f"s{n}", p99_ms=20, request="score") for n in range(12)))
    for number in (1, 2):
        other.second(number, requests=3)
        rows = leader.second(number, requests=2)
    assert rows == [Counts(5, 0)] * 12


def test_other_objectives_begin_at_zero_and_take_nothing_away(workers):
    from inferscope.detect import Trigger

    leader, other = workers(slo=(SLO("score", p99_ms=20),))
    for number in range(1, 5):
        other.second(number, requests=50)
        leader.second(number, requests=50)
    for worker in (leader, other):
        worker.judging.trigger = Trigger((SLO("rank", p99_ms=5), SLO("score", p99_ms=20)))
    other.second(5, requests=7)
    assert leader.second(5, requests=7) == [Counts(0, 0), Counts(14, 0)], "the 200 requests of the other objective are nobody's now"
    other.second(6, requests=7)
    assert leader.second(6, requests=7) == [Counts(0, 0), Counts(14, 0)]


def test_what_broke_waits_while_another_process_of_the_host_captures(workers, tmp_path):
    (worker,) = workers(1, slo=(SLO("score", p99_ms=20),), triggers={"lock_wait_ms": 10})
    other = HostBudget(tmp_path / "capture.lock")
    assert other.acquire(S) is None
    for number in range(1, 40):
        worker.second(number, ("lock", "rules", 50), requests=5)
    assert worker.keeper.opened == []
    assert worker.judging.selection.waiting
    assert worker.judging.status()["fleet"]["host_lock"] == "another process of this host is capturing"
    other.release()
    worker.second(40, ("lock", "rules", 50))
    (breach,) = worker.keeper.opened
    assert breach.detected_ns == 40 * S, "it was detected long ago: captures take it for a new one"
    assert breach.onset_ns < 10 * S
    assert worker.judging.status()["fleet"]["host_lock"] == "held"
    for number in range(41, 42 + int(CAPTURE_S)):
        worker.second(number, ("lock", "rules", 50))
    assert worker.judging.status()["fleet"]["host_lock"] == "free", "collecting is over, though the incident is open"


def test_a_breach_that_ended_while_it_waited_opens_nothing(workers, tmp_path):
    (worker,) = workers(1, slo=(SLO("score", p99_ms=20),), triggers={"lock_wait_ms": 10})
    other = HostBudget(tmp_path / "capture.lock")
    assert other.acquire(S) is None
    for number in range(1, 20):
        worker.second(number, ("lock", "rules", 50), requests=5)
    for number in range(20, 90):
        worker.second(number, requests=5)
    other.release()
    worker.second(90)
    assert worker.keeper.opened == []


def test_a_replica_that_is_not_drawn_opens_no_incident(workers):
    (worker,) = workers(1, slo=(SLO("score", p99_ms=20),), triggers={"lock_wait_ms": 10}, fleet_size=100_000)
    worker.judging.selection._uniform = lambda: 0.99
    for number in range(1, 40):
        worker.second(number, ("lock", "rules", 50), requests=5)
    assert worker.keeper.opened == []
    assert worker.judging.trigger.state["lock_wait"].phase == "open"
    told = worker.judging.status()["fleet"]
    assert (told["breaches"], told["drawn"], len(told["waiting"])) == (1, 0, 1)


def test_where_nothing_can_be_kept_the_host_is_left_alone(workers):
    (worker,) = workers(1, slo=(SLO("score", p99_ms=20),), triggers={"lock_wait_ms": 10})
    worker.keeper.root = False
    for number in range(1, 20):
        worker.second(number, ("lock", "rules", 50), requests=5)
    assert not worker.judging.host.held
    assert worker.judging.selection.waiting == ()


def test_a_capture_on_demand_takes_its_turn_too(workers, tmp_path):
    (worker,) = workers(1)
    other = HostBudget(tmp_path / "capture.lock")
    assert other.acquire(S) is None
    with pytest.raises(CaptureRefusedError, match="another process of this host"):
        worker.judging.permit(S)
    other.release()
    worker.judging.permit(S)
    worker.judging.permit(2 * S)


def test_an_objective_burns_while_the_last_seconds_hold_more_bad_requests_than_it_allows(workers):
    (worker,) = workers(1, slo=(SLO("score", p99_ms=20),))
    worker.recorder.set_edges("score", (20 * MS,))

    def slow(number):
        for _ in range(number):
            with worker.recorder.request("score", started_ns=now_ns() - 50 * MS):
                pass

    worker.second(1, requests=100)
    slow(2)
    worker.second(2)
    assert not worker.judging.burning, "two bad requests are no fire"
    slow(1)
    worker.second(3)
    assert worker.judging.burning
    for number in range(4, 14):
        worker.second(number, requests=10)
    assert not worker.judging.burning
