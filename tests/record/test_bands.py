"""Bands, exact edges and which requests are retained."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferscope.types import Reason

HIGHEST = 60_000_000_000


def band_of(ns):
    """Written from the definition: 27 octaves from 1.024 us, each cut in 8 equal parts."""
    if ns < 1024:
        return 0
    octave = 0
    while 1024 << (octave + 1) <= ns:
        octave += 1
    low = 1024 << octave
    return min(octave * 8 + (ns - low) * 8 // low, 215)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    walls=st.lists(st.integers(0, 200_000), min_size=1, max_size=40),
    edges=st.lists(st.integers(500, 150_000), min_size=1, max_size=4, unique=True),
)
def test_rows_are_ordered_exact_and_hold_every_nanosecond(implementation, reader, walls, edges):
    now = [0]
    recorder = implementation(clock=lambda: now[0])
    recorder.set_edges("r", edges)
    edges = sorted(edges)
    expected = {}
    for wall in walls:
        with recorder.request("r"), recorder.stage("s"):
            now[0] += wall
        row = band_of(wall)
        for index, edge in enumerate(edges):
            if band_of(edge) == band_of(wall) and wall > edge:
                row = 216 + index
        count, total = expected.get(row, (0, 0))
        expected[row] = (count + 1, total + wall)
    rows = reader(recorder).bands()
    assert {band: (count, sum(sums)) for band, count, sums in rows} == expected
    assert sum(sums[2] for _, _, sums in rows) == sum(walls), "all of it in the stage"
    order = [(band, 0) if band < 216 else (band_of(edges[band - 216]), band) for band, _, _ in rows]
    assert order == sorted(order)
    assert reader(recorder).classed()["violations"] == tuple(sum(wall > edge for wall in walls) for edge in edges)


@pytest.mark.parametrize(
    ("ns", "band"), [(0, 0), (1023, 0), (1024, 0), (1151, 0), (1152, 1), (2047, 7), (2048, 8), (HIGHEST, 205), (1 << 40, 215)]
)
def test_bands_at_their_borders(timed, clock, reader, ns, band):
    with timed.request("r"):
        clock.tick(ns)
    assert [row[0] for row in reader(timed).bands()] == [band]


def test_edges_are_exact_to_the_nanosecond(timed, clock, reader):
    timed.set_edges("r", [20_000_000])
    for wall in (20_000_000, 20_000_001):
        with timed.request("r"):
            clock.tick(wall)
    assert [row[:2] for row in reader(timed).bands()] == [(band_of(20_000_000), 1), (216, 1)]
    assert reader(timed).classed()["violations"] == (1,)


def test_new_edges_fold_the_old_rows_back(timed, clock, reader):
    timed.set_edges("r", [1500, 3000])
    for wall in (1400, 1530, 3050):
        with timed.request("r"):
            clock.tick(wall)
    timed.set_edges("r", [3000])
    assert [row[:2] for row in reader(timed).bands()] == [(2, 1), (3, 1), (11, 1)]
    assert reader(timed).classed()["violations"] == (1,)


def test_at_most_four_edges(timed):
    timed.set_edges("r", [5, 4, 3, 2, 1, 1])
    with timed.request("r"):
        pass
    assert timed.classes()[0][5] == (1, 2, 3, 4)


def run(recorder, clock, walls):
    for wall in walls:
        with recorder.request("r"):
            clock.tick(wall)


def reasons(reader, recorder):
    return [record.reasons for record in reader(recorder).drain()]


def test_breaching_requests_are_kept_within_their_budget(timed, clock, reader):
    timed.set_edges("r", [10])
    timed.begin_epoch(breaching=3, reservoir=0, slowest=0)
    run(timed, clock, [5, 11, 12, 10, 13, 14, 15])
    kept = reader(timed).drain()
    assert [record.wall_ns for record in kept] == [11, 12, 13]
    assert {record.reasons for record in kept} == {Reason.BREACH}
    timed.begin_epoch(breaching=1, reservoir=0, slowest=0)
    run(timed, clock, [20, 21])
    assert [record.wall_ns for record in reader(timed).drain()] == [20]


def test_the_slowest_of_an_epoch_are_kept(timed, clock, reader):
    timed.begin_epoch(breaching=0, reservoir=0, slowest=2)
    run(timed, clock, [5, 9, 1, 7, 8, 2])
    kept = reader(timed).drain()
    assert [record.wall_ns for record in kept] == [5, 9, 7, 8]
    timed.begin_epoch(breaching=0, reservoir=0, slowest=2)
    run(timed, clock, [1])
    assert reasons(reader, timed) == [Reason.SLOWEST]


def test_each_band_has_a_fair_reservoir(timed, clock, reader):
    timed.begin_epoch(breaching=0, reservoir=8, slowest=0)
    run(timed, clock, [2000] * 2000 + [4000] * 8)
    kept = reader(timed).drain()
    fast = [record for record in kept if record.wall_ns == 2000]
    assert sum(record.wall_ns == 4000 for record in kept) == 8
    # 8 + sum(8/n) for n = 9 … 2000 is 52 expected; the bounds are 5 standard deviations away.
    assert 20 < len(fast) < 90
    assert {record.reasons for record in kept} == {Reason.RESERVOIR}


def test_an_epoch_halves_what_the_reservoirs_have_seen(timed, clock, reader):
    timed.begin_epoch(breaching=0, reservoir=4, slowest=0)
    run(timed, clock, [2000] * 7)
    timed.begin_epoch(breaching=0, reservoir=4, slowest=0)
    reader(timed).drain()
    run(timed, clock, [2000])
    assert reasons(reader, timed) == [Reason.RESERVOIR], "3 seen, the fourth always fits"


def test_the_queue_is_bounded(timed, clock):
    timed.begin_epoch(breaching=10**6, reservoir=0, slowest=0)
    timed.set_edges("r", [1])
    run(timed, clock, [5] * 8200)
    assert len(timed.drain()) == 8192
    assert timed.counters()["retained_dropped"] == 8


def test_columns_run_out_into_other(timed, clock, reader):
    with timed.request("r"):
        for number in range(70):
            with timed.stage(f"s{number}"):
                clock.tick(1)
    assert len(timed.columns()) == 64
    (record,) = reader(timed).drain()
    assert record.vector[1] == 8
    assert sum(record.vector) == 70
    assert timed.counters()["column_overflow"] == 8
    assert reader(timed).count("stage", "s69") == 1


def test_series_and_classes_run_out_into_other(timed, clock, reader):
    for number in range(600):
        timed.interval("copy", f"c{number}", 0, 1)
    for number in range(70):
        with timed.request(f"r{number}"):
            clock.tick(1)
    assert len(timed.series()) <= 512 + 1 + 64
    assert reader(timed).count("other", "other") == 88
    assert len(timed.classes()) == 64
    assert timed.classes()[63][1:4] == ("other", None, None)
    assert reader(timed).classed(63)["count"] == 7
    assert timed.counters()["series_overflow"] == 88 + 7


def test_attributes_with_too_many_values_fold_into_other(timed, clock, reader):
    """`cls` given a tenant's id instead of its tier."""
    for _ in range(2):
        for tenant in range(100):
            with timed.request("score", model="ranker", cls=f"tenant {tenant}"):
                clock.tick(tenant + 1)
    classes = timed.classes()
    assert [row[1:4] for row in classes] == [*(("score", "ranker", f"tenant {n}") for n in range(63)), ("other", None, None)]
    assert [reader(timed).classed(index)["count"] for index in range(64)] == [2] * 63 + [74]
    assert sum(reader(timed).classed(index)["wall_ns"] for index in range(64)) == 100 * 101
    assert reader(timed).counts("request", "other", "", "")[1:3] == (74, 2 * sum(range(64, 101)))
    assert timed.counters()["series_overflow"] == 74, "each request that was folded, not each name"


def test_long_names_are_cut(timed):
    with timed.request("r" * 500), timed.stage("s" * 500):
        pass
    assert timed.classes()[0][1] == "r" * 120
    assert timed.columns()[2] == ("stage", "s" * 120)
