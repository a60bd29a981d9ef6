"""Thread CPU time of short requests is read for a few of them, and what these say holds for all."""

from __future__ import annotations

import time

import pytest

from inferscope.record import fallback

PERIODS = (4, 64)


def burn(cpu_ns: int) -> None:
    """Spend so much CPU time of this thread."""
    end = time.thread_time_ns() + cpu_ns
    while time.thread_time_ns() < end:
        pass


@pytest.mark.parametrize("period", PERIODS)
def test_which_requests_are_measured_does_not_follow_the_traffic(timed, clock, period):
    """A class whose every nth request differs: were every 64th measured, it would always be of the same kind."""
    blocks = 80
    heavy = before = 0
    for number in range(64 * blocks):
        with timed.request("r"):
            clock.tick(1000)
        now = timed.read_class(0)["cpu_requests"]
        heavy += now != before and number % period == 0
        before = now
    assert before == blocks
    deviation = (blocks / period * (1 - 1 / period)) ** 0.5
    assert abs(heavy - blocks / period) < 5 * deviation + 1


def test_a_planted_share_of_cpu_comes_out(timed, clock):
    """Every fourth request computes, the others wait. The weighted sums give the share that the thread's own clock gives."""
    blocks, cpu = 100, 0
    for number in range(64 * blocks):
        before = time.thread_time_ns()
        with timed.request("r"):
            if number % 4 == 0:
                burn(20_000)
            clock.tick(300_000)
        cpu += time.thread_time_ns() - before
    told = timed.read_class(0)
    assert told["cpu_requests"] == blocks
    assert told["cpu_wall_ns"] == pytest.approx(told["wall_ns"], rel=1 / blocks)
    # 100 are measured, of which 25 computed, give or take 4.3: five deviations are 0.87. Every 64th would say 4 times the truth.
    assert told["cpu_ns"] == pytest.approx(cpu, rel=0.9)


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_a_class_that_changes_its_length_is_no_mixture_of_two_scales(implementation, clock, mode):
    """Long requests are measured always and count once, short ones stand for 64: sums of both are on one scale."""
    recorder = implementation(clock=clock)
    recorder.cpu_mode = mode
    for length, count in ((100_000, 64 * 100), (4_000_000, 400)):
        for _ in range(count):
            with recorder.request("r"):
                clock.tick(length)
    told = recorder.read_class(0)
    assert told["wall_ns"] == 64 * 100 * 100_000 + 400 * 4_000_000
    # Before the class is known to be long, one of its long requests may be drawn as a short one is: it stands for 64, as rarely as it should.
    drawn = 64 * 4_000_000 if mode == "auto" else 0
    assert told["cpu_wall_ns"] == pytest.approx(told["wall_ns"], rel=0, abs=(0.05 * told["wall_ns"] if drawn else 0) + drawn)
    assert told["cpu_requests"] == 6800 if mode == "on" else 480 <= told["cpu_requests"] <= 520


def test_both_cores_name_the_same_totals(recorder):
    with recorder.request("r"):
        burn(200_000)
    told = recorder.read_class(0)
    assert (told["cpu_requests"], told["count"]) == (1, 1), "the first of a class: nobody knows yet how long its requests are"
    assert 150_000 < told["cpu_ns"] <= told["cpu_wall_ns"] + 1_000_000 * (type(recorder) is fallback.Recorder)
