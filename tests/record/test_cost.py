"""Costs as ratios to two clock reads in the same run; the benchmarks measure them properly."""

from __future__ import annotations

import time

import pytest

COUNT = 5_000


def cheapest(function):
    """Thread CPU time of one round, the least of several: other load can only add."""
    best = float("inf")
    for _ in range(9):
        start = time.thread_time_ns()
        function()
        best = min(best, time.thread_time_ns() - start)
    return best


@pytest.fixture
def floor():
    clock = time.perf_counter_ns

    def two_reads():
        for _ in range(COUNT):
            clock()
            clock()

    return cheapest(two_reads)


def test_a_stage_costs_a_bounded_multiple_of_two_clock_reads(recorder, floor):
    stage = recorder.stage

    def spans():
        for _ in range(COUNT):
            with stage("s"):
                pass

    pure = "pure" in type(recorder).__module__
    assert cheapest(spans) < (13 if pure else 3) * floor


def test_a_stage_inside_a_request_too(recorder, floor):
    stage = recorder.stage

    def spans():
        for _ in range(COUNT // 8):
            with recorder.request("r") as request:
                for _ in range(8):
                    with stage("s"):
                        pass
                request.discard()

    pure = "pure" in type(recorder).__module__
    assert cheapest(spans) < (24 if pure else 5) * floor
