"""Lots among replicas, turns on a host."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest

from inferscope.detect import SLO, Counts, Trigger
from inferscope.detect.fleet import JITTER_S, ROUND_S, WANTED, HostBudget, SelfSelection

S = 1_000_000_000


def breach(name="b"):
    trigger = Trigger([SLO("score", p99_ms=20)])
    return trigger.manual(0, name)


def test_alone_it_captures_at_once():
    for fleet in (1, 4):
        selection = SelfSelection(fleet)
        one = breach()
        selection.offer(one, 5 * S)
        assert selection.take(5 * S) is one
        assert selection.take(6 * S) is one, "until it has its incident"
        selection.forget(one.id)
        assert selection.take(7 * S) is None


def test_of_many_about_four_capture_one_round_after_another():
    rng, one = random.Random(2026), breach()
    fleets = []
    for _ in range(40):
        begun = []
        for _ in range(1000):
            selection = SelfSelection(1000, rng.random)
            selection.offer(one, 0)
            for at in range(len(WANTED)):
                when = int((at * ROUND_S + JITTER_S) * S)
                if selection.take(int(at * ROUND_S * S)) or selection.take(when):
                    begun.append(at)
                    break
        fleets.append([begun.count(at) for at in range(len(WANTED))])
    means = [sum(fleet[at] for fleet in fleets) / len(fleets) for at in range(len(WANTED))]
    # four standard errors of a Poisson mean
    assert all(mean == pytest.approx(wanted, abs=4 * (wanted / len(fleets)) ** 0.5) for mean, wanted in zip(means, WANTED, strict=True)), (
        means
    )
    assert sum(max(fleet) > 5 for fleet in fleets) <= 0.1 * len(fleets), "0.5 % of the fleet"
    assert sum(fleet[0] > 0 for fleet in fleets) >= 0.7 * len(fleets), "soon"


def test_whoever_was_not_drawn_is_drawn_again_more_and_more_rarely():
    lots = iter([0.9, 0.015, 0.9, 0.9, 0.9, 0.001, 0.5])
    selection = SelfSelection(100, lambda: next(lots))
    one = breach()
    selection.offer(one, 0)
    assert selection.take(int((ROUND_S - 1) * S)) is None
    for at in (1, 2, 3, 5):
        # drawn and not chosen (the second lot would have won the first round); from the third on rounds grow
        assert selection.take(int(at * ROUND_S * S)) is None
    assert selection.take(int(9 * ROUND_S * S)) is None  # chosen, in two seconds
    assert selection.take(int((9 * ROUND_S + 1) * S)) is None
    assert selection.take(int((9 * ROUND_S + 2) * S)) is one
    assert (selection.offered, selection.drawn) == (1, 1)


def test_what_ended_is_not_captured():
    selection = SelfSelection(2000, lambda: 0.0)
    one = breach()
    selection.offer(one, 0)
    assert selection.waiting == (one.id,)
    selection.forget(one.id)
    assert selection.take(100 * S) is None


@pytest.fixture
def lock(tmp_path):
    return tmp_path / "capture.lock"


def test_one_process_of_a_host_captures_at_a_time(lock):
    first, second = HostBudget(lock), HostBudget(lock)
    assert first.acquire(S) is None
    assert first.acquire(2 * S) is None, "it has it already"
    assert second.acquire(2 * S) == "another process of this host is capturing"
    first.release()
    assert second.acquire(3 * S) is None
    assert lock.stat().st_mode & 0o777 == 0o600
    second.release()


def test_so_many_an_hour(lock):
    begun = []
    for number in range(5):
        budget = HostBudget(lock, per_hour=3)
        begun.append(budget.acquire((1 + number * 60) * S))
        budget.release()
    assert begun[:3] == [None] * 3
    assert begun[3] == begun[4] == "this host has captured 3 times within an hour"
    late = HostBudget(lock, per_hour=3)
    assert late.acquire(3602 * S) is None
    late.release()


def test_a_machine_that_was_started_again_has_captured_nothing(lock):
    for _ in range(3):
        budget = HostBudget(lock, per_hour=3)
        assert budget.acquire(10_000 * S) is None
        budget.release()
    again = HostBudget(lock, per_hour=3)
    assert again.acquire(5 * S) is None
    again.release()


@pytest.mark.parametrize("content", [b"", b"x", b"\xff" * 100, b"\0" * 100_000])
def test_a_damaged_file_limits_nothing(lock, content):
    lock.write_bytes(content)
    budget = HostBudget(lock, per_hour=100)
    assert budget.acquire(10 * S) is None
    budget.release()


def test_a_file_that_cannot_be_used_limits_nothing_and_says_so(tmp_path):
    assert HostBudget(None).acquire(S) is None
    blocked = HostBudget(tmp_path / "nothing" / "capture.lock")
    assert blocked.acquire(S) is None
    assert "cannot be used" in blocked.reason
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    followed = HostBudget(tmp_path / "link")
    assert followed.acquire(S) is None
    assert not (tmp_path / "elsewhere").exists()


def test_a_killed_process_holds_nobody_up(lock):
    code = "import os, sys, time, pathlib; from inferscope.detect.fleet import HostBudget; b = HostBudget(pathlib.Path(sys.argv[1]));"
    code += "print(b.acquire(10**9), flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code, str(lock)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "None\n"
        assert HostBudget(lock).acquire(2 * S) is not None
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    after = HostBudget(lock)
    assert after.acquire(3 * S) is None
    after.release()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_gives_nothing_back(lock):
    parent = HostBudget(lock)
    assert parent.acquire(S) is None
    pid = os.fork()
    if pid == 0:
        try:
            parent.after_fork()
            os._exit(0 if not parent.held else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert HostBudget(lock).acquire(2 * S) == "another process of this host is capturing"
    parent.release()


def test_counts_of_a_fleet_need_more_evidence():
    alone, fleet = Trigger([SLO("score", p99_ms=20)]), Trigger([SLO("score", p99_ms=20)], fleet_size=100_000)
    for trigger in (alone, fleet):
        trigger.mark_ready()
    delays = []
    for trigger in (alone, fleet):
        delays.append(next(second for second in range(1, 100) if trigger.update(second * S, [Counts(50, 3)]) is not None))
    assert delays[0] < delays[1]
