from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscope.capture.budget import CaptureBudget, Spending
from inferscope.errors import ConfigurationError

SECOND = 1_000_000_000
MS = 1_000_000


def test_defaults_are_the_documented_ones():
    budget = CaptureBudget()
    assert (budget.max_share, budget.attempts_per_s, budget.stall_ms_per_s) == (0.2, 10, 5)
    assert (budget.slow, budget.body, budget.per_hour, budget.disk_mb) == (8, 5, 6, 512)


def test_is_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        CaptureBudget().slow = 3
    with pytest.raises(TypeError):
        CaptureBudget(0.1)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_share", 0),
        ("max_share", 1.5),
        ("max_share", "0.2"),
        ("max_share", float("nan")),
        ("attempts_per_s", 0),
        ("stall_ms_per_s", -1),
        ("slow", 0),
        ("slow", 1.5),
        ("slow", True),
        ("body", -1),
        ("per_hour", 0),
        ("disk_mb", 0),
        ("incidents", None),
        ("free_memory_mb", -1),
        ("armed_s", 0.5),
        ("cooldown_s", -0.1),
    ],
)
def test_unusable_keywords_are_named(key, value):
    with pytest.raises(ConfigurationError) as caught:
        CaptureBudget(**{key: value})
    assert caught.value.key == key
    assert key in str(caught.value)


@given(st.sampled_from([1.0, 0.5, 0.3, 0.2, 0.1, 0.03]), st.integers(0, 2**32))
def test_share_is_never_exceeded(share, seed):
    spending = Spending(CaptureBudget(max_share=share, attempts_per_s=100), random.Random(seed).random)
    block = -int(-1.0 // share)
    for n in range(1, 200):
        spending.draw(n * SECOND)
        assert spending.attempts <= share * n + 1
        if n % block == 0:
            assert spending.attempts == n // block


def test_draws_do_not_follow_a_period_of_the_traffic():
    spending = Spending(CaptureBudget(max_share=0.2, attempts_per_s=100), random.Random(3).random)
    phases = {n % 5 for n in range(500) if spending.draw(n * SECOND)}
    assert phases == {0, 1, 2, 3, 4}


def test_attempts_are_spaced():
    spending = Spending(CaptureBudget(max_share=1.0, attempts_per_s=10))
    drawn = [now for now in range(0, 3 * SECOND, MS) if spending.draw(now)]
    assert all(later - earlier >= SECOND / 10 for earlier, later in itertools.pairwise(drawn))
    assert len(drawn) == 30


@given(st.lists(st.integers(1, 20 * MS), min_size=1, max_size=60))
def test_stall_stays_within_its_rate(costs):
    """Up to any attempt, what was spent before the last one is covered by the time that passed at 5 ms a second."""
    spending = Spending(CaptureBudget(max_share=1.0, attempts_per_s=100, stall_ms_per_s=5))
    now, spent, waiting = 0, 0, list(costs)
    for _ in range(100_000):
        if not waiting:
            break
        if spending.draw(now):
            assert spent * 200 <= now + 1
            spent += waiting[0]
            spending.spend(waiting.pop(0), now)
        now += 20 * MS
    assert spending.stall_ns == spent


def test_incidents_an_hour():
    spending = Spending(CaptureBudget(per_hour=2))
    assert [spending.open_incident(minute * 60 * SECOND) for minute in (0, 1, 2, 59)] == [True, True, False, False]
    assert spending.open_incident(60 * 60 * SECOND)
    assert not spending.open_incident(60 * 60 * SECOND + 1)


def test_likely_requests_come_out_of_turn_within_share_and_pace():
    spending = Spending(CaptureBudget(max_share=0.1, attempts_per_s=10), uniform=lambda: 0.5)
    drawn = [n for n in range(1000) if spending.draw(n * SECOND // 50, likely=n % 50 in {10, 11, 12})]
    assert 20 <= len(drawn) <= 100
    assert any(n % 50 == 10 for n in drawn)
    assert all(later - earlier >= 5 for earlier, later in itertools.pairwise(drawn))


def test_random_draws_leave_room_for_likely_ones_while_those_come():
    def attempts(likely):
        spending = Spending(CaptureBudget(max_share=0.2, stall_ms_per_s=5))
        by_kind = {True: 0, False: 0}
        for n in range(6000):
            now = n * SECOND // 100
            kind = likely and n % 75 == 0
            if spending.draw(now, likely=kind):
                by_kind[kind] += 1
                spending.spend(MS, now)
        return by_kind

    alone, together = attempts(False), attempts(True)
    assert together[True] > 30  # of 80 late episodes in a minute
    assert together[False] > alone[False] / 5
    assert sum(together.values()) <= 5 * 60 + 1
